"""Tokenize text into shards on several threads. tiktoken releases the GIL while it encodes.

The reader, the worker threads and the writer are connected by a bounded queue. Tokens are written in text
order, so the shards are byte-identical for any number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotlap.corpus.decoding import Tally
from hotlap.corpus.pieces import Piece
from hotlap.corpus.tokenizer import Ids, Tokenizer
from hotlap.data.manifest import ShardEntry, describe_shard
from hotlap.data.shards import SPLITS, ShardWriter, shard_name
from hotlap.progress import ByteProgress

BATCH_CHARACTERS = 2**20  # per task of a worker thread


@dataclass(frozen=True)
class Batch:
    """Pieces in order, each with its split. `bytes_read` is the input position after the last piece."""

    pieces: list[tuple[str, Piece]]
    bytes_read: int

    def encode(self, tokenizer: Tokenizer) -> dict[str, Ids]:
        """The tokens to append to each split. Each document starts with `<|endoftext|>`."""
        start = np.array([tokenizer.end_of_text], np.uint32)
        tokens: dict[str, list[Ids]] = {}
        for split, piece in self.pieces:
            parts = tokens.setdefault(split, [])
            if piece.begins_document:
                parts.append(start)
            parts.append(tokenizer.encode(piece.text))
        return {split: np.concatenate(parts) for split, parts in tokens.items()}


def in_batches(pieces: Iterable[tuple[str, Piece]], tally: Tally) -> Iterator[Batch]:
    batch: list[tuple[str, Piece]] = []
    characters = 0
    for split, piece in pieces:
        batch.append((split, piece))
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            yield Batch(batch, tally.bytes_read)
            batch, characters = [], 0
    yield Batch(batch, tally.bytes_read)


def write_shards(
    batches: Iterable[Batch],
    tokenizer: Tokenizer,
    directory: Path,
    shard_tokens: int,
    workers: int,
    progress: ByteProgress,
) -> list[ShardEntry]:
    """Tokenize `batches` on `workers` threads and write the tokens in batch order."""
    splits = {split: _SplitWriter(directory, split, shard_tokens, tokenizer) for split in SPLITS}
    pool = ThreadPoolExecutor(workers)
    waiting: deque[tuple[Batch, Future[dict[str, Ids]]]] = deque()

    def write_first() -> None:
        batch, encoded = waiting.popleft()
        for split, tokens in encoded.result().items():
            splits[split].append(tokens)
        progress.advance_to(batch.bytes_read)

    try:
        for batch in batches:
            waiting.append((batch, pool.submit(batch.encode, tokenizer)))
            if len(waiting) > 2 * workers:  # enough to keep every thread busy; more would only use memory
                write_first()
        while waiting:
            write_first()
        return [entry for writer in splits.values() for entry in writer.close()]
    finally:
        pool.shutdown(cancel_futures=True)
        for writer in splits.values():
            writer.abort()


class _SplitWriter:
    """Writes one split's tokens to shards of equal size and counts their documents and bytes."""

    def __init__(self, directory: Path, split: str, shard_tokens: int, tokenizer: Tokenizer) -> None:
        self._directory = directory
        self._split = split
        self._shard_tokens = shard_tokens
        self._tokenizer = tokenizer
        self._entries: list[ShardEntry] = []
        self._shard: ShardWriter | None = None
        self._documents = self._text_bytes = 0

    def append(self, tokens: Ids) -> None:
        while tokens.size:
            if self._shard is None:
                path = self._directory / shard_name(self._split, len(self._entries))
                self._shard = ShardWriter(path, self._tokenizer.vocab_size)
                self._documents = self._text_bytes = 0
            fitting = tokens[: self._shard_tokens - self._shard.tokens]
            self._shard.append(fitting)
            self._documents += int(np.count_nonzero(fitting == self._tokenizer.end_of_text))
            self._text_bytes += self._tokenizer.text_bytes(fitting)
            tokens = tokens[fitting.size :]
            if self._shard.tokens == self._shard_tokens:
                self._finish_shard()

    def _finish_shard(self) -> None:
        assert self._shard is not None, "no shard is open"
        self._shard.commit()
        self._entries.append(
            describe_shard(
                self._shard.path, self._split, documents=self._documents, text_bytes=self._text_bytes
            )
        )
        self._shard = None

    def close(self) -> list[ShardEntry]:
        if self._shard is not None:
            self._finish_shard()
        return self._entries

    def abort(self) -> None:
        if self._shard is not None:
            self._shard.abort()
