"""Files and directories that are complete or absent, even after a kill or a power failure, and locks on them.

Everything is written under a temporary name, synced to disk and then renamed. `reading` and `writing` turn
errors of the operating system into one line for the user; the other functions let them pass.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from hotlap.errors import ConfigError, DataError, HotlapError


def cache_directory() -> Path:
    """`$HOTLAP_CACHE` if set, otherwise `hotlap` in the user's cache directory."""
    try:
        if own := os.environ.get("HOTLAP_CACHE"):
            return Path(own).expanduser().absolute()
        shared = os.environ.get("XDG_CACHE_HOME")
        return (Path(shared) if shared else Path.home() / ".cache").expanduser().absolute() / "hotlap"
    except RuntimeError as error:  # neither HOME nor an entry in the user database, as in some containers
        raise ConfigError(
            expected="a home directory, for the cache in it", found=str(error), do="set HOTLAP_CACHE"
        ) from error


def without_home(text: str) -> str:
    """Text with the user's home directory as `~`, so that a file that is shared does not name the user."""
    home = os.path.expanduser("~")
    if len(home) < 2:
        return text
    return re.sub(rf"(?<![\w./-]){re.escape(home)}(?=/|$|[^\w.-])", "~", text)


def without_folders(text: str) -> str:
    """The text with absolute paths cut to their last part, so that nothing of this machine is shared."""
    return re.sub(r"(?<![\w:/])~?/(?:[^\s/]+/)*([^\s/]+)", r"\1", text)


@contextmanager
def reading(path: Path, error: type[HotlapError] = DataError) -> Iterator[None]:
    """Turn an OSError (no such file, no permission, a bad disk) into `error`."""
    try:
        yield
    except OSError as cause:
        raise error(
            expected=f"a readable file {path}", found=cause.strerror or str(cause), do="check the path"
        ) from cause


@contextmanager
def writing(
    path: Path, error: type[HotlapError] = DataError, also: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turn an OSError (a full disk, no permission) into `error`.

    `also`: exceptions with which libraries wrap an OSError.
    """
    try:
        yield
    except Exception as cause:
        if not isinstance(cause, (OSError, *also)):
            raise
        raise error(
            expected=f"to write {path}",
            found=getattr(cause, "strerror", None) or str(cause),
            do="make room on the disk, check the permissions or choose another directory;"
            " no incomplete file is left under that name",
        ) from cause


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a directory, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path, error: type[HotlapError] = DataError) -> str:
    with reading(path, error), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_directory(path: Path) -> None:
    """Make a directory and its missing parents, and sync each new name."""
    if not path.is_dir():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def partial_path(path: Path) -> Path:
    """The temporary name of a large file that is written in parts; see `publish`."""
    return path.with_name(path.name + ".partial")


def publish(file: BinaryIO, path: Path) -> None:
    """Sync and close `file`, which is open under a temporary name, and rename it to `path`."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    Path(file.name).replace(path)
    sync(path.parent)


def write_atomically(path: Path, content: bytes) -> None:
    """Write a whole file. Readers see the old content or the new, also when two processes write at once."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            publish(file, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_directory(path: Path, keep_replaced_as: Path | None = None) -> Iterator[Path]:
    """Yield an empty hidden directory, which is synced and renamed to `path` when the block ends.

    If the block raises, the hidden directory is removed and `path` stays as it was. A killed process leaves
    the hidden directory behind, and the next attempt empties it. Only one process may write `path` at a time.

    A directory that is already at `path` moves to `keep_replaced_as`; by default it is removed as soon as the
    new one is in its place. If `path` is a symbolic link, the directory that it names is written.
    """
    path = without_link(path)
    work = hidden(path, "unfinished")
    replaced = keep_replaced_as or hidden(path, "replaced")
    make_directory(path.parent)
    _remove(work)
    if keep_replaced_as is None and replaced.exists() and not path.exists():
        replaced.rename(path)  # a process was killed between the two renames below
    existed = path.exists()
    try:
        work.mkdir()
        yield work
        for written in (*work.rglob("*"), work):
            sync(written)
        if existed:
            _remove(replaced)
            path.rename(replaced)
        work.rename(path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        if existed and not path.exists():
            replaced.rename(path)
        raise
    sync(path.parent)
    if keep_replaced_as is None:
        shutil.rmtree(replaced, ignore_errors=True)


def without_link(path: Path) -> Path:
    """`path`, or what it names if it is a symbolic link."""
    return path.resolve() if path.is_symlink() else path


def _remove(path: Path) -> None:
    """Remove a leftover of an earlier attempt. Of a symbolic link only the link, never what it names."""
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def hidden(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{ending}")


def lock(path: Path, when_held: Callable[[str], None]) -> FileIO:
    """Lock the file at `path`, which is created if need be, and return it. Closing it releases the lock.

    If another process holds the lock, `when_held` is called with what it wrote into the file, its process id.
    It raises to give up, or returns to wait for the lock.

    This is `flock`: the kernel releases the lock when the last process that has the file open ends, even by
    SIGKILL. The `filelock` package is built on it too, but keeps the open file to itself: the runs of a race
    have to inherit it, so that a run that outlives its race keeps the lock.
    """
    import fcntl  # not on Windows, where run directories can still be read

    while True:
        with ExitStack() as stack:
            file = stack.enter_context(FileIO(path, "a+", opener=_without_following))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                when_held(file.read().decode(errors="replace").strip())
                fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):  # otherwise its last holder has removed it: lock the new one
                file.truncate(0)
                file.write(f"{os.getpid()}\n".encode())
                stack.pop_all()
                return file


@contextmanager
def locked_beside(path: Path, when_held: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock for writing `path`: a hidden file beside it, which is removed afterwards."""
    place = hidden(without_link(path), "lock")
    make_directory(place.parent)
    with lock(place, when_held):
        try:
            yield
        finally:
            place.unlink(missing_ok=True)


def _without_following(path: str, flags: int) -> int:
    """Open a file, but not through a symbolic link: whoever made the link would choose what is truncated."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _is_at(path: Path, file: FileIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
