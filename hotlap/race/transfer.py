"""A run's directory on its way to another machine: it arrives whole, or not at all.

The sender lists its files with their sizes and checksums, and hands them out in chunks, so that memory does
not depend on the size of a checkpoint. The receiver writes under a hidden name, compares, and renames.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from hotlap.errors import RaceError
from hotlap.files import atomic_directory, file_sha256, writing

CHUNK_BYTES = 8 << 20


class Piece(NamedTuple):
    """A file of a directory."""

    name: str  # its path within the directory, with `/`
    bytes: int
    sha256: str


def inventory(directory: Path) -> list[Piece]:
    """The files of a directory that nobody writes to."""
    return [
        Piece(path.relative_to(directory).as_posix(), path.stat().st_size, file_sha256(path, RaceError))
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]


def read_chunk(directory: Path, name: str, offset: int) -> bytes:
    with (directory / name).open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


def receive(directory: Path, pieces: Sequence[Piece], read: Callable[[str, int], bytes]) -> None:
    """Make or replace `directory` by the files that `read(name, offset)` hands out.

    Raises if one arrives in another form than it was listed; `directory` is then as it was.
    """
    with writing(directory, RaceError), atomic_directory(directory) as work:
        for piece in pieces:
            path = work / _plain(piece.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            digest, size = hashlib.sha256(), 0
            with path.open("xb") as file:
                while size < piece.bytes and (chunk := read(piece.name, size)):
                    digest.update(chunk)
                    size += file.write(chunk)
            if (size, digest.hexdigest()) != (piece.bytes, piece.sha256):
                raise RaceError(
                    expected=f"{piece.name} of {directory.name} as it was sent,"
                    f" {piece.bytes} bytes with sha256 {piece.sha256[:16]}…",
                    found=f"{size} bytes with {digest.hexdigest()[:16]}…",
                    do="repeat the command",
                )


def _plain(name: str) -> PurePosixPath:
    """The name, which must not lead out of the directory."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise RaceError(
            expected="names of files within a run's directory", found=repr(name), do="repeat the command"
        )
    return path
