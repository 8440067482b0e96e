"""In which order a stream's tokens come, as pure functions of a state of two integers.

Each order says which tokens the batch at a state holds, which state follows, and how many tokens were handed
out or dropped on the way there. So batches and counters after a resume are those of an uninterrupted run.
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

ORDER_WINDOW_CHUNKS = 4096  # so many places of a shuffled order are computed at once


@dataclass(frozen=True)
class LoaderState:
    """Where the next batch begins: tokens into the epoch, and epochs completed. The same on every rank."""

    position: int = 0
    epoch: int = 0


class Order(Protocol):
    """What the loader asks of an order; a batch is `batch_tokens` tokens over all ranks."""

    def windows(self, state: LoaderState, first: int, count: int) -> Tokens:
        """Tokens first … first+count−1 of the batch, each with its successor: rows of W+1 for W inputs."""

    def following(self, state: LoaderState) -> LoaderState:
        """The state after the batch at `state`."""

    def settle(self, state: LoaderState) -> LoaderState:
        """The first state from `state` on at which a batch begins; DataError when there can be none."""

    def served(self, state: LoaderState) -> int:
        """Tokens handed out as targets before `state`, over all epochs and ranks."""

    def dropped(self, state: LoaderState) -> int:
        """Tokens passed over before `state`: in no batch, neither as input nor as target."""


class Carry:
    """The stream as a ring: the target of its last token is its first one, the beginning of the next epoch.

    So every token is an input once and a target once per epoch, in order, and nothing is dropped.
    """

    def __init__(self, stream: TokenStream, batch_tokens: int) -> None:
        self.stream, self.batch_tokens = stream, batch_tokens
        require_tokens(stream, batch_tokens, len(stream))

    def windows(self, state: LoaderState, first: int, count: int) -> Tokens:
        size = len(self.stream)
        start = (state.position + first) % size
        if start + count < size:
            return self.stream.read(start, count + 1)[None]
        until_end = size - start
        pieces = [self.stream.read(start, until_end), self.stream.read(0, count + 1 - until_end)]
        return np.concatenate(pieces)[None]

    def following(self, state: LoaderState) -> LoaderState:
        epochs, position = divmod(state.position + self.batch_tokens, len(self.stream))
        return LoaderState(position, state.epoch + epochs)

    def settle(self, state: LoaderState) -> LoaderState:
        check_state(self.stream, state, len(self.stream), step_tokens=1)
        return state

    def served(self, state: LoaderState) -> int:
        return state.epoch * len(self.stream) + state.position

    def dropped(self, state: LoaderState) -> int:  # noqa: ARG002
        return 0


class Drop:
    """The published records' rule: a shard is left when a whole batch and its last target no longer fit."""

    def __init__(self, stream: TokenStream, batch_tokens: int) -> None:
        self.stream, self.batch_tokens = stream, batch_tokens
        lengths = stream.ends - stream.starts
        require_tokens(stream, batch_tokens + 1, int(lengths.max()), of="its longest shard")
        batches = (lengths - 1) // batch_tokens
        self._served = np.concatenate([[0], np.cumsum(batches * batch_tokens)])  # before each shard
        dropped = np.where(batches > 0, lengths - batches * batch_tokens - 1, lengths)
        self._dropped = np.concatenate([[0], np.cumsum(dropped)])

    def windows(self, state: LoaderState, first: int, count: int) -> Tokens:
        return self.stream.read(state.position + first, count + 1)[None]

    def following(self, state: LoaderState) -> LoaderState:
        return self._leave_short_shards(LoaderState(state.position + self.batch_tokens, state.epoch))

    def settle(self, state: LoaderState) -> LoaderState:
        check_state(self.stream, state, len(self.stream), step_tokens=1)
        offset = state.position - int(self.stream.starts[self._shard(state)])
        check_state(self.stream, LoaderState(offset, state.epoch), len(self.stream), self.batch_tokens)
        return self._leave_short_shards(state)

    def served(self, state: LoaderState) -> int:
        shard = self._shard(state)
        before = state.epoch * self._served[-1] + self._served[shard]
        return int(before + state.position - self.stream.starts[shard])

    def dropped(self, state: LoaderState) -> int:
        return int(state.epoch * self._dropped[-1] + self._dropped[self._shard(state)])

    def _shard(self, state: LoaderState) -> int:
        return int(np.searchsorted(self.stream.ends, state.position, side="right"))

    def _leave_short_shards(self, state: LoaderState) -> LoaderState:
        while state.position + self.batch_tokens + 1 > (end := int(self.stream.ends[self._shard(state)])):
            last = end == len(self.stream)
            state = LoaderState(0, state.epoch + 1) if last else LoaderState(end, state.epoch)
        return state


