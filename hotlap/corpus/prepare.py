"""From documents to shards with a manifest: split, tokenize on several threads, write.

The shards depend only on the documents and the settings, not on the number of threads or on interruptions.
Memory is bounded for any input. The directory is written atomically.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from hotlap.corpus.corpora import fetch_gpt2_tokenizer
from hotlap.corpus.decoding import Tally
from hotlap.corpus.hub import HubSource
from hotlap.corpus.sources import Source
from hotlap.corpus.tokenizer import (
    GPT2,
    TOKENIZER_FILE,
    Tokenizer,
    check_vocabulary,
    train_tokenizer,
)
from hotlap.corpus.tokenizing import assign_splits, in_batches, write_shards
from hotlap.data.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    ShardEntry,
    TokenizerEntry,
    check_count,
    read_manifest,
    write_manifest,
)
from hotlap.data.shards import MAX_SHARD_TOKENS
from hotlap.errors import ConfigError, DataError
from hotlap.files import atomic_directory, hidden, lock, make_directory, without_link, writing
from hotlap.progress import ByteProgress, Say, silent

Vocabulary = int | str  # the size of a vocabulary to train, or GPT2


@dataclass(frozen=True)
class ShardSettings:
    """What the shards depend on besides the documents."""

    vocabulary: Vocabulary = 4096
    val_fraction: Fraction = Fraction(1, 20)
    shard_tokens: int = 100_000_000
    tokenizer_sample_mb: int = 100

    def __post_init__(self) -> None:
        if isinstance(self.vocabulary, int):
            check_vocabulary(self.vocabulary)
        elif self.vocabulary != GPT2:
            raise ConfigError(
                expected=f"a vocabulary size or `{GPT2}`", found=f"`{self.vocabulary}`", do="give one of them"
            )
        if not 0 <= self.val_fraction <= Fraction(1, 2):
            raise ConfigError(
                expected="a validation fraction from 0 to 0.5",
                found=str(float(self.val_fraction)),
                do="choose one in that range",
            )
        if not 1 <= self.shard_tokens <= MAX_SHARD_TOKENS:
            raise ConfigError(
                expected=f"1 to {MAX_SHARD_TOKENS} tokens per shard",
                found=str(self.shard_tokens),
                do="choose a number in that range",
            )
        if self.tokenizer_sample_mb < 1:
            raise ConfigError(
                expected="a tokenizer sample of 1 MB or more",
                found=str(self.tokenizer_sample_mb),
                do="choose a larger one",
            )

    @property
    def tokenizer_name(self) -> str:
        return GPT2 if self.vocabulary == GPT2 else f"bpe{self.vocabulary}"

    def described(self) -> dict[str, str]:
        described = {
            "tokenizer": self.tokenizer_name,
            "val_fraction": str(self.val_fraction),
            "shard_tokens": str(self.shard_tokens),
        }
        if self.vocabulary != GPT2:
            described["tokenizer_sample_mb"] = str(self.tokenizer_sample_mb)
        return described


def available_workers() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare(
    source: Source | HubSource,
    settings: ShardSettings,
    directory: Path,
    *,
    workers: int | None = None,
    force: bool = False,
    say: Say = silent,
) -> Manifest:
    """Write the shards of `source` to `directory`, unless it already contains exactly these.

    With `force`, a directory with other shards is replaced. Shards from the hub are ready-made, and take no
    notice of `settings`. If another process is writing the same directory, wait and use its result.
    """
    own = {} if isinstance(source, HubSource) else settings.described()
    wanted = {**own, **source.settings}

    def existing() -> Manifest | None:
        check_replaceable(directory)
        manifest = None if force else find_prepared(directory, wanted)
        if manifest is not None:
            say(f"{directory} is complete, with these settings: nothing to do")
        return manifest

    if (found := existing()) is not None:
        return found
    with writing(directory), only_process(directory, say):
        if (found := existing()) is not None:  # written by another process in the meantime
            return found
        with atomic_directory(directory) as work:
            (work / UNFINISHED_NAME).write_text("{}\n")
            if isinstance(source, HubSource):
                manifest = source.write_shards(work, say)
            else:
                manifest = _tokenize(source, settings, work, workers or available_workers(), say)
            write_manifest(work, manifest)
            (work / UNFINISHED_NAME).unlink()
    return manifest


@contextmanager
def only_process(directory: Path, say: Say) -> Iterator[None]:
    """Hold the lock for writing `directory`; a process that finds it held waits."""
    path = hidden(without_link(directory), "lock")
    make_directory(path.parent)
    with lock(path, lambda _: say(f"waiting for another process that is writing {directory}")):
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def check_replaceable(directory: Path) -> None:
    """Refuse to replace anything but an empty directory or one with prepared data."""
    if not directory.exists() or (directory / MANIFEST_NAME).exists():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise DataError(
            expected=f"a new or empty directory at {directory}",
            found="files of another kind" if directory.is_dir() else "a file",
            do="choose another directory with --out",
        )


def find_prepared(directory: Path, wanted: Mapping[str, str]) -> Manifest | None:
    """The manifest of `directory`, None if it has none; an error if it was made with other settings."""
    manifest = read_manifest(directory)
    if manifest is None:
        return None
    names = sorted({*wanted, *manifest.settings})
    differences = [
        f"{name} {manifest.settings.get(name, 'unset')} instead of {wanted.get(name, 'unset')}"
        for name in names
        if manifest.settings.get(name) != wanted.get(name)
    ]
    if differences:
        raise DataError(
            expected=f"data prepared with the same settings in {directory}",
            found="; ".join(differences),
            do="choose another directory with --out, or replace this one with --force",
        )
    for shard in manifest.shards:
        check_count(directory / shard.file, shard)
    return manifest


def _tokenize(source: Source, settings: ShardSettings, work: Path, workers: int, say: Say) -> Manifest:
    source.make_ready()
    tokenizer = _tokenizer_for(source, settings, say)
    tally = Tally()
    with ByteProgress("tokenizing", source.bytes_to_read) as progress:
        pieces = assign_splits(source.pieces(tally), settings.val_fraction)
        batches = in_batches(pieces, tally)
        shards = write_shards(batches, tokenizer, work, settings.shard_tokens, workers, progress)
    _check_splits(shards, settings)
    tokenizer.save(work)
    return Manifest(
        tokenizer=TokenizerEntry(tokenizer.name, tokenizer.fingerprint, TOKENIZER_FILE),
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.end_of_text,
        shards=tuple(shards),
        source=source.description,
        licence=source.licence,
        counters=dict(sorted(tally.counters.items())),
        settings={**settings.described(), **source.settings},
    )


def _tokenizer_for(source: Source, settings: ShardSettings, say: Say) -> Tokenizer:
    if not isinstance(settings.vocabulary, int):
        return fetch_gpt2_tokenizer(say)
    with ByteProgress("reading for the tokenizer", source.bytes_to_read) as progress:
        sample = _training_sample(source, settings, progress)
        return train_tokenizer(sample, settings.vocabulary)


def _training_sample(source: Source, settings: ShardSettings, progress: ByteProgress) -> Iterator[str]:
    """Documents of the training split, evenly spaced over the input, up to `tokenizer_sample_mb` of text."""
    most_bytes = settings.tokenizer_sample_mb * 10**6
    every = max(1, math.ceil(source.text_bytes / most_bytes))
    tally = Tally()
    training_index, taken_bytes = -1, 0
    for split, piece in assign_splits(source.pieces(tally), settings.val_fraction):
        progress.advance_to(tally.bytes_read)
        if split != "train":
            continue
        training_index += piece.begins_document
        if training_index % every == 0:
            yield piece.text
            taken_bytes += len(piece.text.encode())
            if taken_bytes >= most_bytes:  # there was more text than estimated
                return


def _check_splits(shards: Iterable[ShardEntry], settings: ShardSettings) -> None:
    documents = {"train": 0, "val": 0}
    for shard in shards:
        documents[shard.split] += shard.documents or 0
    if documents["train"] and (documents["val"] or not settings.val_fraction):
        return
    count = sum(documents.values())
    raise DataError(
        expected=f"enough documents for a validation split of 1 in {float(1 / settings.val_fraction):g}"
        if count
        else "at least one document with text",
        found=f"{count} document{'s' * (count != 1)}",
        do="give more documents, split text files into documents with --separator, raise --val-fraction, "
        "or train without validation: --val-fraction 0"
        if count
        else "check the input",
    )
