"""A cache of values that need a full read of a file to compute, such as checksums.

The cache is a file in the same directory. An entry is valid while the file's identity (size, mtime, ctime,
inode) is unchanged. A missing, damaged, outdated or unwritable cache costs time but is never incorrect.
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

CACHE_NAME = ".verified.json"
READERS = 8

# A file that is written twice within one clock tick of its file system keeps its identity. A file that
# changed less than this long ago is therefore measured but not cached.
SETTLED_SECONDS = 2.0


def measure_once(paths: Sequence[Path], fact: str, measure: Callable[[Path], Any]) -> list[Any]:
    """`measure(path)` for each path, in threads, or the cached value if the file is unchanged.

    All paths are in one directory. `fact` is the key of the value in the cache.
    """
    cache_path = paths[0].parent / CACHE_NAME
    cache = _read_cache(cache_path)
    before = [_identity(path) for path in paths]

    def cached_facts(path: Path, identity: list[int]) -> dict[str, Any]:
        known = cache.get(path.name)
        return known if isinstance(known, dict) and known.get("identity") == identity else {}

    def cached_or_measured(path: Path, identity: list[int]) -> Any:
        known = cached_facts(path, identity)
        return known[fact] if fact in known else measure(path)

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as readers:
        values = list(readers.map(cached_or_measured, paths, before))

    updated = dict(cache)
    for path, identity, value in zip(paths, before, values, strict=True):
        if _identity(path) == identity and _is_settled(path):
            updated[path.name] = {**cached_facts(path, identity), "identity": identity, fact: value}
    if updated != cache:
        _write_cache(cache_path, updated)
    return values


def _identity(path: Path) -> list[int]:
    with reading(path):
        status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _is_settled(path: Path) -> bool:
    status = path.stat()
    return time.time() - max(status.st_mtime, status.st_ctime) > SETTLED_SECONDS


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        return unseal(path.read_bytes())
    except (OSError, ValueError):
        return {}


def _write_cache(path: Path, cache: dict[str, Any]) -> None:
    # Several ranks may write at the same time, each to its own temporary name. The last one wins.
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(seal(cache))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
