"""Value embeddings: tables indexed by the input token and mixed into the attention values.

`value_table_of_layer` of the configuration assigns tables to layers. The tables are separate or, as
in the earlier records, concatenated into one wide table. Both compute the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from hotlap.config import ModelConfig
from hotlap.model.layers import Table


class ValueEmbeddings(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.table_of_layer = config.value_table_of_layer
        self.head_dim = config.head_dim
        self.num_tables = 1 + max((t for t in self.table_of_layer if t is not None), default=-1)
        features = config.kv_heads * config.head_dim
        joined = config.value_tables == "joined" and self.num_tables > 0
        widths = [self.num_tables * features] if joined else [features] * self.num_tables
        self.tables = nn.ModuleList(Table(config.vocab_size, width) for width in widths)

    def forward(self, tokens_T: Tensor) -> list[Tensor | None]:
        """Per layer, the values to mix in, (T, kv heads, head dim), or None."""
        rows = [table(tokens_T) for table in self.tables]
        if len(rows) < self.num_tables:
            rows = list(rows[0].chunk(self.num_tables, dim=-1))
        by_table = [row.unflatten(-1, (-1, self.head_dim)) for row in rows]
        return [None if table is None else by_table[table] for table in self.table_of_layer]
