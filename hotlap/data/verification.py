"""Facts about files that take a full read to know, measured once and remembered beside the files.

Relies on a file's identity (size, times of change, inode) changing with its content. A memory that is
missing, damaged, of another file or cannot be written costs time, never correctness.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hotlap.files import reading
from hotlap.json_files import seal, unseal

MEMORY_NAME = ".verified.json"
READERS = 8

# A file written to twice within one clock tick of its file system keeps its identity; what changed less than
# this long ago is therefore measured but not yet remembered.
SETTLED_SECONDS = 2.0


def measure_once(paths: Sequence[Path], fact: str, measure: Callable[[Path], Any]) -> list[Any]:
    """`measure` of each path (all in one directory), in threads; recalled where the file is unchanged."""
    memory_path = paths[0].parent / MEMORY_NAME
    memory = _read_memory(memory_path)
    before = [_identity(path) for path in paths]

    def known_of(path: Path, identity: list[int]) -> dict[str, Any]:
        known = memory.get(path.name)
        return known if isinstance(known, dict) and known.get("identity") == identity else {}

    def recall_or_measure(path: Path, identity: list[int]) -> Any:
        known = known_of(path, identity)
        return known[fact] if fact in known else measure(path)

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
        values = list(readers.map(recall_or_measure, paths, before))

    learned = dict(memory)
    for path, identity, value in zip(paths, before, values, strict=True):
        if _identity(path) == identity and _is_settled(path):
            learned[path.name] = {**known_of(path, identity), "identity": identity, fact: value}
    if learned != memory:
        _write_memory(memory_path, learned)
    return values


def _identity(path: Path) -> list[int]:
    with reading(path):
        status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _is_settled(path: Path) -> bool:
    status = path.stat()
    return time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_SECONDS


def _read_memory(path: Path) -> dict[str, Any]:
    try:
        return unseal(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _write_memory(path: Path, memory: dict[str, Any]) -> None:
    # The ranks of a run may do this at the same time, each under a name of its own; the last one wins.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(seal(memory))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
