"""The distributed data loader: yields this rank's sequences of each global batch, on its device.

An `Order` decides which tokens a batch holds. The loader splits the batch over the ranks, converts the tokens
to int32 inputs and int64 targets and, on CUDA, prefetches one batch ahead into pinned memory. Its state
counts only the batches that were returned, not the prefetched one, so resuming from it is exact.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from hotlap.data.order import Carry, Drop, LoaderState, Order, Shuffled
from hotlap.data.shards import Tokens
from hotlap.data.stream import TokenStream
from hotlap.errors import ConfigError

TAILS = ("carry", "drop")
ORDERS = ("stream", "shuffled")


@dataclass(frozen=True)
class Batch:
    """This rank's sequences of one step. B: sequences, T: tokens per sequence."""

    inputs: Tensor  # (B, T) int32 token ids
    targets: Tensor  # (B, T) int64: the token after each input
    chunk_tokens: (
        int | None
    )  # each chunk of this many tokens is masked as its own document; None: by the text


class Loader:
    """Yields batches of `batch_tokens` over all ranks. Rank r gets the r-th of `world_size` equal slices.

    `prefetch` defaults to on for CUDA and off elsewhere.
    """

    def __init__(
        self,
        stream: TokenStream,
        *,
        batch_tokens: int,
        sequence_tokens: int,
        rank: int = 0,
        world_size: int = 1,
        tail: str = "carry",
        order: str = "stream",
        chunk_tokens: int | None = None,
        seed: int = 0,
        device: torch.device | str = "cpu",
        prefetch: bool | None = None,
    ) -> None:
        check_batch_split(batch_tokens, sequence_tokens, rank, world_size)
        self.device = torch.empty(0, device=device).device  # "cuda" → "cuda:<current index>"
        self.sequence_tokens = sequence_tokens
        self.local_tokens = batch_tokens // world_size
        self.rank = rank
        self.chunk_tokens = chunk_tokens if order == "shuffled" else None
        self._order = make_order(stream, batch_tokens, sequence_tokens, tail, order, chunk_tokens, seed)
        self._state = self._order.align(LoaderState())
        use_thread = self.device.type == "cuda" if prefetch is None else prefetch
        self._thread = ThreadPoolExecutor(1, "loader", self._init_thread) if use_thread else None
        self._prefetched: Future[Batch] | None = None  # the batch at self._state

    @property
    def state(self) -> LoaderState:
        """The position of the next batch. Sufficient to resume from, with any world size."""
        return self._state

    def load_state(self, state: LoaderState) -> None:
        self._state = self._order.align(state)
        self._prefetched = None

    @property
    def tokens_served(self) -> int:
        """Tokens used as targets since the start of the run, over all ranks."""
        return self._order.served(self._state)

    @property
    def tokens_dropped(self) -> int:
        """Tokens skipped since the start of the run: neither an input nor a target of any batch."""
        return self._order.dropped(self._state)

    @property
    def tokens_per_epoch(self) -> int:
        """Trained on in each epoch, over all ranks."""
        return self._order.served(LoaderState(0, 1))

    @property
    def tokens_dropped_per_epoch(self) -> int:
        return self._order.dropped(LoaderState(0, 1))

    def next(self) -> Batch:
        next_state = self._order.next_state(self._state)
        if self._thread is None:
            batch = self._host_batch(self._state)
        else:
            prefetched = self._prefetched or self._thread.submit(self._host_batch, self._state)
            self._prefetched = None
            batch = prefetched.result()
            self._prefetched = self._thread.submit(self._host_batch, next_state)
        self._state = next_state
        return to_device(batch, self.device)

    def close(self) -> None:
        """Stop the prefetch thread, if any. The loader cannot be used afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _init_thread(self) -> None:
        # A new thread starts on GPU 0. Pinning memory there would create a second CUDA context.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _host_batch(self, state: LoaderState) -> Batch:
        rows = self._order.read(state, self.rank * self.local_tokens, self.local_tokens)
        return to_batch(rows, self.sequence_tokens, self.chunk_tokens, pin=copies_asynchronously(self.device))


def to_batch(rows: Tokens, sequence_tokens: int, chunk_tokens: int | None, *, pin: bool = False) -> Batch:
    """Convert rows of n+1 tokens to inputs (the first n) and targets (the last n), viewed as sequences."""
    shape = (rows.shape[0], rows.shape[1] - 1)
    inputs = torch.empty(shape, dtype=torch.int32, pin_memory=pin)
    targets = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
    inputs.numpy()[:] = rows[:, :-1]
    targets.numpy()[:] = rows[:, 1:]
    return Batch(inputs.view(-1, sequence_tokens), targets.view(-1, sequence_tokens), chunk_tokens)


def copies_asynchronously(device: torch.device) -> bool:
    """Whether batches are copied to the device while it computes, which needs pinned memory."""
    return device.type == "cuda"


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Does not wait for the copy if `batch` is in pinned memory.

    torch's host allocator reuses a pinned block only after its copy to the device has finished.
    """
    if device.type == "cpu":
        return batch
    asynchronously = copies_asynchronously(device)
    inputs = batch.inputs.to(device, non_blocking=asynchronously)
    targets = batch.targets.to(device, non_blocking=asynchronously)
    return Batch(inputs, targets, batch.chunk_tokens)


def make_order(
    stream: TokenStream,
    batch_tokens: int,
    sequence_tokens: int,
    tail: str,
    order: str,
    chunk_tokens: int | None,
    seed: int,
) -> Order:
    for name, value, known in (("tail", tail, TAILS), ("order", order, ORDERS)):
        if value not in known:
            raise ConfigError(
                expected=f"a loader's {name} ({', '.join(known)})",
                found=repr(value),
                do="choose one of these",
            )
    if order == "stream":
        return Carry(stream, batch_tokens) if tail == "carry" else Drop(stream, batch_tokens)
    if tail == "drop":
        raise ConfigError(
            expected='tail "carry" with order "shuffled"',
            found='"drop"',
            do='remove it; tail applies only to order "stream"',
        )
    if chunk_tokens is None or chunk_tokens < 1 or sequence_tokens % chunk_tokens:
        raise ConfigError(
            expected=f"chunks that divide a sequence of {sequence_tokens} tokens",
            found=f"chunks of {chunk_tokens}",
            do="change the chunk or the sequence length",
        )
    return Shuffled(stream, batch_tokens, chunk_tokens, seed)


def check_batch_split(batch_tokens: int, sequence_tokens: int, rank: int, world_size: int) -> None:
    """Check that a batch consists of whole sequences, the same number for each rank."""
    if sequence_tokens < 1 or batch_tokens < 1 or batch_tokens % sequence_tokens:
        raise ConfigError(
            expected="a batch of whole sequences",
            found=f"{batch_tokens} tokens per step in sequences of {sequence_tokens}",
            do="make the tokens per step a multiple of the sequence length",
        )
    sequences = batch_tokens // sequence_tokens
    if world_size < 1 or sequences % world_size:
        raise ConfigError(
            expected=f"a number of ranks that divides the {sequences} sequences of a step",
            found=f"{world_size} ranks",
            do="change the number of ranks, the tokens per step or the sequence length",
        )
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
