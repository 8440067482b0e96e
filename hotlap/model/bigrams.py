"""Bigram embeddings: rows of a table, chosen by a hash of a token and the one before it.

They give every token what a shallow model would spend a layer of attention on, and cost a look-up. Pairs that
share a row share its features; the model learns to live with it. Shapes: T tokens, C width.
"""

from __future__ import annotations

from torch import Tensor, nn

from hotlap.model.layers import Table

# Large odd numbers without a pattern; products wrap around in 64 bits.
FACTORS = (0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x369DEA0F31A53F85)


def bigram_rows(tokens_T: Tensor, previous_T: Tensor, num_rows: int) -> Tensor:
    """(T,) int64: the row of each pair. −1, which stands before a document's first token, pairs like any."""
    mixed = FACTORS[0] * previous_T.long() + FACTORS[1] * tokens_T.long()
    # A sum of products alone would send pairs at fixed distances to one row, however many rows there are.
    mixed = (mixed ^ (mixed >> 32)) * FACTORS[2]
    return (mixed ^ (mixed >> 29)) % num_rows


class BigramEmbedding(nn.Module):
    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.table = Table(num_rows, width)
        # What a pair adds to its token is learned from nothing.
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens_T: Tensor, previous_T: Tensor) -> Tensor:
        """(T, C), in the dtype of the table."""
        rows: Tensor = self.table(bigram_rows(tokens_T, previous_T, self.table.num_embeddings))
        return rows
