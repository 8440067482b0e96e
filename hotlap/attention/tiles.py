"""The blocked backend's plan: which queries meet which keys, as batches of equally shaped matrix products.

It relies on one fact of `masks.py`: query q sees the keys first_key[q] … q. A tile is 128 queries and the ONE
contiguous slice of keys they need, so no key is ever gathered. A batch is several heads of one tile, or
several equal tiles of one head with disjoint keys; either way B products whose operands are strided views.

Shapes: B products a batch, R query heads per key/value head, L keys of a tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

TILE = 128
# A tile's first key is rounded down to this: products and softmax of ragged rows are up to a third slower.
KEY_ALIGNMENT = 16
# Scores of one batch: large enough to hide the cost of a call, small enough to stay in a CPU's cache.
BATCH_ELEMENTS = 512 * 1024


@dataclass(frozen=True)
class Run:
    """Tiles that look alike: same number of keys, same hidden pairs, a constant distance, disjoint keys."""

    first_query: int
    num_keys: int
    num_tiles: int
    stride: int  # tokens from a tile to the next, at least num_keys when there are several
    # (TILE, W) 0 where visible, −inf elsewhere, for the last W ≤ num_keys keys; all queries see those before.
    bias: Tensor


@dataclass(frozen=True)
class Batch:
    """B = num_tiles × num_kv_heads products; at least one of the two is 1."""

    run: Run
    first_query: int
    num_tiles: int
    first_kv_head: int
    num_kv_heads: int

    @property
    def size(self) -> int:
        return self.num_tiles * self.num_kv_heads

    @property
    def first_key(self) -> int:
        return self.first_query + TILE - self.run.num_keys


def batches(runs: tuple[Run, ...], num_kv_heads: int, heads_per_kv: int) -> list[Batch]:
    """Every (tile, head) pair once, in a fixed order, so that a forward and its backward agree.

    The order follows the sequence, so that what neighbouring tiles share is still in cache.
    """
    found = [batch for run in runs for batch in _run_batches(run, num_kv_heads, heads_per_kv)]
    return sorted(found, key=lambda batch: batch.first_query)


def _run_batches(run: Run, num_kv_heads: int, heads_per_kv: int) -> Iterator[Batch]:
    """Batch tiles or heads, whichever takes fewer calls."""
    most = max(1, BATCH_ELEMENTS // (heads_per_kv * TILE * run.num_keys))
    if num_kv_heads * -(-run.num_tiles // most) < run.num_tiles * -(-num_kv_heads // most):
        tiles_at_once, heads_at_once = most, 1
    else:
        tiles_at_once, heads_at_once = 1, most
    for tile in range(0, run.num_tiles, tiles_at_once):
        num_tiles = min(tiles_at_once, run.num_tiles - tile)
        for head in range(0, num_kv_heads, heads_at_once):
            num_heads = min(heads_at_once, num_kv_heads - head)
            yield Batch(run, run.first_query + tile * run.stride, num_tiles, head, num_heads)


def plan_runs(first_key: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[Run, ...]:
    """The runs for first_key (T,) int32 on the CPU. Where T does not fill the last tile, its end is repeated.

    All layers ask for the same plan, so the last few are remembered by content.
    """
    return _plan_runs(first_key.numpy().tobytes(), dtype, device)


@lru_cache(maxsize=2)
def _plan_runs(first_key_bytes: bytes, dtype: torch.dtype, device: torch.device) -> tuple[Run, ...]:
    first_key = np.frombuffer(first_key_bytes, dtype=np.int32)
    num_tiles = -(-len(first_key) // TILE)
    padded = np.pad(first_key, (0, num_tiles * TILE - len(first_key)), mode="edge")
    starts = np.arange(num_tiles, dtype=np.int32) * TILE
    relative = padded.reshape(num_tiles, TILE) - starts[:, None]  # first visible key − the tile's first query

    alike: dict[bytes, list[int]] = {}
    for tile in range(num_tiles):
        alike.setdefault(relative[tile].tobytes(), []).append(tile)
    triangle = _bias(np.zeros(TILE, dtype=np.int32), 0, dtype, device)
    runs = []
    for tiles in alike.values():
        pattern = relative[tiles[0]]
        first = int(pattern[0]) // KEY_ALIGNMENT * KEY_ALIGNMENT
        num_keys = TILE - first
        bias = triangle if first == pattern[-1] else _bias(pattern, first, dtype, device)
        for first_tile, step, count in _progressions(tiles, -(-num_keys // TILE)):
            runs.append(Run(first_tile * TILE, num_keys, count, step * TILE, bias))
    return tuple(sorted(runs, key=lambda run: run.first_query))


def _progressions(tiles: list[int], least_step: int) -> Iterator[tuple[int, int, int]]:
    """Split ascending tile numbers into (first, step, count) with the smallest step ≥ least_step."""
    left = dict.fromkeys(tiles)
    while left:
        first = next(iter(left))
        step = next((tile - first for tile in left if tile - first >= least_step), least_step)
        count = 0
        while first + count * step in left:
            del left[first + count * step]
            count += 1
        yield first, step, count


def _bias(pattern: np.ndarray, first: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(TILE, W) for query i that sees from pattern[i] on, keys from `first` on; all from the tile's start."""
    keys = np.arange(first, TILE)
    visible = (keys >= pattern[:, None]) & (keys <= np.arange(TILE)[:, None])
    bias = torch.zeros(visible.shape, dtype=dtype, device=device)
    return bias.masked_fill_(torch.from_numpy(~visible).to(device), float("-inf"))
