"""The distributed loader: this rank's share of each global batch, as tensors on its device.

Relies on an `Order` for which tokens come when; adds the split over ranks, the widening of integers and, for
a GPU, pinned memory and a thread one batch ahead. The state it reports is that of the batches handed out.
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
    """This rank's sequences of one step."""

    inputs: Tensor  # int32 (sequences, tokens)
    targets: Tensor  # int64 (sequences, tokens): the successor of each input
    chunk_tokens: int | None  # every run of so many tokens is a document of its own; None: as the text has it


class Loader:
    """Hands out batches of `batch_tokens` over all ranks; rank r takes the r-th of equal runs of sequences.

    Without a GPU, `prefetch` is off and the only copy is the one that widens the integers.
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
        check_shares(batch_tokens, sequence_tokens, rank, world_size)
        self.device = torch.empty(0, device=device).device  # "cuda" becomes the current one, with its number
        self.sequence_tokens = sequence_tokens
        self.local_tokens = batch_tokens // world_size
        self.rank = rank
        self.chunk_tokens = chunk_tokens if order == "shuffled" else None
        self._order = make_order(stream, batch_tokens, sequence_tokens, tail, order, chunk_tokens, seed)
        self._state = self._order.settle(LoaderState())
        self._pin = self.device.type == "cuda"
        ahead = self._pin if prefetch is None else prefetch
        self._thread = ThreadPoolExecutor(1, "loader", self._enter_thread) if ahead else None
        self._ahead: Future[Batch] | None = None  # the batch at self._state, in the making

    @property
    def state(self) -> LoaderState:
        """Where the next batch begins. Enough to go on from here, on any world size."""
        return self._state

    def load_state(self, state: LoaderState) -> None:
        self._state = self._order.settle(state)
        self._ahead = None

    @property
    def tokens_served(self) -> int:
        """Tokens handed out as targets since the start of the run, over all ranks."""
        return self._order.served(self._state)

    @property
    def tokens_dropped(self) -> int:
        """Tokens passed over since the start of the run: in no batch, neither as input nor as target."""
        return self._order.dropped(self._state)

    @property
    def tokens_dropped_per_epoch(self) -> int:
        return self._order.dropped(LoaderState(0, 1))

    def next(self) -> Batch:
        following = self._order.following(self._state)
        if self._thread is None:
            batch = self._host_batch(self._state)
        else:
            ahead = self._ahead or self._thread.submit(self._host_batch, self._state)
            self._ahead = None
            batch = ahead.result()
            self._ahead = self._thread.submit(self._host_batch, following)
        self._state = following
        if self.device.type == "cpu":
            return batch
        # Pinned blocks go back to torch's host allocator, which reuses one only after its copy is through.
        inputs = batch.inputs.to(self.device, non_blocking=self._pin)
        targets = batch.targets.to(self.device, non_blocking=self._pin)
        return Batch(inputs, targets, batch.chunk_tokens)

    def close(self) -> None:
        """End the thread, if there is one. The loader cannot be used afterwards."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def _enter_thread(self) -> None:
        # A new thread starts on GPU 0, where pinning memory would open a second context for this process.
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def _host_batch(self, state: LoaderState) -> Batch:
        windows = self._order.windows(state, self.rank * self.local_tokens, self.local_tokens)
        return widen(windows, self.sequence_tokens, self.chunk_tokens, pin=self._pin)


def widen(windows: Tokens, sequence_tokens: int, chunk_tokens: int | None, *, pin: bool = False) -> Batch:
    """Rows of W+1 tokens as inputs and targets of whole sequences, in one copy each."""
    shape = (windows.shape[0], windows.shape[1] - 1)
    inputs = torch.empty(shape, dtype=torch.int32, pin_memory=pin)
    targets = torch.empty(shape, dtype=torch.int64, pin_memory=pin)
    inputs.numpy()[:] = windows[:, :-1]
    targets.numpy()[:] = windows[:, 1:]
    return Batch(inputs.view(-1, sequence_tokens), targets.view(-1, sequence_tokens), chunk_tokens)


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
                do="choose one of those",
            )
    if order == "stream":
        return Carry(stream, batch_tokens) if tail == "carry" else Drop(stream, batch_tokens)
    if tail == "drop":
        raise ConfigError(
            expected='tail "carry" with order "shuffled"',
            found='"drop"',
            do='leave it out; it is a rule about shards for order "stream"',
        )
    if chunk_tokens is None or chunk_tokens < 1 or sequence_tokens % chunk_tokens:
        raise ConfigError(
            expected=f"chunks that divide a sequence of {sequence_tokens} tokens",
            found=f"chunks of {chunk_tokens}",
            do="choose another chunk or sequence length",
        )
    return Shuffled(stream, batch_tokens, chunk_tokens, seed)


def check_shares(batch_tokens: int, sequence_tokens: int, rank: int, world_size: int) -> None:
    """Whole sequences per batch, and the same number of them for each rank."""
    if sequence_tokens < 1 or batch_tokens < 1 or batch_tokens % sequence_tokens:
        raise ConfigError(
            expected="a batch of whole sequences",
            found=f"{batch_tokens} tokens a step in sequences of {sequence_tokens}",
            do="make the tokens a step a multiple of the sequence length",
        )
    sequences = batch_tokens // sequence_tokens
    if world_size < 1 or sequences % world_size:
        raise ConfigError(
            expected=f"a number of ranks that divides the {sequences} sequences of a step",
            found=f"{world_size} ranks",
            do="change the number of ranks, the tokens a step or the sequence length",
        )
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
