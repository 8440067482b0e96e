"""Decode a user's files to text: decompress gzip and Zstandard, decode UTF-8, count or reject damage.

Everything is streamed: memory use is one block, regardless of the file size.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO

from hotlap.corpus.tokenizer import without_surrogates
from hotlap.errors import DataError
from hotlap.files import reading

BLOCK_BYTES = 2**20
BINARY_PROBE_BYTES = 2**13
COMPRESSED_BLOCK_BYTES = 2**14  # small, because a few compressed bytes can expand to very many
COMPRESSIONS = (".gz", ".zst")


@dataclass
class Tally:
    """Bytes read so far, and counts of repaired or skipped input."""

    bytes_read: int = 0  # on disk (compressed), for the progress bar
    counters: Counter[str] = field(default_factory=Counter)


class _Counted(io.RawIOBase):
    """A file that counts the bytes read from it."""

    def __init__(self, file: BinaryIO, tally: Tally) -> None:
        self._file = file
        self._tally = tally

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._tally.bytes_read += len(data)
        return len(data)


class _Unzstd(io.RawIOBase):
    """A Zstandard decompressor. Unlike the library's reader, it detects a file truncated inside a frame."""

    def __init__(self, file: IO[bytes]) -> None:
        from zstandard import ZstdDecompressor

        self._new_frame = ZstdDecompressor().decompressobj
        self._file = file
        self._frame = self._new_frame()
        self._inside_frame = False
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._compressed = self._compressed or self._file.read(COMPRESSED_BLOCK_BYTES)
            if not self._compressed:
                if self._inside_frame:
                    raise EOFError("the file ends inside a frame")
                return 0
            self._ready = memoryview(self._frame.decompress(self._compressed))
            self._inside_frame = not self._frame.eof
            self._compressed = b""
            if self._frame.eof:
                self._compressed = self._frame.unused_data
                self._frame = self._new_frame()
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


@contextmanager
def decompressing(path: Path) -> Iterator[None]:
    """Convert any decompression error for `path` to a `DataError`."""
    import zstandard

    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            expected=f"a complete {path.suffix} file at {path}",
            found=str(error),
            do="copy or compress it again",
        ) from error


@contextmanager
def open_decompressed(path: Path, tally: Tally) -> Iterator[io.BufferedIOBase]:
    with reading(path), decompressing(path), path.open("rb") as file:
        stream = io.BufferedReader(_Counted(file, tally), BLOCK_BYTES)
        if path.suffix == ".gz":
            yield gzip.GzipFile(fileobj=stream)
        elif path.suffix == ".zst":
            yield io.BufferedReader(_Unzstd(stream), BLOCK_BYTES)
        else:
            yield stream


def check_text_file(path: Path) -> None:
    """Raise a DataError for an empty file or a binary one (a NUL byte near the start)."""
    with open_decompressed(path, Tally()) as stream:
        start = stream.read(BINARY_PROBE_BYTES)
    if not start:
        raise DataError(
            expected=f"text in {path}", found="an empty file", do="remove it or pass --skip-bad-files"
        )
    if b"\0" in start:
        raise DataError(
            expected=f"UTF-8 text in {path}",
            found=f"binary data (a NUL byte at offset {start.index(0)})",
            do="convert it to UTF-8, remove it or pass --skip-bad-files",
        )


class Decoder:
    """Decodes UTF-8 in blocks. An invalid sequence becomes U+FFFD and is counted; `strict` raises instead."""

    def __init__(self, path: Path, tally: Tally, *, strict: bool) -> None:
        self._path = path
        self._tally = tally
        self._strict = strict
        self._pending = b""
        self._offset = 0  # in the file, of the first pending byte

    def decode(self, block: bytes, *, final: bool) -> str:
        data = self._pending + block
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            self._refuse_if_strict(self._offset + error.start, data[error.start : error.end])
            text, used = codecs.utf_8_decode(data, "replace", final)
            # A U+FFFD that is in the file itself is not damage. Its first byte is never a continuation byte,
            # so a search for its encoding finds every occurrence.
            replaced = text.count("\ufffd") - data.count("\ufffd".encode(), 0, used)
            self._tally.counters["invalid_utf8_replaced"] += replaced
        self._pending = data[used:]
        self._offset += used
        return text

    def _refuse_if_strict(self, offset: int, found: bytes) -> None:
        if self._strict:
            raise DataError(
                expected=f"valid UTF-8 in {self._path}",
                found=f"byte 0x{found.hex()} at offset {offset}",
                do="fix the file, or omit --strict to replace and count invalid bytes",
            )

    def check_surrogates(self, text: str, where: str) -> str:
        """Replace and count lone surrogates, which JSON escapes can produce; `strict` raises instead."""
        text, replaced = without_surrogates(text)
        if replaced and self._strict:
            raise DataError(
                expected=f"valid Unicode in {where}",
                found=f"lone surrogates: {replaced}",
                do="fix the file, or omit --strict to replace and count them",
            )
        if replaced:
            self._tally.counters["invalid_utf8_replaced"] += replaced
        return text
