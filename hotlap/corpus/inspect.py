"""Describe a directory of shards and verify every file against the manifest's checksums.

For bare shards without a manifest, only the headers are read, and unknown fields are None.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hotlap.corpus.survey import problem_lines
from hotlap.corpus.tokenizer import load_tokenizer
from hotlap.data.manifest import MANIFEST_NAME, Manifest, read_manifest, verify_file
from hotlap.data.shards import SPLITS, find_shards, map_tokens, read_header
from hotlap.errors import DataError

FIRST_TOKENS = 24
SHOWN_FILES = 20


@dataclass(frozen=True)
class Split:
    name: str
    shards: int
    tokens: int
    documents: int | None
    text_bytes: int | None


@dataclass(frozen=True)
class Opening:
    """The first tokens of a split's first document, and their text."""

    ids: list[int]
    text: str | None


@dataclass(frozen=True)
class Inspection:
    directory: str
    verified: bool  # against checksums; False without a manifest
    splits: list[Split]
    shards: list[dict[str, Any]]
    opening: Opening
    manifest: Manifest | None


def inspect_directory(directory: Path) -> Inspection:
    if not directory.is_dir():
        raise DataError(
            expected=f"a directory of token shards at {directory}",
            found="a file" if directory.exists() else "nothing",
            do="check the path, or create it with `hotlap data prepare`",
        )
    manifest = read_manifest(directory)
    if manifest is None:
        return _inspect_bare(directory)
    for shard in manifest.shards:
        verify_file(directory, shard)
    if manifest.tokenizer.file is not None:
        verify_file(directory, manifest.tokenizer)
    splits = [summarize(manifest, split) for split in SPLITS if manifest.of_split(split)]
    first = manifest.of_split(splits[0].name)[0]
    ids = _first_ids(directory / first.file)
    text = load_tokenizer(directory).decode(ids) if manifest.tokenizer.file is not None else None
    return Inspection(
        directory=str(directory),
        verified=True,
        splits=splits,
        shards=[asdict(shard) for shard in manifest.shards],
        opening=Opening(ids, text),
        manifest=manifest,
    )


def summarize(manifest: Manifest, split: str) -> Split:
    shards = manifest.of_split(split)
    return Split(
        name=split,
        shards=len(shards),
        tokens=sum(shard.tokens for shard in shards),
        documents=_sum_known([shard.documents for shard in shards]),
        text_bytes=_sum_known([shard.text_bytes for shard in shards]),
    )


def _sum_known(counts: list[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _inspect_bare(directory: Path) -> Inspection:
    splits, shards = [], []
    for split in SPLITS:
        paths = find_shards(directory, split)
        if paths:
            counts = [read_header(path).tokens for path in paths]
            splits.append(Split(split, len(paths), sum(counts), None, None))
            shards += [
                {"file": path.name, "split": split, "tokens": count}
                for path, count in zip(paths, counts, strict=True)
            ]
    if not shards:
        raise DataError(
            expected=f"token shards (*train*.bin, *val*.bin) in {directory}",
            found="none",
            do="check the path, or create shards with `hotlap data prepare`",
        )
    ids = _first_ids(directory / str(shards[0]["file"]))
    return Inspection(str(directory), False, splits, shards, Opening(ids, None), None)


def _first_ids(shard: Path) -> list[int]:
    return [int(token) for token in map_tokens(shard)[:FIRST_TOKENS]]


def as_lines(found: Inspection) -> list[str]:
    """An inspection as lines of text."""
    manifest = found.manifest
    lines = [found.directory]
    if manifest is None:
        lines.append("no manifest: tokenizer, documents, bytes, source and license are unknown")
    else:
        lines += [
            f"source     {manifest.source}",
            f"license    {manifest.licence}",
            f"tokenizer  {manifest.tokenizer.name}, {manifest.vocab_size} tokens, end of text "
            f"{manifest.end_of_text}, sha256 {manifest.tokenizer.sha256[:16]}…",
        ]
        lines += [f"settings   {name} = {value}" for name, value in manifest.settings.items()]
        lines += [f"note       {name.replace('_', ' ')}: {n:,}" for name, n in manifest.counters.items()]
        lines += [
            f"file       {file.file}: {file.read_as}, {file.documents:,} documents, {file.text_bytes:,} bytes"
            for file in manifest.files[:SHOWN_FILES]
        ]
        if len(manifest.files) > SHOWN_FILES:
            lines.append(
                f"           and {len(manifest.files) - SHOWN_FILES} more, listed in {MANIFEST_NAME}"
            )
        lines += [*problem_lines(manifest.problems), *manifest.notes]
    lines += [split_line(split) for split in found.splits]
    lines += [f"{name:<10} none" for name in SPLITS if name not in [split.name for split in found.splits]]
    lines += [
        f"shard      {shard['file']}: {shard['tokens']:,} tokens"
        + (f", sha256 {shard['sha256'][:16]}… verified" if found.verified else ", not verified")
        for shard in found.shards
    ]
    lines.append(f"first      {found.opening.ids}")
    if found.opening.text is not None:
        lines.append(f"decoded    {found.opening.text!r}")
    return lines


def split_line(split: Split) -> str:
    if not split.shards:
        return f"{split.name:<10} none"
    documents = "documents unknown" if split.documents is None else f"{split.documents:,} documents"
    text = "bytes unknown" if split.text_bytes is None else f"{split.text_bytes:,} bytes of text"
    ratio = "" if split.text_bytes is None else f" ({split.text_bytes / split.tokens:.2f} bytes per token)"
    shards = f"{split.shards} shard{'s' * (split.shards != 1)}"
    return f"{split.name:<10} {documents}, {text}, {split.tokens:,} tokens{ratio}, {shards}"
