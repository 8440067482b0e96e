"""Reads which steps an offline run of W&B has, from the files that `wandb sync` would upload.

W&B itself tells only online how far a run is. Its files are logs in LevelDB's format: blocks of 32 KiB with
records that may be split (https://github.com/google/leveldb/blob/main/doc/log_format.md), after a header of
7 bytes; each record is a protobuf message of the package `wandb`.
"""

from __future__ import annotations

import importlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE_HEADER_BYTES = 7
BLOCK_BYTES = 32 * 1024
RECORD_HEADER = struct.Struct("<IHB")  # checksum, length, type
FULL, LAST = 1, 4


def logged_values(folder: Path, run_id: str) -> set[tuple[str, int]]:
    """Kind and step of what the offline files of a run have. `folder`: W&B's own, in the run directory."""
    found = set()
    for path in sorted(folder.glob(f"*-{run_id}/run-{run_id}.wandb")):
        for row in history(path):
            found |= {(name.partition("/")[0], int(row["_step"])) for name in row if "/" in name}
    return found


def history(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a `.wandb` file, each with its `_step`."""
    message = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    for content in records(path.read_bytes()):
        record = message()
        record.ParseFromString(content)
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            yield {"_step": record.history.step.num, **items}


def records(content: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format; an incomplete last one, of a killed process, is left out."""
    at, parts = FILE_HEADER_BYTES, b""
    while True:
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < RECORD_HEADER.size:
            at += left  # a block's end, too short for a header
        if at + RECORD_HEADER.size > len(content):
            return
        _, length, kind = RECORD_HEADER.unpack_from(content, at)
        start = at + RECORD_HEADER.size
        at = start + length
        if kind == 0 or at > len(content):
            return
        parts += content[start:at]
        if kind in (FULL, LAST):
            yield parts
            parts = b""
