"""Find the encoding of a file: a byte order mark, valid UTF-8, NUL bytes, or else its letters decide.

The whole file is read, so that one Latin-1 letter at its end is found. Letters are judged by
charset-normalizer (https://github.com/jawah/charset_normalizer) over the encodings of `CANDIDATES`.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from dataclasses import dataclass
from typing import BinaryIO

from hotlap.corpus.decoding import BLOCK_BYTES
from hotlap.errors import ConfigError, DataError

PROBE_BYTES = 2**13
SAMPLE_BYTES = 2**16  # around letters beyond ASCII, to judge an encoding by
WINDOW_BYTES = 2**12  # of each part of the sample

# UTF-32 before UTF-16, whose little-endian mark is the start of the other's.
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
    b"\x84\x31\x95\x33": "gb18030",
}
# Of encodings that explain a text equally well, the first one.
CANDIDATES = (
    "cp1252",
    "cp1253",
    "cp932",
    "gb18030",
    "cp1251",
    "euc_jp",
    "euc_kr",
    "big5",
    "koi8_r",
    "cp1250",
    "cp1254",
    "utf_16_le",
    "utf_16_be",
)
SHOWN = {
    "utf-8": "UTF-8",
    "utf-16-le": "UTF-16 LE",
    "utf-16-be": "UTF-16 BE",
    "utf-32-le": "UTF-32 LE",
    "utf-32-be": "UTF-32 BE",
    "cp1252": "Latin-1 or cp1252",
    "cp932": "Shift-JIS (cp932)",
    "gb18030": "GB18030",
}
WIDE = ("utf-32-le", "utf-32-be", "utf-16-le", "utf-16-be")
MOST_CHAOS = 0.2  # charset-normalizer's measure of how unlikely a sequence of letters is
LEAST_PRINTABLE = 0.98


@dataclass(frozen=True)
class Encoding:
    codec: str
    found_by: str  # in words; "" for UTF-8 without a mark
    mark: bytes = b""  # a byte order mark, which is no text

    def __str__(self) -> str:
        name = SHOWN.get(self.codec, self.codec)
        return f"{name}, {self.found_by}" if self.found_by else name


UTF8 = Encoding("utf-8", "")


def named_encoding(name: str) -> str:
    """The codec that the user names."""
    try:
        codec = codecs.lookup(name)
    except LookupError:
        codec = None
    if codec is None or not codec._is_text_encoding:
        raise ConfigError(
            expected="the name of an encoding that Python knows, such as cp1253 or shift_jis",
            found=f"`{name}`",
            do="see https://docs.python.org/3/library/codecs.html#standard-encodings",
        )
    plain = {"utf-8-sig": "utf-8", "utf-16": "utf-16-le", "utf-32": "utf-32-le"}
    return plain.get(codec.name, codec.name)


def find_encoding(
    stream: BinaryIO,
    name: str,
    *,
    forced: str | None = None,
    declared: str | None = None,
    strict: bool = False,
) -> Encoding:
    """The encoding of a file. Raises a DataError if it is empty or no text.

    `forced`: the user's choice, which only a byte order mark overrules; `declared`: what the file itself
    states; `strict`: without a mark or a choice it has to be UTF-8.
    """
    start = stream.read(BLOCK_BYTES)
    if not start:
        raise DataError(
            expected=f"text in {name}",
            found="an empty file",
            do="remove it or pass --skip-bad-files to `hotlap data prepare`",
        )
    for mark, codec in MARKS.items():
        if start.startswith(mark):
            return Encoding(codec, "by its byte order mark", mark)
    if forced is not None:
        return Encoding(forced, "as --encoding says")
    if b"\0" in start[:PROBE_BYTES]:
        return _wide_encoding(start, name)
    if strict:
        return UTF8
    sample = _Sample()
    block = start
    while block:
        sample.add(block)
        block = stream.read(BLOCK_BYTES)
    sample.end()
    if sample.is_utf8:
        return UTF8
    if declared is not None and sample.decoded(declared) is not None:
        return Encoding(declared, "as the file itself declares")
    if likely := _by_letters(sample):
        return Encoding(likely, "by its letters")
    raise DataError(
        expected=f"text in {name}, in UTF-8 or another encoding that can be found",
        found="bytes that are text in none",
        do="give `hotlap data prepare` its --encoding or --skip-bad-files, or remove the file",
    )


class _Sample:
    """Counts what is UTF-8 in a stream, and keeps parts of it around bytes beyond ASCII."""

    def __init__(self) -> None:
        self.valid = self.invalid = 0  # characters beyond ASCII, and sequences that are none
        self.content = bytearray()
        self._later = False
        self._cut = False  # within a line, perhaps within a character
        self._pending = b""

    def add(self, block: bytes, *, final: bool = False) -> None:
        data = self._pending + block
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
            if not self.invalid:  # most files: nothing else has to be known of them
                self.valid += len(data) - len(text)
        except UnicodeDecodeError:
            text, used = codecs.utf_8_decode(data, "replace", final)
            self.invalid += text.count("\ufffd") - data.count("\ufffd".encode(), 0, used)
            self.valid += len(_BEYOND_ASCII.findall(text))
        self._pending = data[used:]
        if not block.isascii():
            self._keep(block)

    def end(self) -> None:
        self.add(b"", final=True)

    @property
    def is_utf8(self) -> bool:
        """UTF-8, perhaps with damage. In other encodings few sequences happen to be valid UTF-8."""
        return self.invalid < max(1, self.valid)

    def _keep(self, block: bytes) -> None:
        # A later block may start within a character.
        position = block.find(b"\n") + 1 if self._later else 0
        self._later = True
        while len(self.content) < SAMPLE_BYTES and (found := _HIGH_BYTE.search(block, position)):
            # From the start of a line, so that no character of several bytes is cut.
            start = max(position, block.rfind(b"\n", 0, found.start()) + 1)
            position = start + max(WINDOW_BYTES, found.start() + 1 - start)
            end = block.find(b"\n", position)
            position = len(block) if end < 0 else end + 1
            end = min(position, start + SAMPLE_BYTES)
            at_end_of_file = end == len(block) < BLOCK_BYTES
            self._cut = self._cut or not (at_end_of_file or block[end - 1 : end] == b"\n")
            self.content += block[start:end]

    def decoded(self, codec: str) -> str | None:
        """The kept parts as text, or None if they are not valid in this encoding."""
        try:
            decoder = codecs.getincrementaldecoder(codec)("strict")
            return decoder.decode(bytes(self.content), not self._cut)
        except (UnicodeDecodeError, LookupError):
            return None


_HIGH_BYTE = re.compile(rb"[\x80-\xff]")
_BEYOND_ASCII = re.compile("[^\x00-\x7f\ufffd]")


def _decodes(data: bytes, codec: str) -> bool:
    try:
        codecs.getincrementaldecoder(codec)("strict").decode(data, False)
    except (UnicodeDecodeError, LookupError):
        return False
    return True


def _wide_encoding(start: bytes, name: str) -> Encoding:
    """UTF-16 or UTF-32 without a mark. Other data with NUL bytes is binary."""
    probe = start[:PROBE_BYTES]
    best, most = None, 0.0
    for codec in WIDE:
        unit = 4 if "32" in codec else 2
        whole = len(start) % unit == 0 or len(start) == BLOCK_BYTES
        if not whole or len(probe) < 2 * unit or not _decodes(probe, codec):
            continue
        text = codecs.getincrementaldecoder(codec)("strict").decode(probe, False)
        score = _printable(text) + _common(text)
        if _printable(text) >= LEAST_PRINTABLE and score > most:
            best, most = codec, score
    if best is None:
        raise DataError(
            expected=f"text in {name}",
            found=f"binary data (a NUL byte at offset {probe.index(0)})",
            do="convert it to text, remove it or pass --skip-bad-files to `hotlap data prepare`",
        )
    return Encoding(best, "by its NUL bytes")


def _printable(text: str) -> float:
    """The share of characters that occur in text: assigned, and no control characters."""
    if not text:
        return 0.0
    odd = sum(
        char not in "\t\n\r\f" and unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs") for char in text
    )
    return 1 - odd / len(text)


def _common(text: str) -> float:
    """The share of characters that most texts have, whatever their language; it tells the order of bytes."""
    return sum(char.isascii() or char in "\u3000\u3001\u3002\uff0c" for char in text) / len(text)


def _by_letters(sample: _Sample) -> str | None:
    """The first of the encodings that explain the sample best, or None if none does."""
    from charset_normalizer import from_bytes

    ranked = []
    for preference, codec in enumerate(CANDIDATES):
        text = sample.decoded(codec)
        if text is None or _printable(text[:PROBE_BYTES]) < LEAST_PRINTABLE:
            continue
        match = from_bytes(text.encode(), cp_isolation=["utf_8"], threshold=MOST_CHAOS).best()
        if match is not None:
            ranked.append((round(match.chaos, 2), -round(match.coherence, 1), preference, codec))
    if not ranked:
        return None
    codec = min(ranked)[3]
    # They differ in one letter, which is a pilcrow in the wrong one.
    if codec == "cp1253" and re.search("¶[α-ώ]", sample.decoded(codec) or ""):
        return "iso8859-7"
    return codec.replace("_", "-")
