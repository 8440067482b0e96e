"""All shards of one split as one virtual, memory-mapped stream of tokens.

`open_split` checks the shards before it returns a stream: against the manifest's checksums if there is a
manifest, otherwise against the vocabulary size. Properties that only a manifest provides are None without it.
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
    """Concatenated shards. Indices count tokens from the start of the first shard."""

    def __init__(
        self,
        shards: Sequence[Tokens],
        *,
        name: str,
        manifest: Manifest | None,
        split: str,
        checksums: Sequence[str] = (),
    ) -> None:
        assert shards, "a stream needs a shard"
        self.name = name  # for messages
        self.manifest = manifest
        self.shards = tuple(shards)
        self.ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)
        self.starts = self.ends - [len(shard) for shard in shards]
        self._checksums = tuple(checksums)  # of the files; none for shards in memory
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
        """Number of documents in the split, or None if unknown."""
        return _sum_known([entry.documents for entry in self._entries])

    @property
    def text_bytes(self) -> int | None:
        """Bytes of text that the split's tokens encode, or None if unknown."""
        return _sum_known([entry.text_bytes for entry in self._entries])

    @property
    def fingerprint(self) -> str:
        """A hash of the shards' checksums."""
        facts = " ".join(self._checksums)
        return hashlib.sha256(facts.encode()).hexdigest()[:16]

    def read(self, start: int, count: int) -> Tokens:
        """Tokens [start, start+count). A view if they are in one shard, otherwise a copy."""
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
        """`read(start, count)` for each start, as the rows of a new array (len(starts), count)."""
        rows = np.empty((len(starts), count), self.dtype)
        # Indexing a sliding-window view is faster for hundreds of rows but slower for a few. Small batches
        # are where the cost of this call matters, so loop.
        shard_of = np.searchsorted(self.ends, starts, side="right")
        offsets = (starts - self.starts[shard_of]).tolist()
        for row, shard, offset in zip(rows, shard_of.tolist(), offsets, strict=True):
            piece = self.shards[shard][offset : offset + count]
            row[:] = piece if len(piece) == count else self.read(int(self.starts[shard]) + offset, count)
        return rows


def open_split(directory: Path, split: str, *, vocab_size: int | None = None) -> TokenStream:
    """Open and check a split of a prepared directory or of a directory of bare shards.

    `vocab_size` is the model's. A manifest must name the same size; without a manifest, every token id must
    be smaller. The first call reads every byte (for checksums, and without a manifest for the largest id).
    Later calls reuse the cached result while the files are unchanged.
    """
    if split not in SPLITS:
        raise DataError(
            expected=f"a split ({', '.join(SPLITS)})", found=repr(split), do="choose one of these"
        )
    if not directory.is_dir():
        raise DataError(
            expected=f"a directory of token shards at {directory}",
            found="a file" if directory.exists() else "nothing",
            do="check the path, or create it with `hotlap data prepare`",
        )
    if (directory / UNFINISHED_NAME).exists():
        raise DataError(
            expected=f"completely prepared data in {directory}",
            found=f"{UNFINISHED_NAME}: the preparation was interrupted",
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
            do="check the path, or create shards with `hotlap data prepare`",
        )
    shards = [map_tokens(path) for path in paths]
    for path, shard in zip(paths, shards, strict=True):
        if shard.dtype != shards[0].dtype:
            raise DataError(
                expected=f"every {split} shard in {directory} with {8 * shards[0].itemsize}-bit tokens",
                found=f"{8 * shard.itemsize}-bit tokens in {path.name}",
                do="keep data from different tokenizers in different directories",
            )
    checksums = [str(found) for found in measure_once(paths, "sha256", file_sha256)]
    if manifest is not None:
        _check_checksums(paths, manifest.of_split(split), checksums)
    else:
        _check_ids(paths, shards[0].dtype, vocab_size)
    name = f"{directory} ({split})"
    return TokenStream(shards, name=name, manifest=manifest, split=split, checksums=checksums)


def _listed_shards(directory: Path, split: str, manifest: Manifest, vocab_size: int | None) -> list[Path]:
    """The split's shards according to the manifest. Checks the vocabulary size and for unlisted shards."""
    if vocab_size is not None and manifest.vocab_size != vocab_size:
        raise DataError(
            expected=f"the model's vocabulary of {vocab_size} tokens",
            found=f"a vocabulary of {manifest.vocab_size} in {directory}",
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


def _check_checksums(paths: Sequence[Path], entries: Sequence[ShardEntry], found: Sequence[str]) -> None:
    for path, entry, sha256 in zip(paths, entries, found, strict=True):
        if sha256 != entry.sha256:
            raise wrong_checksum(path, entry.sha256, sha256)


def _check_ids(paths: Sequence[Path], dtype: np.dtype[Any], vocab_size: int | None) -> None:
    limit = MAX_VOCABULARY if vocab_size is None else vocab_size
    if limit > np.iinfo(dtype).max:
        return  # every id that fits the dtype is valid
    largest_ids = measure_once(paths, "largest_id", lambda path: int(map_tokens(path).max()))
    for path, largest in zip(paths, largest_ids, strict=True):
        if largest >= limit:
            raise DataError(
                expected=f"token ids below the vocabulary size {limit} in {path}",
                found=f"id {largest}",
                do="train with the vocabulary size of the tokenizer that produced the data",
            )


def _sum_known(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None
