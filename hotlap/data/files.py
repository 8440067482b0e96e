"""Files of prepared data: errors of the system as one line, and JSON that notices damage to itself.

Sealed JSON carries the checksum of its own content, so that a changed byte cannot change what is read from
it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hotlap.errors import DataError
from hotlap.files import replace_whole

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


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file at once, or leave what was there."""
    with writing(path):
        replace_whole(path, content)


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
