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


def batches(runs: tuple[Run, ...], num_kv_heads: int, heads_per_kv: int) -> Iterator[Batch]:
    """Every (tile, head) pair once, in a fixed order, so that a forward and its backward agree.

    Tiles or heads are batched, whichever takes fewer calls.
    """
    for run in runs:
        most = max(1, BATCH_ELEMENTS // (heads_per_kv * TILE * run.num_keys))
        if num_kv_heads * -(-run.num_tiles // most) < run.num_tiles * -(-num_kv_heads // most):
            for head in range(num_kv_heads):
                for tile in range(0, run.num_tiles, most):
                    first_query = run.first_query + tile * run.stride
                    yield Batch(run, first_query, min(most, run.num_tiles - tile), head, 1)
        else:
            for tile in range(run.num_tiles):
                first_query = run.first_query + tile * run.stride
                for head in range(0, num_kv_heads, most):
                    yield Batch(run, first_query, 1, head, min(most, num_kv_heads - head))


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
    triangle = _bias(np.zeros(TILE, dtype=np.int32), dtype, device)
    runs = []
    for tiles in alike.values():
        pattern = relative[tiles[0]]
        num_keys = TILE - int(pattern[0])
        bias = triangle if pattern[0] == pattern[-1] else _bias(pattern, dtype, device)
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


def _bias(pattern: np.ndarray, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(TILE, W) for queries that see from pattern[i] on, relative to the tile's first query."""
    keys = np.arange(pattern[0], TILE)
    visible = (keys >= pattern[:, None]) & (keys <= np.arange(TILE)[:, None])
    bias = torch.zeros(visible.shape, dtype=dtype, device=device)
    return bias.masked_fill_(torch.from_numpy(~visible).to(device), float("-inf"))
