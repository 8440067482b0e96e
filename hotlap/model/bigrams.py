"""Bigram embeddings: rows of a table, chosen by a hash of a token and the one before it.

They give every token what a shallow model would spend a layer of attention on, and cost a look-up. Pairs that
share a row share its features, so the hash matters. Tokens are numbered about in the order of how frequent
they are, which puts the frequent pairs close to each other in the plane of (previous, token). A lattice in
that plane with the golden ratio as its slope keeps pairs that are close in different rows, where a random
hash would let frequent ones meet by chance. Shapes: T tokens, C width.
"""

from __future__ import annotations

import math
from typing import ClassVar

from torch import Tensor, nn

from hotlap.model.layers import Table
from hotlap.model.roles import Role

GOLDEN_RATIO = (1 + math.sqrt(5)) / 2


def previous_stride(num_rows: int) -> int:
    """How many rows on the next previous token is. Coprime to their number, so that none is left out."""
    stride = max(1, round(num_rows / GOLDEN_RATIO))
    while math.gcd(stride, num_rows) != 1:
        stride += 1
    return stride


def bigram_rows(tokens_T: Tensor, previous_T: Tensor, num_rows: int) -> Tensor:
    """(T,) int64: the row of each pair. −1, which stands before a document's first token, pairs like any."""
    return (previous_stride(num_rows) * previous_T.long() + tokens_T.long()) % num_rows


class PairTable(Table):
    """A `Table` that another optimizer group may take: a step touches few of its rows."""

    roles: ClassVar[dict[str, Role]] = {"weight": "pairs"}


class BigramEmbedding(nn.Module):
    def __init__(self, num_rows: int, width: int) -> None:
        super().__init__()
        self.table = PairTable(num_rows, width)
        # What a pair adds to its token is learned from nothing.
        nn.init.zeros_(self.table.weight)

    def forward(self, tokens_T: Tensor, previous_T: Tensor) -> Tensor:
        """(T, C), in the dtype of the table."""
        rows: Tensor = self.table(bigram_rows(tokens_T, previous_T, self.table.num_embeddings))
        return rows
