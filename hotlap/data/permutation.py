"""A seeded permutation of [0, size), computed per index with random access and no table.

A table from NumPy's or torch's generator would need less code. But it takes 8 bytes per index and a pause at
each epoch, and a library may change the order between releases, which would silently break exact resume.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

# A Feistel network with addition instead of XOR. An index is a cell (left, right) of a nearly square grid.
# The rounds alternate: each adds a hash of one coordinate to the other, modulo the side, which is invertible.
ROUNDS = 8


def permute(indices: NDArray[np.int64], size: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """Map each index in [0, size) through the permutation of (seed, epoch)."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = [_round_key(seed, epoch, number) for number in range(ROUNDS)]
    permuted = _shuffle_grid(indices, rows, columns, keys)
    # Cycle walking: the grid has up to `rows` cells beyond `size`. Permuting such a cell again until it is
    # below `size` terminates (the cycle contains the original index) and keeps the map a bijection.
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
    """The finalizer of splitmix64, modulo 2^64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_key(seed: int, epoch: int, number: int) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{number}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))
