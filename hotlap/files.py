"""Where files are cached, and files that are whole or absent, and stay so when the process is killed or the
machine goes down.

Everything that is written at once goes to a `.partial` name first, is synced, then renamed. Errors of the
system pass through; `hotlap.data.files` and `hotlap.runs.durable` turn them into one line for the user.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO


def cache_directory() -> Path:
    """`$HOTLAP_CACHE`, else `hotlap` in the user's cache directory."""
    if own := os.environ.get("HOTLAP_CACHE"):
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").expanduser().absolute() / "hotlap"


def partial_path(path: Path) -> Path:
    """Where `path` is written until it is complete: always the same, so a killed run leaves at most one."""
    return path.with_name(path.name + ".partial")


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(file: BinaryIO, path: Path) -> None:
    """Close `file`, which is open at `partial_path(path)`, and give it its name once it is safely on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    partial_path(path).replace(path)
    sync(path.parent)


def replace_whole(path: Path, content: bytes) -> None:
    """Write a file at once, or leave what was there."""
    try:
        with partial_path(path).open("wb") as file:
            file.write(content)
            publish(file, path)
    except BaseException:
        partial_path(path).unlink(missing_ok=True)
        raise
