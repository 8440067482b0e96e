"""All shards of one split as one virtual stream of tokens, memory-mapped.

`open_split` hands out a stream only after its shards have been checked: against the manifest's checksums
where there is one, against the vocabulary otherwise. What a bare directory cannot tell is None.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotlap.data.manifest import (
    MANIFEST_NAME,
    UNFINISHED_NAME,
    Manifest,
    ShardEntry,
    check_count,
    read_manifest,
    wrong_checksum,
)
from hotlap.data.shards import MAX_VOCABULARY, SPLITS, Tokens, find_shards, map_tokens
from hotlap.data.verification import measure_once
from hotlap.errors import DataError
from hotlap.files import file_sha256


class TokenStream:
    """Shards end to end. Indices are tokens from the start of the first shard."""

    def __init__(self, shards: Sequence[Tokens], *, name: str, manifest: Manifest | None, split: str) -> None:
        assert shards, "a stream needs a shard"
        self.name = name  # for messages
        self.manifest = manifest
        self.shards = tuple(shards)
        self.ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self.starts = self.ends - [len(shard) for shard in shards]
        self._entries: tuple[ShardEntry, ...] = manifest.of_split(split) if manifest else ()

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.shards[0].dtype

    @property
    def end_of_text(self) -> int | None:
        return self.manifest.end_of_text if self.manifest else None

    @property
    def documents(self) -> int | None:
        """Documents in the split; None when unknown."""
        return _sum_known([entry.documents for entry in self._entries])

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text that the split's tokens stand for; None when unknown."""
        return _sum_known([entry.text_bytes for entry in self._entries])

    @property
    def fingerprint(self) -> str:
        """Differs when the data differs: by checksums with a manifest, by shard lengths alone without."""
        checksums = [entry.sha256 for entry in self._entries]
        facts = " ".join(checksums or [str(len(shard)) for shard in self.shards])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def read(self, start: int, count: int) -> Tokens:
        """Tokens start … start+count−1: a view when they lie in one shard, else a copy."""
        assert 0 <= start < start + count <= len(self), f"{start}+{count} is outside of {len(self)} tokens"
        shard = int(np.searchsorted(self.ends, start, side="right"))
        offset = start - int(self.starts[shard])
        pieces = [self.shards[shard][offset : offset + count]]
        missing = count - len(pieces[0])
        while missing > 0:
            shard += 1
            pieces.append(self.shards[shard][:missing])
            missing -= len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def gather(self, starts: NDArray[np.int64], count: int) -> Tokens:
        """`read(start, count)` for every start, as rows of one new array (len(starts), count)."""
        rows = np.empty((len(starts), count), self.dtype)
        # Indexing a view of all windows at once is faster on hundreds of rows, but slower on few, and those
        # are where the cost of a call shows.
        shard_of = np.searchsorted(self.ends, starts, side="right")
        offsets = (starts - self.starts[shard_of]).tolist()
        for row, shard, offset in zip(rows, shard_of.tolist(), offsets, strict=True):
            piece = self.shards[shard][offset : offset + count]
            row[:] = piece if len(piece) == count else self.read(int(self.starts[shard]) + offset, count)
        return rows


def open_split(directory: Path, split: str, *, vocab_size: int | None = None) -> TokenStream:
    """Open a split of a prepared directory, or of bare shards, and check it.

    `vocab_size` is the model's: a manifest must name the same, and without one no token may reach it. The
    first opening reads every byte once (checksums with a manifest, the largest id without); later ones recall
    the result while the files stay unchanged.
    """
    if split not in SPLITS:
        raise DataError(
            expected=f"a split ({', '.join(SPLITS)})", found=repr(split), do="choose one of those"
        )
    if not directory.is_dir():
        raise DataError(
            expected=f"a directory of token shards at {directory}",
            found="a file" if directory.exists() else "nothing",
            do="check the path, or make one with `hotlap data prepare`",
        )
    if (directory / UNFINISHED_NAME).exists():
        raise DataError(
            expected=f"a finished preparation in {directory}",
            found=f"{UNFINISHED_NAME}, which says that it was interrupted",
            do="run the same `hotlap data prepare` again; it starts over",
        )
    manifest = read_manifest(directory)
    if manifest is not None:
        paths = _listed_shards(directory, split, manifest, vocab_size)
    else:
        paths = find_shards(directory, split)
    if not paths:
        raise DataError(
            expected=f"a shard of the {split} split in {directory}",
            found=f"no *{split}*.bin" if manifest is None else f"none in its {MANIFEST_NAME}",
            do="check the path, or make some with `hotlap data prepare`",
        )
    shards = [map_tokens(path) for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        if shard.dtype != shards[0].dtype:
            raise DataError(
                expected=f"every {split} shard in {directory} with {8 * shards[0].itemsize}-bit tokens",
                found=f"{8 * shard.itemsize}-bit tokens in {path.name}",
                do="keep data of different tokenizers in different directories",
            )
    if manifest is not None:
        _check_checksums(paths, manifest.of_split(split))
    else:
        _check_ids(paths, shards[0].dtype, vocab_size)
    return TokenStream(shards, name=f"{directory} ({split})", manifest=manifest, split=split)


def _listed_shards(directory: Path, split: str, manifest: Manifest, vocab_size: int | None) -> list[Path]:
    """The split's shards by the manifest, which must list what is there and fit the model."""
    if vocab_size is not None and manifest.vocab_size != vocab_size:
        raise DataError(
            expected=f"the model's vocabulary of {vocab_size} tokens",
            found=f"one of {manifest.vocab_size} in {directory}",
            do=f"prepare it with --vocab {vocab_size}, or train with --vocab-size {manifest.vocab_size}",
        )
    listed = {entry.file for entry in manifest.shards}
    unlisted = sorted(path.name for path in directory.glob("*.bin") if path.name not in listed)
    if unlisted:
        raise DataError(
            expected=f"only the shards that {directory / MANIFEST_NAME} lists",
            found=f"{unlisted[0]} as well",
            do="remove it, or prepare the data again",
        )
    entries = manifest.of_split(split)
    for entry in entries:
        check_count(directory / entry.file, entry)
    return [directory / entry.file for entry in entries]


def _check_checksums(paths: Sequence[Path], entries: Sequence[ShardEntry]) -> None:
    found = measure_once(paths, "sha256", file_sha256)
    for path, entry, sha256 in zip(paths, entries, found, strict=True):
        if sha256 != entry.sha256:
            raise wrong_checksum(path, entry.sha256, str(sha256))


def _check_ids(paths: Sequence[Path], dtype: np.dtype[Any], vocab_size: int | None) -> None:
    limit = MAX_VOCABULARY if vocab_size is None else vocab_size
    if limit > np.iinfo(dtype).max:
        return  # no id that the dtype can hold is too large
    largest_ids = measure_once(paths, "largest_id", lambda path: int(map_tokens(path).max()))
    for path, largest in zip(paths, largest_ids, strict=True):
        if largest >= limit:
            raise DataError(
                expected=f"token ids below the vocabulary size {limit} in {path}",
                found=f"id {largest}",
                do="train with the vocabulary of the tokenizer that made the data",
            )


def _sum_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
