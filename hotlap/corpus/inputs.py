"""Find the files that may contain text among the user's paths, and open them, also inside archives.

Nothing is read to find them: what a file contains is checked by the survey (see `survey`), before any work
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from hotlap.corpus.decoding import COMPRESSIONS, Tally, opened_file, uncompressed
from hotlap.errors import DataError

TEXT, HTML, LINES, TABLE = ".txt", ".html", ".jsonl", ".csv"
PARQUET, EPUB, PDF, DOCX = ".parquet", ".epub", ".pdf", ".docx"
ZIP, TAR = ".zip", ".tar"
KIND_OF_SUFFIX = {
    ".txt": TEXT,
    ".md": TEXT,
    ".html": HTML,
    ".htm": HTML,
    ".xhtml": HTML,
    ".jsonl": LINES,
    ".csv": TABLE,
    ".tsv": TABLE,
    ".parquet": PARQUET,
    ".epub": EPUB,
    ".pdf": PDF,
    ".docx": DOCX,
    ".zip": ZIP,
    ".tar": TAR,
}
STREAMED = (TEXT, HTML, LINES, TABLE)  # read from the start to the end, so they may be compressed
ARCHIVES = (ZIP, TAR)
KNOWN_SUFFIXES = (
    f"{', '.join(suffix for suffix in KIND_OF_SUFFIX if suffix not in ('.htm', '.xhtml'))} "
    f"(text and .tar also with {' or '.join(COMPRESSIONS)})"
)


@dataclass(frozen=True)
class Input:
    """A file with text, on disk or inside an archive. It can be opened repeatedly, until the next one."""

    name: str  # for messages and the manifest; unique
    kind: str
    compression: str  # "" if it is not compressed
    is_given: bool  # named by the user, not found in a folder or an archive
    size: int  # in bytes, as it is stored
    open_stored: Callable[[], AbstractContextManager[BinaryIO]]  # with random access
    most_bytes: int | None = None  # that its compressed content may expand to; None: any number

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """Its content, decompressed, to be read once."""
        with (
            self.open_stored() as stored,
            uncompressed(self.name, stored, self.compression, self.most_bytes) as content,
        ):
            yield content


@dataclass(frozen=True)
class Found:
    """A file on disk, which may be an archive."""

    path: Path
    kind: str
    compression: str
    is_given: bool

    def as_input(self, tally: Tally) -> Input:
        return Input(
            name=str(self.path),
            kind=self.kind,
            compression=self.compression,
            is_given=self.is_given,
            size=self.path.stat().st_size,
            open_stored=lambda: opened_file(self.path, tally),
        )


def kind_of(name: str) -> tuple[str, str]:
    """A file's format and its compression, by its name; the format is "" if it is not supported."""
    name = name.lower()
    path = PurePosixPath(f"{name.removesuffix('.tgz')}.tar.gz" if name.endswith(".tgz") else name)
    compression = path.suffix if path.suffix in COMPRESSIONS else ""
    kind = KIND_OF_SUFFIX.get(PurePosixPath(path.stem).suffix if compression else path.suffix, "")
    # The other formats have their own compression, and need random access.
    return ("" if compression and kind not in (*STREAMED, TAR) else kind), compression


def is_hidden(parts: Sequence[str]) -> bool:
    """Whether a path inside a folder or an archive is left out; `__MACOSX` has copies of file attributes."""
    return any(part.startswith(".") or part == "__MACOSX" for part in parts)


def find_inputs(paths: Sequence[Path]) -> tuple[list[Found], list[Path]]:
    """The files of `paths` in a fixed order, and those of other formats in folders, which are not read.

    Within a folder the order is that of the names. Hidden files are left out.
    """
    found: list[Found] = []
    others: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(path.rglob("*"), key=lambda file: file.relative_to(path).as_posix())
            for file in inside:
                if file.is_file() and not is_hidden(file.relative_to(path).parts):
                    kind, compression = kind_of(file.name)
                    if kind:
                        found.append(Found(file, kind, compression, is_given=False))
                    else:
                        others.append(file)
        elif not path.exists():
            raise DataError(expected=f"a file or directory {path}", found="nothing", do="check the path")
        else:
            kind, compression = kind_of(path.name)
            if not kind:
                raise DataError(
                    expected=f"a file with the suffix {KNOWN_SUFFIXES}",
                    found=str(path),
                    do="rename or convert it",
                )
            found.append(Found(path, kind, compression, is_given=True))
    return found, others
