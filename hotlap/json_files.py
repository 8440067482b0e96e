"""JSON on disk: strict (no NaN or infinity), written atomically, and sealed where damage must be noticed.

Sealed JSON contains the checksum of the rest of its content, so a changed byte cannot change a value unseen.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hotlap.errors import HotlapError
from hotlap.files import reading, write_atomically, writing

CHECKSUM_FIELD = "checksum"


def finite(value: Any) -> Any:
    """A copy as strict JSON allows it: NaN and infinities become None, tuples and arrays become lists."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, np.ndarray):
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: Mapping[str, Any], error: type[HotlapError]) -> None:
    text = json.dumps(finite(content), indent=1, allow_nan=False) + "\n"
    with writing(path, error):
        write_atomically(path, text.encode())


def write_sealed(path: Path, content: Mapping[str, Any], error: type[HotlapError]) -> None:
    with writing(path, error):
        write_atomically(path, seal(finite(content)))


def read_sealed(path: Path, error: type[HotlapError]) -> dict[str, Any]:
    """The content of a file by `write_sealed`. One from before it was sealed is read without its check."""
    with reading(path, error):
        sealed = path.read_bytes()
    content = parse_object(sealed, str(path), error)
    if CHECKSUM_FIELD not in content:
        return content
    try:
        return unseal(sealed)
    except ValueError as cause:
        raise damaged(str(path), "unmodified content", str(cause), error) from cause


def read_object(path: Path, error: type[HotlapError]) -> dict[str, Any]:
    """The JSON object in a file; whatever else is in it is raised as `error`."""
    with reading(path, error):
        content = path.read_bytes()
    return parse_object(content, str(path), error)


def parse_object(content: bytes, place: str, error: type[HotlapError]) -> dict[str, Any]:
    """`place`: the file, and the line if it is one of many."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as cause:
        if isinstance(cause, UnicodeDecodeError):
            found = f"bytes that are not UTF-8 at offset {cause.start}"
        else:
            found = " ".join(str(cause).split()) or type(cause).__name__
        raise damaged(place, "a JSON object", found, error) from cause
    if not isinstance(value, dict):
        raise damaged(place, "a JSON object", type(value).__name__, error)
    return value


def damaged(place: str, expected: str, found: str, error: type[HotlapError]) -> HotlapError:
    return error(expected=f"{expected} in {place}", found=found, do="restore the file from a backup")


def canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def seal(content: Mapping[str, Any], to_text: Callable[[Mapping[str, Any]], str] = canonical) -> bytes:
    """`content` as readable JSON with a checksum field; `to_text` makes the text that the checksum is of."""
    assert CHECKSUM_FIELD not in content, f"`{CHECKSUM_FIELD}` is reserved for the seal"
    sealed = {**content, CHECKSUM_FIELD: hashlib.sha256(to_text(content).encode()).hexdigest()}
    text = json.dumps(sealed, indent=1, ensure_ascii=False) + "\n"
    # What UTF-8 cannot encode, such as a byte of a path that is no text, becomes an escape of JSON.
    return text.encode(errors="backslashreplace")


def unseal(sealed: bytes, to_text: Callable[[Mapping[str, Any]], str] = canonical) -> dict[str, Any]:
    """The content of sealed JSON. Raises ValueError, with a message for a user, if it is damaged."""
    try:
        content = json.loads(sealed)
        if not isinstance(content, dict) or CHECKSUM_FIELD not in content:
            raise ValueError(f"no `{CHECKSUM_FIELD}` field")
        checksum = content.pop(CHECKSUM_FIELD)
        text = to_text(content)
    except json.JSONDecodeError as error:
        raise ValueError(f"no valid JSON ({error})") from error
    except RecursionError as error:
        raise ValueError("JSON that is nested too deeply") from error
    if checksum != hashlib.sha256(text.encode()).hexdigest():
        raise ValueError("content that does not match its own checksum")
    return content
