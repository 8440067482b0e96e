"""The order in which batches take tokens from a stream, as pure functions of a `LoaderState`.

An order gives the tokens of the batch at a state, the next state, and the number of tokens served or dropped
before a state. A resumed run therefore gets the same batches and counters as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hotlap.data.permutation import permute
from hotlap.data.shards import Tokens
from hotlap.data.stream import TokenStream
from hotlap.errors import DataError

PERMUTE_AT_ONCE = 4096  # positions of a shuffled order that are computed together and cached


@dataclass(frozen=True)
class LoaderState:
    """The start of the next batch: tokens into the epoch, and completed epochs. The same on every rank."""

    position: int = 0
    epoch: int = 0


class Order(Protocol):
    """The interface between the loader and an order. A batch is `batch_tokens` tokens over all ranks."""

    def read(self, state: LoaderState, first: int, count: int) -> Tokens:
        """Tokens [first, first+count) of the batch and their targets: rows of n+1 tokens for n inputs."""

    def next_state(self, state: LoaderState) -> LoaderState:
        """The state after the batch at `state`."""

    def align(self, state: LoaderState) -> LoaderState:
        """The first state at or after `state` where a batch starts. DataError if `state` is invalid."""

    def served(self, state: LoaderState) -> int:
        """Tokens used as targets before `state`, over all epochs and ranks."""

    def dropped(self, state: LoaderState) -> int:
        """Tokens skipped before `state`: neither an input nor a target of any batch."""


class Carry:
    """The stream as a ring: the target of the last token is the first token of the next epoch.

    Every token is an input once and a target once per epoch, in order. Nothing is dropped.
    """

    def __init__(self, stream: TokenStream, batch_tokens: int) -> None:
        self.stream, self.batch_tokens = stream, batch_tokens
        require_tokens(stream, batch_tokens, len(stream))

    def read(self, state: LoaderState, first: int, count: int) -> Tokens:
        size = len(self.stream)
        start = (state.position + first) % size
        if start + count < size:
            return self.stream.read(start, count + 1)[None]
        until_end = size - start
        pieces = [self.stream.read(start, until_end), self.stream.read(0, count + 1 - until_end)]
        return np.concatenate(pieces)[None]

    def next_state(self, state: LoaderState) -> LoaderState:
        epochs, position = divmod(state.position + self.batch_tokens, len(self.stream))
        return LoaderState(position, state.epoch + epochs)

    def align(self, state: LoaderState) -> LoaderState:
        check_state(self.stream, state, len(self.stream), step_tokens=1)
        return state

    def served(self, state: LoaderState) -> int:
        return state.epoch * len(self.stream) + state.position

    def dropped(self, state: LoaderState) -> int:  # noqa: ARG002
        return 0


class Drop:
    """The published records' rule: drop the end of a shard that is too short for a whole batch.

    A batch needs `batch_tokens` inputs and one more token for the last target.
    """

    def __init__(self, stream: TokenStream, batch_tokens: int) -> None:
        self.stream, self.batch_tokens = stream, batch_tokens
        lengths = stream.ends - stream.starts
        require_tokens(stream, batch_tokens + 1, int(lengths.max()), of="its longest shard")
        batches = (lengths - 1) // batch_tokens
        self._served = np.concatenate([[0], np.cumsum(batches * batch_tokens)])  # tokens before each shard
        dropped = np.where(batches > 0, lengths - batches * batch_tokens - 1, lengths)
        self._dropped = np.concatenate([[0], np.cumsum(dropped)])

    def read(self, state: LoaderState, first: int, count: int) -> Tokens:
        return self.stream.read(state.position + first, count + 1)[None]

    def next_state(self, state: LoaderState) -> LoaderState:
        return self._skip_short_shards(LoaderState(state.position + self.batch_tokens, state.epoch))

    def align(self, state: LoaderState) -> LoaderState:
        check_state(self.stream, state, len(self.stream), step_tokens=1)
        offset = state.position - int(self.stream.starts[self._shard(state)])
        check_state(self.stream, LoaderState(offset, state.epoch), len(self.stream), self.batch_tokens)
        return self._skip_short_shards(state)

    def served(self, state: LoaderState) -> int:
        shard = self._shard(state)
        before = state.epoch * self._served[-1] + self._served[shard]
        return int(before + state.position - self.stream.starts[shard])

    def dropped(self, state: LoaderState) -> int:
        return int(state.epoch * self._dropped[-1] + self._dropped[self._shard(state)])

    def _shard(self, state: LoaderState) -> int:
        return int(np.searchsorted(self.stream.ends, state.position, side="right"))

    def _skip_short_shards(self, state: LoaderState) -> LoaderState:
        while state.position + self.batch_tokens + 1 > (end := int(self.stream.ends[self._shard(state)])):
            last = end == len(self.stream)
            state = LoaderState(0, state.epoch + 1) if last else LoaderState(end, state.epoch)
        return state


class Shuffled:
    """Chunks of C tokens in a seeded random order, different in each epoch. A batch may span two epochs.

    Chunk c has the inputs [c·C, c·C + C) and the tokens after them as targets. The tokens after the last
    chunk's last target are dropped, the same ones in each epoch.
    """

    def __init__(self, stream: TokenStream, batch_tokens: int, chunk_tokens: int, seed: int) -> None:
        self.stream, self.batch_tokens, self.chunk_tokens, self.seed = (
            stream,
            batch_tokens,
            chunk_tokens,
            seed,
        )
        require_tokens(stream, batch_tokens + 1, len(stream))
        self.chunks = (len(stream) - 1) // chunk_tokens
        self.epoch_tokens = self.chunks * chunk_tokens

    def read(self, state: LoaderState, first: int, count: int) -> Tokens:
        chunk_starts = self._chunks_at(state, first, count) * self.chunk_tokens
        return self.stream.gather(chunk_starts, self.chunk_tokens + 1)

    def next_state(self, state: LoaderState) -> LoaderState:
        epochs, position = divmod(state.position + self.batch_tokens, self.epoch_tokens)
        return LoaderState(position, state.epoch + epochs)

    def align(self, state: LoaderState) -> LoaderState:
        check_state(self.stream, state, self.epoch_tokens, self.chunk_tokens)
        return state

    def served(self, state: LoaderState) -> int:
        return state.epoch * self.epoch_tokens + state.position

    def dropped(self, state: LoaderState) -> int:
        return state.epoch * (len(self.stream) - self.epoch_tokens - 1)

    def _chunks_at(self, state: LoaderState, first: int, count: int) -> NDArray[np.int64]:
        """The chunk indices of tokens [first, first+count) of the batch, in order."""
        index = (state.position + first) // self.chunk_tokens
        missing = count // self.chunk_tokens
        pieces = []
        while missing > 0:
            epochs, index_in_epoch = divmod(index, self.chunks)
            part, offset = divmod(index_in_epoch, PERMUTE_AT_ONCE)
            order = _permuted_part(self.chunks, self.seed, state.epoch + epochs, part)
            pieces.append(order[offset : offset + missing])
            index, missing = index + len(pieces[-1]), missing - len(pieces[-1])
        return np.concatenate(pieces)


@lru_cache(maxsize=4)
def _permuted_part(chunks: int, seed: int, epoch: int, part: int) -> NDArray[np.int64]:
    first = part * PERMUTE_AT_ONCE
    indices = np.arange(first, min(first + PERMUTE_AT_ONCE, chunks), dtype=np.int64)
    return permute(indices, chunks, seed, epoch)


def require_tokens(stream: TokenStream, needed: int, found: int, of: str = "all") -> None:
    if found < needed:
        raise DataError(
            expected=f"at least {needed} tokens in {stream.name}, for one batch",
            found=f"{found} in {of}",
            do="use fewer tokens per step, or more data",
        )


def check_state(stream: TokenStream, state: LoaderState, size: int, step_tokens: int) -> None:
    """Raise a DataError for a state that this data and these settings cannot produce."""
    if not (0 <= state.position < size and state.epoch >= 0 and state.position % step_tokens == 0):
        raise DataError(
            expected=f"a position from 0 to {size - 1} in {stream.name}"
            + (f" in steps of {step_tokens} tokens" if step_tokens > 1 else ""),
            found=f"position {state.position} in epoch {state.epoch}",
            do="resume with the data, batch and chunk size that the run was started with",
        )
