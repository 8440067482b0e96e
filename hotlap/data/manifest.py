"""`manifest.json`: the contents, origin and checksums of a directory of shards.

It is written last and atomically, so a directory with a manifest is complete. Every field is checked when the
file is read, and the file contains its own checksum: a damaged manifest raises an error.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hotlap.data.shards import SPLITS, read_header, variant_for
from hotlap.errors import DataError
from hotlap.files import file_sha256, reading, write_atomically, writing
from hotlap.json_files import seal, unseal

MANIFEST_NAME = "manifest.json"
MANIFEST_FORMAT = "hotlap-tokens"
MANIFEST_VERSION = 1
OPTIONAL_LISTS = ("files", "problems", "notes")

# `hotlap data prepare` creates this file before the first shard and removes it after writing the manifest. A
# directory that contains it is rejected, because some of its shards may be missing.
UNFINISHED_NAME = "unfinished.json"


@dataclass(frozen=True)
class TokenizerEntry:
    name: str
    sha256: str
    file: str | None  # in the manifest's directory; None if the name alone identifies the tokenizer


@dataclass(frozen=True)
class ShardEntry:
    file: str
    split: str
    tokens: int
    documents: int | None  # that start in this shard; None if unknown
    text_bytes: int | None  # UTF-8 bytes of text that the tokens encode; None if unknown
    sha256: str  # of the whole file, as printed by `sha256sum`


@dataclass(frozen=True)
class FileEntry:
    """A file that the text was read from."""

    file: str
    read_as: str  # its format and encoding, in words
    documents: int
    text_bytes: int


@dataclass(frozen=True)
class Problem:
    """A file, or a line of one, that was left out or repaired."""

    file: str
    line: int | None  # None: the whole file
    reason: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.line is None else f', line {self.line}'}: {self.reason}"


@dataclass(frozen=True)
class Manifest:
    tokenizer: TokenizerEntry
    vocab_size: int
    end_of_text: int
    shards: tuple[ShardEntry, ...]
    source: str
    licence: str
    counters: Mapping[str, int] = field(default_factory=dict)  # such as invalid UTF-8 sequences replaced
    settings: Mapping[str, str] = field(
        default_factory=dict
    )  # options of the preparation, to detect a change
    # Of the user's own files; the first ones if there are very many. Absent from the file if empty.
    files: tuple[FileEntry, ...] = ()
    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()  # what was chosen in the preparation, and why

    def of_split(self, split: str) -> tuple[ShardEntry, ...]:
        """A split's shards in name order, which is the order of the token stream."""
        return tuple(sorted((s for s in self.shards if s.split == split), key=lambda s: s.file))


