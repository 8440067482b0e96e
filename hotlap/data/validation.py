"""Validation batches: the same tokens each time, from the start of the split, for any world size.

The k-th sequence goes to rank k modulo the world size, so the number of sequences per rank may differ by one.
To average, sum losses and token counts over batches and ranks, then divide.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hotlap.data.loader import Batch, copies_asynchronously, to_batch, to_device
from hotlap.data.stream import TokenStream
from hotlap.errors import ConfigError, DataError

# Attention is masked in blocks: sequences are whole numbers of them.
BLOCK_TOKENS = 128


class ValidationBatches:
    """Can be iterated repeatedly. Each batch is one sequence; the last one may be shorter."""

    def __init__(
        self,
        stream: TokenStream,
        sequences: Sequence[tuple[int, int]],  # (first token, number of targets) of each
        *,
        rank: int,
        world_size: int,
        device: torch.device | str,
    ) -> None:
        self.tokens = sum(count for _, count in sequences)  # targets, over all ranks
        self.tokens_left_out = len(stream) - 1 - self.tokens  # targets of the split that are not evaluated
        self.stream = stream
        self.device = torch.device(device)
        self.num_sequences = len(sequences)  # over all ranks
        self.own_sequences = slice(rank, None, world_size)  # of them, those of this rank
        self._of_all_ranks = sequences
        self._rank, self._world_size = rank, world_size
        self._sequences = sequences[self.own_sequences]

    def split(self, most_tokens: int) -> tuple[ValidationBatches, ValidationBatches]:
        """At least one sequence and at most `most_tokens` tokens, evenly spread; and all other sequences."""
        total = self.num_sequences
        wanted = min(total, max(1, most_tokens * total // self.tokens))
        spread = {(2 * i + 1) * total // (2 * wanted) for i in range(wanted)}
        return self._only(spread), self._only(set(range(total)) - spread)

    def _only(self, numbers: set[int]) -> ValidationBatches:
        sequences = [self._of_all_ranks[number] for number in sorted(numbers)]
        return ValidationBatches(
            self.stream, sequences, rank=self._rank, world_size=self._world_size, device=self.device
        )

    def __len__(self) -> int:
        """Number of batches on this rank."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Batch]:
        for start, count in self._sequences:
            rows = self.stream.read(start, count + 1)[None]
            batch = to_batch(rows, count, chunk_tokens=None, pin=copies_asynchronously(self.device))
            yield to_device(batch, self.device)


def validation_batches(
    stream: TokenStream,
    tokens: int | None,
    sequence_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    block_tokens: int = BLOCK_TOKENS,
    device: torch.device | str = "cpu",
) -> ValidationBatches:
    """Batches over the first `tokens` targets of a split, or over the whole split if None.

    Block-sparse attention needs sequence lengths that are multiples of `block_tokens`. With None, up to
    `block_tokens` − 1 targets at the end are therefore left out; `tokens_left_out` is their number.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    if sequence_tokens < 1 or sequence_tokens % block_tokens:
        raise ConfigError(
            expected=f"a validation sequence length that is a multiple of {block_tokens} tokens",
            found=f"{sequence_tokens}",
            do="change the sequence length",
        )
    if tokens is not None and (tokens < 1 or tokens % block_tokens):
        raise ConfigError(
            expected=f"validation tokens as a multiple of {block_tokens}",
            found=f"{tokens}",
            do="round the number of tokens",
        )
    needed = block_tokens if tokens is None else tokens
    if len(stream) - 1 < needed:
        raise DataError(
            expected=f"at least {needed + 1} tokens in {stream.name}, to validate on {needed}",
            found=f"{len(stream)}",
            do="validate on fewer tokens, or prepare a larger validation split",
        )
    available = (len(stream) - 1) // block_tokens * block_tokens
    end = available if tokens is None else tokens
    sequences = [(start, min(sequence_tokens, end - start)) for start in range(0, end, sequence_tokens)]
    return ValidationBatches(stream, sequences, rank=rank, world_size=world_size, device=device)
