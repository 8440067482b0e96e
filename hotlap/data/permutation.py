"""A seeded bijection of 0 … size−1, computed per index: no table, random access, the same in every version.

A table from a library's generator would be shorter, but it takes 8 bytes an index and a pause at each epoch,
and libraries may change the order between releases: an exact resume would become a silent approximation.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

# An index is a pair (left, right) of a near-square grid. In turn each half is shifted, modulo its side, by a
# hash of the other, so that every round can be undone: a Feistel network with additions in place of XOR.
ROUNDS = 8


def permute(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Where the bijection of (seed, epoch) sends each index below `size`."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = [_round_key(seed, epoch, number) for number in range(ROUNDS)]
    permuted = _shuffle_grid(indices, rows, columns, keys)
    # The grid has up to `rows` places too many. Going on from such a place leads back below `size` (the walk
    # is a cycle that contains the index itself), and leads there from one index only.
    while (outside := permuted >= size).any():
        permuted[outside] = _shuffle_grid(permuted[outside], rows, columns, keys)
    return permuted


def _shuffle_grid(
    indices: NDArray[np.int64], rows: int, columns: int, keys: list[np.uint64]
) -> NDArray[np.int64]:
    left, right = np.divmod(indices.astype(np.uint64), np.uint64(columns))
    for number, key in enumerate(keys):
        if number % 2 == 0:
            left = (left + _hash(right + key) % np.uint64(rows)) % np.uint64(rows)
        else:
            right = (right + _hash(left + key) % np.uint64(columns)) % np.uint64(columns)
    return np.asarray(left * np.uint64(columns) + right, np.int64)


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64 bits; arithmetic modulo 2^64 (the finaliser of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_key(seed: int, epoch: int, number: int) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