def describe_shard(path: Path, split: str, *, documents: int | None, text_bytes: int | None) -> ShardEntry:
    """The manifest entry of a shard on disk."""
    return ShardEntry(
        file=path.name,
        split=split,
        tokens=read_header(path).tokens,
        documents=documents,
        text_bytes=text_bytes,
        sha256=file_sha256(path),
    )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    path = directory / MANIFEST_NAME
    content = {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, **asdict(manifest)}
    content["shards"] = list(content["shards"])
    for name in OPTIONAL_LISTS:
        content[name] = list(content[name])
        if not content[name]:
            del content[name]
    assert _manifest_from(path, content) == manifest, "the manifest does not survive a round trip"
    with writing(path):
        write_atomically(path, seal(content))


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a directory, or None if it has none."""
    path = directory / MANIFEST_NAME
    if not path.exists():
        return None
    with reading(path):
        sealed = path.read_bytes()
    try:
        content = unseal(sealed)
    except ValueError as error:
        raise _damaged(path, "an unmodified manifest", str(error)) from error
    return _manifest_from(path, content)


def verify_file(directory: Path, entry: ShardEntry | TokenizerEntry) -> None:
    """Check a file against its entry: header, size and checksum."""
    assert entry.file is not None, "an entry without a file cannot be verified"
    path = directory / entry.file
    if isinstance(entry, ShardEntry):
        check_count(path, entry)
    found = file_sha256(path)
    if found != entry.sha256:
        raise wrong_checksum(path, entry.sha256, found)


def check_count(path: Path, entry: ShardEntry) -> None:
    """Check the token count against the manifest, without reading the tokens."""
    tokens = read_header(path).tokens
    if tokens != entry.tokens:
        raise DataError(
            expected=f"{entry.tokens} tokens in {path}, according to its {MANIFEST_NAME}",
            found=f"{tokens}",
            do="copy or prepare the data again",
        )


def wrong_checksum(path: Path, expected: str, found: str) -> DataError:
    return DataError(
        expected=f"sha256 {expected[:16]}… for {path}, according to its {MANIFEST_NAME}",
        found=f"{found[:16]}…",
        do="the file is damaged or was modified: copy or prepare the data again",
    )


def _damaged(path: Path, expected: str, found: str) -> DataError:
    return DataError(expected=f"{expected} in {path}", found=found, do="copy or prepare the data again")


class _Fields:
    """Pops typed fields from a JSON object. `done` raises if any are left."""

    def __init__(self, path: Path, where: str, content: Any) -> None:
        self.path = path
        self.where = where
        if not isinstance(content, dict):
            raise self.wrong("an object", content)
        self.left = dict(content)

    def wrong(self, expected: str, found: object, name: str = "") -> DataError:
        where = ".".join(part for part in (self.where, name) if part) or "the manifest"
        return _damaged(self.path, f"{expected} as `{where}`", repr(found)[:80])

    def take(self, name: str) -> Any:
        if name not in self.left:
            raise self.wrong("a value", "none", name)
        return self.left.pop(name)

    def text(self, name: str, pattern: str = r"(?s).*", what: str = "a string") -> str:
        value = self.take(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self.wrong(what, value, name)
        return value

    def file_name(self, name: str) -> str:
        # A manifest must not refer to files outside its directory.
        return self.text(name, r"(?!\.)[^/\\\0]+", "a file name without a path")

    def sha256(self, name: str) -> str:
        return self.text(name, "[0-9a-f]{64}", "64 hexadecimal digits")

    def number(self, name: str, least: int = 0) -> int:
        value = self.take(name)
        if type(value) is not int or value < least:  # isinstance would accept a bool
            raise self.wrong(f"an integer of at least {least}", value, name)
        return value

    def number_or_none(self, name: str) -> int | None:
        if self.left.get(name, 0) is None:
            return self.take(name)
        return self.number(name)

    def optional_list(self, name: str) -> list[Any]:
        value = self.left.pop(name, [])
        if not isinstance(value, list):
            raise self.wrong("a list", value, name)
        return value

    def done(self) -> None:
        if self.left:
            raise self.wrong("no unknown fields", sorted(self.left))


def _manifest_from(path: Path, content: Any) -> Manifest:
    fields = _Fields(path, "", content)
    if (kind := fields.text("format")) != MANIFEST_FORMAT:
        raise fields.wrong(repr(MANIFEST_FORMAT), kind, "format")
    version = fields.number("version")
    if version != MANIFEST_VERSION:
        raise DataError(
            expected=f"version {MANIFEST_VERSION} of {path}", found=str(version), do="prepare the data again"
        )
    vocab_size = fields.number("vocab_size", least=1)
    variant_for(vocab_size)
    end_of_text = fields.number("end_of_text")
    if end_of_text >= vocab_size:
        raise fields.wrong(f"an id below {vocab_size}", end_of_text, "end_of_text")
    shards = fields.take("shards")
    if not isinstance(shards, list) or not shards:
        raise fields.wrong("a list of shards", shards, "shards")
    entries = tuple(_shard_from(path, f"shards.{i}", shard) for i, shard in enumerate(shards))
    if len({entry.file for entry in entries}) != len(entries):
        raise fields.wrong("each file once", [entry.file for entry in entries], "shards")
    manifest = Manifest(
        tokenizer=_tokenizer_from(path, fields.take("tokenizer")),
        vocab_size=vocab_size,
        end_of_text=end_of_text,
        shards=entries,
        source=fields.text("source"),
        licence=fields.text("licence"),
        counters=_counters_from(path, fields.take("counters")),
        settings=_settings_from(path, fields.take("settings")),
        files=tuple(
            _file_from(path, f"files.{i}", entry) for i, entry in enumerate(fields.optional_list("files"))
        ),
        problems=tuple(
            _problem_from(path, f"problems.{i}", entry)
            for i, entry in enumerate(fields.optional_list("problems"))
        ),
        notes=tuple(_note_from(path, i, note) for i, note in enumerate(fields.optional_list("notes"))),
    )
    fields.done()
    return manifest


def _tokenizer_from(path: Path, content: Any) -> TokenizerEntry:
    fields = _Fields(path, "tokenizer", content)
    file = fields.take("file") if fields.left.get("file", "") is None else fields.file_name("file")
    entry = TokenizerEntry(name=fields.text("name"), sha256=fields.sha256("sha256"), file=file)
    fields.done()
    return entry


def _shard_from(path: Path, where: str, content: Any) -> ShardEntry:
    fields = _Fields(path, where, content)
    entry = ShardEntry(
        file=fields.file_name("file"),
        split=fields.text("split", "|".join(SPLITS), " or ".join(SPLITS)),
        tokens=fields.number("tokens", least=1),
        documents=fields.number_or_none("documents"),
        text_bytes=fields.number_or_none("text_bytes"),
        sha256=fields.sha256("sha256"),
    )
    fields.done()
    return entry


def _file_from(path: Path, where: str, content: Any) -> FileEntry:
    fields = _Fields(path, where, content)
    entry = FileEntry(
        file=fields.text("file"),
        read_as=fields.text("read_as"),
        documents=fields.number("documents"),
        text_bytes=fields.number("text_bytes"),
    )
    fields.done()
    return entry


def _problem_from(path: Path, where: str, content: Any) -> Problem:
    fields = _Fields(path, where, content)
    problem = Problem(fields.text("file"), fields.number_or_none("line"), fields.text("reason"))
    fields.done()
    return problem


def _note_from(path: Path, index: int, note: Any) -> str:
    if not isinstance(note, str):
        raise _damaged(path, f"a string as `notes.{index}`", repr(note)[:80])
    return note


def _counters_from(path: Path, content: Any) -> dict[str, int]:
    fields = _Fields(path, "counters", content)
    return {name: fields.number(name) for name in list(fields.left)}


def _settings_from(path: Path, content: Any) -> dict[str, str]:
    fields = _Fields(path, "settings", content)
    return {name: fields.text(name) for name in list(fields.left)}