class Shuffled:
    """Chunks of C tokens in a seeded order, new each epoch; a batch may run on into the next epoch's order.

    Chunk c has the inputs c·C … c·C+C−1 and their successors as targets. Tokens behind the last whole chunk
    and its last target are dropped, the same ones each epoch.
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

    def windows(self, state: LoaderState, first: int, count: int) -> Tokens:
        chunk_starts = self._chunks_at(state, first, count) * self.chunk_tokens
        return self.stream.gather(chunk_starts, self.chunk_tokens + 1)

    def following(self, state: LoaderState) -> LoaderState:
        epochs, position = divmod(state.position + self.batch_tokens, self.epoch_tokens)
        return LoaderState(position, state.epoch + epochs)

    def settle(self, state: LoaderState) -> LoaderState:
        check_state(self.stream, state, self.epoch_tokens, self.chunk_tokens)
        return state

    def served(self, state: LoaderState) -> int:
        return state.epoch * self.epoch_tokens + state.position

    def dropped(self, state: LoaderState) -> int:
        return state.epoch * (len(self.stream) - self.epoch_tokens - 1)

    def _chunks_at(self, state: LoaderState, first: int, count: int) -> NDArray[np.int64]:
        """The chunks of the tokens first … first+count−1 of the batch, in their order."""
        place = (state.position + first) // self.chunk_tokens
        missing = count // self.chunk_tokens
        pieces = []
        while missing > 0:
            epochs, place_in_epoch = divmod(place, self.chunks)
            window, offset = divmod(place_in_epoch, ORDER_WINDOW_CHUNKS)
            order = _order_window(self.chunks, self.seed, state.epoch + epochs, window)
            pieces.append(order[offset : offset + missing])
            place, missing = place + len(pieces[-1]), missing - len(pieces[-1])
        return np.concatenate(pieces)


@lru_cache(maxsize=4)
def _order_window(chunks: int, seed: int, epoch: int, window: int) -> NDArray[np.int64]:
    first = window * ORDER_WINDOW_CHUNKS
    places = np.arange(first, min(first + ORDER_WINDOW_CHUNKS, chunks), dtype=np.int64)
    return permute(places, chunks, seed, epoch)


def require_tokens(stream: TokenStream, needed: int, found: int, of: str = "all") -> None:
    if found < needed:
        raise DataError(
            expected=f"at least {needed} tokens in {stream.name}, for one batch",
            found=f"{found} in {of}",
            do="use fewer tokens a step, or more data",
        )


def check_state(stream: TokenStream, state: LoaderState, size: int, step_tokens: int) -> None:
    """Refuse a state that cannot have come from this data and these settings."""
    if not (0 <= state.position < size and state.epoch >= 0 and state.position % step_tokens == 0):
        raise DataError(
            expected=f"a position from 0 to {size - 1} in {stream.name}"
            + (f" in steps of {step_tokens} tokens" if step_tokens > 1 else ""),
            found=f"position {state.position} in epoch {state.epoch}",
            do="resume with the data, batch and chunk size that the run was started with",
        )
