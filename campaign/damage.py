"""Seeded damage to the bytes of a file, and to the JSON in it.

Each kind takes the content and a source of chance, and returns the damaged content. What knows a format of
its own is in `formats`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Damage = Callable[[bytes, Random], bytes]

PAGE = 4096
NOT_JSON = ("nested lists", "nested objects", "a long number", "NaN", "Infinity", "two values")


def flip_bits(content: bytes, chance: Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(chance.choice((1, 1, 1, 2, 8, 64))):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def flip_bits_at_the_start(content: bytes, chance: Random) -> bytes:
    """Where headers are."""
    return flip_bits(content[:64], chance) + content[64:]


def set_bytes(content: bytes, chance: Random) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(chance.choice((1, 2, 16))):
        changed[chance.randrange(len(changed))] = chance.choice((0, 0xFF, 0x7F, 0x80, chance.randrange(256)))
    return bytes(changed)


def truncate(content: bytes, chance: Random) -> bytes:
    return content[
        : chance.choice((0, 1, len(content) // 2, len(content) - 1, chance.randrange(len(content) + 1)))
    ]


def zero_pages(content: bytes, chance: Random) -> bytes:
    """As a file system leaves a file whose size was written before its content."""
    size = chance.choice((PAGE, 512, 16))
    start = chance.randrange(max(1, -(-len(content) // size))) * size
    count = chance.choice((1, 1, 4, 1000))
    end = min(len(content), start + count * size)
    return content[:start] + bytes(end - start) + content[end:]


def cut_out(content: bytes, chance: Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    return content[:start] + content[start + chance.choice((1, 4, 64, PAGE)) :]


def repeat(content: bytes, chance: Random) -> bytes:
    start = chance.randrange(len(content) + 1)
    end = start + chance.choice((1, 64, PAGE))
    return content[:end] + content[start:end] + content[end:]


def append(content: bytes, chance: Random) -> bytes:
    return content + chance.choice((b"\0", b"\n", b"}", b"{}\n", chance.randbytes(100), content[:1000]))


def noise(content: bytes, chance: Random) -> bytes:
    return chance.randbytes(chance.choice((0, 1, 100, len(content))))


ON_BYTES: tuple[Damage, ...] = (
    *(flip_bits, flip_bits, flip_bits_at_the_start, set_bytes, truncate, truncate),
    *(zero_pages, cut_out, repeat, append, noise),
)


def odd_value(chance: Random) -> Any:
    return chance.choice(
        [
            *(None, True, False, 0, 1, -1, 2.5, -0.0, 1e308, 10**18, 2**31, 2**63, 2**64, 10**400, 10**5000),
            *(float("nan"), float("inf"), float("-inf")),
            *("", "x", "\ud800", "\x1b]0;title\x07", "\0", "../../etc/passwd", "/", "~", "é" * 5000),
            *([], {}, [1], [[]], {"a": "b"}, [None] * 1000, nested(500)),
        ]
    )


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield above
    if isinstance(value, (dict, list)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*above, key))


def change_json(value: Any, chance: Random) -> Any:
    """The value with something in it replaced, removed, renamed, added or exchanged."""
    found = list(places(value))
    place = chance.choice(found[1:] or found)
    if not place:
        return odd_value(chance)
    changed = copy.deepcopy(value)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    key = place[-1]
    kind = chance.choice(("replace", "replace", "remove", "exchange", "number", "rename", "add"))
    if kind == "remove":
        del inner[key]
    elif kind == "exchange":
        other = chance.choice(list(inner) if isinstance(inner, dict) else range(len(inner)))
        inner[key], inner[other] = inner[other], inner[key]
    elif kind == "number" and isinstance(inner[key], (int, float)) and not isinstance(inner[key], bool):
        inner[key] = chance.choice((inner[key] + 1, -inner[key] - 1, inner[key] * 1000 + 1, str(inner[key])))
    elif kind == "rename" and isinstance(inner, dict):
        inner[str(key) + chance.choice(("x", " ", "\0"))] = inner.pop(key)
    elif kind == "add" and isinstance(inner, dict):
        inner[chance.choice(("extra", "", "__class__", "\ud800"))] = odd_value(chance)
    else:
        inner[key] = odd_value(chance)
    return changed


def dump_json(value: Any) -> bytes:
    import sys

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)  # numbers that Python itself refuses to read back
    try:
        return json.dumps(value, indent=1).encode(errors="backslashreplace")
    finally:
        sys.set_int_max_str_digits(before)


def in_json(content: bytes, chance: Random) -> bytes:
    return dump_json(change_json(json.loads(content), chance)) + b"\n"


def in_json_lines(content: bytes, chance: Random) -> bytes:
    lines = content.splitlines(keepends=True)
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    kind = chance.choice(("value", "value", "value", "drop", "repeat", "exchange", "reverse", "no JSON"))
    if kind == "value":
        changed = change_json(json.loads(lines[at]), chance)
        lines[at] = b" ".join(dump_json(changed).split(b"\n")) + b"\n"
    elif kind == "drop":
        del lines[at]
    elif kind == "repeat":
        lines.insert(other, lines[at])
    elif kind == "exchange":
        lines[at], lines[other] = lines[other], lines[at]
    elif kind == "reverse":
        lines.reverse()
    else:
        lines[at] = no_json(lines[at], chance)
    return b"".join(lines)


def no_json(content: bytes, chance: Random) -> bytes:
    """What looks like JSON, and is refused by a strict reader or costs a careless one its stack."""
    kind = chance.choice(NOT_JSON)
    number = chance.choice((b"1" * 5000, b"1e999", b"-1e999"))
    return {
        "nested lists": b"[" * 100_000,
        "nested objects": b'{"a":' * 100_000,
        "a long number": b'{"a": ' + number + b"}",
        "NaN": b'{"step": NaN, "kind": "train"}',
        "Infinity": b'{"step": Infinity, "kind": "train"}',
        "two values": content.strip() + content.strip(),
    }[kind] + b"\n"


ON_JSON: tuple[Damage, ...] = (in_json, in_json, in_json, no_json)
ON_JSON_LINES: tuple[Damage, ...] = (in_json_lines, in_json_lines, in_json_lines, no_json)
