"""Validation batches: the same tokens every time, from the start of the split, whatever the world size.

Sequence k goes to rank k modulo the world size, so ranks may differ by one sequence: sum losses and tokens
over batches and ranks, then divide.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hotlap.data.loader import Batch, widen
from hotlap.data.stream import TokenStream
from hotlap.errors import ConfigError, DataError


class ValidationBatches:
    """Iterable any number of times; each batch holds one sequence, the split's last one maybe shorter."""

    def __init__(
        self,
        stream: TokenStream,
        *,
        tokens: int,
        sequence_tokens: int,
        rank: int,
        world_size: int,
        device: torch.device | str,
    ) -> None:
        self.tokens = tokens  # targets, over all ranks
        self.tokens_left_out = len(stream) - 1 - tokens  # of the split, behind the last target
        self.stream = stream
        self.device = torch.device(device)
        starts = range(rank * sequence_tokens, tokens, world_size * sequence_tokens)
        self._sequences = [(start, min(sequence_tokens, tokens - start)) for start in starts]

    def __len__(self) -> int:
        """Batches of this rank."""
        return len(self._sequences)

    def __iter__(self) -> Iterator[Batch]:
        for start, count in self._sequences:
            batch = widen(self.stream.read(start, count + 1)[None], count, chunk_tokens=None)
            yield Batch(batch.inputs.to(self.device), batch.targets.to(self.device), None)


def validation_batches(
    stream: TokenStream,
    tokens: int | None,
    sequence_tokens: int,
    rank: int = 0,
    world_size: int = 1,
    *,
    block_tokens: int = 128,
    device: torch.device | str = "cpu",
) -> ValidationBatches:
    """The first `tokens` targets of a split, or with None as many as there are in whole blocks.

    Sequence lengths are multiples of `block_tokens`, as attention in blocks needs them; so with None at most
    `block_tokens` − 1 targets are left out, and `tokens_left_out` says how many.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    if sequence_tokens < 1 or sequence_tokens % block_tokens:
        raise ConfigError(
            expected=f"validation sequences in multiples of {block_tokens} tokens",
            found=f"{sequence_tokens}",
            do="choose another sequence length",
        )
    if tokens is not None and (tokens < 1 or tokens % block_tokens):
        raise ConfigError(
            expected=f"validation tokens in multiples of {block_tokens}", found=f"{tokens}", do="round it"
        )
    needed = block_tokens if tokens is None else tokens
    if len(stream) - 1 < needed:
        raise DataError(
            expected=f"at least {needed + 1} tokens in {stream.name}, to validate on {needed}",
            found=f"{len(stream)}",
            do="validate on fewer tokens, or prepare a larger validation split",
        )
    available = (len(stream) - 1) // block_tokens * block_tokens
    return ValidationBatches(
        stream,
        tokens=available if tokens is None else tokens,
        sequence_tokens=sequence_tokens,
        rank=rank,
        world_size=world_size,
        device=device,
    )
