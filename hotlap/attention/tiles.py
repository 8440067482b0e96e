"""The plan of the blocked backend: which queries attend to which keys, as batches of equal matmuls.

It relies on one fact of `mask.py`: query q sees the keys first_key[q] … q. A tile is TILE queries
and the contiguous slice of keys that they see, so keys are never gathered. A batch is several heads
of one tile, or several tiles of one head with equal masks and disjoint keys. Either way it is B
matmuls whose operands are strided views.

Shapes: B matmuls per batch, R query heads per key/value head, L keys per tile.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

TILE = 128
# The first key of a tile is rounded down to a multiple of this: unaligned matmuls are slower.
KEY_ALIGNMENT = 16
# Scores per batch: enough to amortize the overhead of a call, few enough to fit in a CPU's cache.
BATCH_ELEMENTS = 512 * 1024


@dataclass(frozen=True)
class TileRun:
    """Equally spaced tiles with the same number of keys, the same mask and disjoint keys."""

    first_query: int
    num_keys: int
    num_tiles: int
    stride: int  # tokens between the starts of two tiles; at least num_keys if there are several
    # (TILE, W): 0 where visible, else −inf, for the last W keys. All queries see the keys before.
    bias: Tensor


@dataclass(frozen=True)
class TileBatch:
    """B = num_tiles · num_kv_heads matmuls. At least one of the two factors is 1."""

    run: TileRun
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


def batches(runs: tuple[TileRun, ...], num_kv_heads: int, heads_per_kv: int) -> list[TileBatch]:
    """Every (tile, head) pair once, in an order that the forward and backward pass share.

    The order follows the sequence, so that keys shared by neighboring tiles are still in cache.
    """
    tile_batches = [batch for run in runs for batch in _run_batches(run, num_kv_heads, heads_per_kv)]
    return sorted(tile_batches, key=lambda batch: batch.first_query)


def _run_batches(run: TileRun, num_kv_heads: int, heads_per_kv: int) -> Iterator[TileBatch]:
    """Batch over tiles or over heads, whichever needs fewer calls."""
    max_per_batch = max(1, BATCH_ELEMENTS // (heads_per_kv * TILE * run.num_keys))
    if num_kv_heads * -(-run.num_tiles // max_per_batch) < run.num_tiles * -(-num_kv_heads // max_per_batch):
        tiles_per_batch, heads_per_batch = max_per_batch, 1
    else:
        tiles_per_batch, heads_per_batch = 1, max_per_batch
    for tile in range(0, run.num_tiles, tiles_per_batch):
        num_tiles = min(tiles_per_batch, run.num_tiles - tile)
        for head in range(0, num_kv_heads, heads_per_batch):
            num_heads = min(heads_per_batch, num_kv_heads - head)
            yield TileBatch(run, run.first_query + tile * run.stride, num_tiles, head, num_heads)


def plan_runs(first_key: Tensor, dtype: torch.dtype, device: torch.device) -> tuple[TileRun, ...]:
    """The runs for first_key (T,), int32 on the CPU.

    A partial last tile is padded with its last value. All layers ask for the same
    plan, so the most recent plans are cached by content.
    """
    return _plan_runs(first_key.numpy().tobytes(), dtype, device)


@lru_cache(maxsize=2)
def _plan_runs(first_key_bytes: bytes, dtype: torch.dtype, device: torch.device) -> tuple[TileRun, ...]:
    first_key = np.frombuffer(first_key_bytes, dtype=np.int32)
    num_tiles = -(-len(first_key) // TILE)
    padded = np.pad(first_key, (0, num_tiles * TILE - len(first_key)), mode="edge")
    starts = np.arange(num_tiles, dtype=np.int32) * TILE
    # First visible key, relative to the first query of the tile.
    relative = padded.reshape(num_tiles, TILE) - starts[:, None]

    tiles_by_pattern: dict[bytes, list[int]] = {}
    for tile in range(num_tiles):
        tiles_by_pattern.setdefault(relative[tile].tobytes(), []).append(tile)
    triangle = _bias(np.zeros(TILE, dtype=np.int32), 0, dtype, device)
    runs = []
    for tiles in tiles_by_pattern.values():
        pattern = relative[tiles[0]]
        first = int(pattern[0]) // KEY_ALIGNMENT * KEY_ALIGNMENT
        num_keys = TILE - first
        bias = triangle if first == pattern[-1] else _bias(pattern, first, dtype, device)
        for first_tile, step, count in _progressions(tiles, -(-num_keys // TILE)):
            runs.append(TileRun(first_tile * TILE, num_keys, count, step * TILE, bias))
    return tuple(sorted(runs, key=lambda run: run.first_query))


def _progressions(tiles: list[int], min_step: int) -> Iterator[tuple[int, int, int]]:
    """Split ascending tile indices into progressions (first, step, count) with step ≥ min_step."""
    remaining = dict.fromkeys(tiles)
    while remaining:
        first = next(iter(remaining))
        step = next((tile - first for tile in remaining if tile - first >= min_step), min_step)
        count = 0
        while first + count * step in remaining:
            del remaining[first + count * step]
            count += 1
        yield first, step, count


def _bias(pattern: np.ndarray, first: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(TILE, W): 0 where a query sees a key, else −inf.

    The W keys start at `first`, and query i sees keys pattern[i] … i. All positions are
    relative to the first query of the tile.
    """
    keys = np.arange(first, TILE)
    visible = (keys >= pattern[:, None]) & (keys <= np.arange(TILE)[:, None])
    bias = torch.zeros(visible.shape, dtype=dtype, device=device)
    return bias.masked_fill_(torch.from_numpy(~visible).to(device), float("-inf"))
