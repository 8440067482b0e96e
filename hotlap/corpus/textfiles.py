"""Find the readable text files among the user's paths, in a fixed order.

All checks that do not need a full read of a file are made here, before any work starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotlap.corpus.decoding import COMPRESSIONS, Tally, check_text_file
from hotlap.errors import DataError

TEXT_SUFFIXES = (".txt", ".md")
JSONL_SUFFIX = ".jsonl"
PARQUET_SUFFIX = ".parquet"
SUFFIXES = (*TEXT_SUFFIXES, JSONL_SUFFIX, PARQUET_SUFFIX)
KNOWN_SUFFIXES = f"{', '.join(SUFFIXES)} (also with {' or '.join(COMPRESSIONS)}, except parquet)"


def find_text_files(paths: Sequence[Path], tally: Tally, *, skip_bad_files: bool) -> list[Path]:
    """The readable files of `paths`. An empty or binary file is an error, or skipped and counted."""
    usable = []
    for file in _named_or_inside(paths, tally):
        try:
            if kind_of(file) != PARQUET_SUFFIX:
                check_text_file(file)
        except DataError:
            if not skip_bad_files:
                raise
            tally.counters["bad_files_skipped"] += 1
        else:
            usable.append(file)
    return usable


def kind_of(file: Path) -> str:
    """The file's format as a suffix, without the compression suffix, or "" if it is not supported."""
    kind = Path(file.stem).suffix if file.suffix in COMPRESSIONS else file.suffix
    if kind == PARQUET_SUFFIX and file.suffix != PARQUET_SUFFIX:
        return ""  # parquet has its own compression and needs random access
    return kind if kind in SUFFIXES else ""


def _named_or_inside(paths: Sequence[Path], tally: Tally) -> list[Path]:
    """The files of `paths`, in name order within a directory, without hidden files and other formats."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.rglob("*"), key=lambda file: file.relative_to(path).as_posix())
            for file in inside:
                hidden = any(part.startswith(".") for part in file.relative_to(path).parts)
                if file.is_file() and not hidden:
                    if kind_of(file):
                        found.append(file)
                    else:
                        tally.counters["files_of_other_kinds_skipped"] += 1
        elif not path.exists():
            raise DataError(expected=f"a file or directory {path}", found="nothing", do="check the path")
        elif not kind_of(path):
            raise DataError(
                expected=f"a file with the suffix {KNOWN_SUFFIXES}",
                found=str(path),
                do="rename or convert it",
            )
        else:
            found.append(path)
    return found
