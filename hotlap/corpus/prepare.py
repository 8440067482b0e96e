"""From documents to shards with a manifest: split, tokenize on several threads, write.

The shards depend only on the documents and the settings, not on the number of threads or on interruptions.
Memory is bounded for any input. The directory is written atomically.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from hotlap.corpus.corpora import fetch_gpt2_tokenizer
from hotlap.corpus.decoding import Tally
from hotlap.corpus.hub import HubSource
from hotlap.corpus.sources import Source
from hotlap.corpus.splits import ByRule, Plan, plan_splits
from hotlap.corpus.survey import MOST_LISTED, Survey
from hotlap.corpus.tokenizer import (
    GPT2,
    TOKENIZER_FILE,
    Tokenizer,
    check_vocabulary,
    fitting_vocabulary,
    train_tokenizer,
)
from hotlap.corpus.tokenizing import in_batches, write_shards
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
from hotlap.files import atomic_directory, locked_beside, writing
from hotlap.progress import ByteProgress, Say, silent

Vocabulary = int | str  # the size of a vocabulary to train, AUTO or GPT2
AUTO = "auto"  # a vocabulary of the size that the text carries


@dataclass(frozen=True)
class ShardSettings:
    """What the shards depend on besides the documents."""

    vocabulary: Vocabulary = 4096
    val_fraction: Fraction = Fraction(1, 20)
    shard_tokens: int = 100_000_000
    tokenizer_sample_mb: int = 100
    keep_duplicates: bool = False  # in validation, though they repeat training documents

    def __post_init__(self) -> None:
        if isinstance(self.vocabulary, int):
            check_vocabulary(self.vocabulary)
        elif self.vocabulary not in (GPT2, AUTO):
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
        """With AUTO, the size is known only when the text is."""
        return str(self.vocabulary) if self.vocabulary in (GPT2, AUTO) else f"bpe{self.vocabulary}"

    def described(self) -> dict[str, str]:
        described = {
            "tokenizer": self.tokenizer_name,
            "val_fraction": str(self.val_fraction),
            "shard_tokens": str(self.shard_tokens),
        }
        if self.vocabulary != GPT2:
            described["tokenizer_sample_mb"] = str(self.tokenizer_sample_mb)
        if self.keep_duplicates:  # only then, so that data prepared before it existed is found again
            described["keep_duplicates"] = "True"
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
    replace_other: bool = False,
    say: Say = silent,
) -> Manifest:
    """Write the shards of `source` to `directory`, unless it already contains exactly these.

    With `replace_other`, a directory with other shards is replaced; with `force`, any. Shards from the hub
    are ready-made, and take no notice of `settings`. If another process is writing the same directory, wait
    and use its result.
    """
    own = {} if isinstance(source, HubSource) else settings.described()
    wanted = {**own, **source.settings}

    def existing() -> Manifest | None:
        check_replaceable(directory)
        try:
            manifest = None if force else find_prepared(directory, wanted)
        except OtherSettingsError as other:
            if not replace_other:
                raise
            say(f"preparing again: {', '.join(other.names)} changed since {directory} was written")
            return None
        if manifest is not None:
            say(f"{directory} is complete, with these settings: nothing to do")
        return manifest

    if (found := existing()) is not None:
        return found
    waiting = f"waiting for another process that is writing {directory}"
    with writing(directory), locked_beside(directory, lambda _: say(waiting)):
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


class OtherSettingsError(DataError):
    """Prepared data that was made with other settings, or from files that have changed since."""

    def __init__(self, directory: Path, differences: Mapping[str, str]) -> None:
        super().__init__(
            expected=f"data prepared with the same settings in {directory}",
            found="; ".join(differences.values()),
            do="choose another directory with --out, or replace this one with --force",
        )
        self.names = list(differences)


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
    differences = {
        name: f"{name} {manifest.settings.get(name, 'unset')} instead of {wanted.get(name, 'unset')}"
        for name in names
        if manifest.settings.get(name) != wanted.get(name)
    }
    if differences:
        raise OtherSettingsError(directory, differences)
    for shard in manifest.shards:
        check_count(directory / shard.file, shard)
    return manifest


def _tokenize(source: Source, settings: ShardSettings, work: Path, workers: int, say: Say) -> Manifest:
    survey = source.make_ready()
    if survey is not None:
        for line in survey.summary():
            say(line)
        check_some_text(survey)
    notes: list[str] = []
    plan: Plan = ByRule(settings.val_fraction)  # of a corpus, whose documents are known
    if survey is not None:
        plan, notes = plan_splits(
            survey,
            settings.val_fraction,
            lambda: source.pieces(Tally()),
            keep_duplicates=settings.keep_duplicates,
        )
    tokenizer = _tokenizer_for(source, survey, settings, plan, notes, say)
    tally = Tally()
    with ByteProgress("tokenizing", source.bytes_to_read) as progress:
        batches = in_batches(plan.assign(source.pieces(tally)), tally)
        shards = write_shards(batches, tokenizer, work, settings.shard_tokens, workers, progress)
    check_training_text(shards)
    for note in notes:
        say(note)
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
        files=tuple(account.entry() for account in survey.accounts[:MOST_LISTED]) if survey else (),
        problems=tuple(survey.problems[:MOST_LISTED]) if survey else (),
        notes=tuple(notes),
    )


def check_some_text(survey: Survey) -> None:
    if survey.documents:
        return
    first = f" (the first: {survey.problems[0]})" if survey.problems else ""
    raise DataError(
        expected="at least one document with text",
        found=f"0 documents; {len(survey.problems)} problems{first}",
        do="check the input",
    )


def check_training_text(shards: Iterable[ShardEntry]) -> None:
    if not any(shard.split == "train" for shard in shards):
        raise DataError(
            expected="text to train on", found="none besides that of validation", do="give more text"
        )


def _tokenizer_for(
    source: Source, survey: Survey | None, settings: ShardSettings, plan: Plan, notes: list[str], say: Say
) -> Tokenizer:
    vocabulary = settings.vocabulary
    if vocabulary == GPT2:
        return fetch_gpt2_tokenizer(say)
    with ByteProgress("reading for the tokenizer", source.bytes_to_read) as progress:
        sample = _training_sample(source, settings, plan, progress)
        if isinstance(vocabulary, int):
            return train_tokenizer(sample, vocabulary)
        text_bytes = source.text_bytes if survey is None else survey.text_bytes
        tokenizer = train_tokenizer(sample, fitting_vocabulary(text_bytes), or_fewer=True)
    size = f"{text_bytes / 1e6:,.1f} MB" if text_bytes >= 1e6 else f"{text_bytes / 1e3:.3g} kB"
    notes.append(f"vocabulary {tokenizer.vocab_size} tokens, as {size} of text carry (--vocab N for another)")
    return tokenizer


def _training_sample(
    source: Source, settings: ShardSettings, plan: Plan, progress: ByteProgress
) -> Iterator[str]:
    """Documents of the training split, evenly spaced over the input, up to `tokenizer_sample_mb` of text."""
    most_bytes = settings.tokenizer_sample_mb * 10**6
    every = max(1, math.ceil(source.text_bytes / most_bytes))
    tally = Tally()
    training_index, taken_bytes = -1, 0
    for split, piece in plan.assign(source.pieces(tally)):
        progress.advance_to(tally.bytes_read)
        if split != "train":
            continue
        training_index += piece.begins_document
        if training_index % every == 0:
            yield piece.text
            taken_bytes += len(piece.text.encode())
            if taken_bytes >= most_bytes:  # there was more text than estimated
                return
