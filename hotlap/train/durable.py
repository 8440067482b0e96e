"""Files of a run that are whole or absent, and stay so when the process is killed or the machine goes down.

Everything that a checkpoint or a run directory writes at once goes through here. What the system refuses (a
full disk, no permission) becomes a `CheckpointError`: one line, with nothing half-written under a real name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotlap.errors import CheckpointError

PARTIAL_SUFFIX = ".partial"


@contextmanager
def writing(path: Path, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn what the system refuses while `path` is written into a `CheckpointError`.

    `also`: exceptions of libraries that wrap the system's own.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, (OSError, *also)):
            raise
        raise CheckpointError(
            expected=f"to write {path}",
            found=(error.strerror if isinstance(error, OSError) else None) or str(error),
            do="make room or check the permissions; what was there before is intact",
        ) from error


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_directory(path: Path) -> None:
    """Make a directory and the missing ones above it, each on the disk under its name."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file at once, or leave what was there."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    with writing(path):
        try:
            partial.write_bytes(content)
            sync(partial)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)
