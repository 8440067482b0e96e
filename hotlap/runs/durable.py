"""What a run writes: whole files and directories, on the disk when the call returns.

What the system refuses (a full disk, no permission) becomes a `CheckpointError`: one line, with nothing
half-written under a real name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotlap.errors import CheckpointError
from hotlap.files import replace_whole, sync


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


def make_directory(path: Path) -> None:
    """Make a directory and the missing ones above it, each on the disk under its name."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file at once, or leave what was there."""
    with writing(path):
        replace_whole(path, content)
