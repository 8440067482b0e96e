"""Bigram embeddings: rows of a table, indexed by a hash of a token and the one before it.

They give every token information for which a shallow model would need a layer of attention, at the
cost of a lookup. Pairs that collide share a row, so the hash matters. Token ids roughly follow
frequency, which puts frequent pairs close together in the (previous, token) plane. A lattice hash
with a golden-ratio stride maps nearby pairs to different rows; under a random hash, frequent pairs
would collide by chance.

Shapes: T tokens, C width.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor, nn

from hotlap.model.layers import Table
from hotlap.model.roles import Role

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def previous_stride(num_rows: int) -> int:
    """Rows between two consecutive previous tokens.

    Coprime to `num_rows`, so that every row is used.
    """
    stride = max(1, round(num_rows / GOLDEN_RATIO))
    while math.gcd(stride, num_rows) != 1:
        stride += 1
    return stride


def bigram_rows(tokens_T: Tensor, previous_T: Tensor, num_rows: int) -> Tensor:
    """(T,) int64: the row of each pair. The previous token is −1 at the start of a document."""
    return (previous_stride(num_rows) * previous_T.long() + tokens_T.long()) % num_rows


class PairTable(Table):
    """A `Table` with its own role: few of its rows have a gradient per step, as RowRms expects."""

    roles: ClassVar[dict[str, Role]] = {"weight": "pairs"}


class BigramEmbedding(nn.Module):
    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.table = PairTable(num_rows, width)
        # Zero, so that a new model adds nothing to the token embedding.
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens_T: Tensor, previous_T: Tensor) -> Tensor:
        """(T, C), in the dtype of the table."""
        rows: Tensor = self.table(bigram_rows(tokens_T, previous_T, self.table.num_embeddings))
        return rows
