"""Damage that knows a format: headers with absurd sizes, and files that are whole but say something else.

Some of it repairs the checksums afterwards. Such a file is valid: nobody can tell that it was changed, but it
must not end a command by a traceback or a crash either.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard

from campaign.damage import ON_BYTES, change_json, dump_json, in_json_lines
from hotlap.json_files import seal, unseal

SIZES = (0, 1, -1, 2**31 - 1, -(2**31))
LARGE_SIZES = (0, 1, 7, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**64 - 1)


def shard_header(content: bytes, chance: Random) -> bytes:
    """A 4-byte field of a shard's header: magic, version, number of tokens, or an unused one."""
    field = chance.choice((0, 1, 2, 2, 2, chance.randrange(3, 256)))
    value = chance.choice((*SIZES, chance.randrange(2**31)))
    return content[: 4 * field] + struct.pack("<i", value) + content[4 * field + 4 :]


def shard_tokens(content: bytes, chance: Random) -> bytes:
    """A token that no vocabulary has."""
    at = 1024 + 2 * chance.randrange((len(content) - 1024) // 2)
    return content[:at] + chance.choice((b"\xff\xff", b"\x2d\x01", b"\0\x80")) + content[at + 2 :]


def tensors_header(content: bytes, chance: Random) -> bytes:
    """The header of a safetensors file: its length, or a name, dtype, shape or offset in its JSON."""
    if chance.random() < 0.3:
        return struct.pack("<Q", chance.choice(LARGE_SIZES)) + content[8:]
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    changed = dump_json(change_json(header, chance))
    return struct.pack("<Q", len(changed)) + changed + content[8 + length :]


def tensors_not_finite(content: bytes, chance: Random) -> bytes:
    """NaN or infinity as the last number of a safetensors file."""
    return content[:-4] + struct.pack("<f", chance.choice((float("nan"), float("inf"))))


def sealed_again(content: bytes, chance: Random) -> bytes:
    """Sealed JSON with another value and a checksum that fits it."""
    to_text = json.dumps if b"hotlap-checkpoint" in content else None
    arguments: tuple[Any, ...] = (to_text,) if to_text else ()
    changed = change_json(unseal(content, *arguments), chance)
    if not isinstance(changed, dict) or "checksum" in changed:
        changed = {}
    try:
        return seal(changed, *arguments)
    except (ValueError, UnicodeEncodeError):  # a number or a text that a seal cannot be made of
        return seal({}, *arguments)


def gzip_of(damage: Callable[[bytes, Random], bytes]) -> Callable[[bytes, Random], bytes]:
    """Damage what is compressed, and compress it again."""

    def damaged(content: bytes, chance: Random) -> bytes:
        return gzip.compress(damage(gzip.decompress(content), chance), mtime=0)

    damaged.__name__ = f"{damage.__name__} inside"
    return damaged


def zstd_of(damage: Callable[[bytes, Random], bytes]) -> Callable[[bytes, Random], bytes]:
    def damaged(content: bytes, chance: Random) -> bytes:
        return zstandard.compress(damage(zstandard.decompress(content), chance))

    damaged.__name__ = f"{damage.__name__} inside"
    return damaged


def gzip_bomb(_content: bytes, chance: Random) -> bytes:
    """Little that unpacks to much; of one letter, so that it is text."""
    return gzip.compress(b"a" * chance.choice((10**5, 10**6)), mtime=0)


def parquet_table(_content: bytes, chance: Random) -> bytes:
    """A sound file with other columns, types, nulls or rows than a text column."""
    text = chance.choice(
        [
            pyarrow.array(["a b c", None, "", "d e f"] * 20),
            pyarrow.array([1, 2, 3]),
            pyarrow.array([b"\xff\xfe", b"ok"] * 20),
            pyarrow.array([["a"], ["b"]]),
            pyarrow.array([{"a": "b"}] * 3),
            pyarrow.array(["one", "two"] * 20).dictionary_encode(),
            pyarrow.array(["large"] * 40, pyarrow.large_string()),
            pyarrow.array([], pyarrow.string()),
            pyarrow.array([None] * 3),
        ]
    )
    table = pyarrow.table({chance.choice(("text", "text", "text", "body")): text})
    file = io.BytesIO()
    codec = chance.choice(("none", "snappy", "zstd", "gzip"))
    pyarrow.parquet.write_table(table, file, compression=codec, row_group_size=chance.choice((1, 7, 100)))
    return file.getvalue()


def zip_member(content: bytes, chance: Random) -> bytes:
    """A zip file, such as a .docx, with a sound checksum for a damaged member."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = chance.choice(list(members))
    members[name] = chance.choice(ON_BYTES)(members[name], chance)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, member in members.items():
            archive.writestr(zipfile.ZipInfo(name), member)
    return file.getvalue()


def sha256_in_manifest(directory: Path, name: str) -> bool:
    """Write the checksum of a damaged file into the manifest beside it, and seal that; False without one."""
    path = directory / "manifest.json"
    if not path.exists():
        return False
    sealed, content = path.read_bytes(), (directory / name).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    arguments: tuple[Any, ...] = (json.dumps,) if b"hotlap-checkpoint" in sealed else ()
    manifest = unseal(sealed, *arguments)
    if arguments:
        manifest["files"][name] = {"bytes": len(content), "sha256": sha256}
    else:
        for shard in manifest["shards"]:
            if shard["file"] == name:
                shard["sha256"] = sha256
    path.write_bytes(seal(manifest, *arguments))
    return True


def inside(kind: str, of: Callable[..., Any]) -> tuple[Callable[[bytes, Random], bytes], ...]:
    damages = (*ON_BYTES, in_json_lines) if kind == "jsonl" else ON_BYTES
    return tuple(of(damage) for damage in damages)
