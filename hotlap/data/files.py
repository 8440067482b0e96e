"""Files that are either whole or absent, and JSON that notices damage to itself.

Everything the data modules write goes through here: to a `.partial` name first, synced, then renamed. Sealed
JSON carries the checksum of its own content, so that a changed byte cannot change what is read from it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hotlap.errors import DataError

PARTIAL_SUFFIX = ".partial"
CHECKSUM_FIELD = "checksum"


def file_sha256(path: Path) -> str:
    with reading(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the system refuses (no such file, no permission, a bad disk) into a `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            expected=f"a readable file {path}", found=error.strerror or str(error), do="check the path"
        ) from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system refuses (a full disk, no permission) into a `DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            expected=f"to write {path}",
            found=error.strerror or str(error),
            do="make room or choose another directory; nothing half-written is left under that name",
        ) from error


def partial_path(path: Path) -> Path:
    """Where `path` is written until it is complete: always the same, so a killed run leaves at most one."""
    return path.with_name(path.name + PARTIAL_SUFFIX)


def publish(file: BinaryIO, path: Path) -> None:
    """Close `file`, which is open at `partial_path(path)`, and give it its name once it is safely on disk."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    partial_path(path).replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file at once, or leave what was there."""
    with writing(path):
        try:
            with partial_path(path).open("wb") as file:
                file.write(content)
                publish(file, path)
        except BaseException:
            partial_path(path).unlink(missing_ok=True)
            raise


def seal(content: Mapping[str, Any]) -> bytes:
    """`content` as readable JSON with its own checksum in it."""
    assert CHECKSUM_FIELD not in content, f"`{CHECKSUM_FIELD}` is the seal's own field"
    sealed = {**content, CHECKSUM_FIELD: _checksum(content)}
    return (json.dumps(sealed, indent=1, ensure_ascii=False) + "\n").encode()


def unseal(sealed: bytes) -> dict[str, Any]:
    """The content of sealed JSON. Raises ValueError, in words for a user, when it is not what was sealed."""
    try:
        content = json.loads(sealed)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no valid JSON ({error})") from error
    if not isinstance(content, dict) or CHECKSUM_FIELD not in content:
        raise ValueError(f"no `{CHECKSUM_FIELD}` field")
    if content.pop(CHECKSUM_FIELD) != _checksum(content):
        raise ValueError("content that does not match its own checksum")
    return content


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()
