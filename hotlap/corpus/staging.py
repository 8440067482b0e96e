"""A directory that appears at once: filled under a hidden name beside its place, then renamed.

One process at a time fills it; a second one waits and then sees what the first has made. Killed work leaves
only the hidden directory, which the next attempt empties. Relies on `flock`, which ends with its process.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotlap.data.files import writing
from hotlap.data.manifest import UNFINISHED_NAME
from hotlap.errors import DataError
from hotlap.progress import Say, silent


@contextmanager
def staging(place: Path, say: Say = silent) -> Iterator[Path]:
    """An empty directory to fill for `place`, and to hand to `publish`; removed if it is not."""
    work = place.with_name(f".{place.name}.unfinished")
    with writing(place):
        place.parent.mkdir(parents=True, exist_ok=True)
        claim = _claim(work, say)
    try:
        with writing(work):
            for leftover in work.iterdir():
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
            (work / UNFINISHED_NAME).write_text("{}\n")
        yield work
    finally:
        # After `publish` the hidden name is free, and may already be another process's.
        if _is(work, claim):
            shutil.rmtree(work, ignore_errors=True)
        os.close(claim)


def publish(work: Path, place: Path) -> None:
    """Rename `work` to `place`; what was there before is removed once the new one is in its place."""
    with writing(place):
        replaced = place.with_name(f".{place.name}.replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        (work / UNFINISHED_NAME).unlink()
        if place.exists():
            place.rename(replaced)
        work.rename(place)
        parent = os.open(place.parent, os.O_RDONLY)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)
        shutil.rmtree(replaced, ignore_errors=True)


def check_replaceable(place: Path, marker: str) -> None:
    """Refuse to replace anything but an empty directory or one of ours, which holds `marker`."""
    if not place.exists() or (place / marker).exists():
        return
    if not place.is_dir() or any(place.iterdir()):
        raise DataError(
            expected=f"a new or empty directory at {place}",
            found="files of another kind" if place.is_dir() else "a file",
            do="choose another directory with --out",
        )


def _claim(work: Path, say: Say) -> int:
    """Lock the directory `work`, made if need be, and return the handle that holds the lock."""
    import fcntl  # not on Windows, where nothing else here needs it

    while True:
        work.mkdir(exist_ok=True)
        try:
            handle = os.open(work, os.O_RDONLY)
        except FileNotFoundError:
            continue  # published or removed in between
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another process that is writing {work}")
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except BaseException:
                os.close(handle)
                raise
        if _is(work, handle):
            return handle
        os.close(handle)  # its owner has published or removed it


def _is(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False
