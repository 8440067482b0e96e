"""Decode a user's files to text: decompress gzip and Zstandard, decode, count or reject damage.

Everything is streamed: memory use is one block, regardless of the file size. Which encoding a file has is
found in `encodings`.
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
from pathlib import Path, PurePath
from typing import IO, Any, BinaryIO, cast

from hotlap.corpus.tokenizer import without_surrogates
from hotlap.errors import DataError
from hotlap.files import reading

BLOCK_BYTES = 2**20
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

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._tally.bytes_read += len(data)
        return len(data)


class ExpandsTooFarError(DataError):
    """An archive whose content is out of proportion to its size, as that of a decompression bomb is."""

    def __init__(self, name: str, most_bytes: int) -> None:
        super().__init__(
            expected=f"at most {most_bytes / 1e6:,.0f} MB of content in {name}, for its size",
            found="more, as in a decompression bomb",
            do="extract it yourself if you trust it, and give the folder",
        )


class Bounded(io.RawIOBase):
    """A stream that raises an ExpandsTooFarError instead of giving more than `most_bytes`."""

    def __init__(self, file: IO[bytes], name: str, most_bytes: int) -> None:
        self._file = file
        self._name = name
        self._most_bytes = self._left = most_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._left -= len(data)
        if self._left < 0:
            raise ExpandsTooFarError(self._name, self._most_bytes)
        buffer[: len(data)] = data
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
def decompressing(name: str) -> Iterator[None]:
    """Convert any decompression error for the file `name` to a `DataError`."""
    import zstandard

    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
        raise DataError(
            expected=f"a complete {PurePath(name).suffix} file at {name}",
            found=str(error),
            do="copy or compress it again",
        ) from error


@contextmanager
def opened_file(path: Path, tally: Tally) -> Iterator[BinaryIO]:
    with reading(path), path.open("rb") as file:
        yield cast(BinaryIO, io.BufferedReader(_Counted(file, tally), BLOCK_BYTES))


@contextmanager
def uncompressed(
    name: str, stored: BinaryIO, compression: str, most_bytes: int | None = None
) -> Iterator[BinaryIO]:
    """The content of a file that may be compressed; `most_bytes`: what it may expand to, or None."""
    if not compression:
        yield stored
        return
    with decompressing(name):
        content: Any = gzip.GzipFile(fileobj=stored)
        if compression == ".zst":
            content = io.BufferedReader(_Unzstd(stored), BLOCK_BYTES)
        if most_bytes is not None:
            content = io.BufferedReader(Bounded(content, name, most_bytes), BLOCK_BYTES)
        yield content


class Decoder:
    """Decodes in blocks. What is no character becomes U+FFFD and is counted; `strict` raises instead."""

    def __init__(self, name: str, tally: Tally, *, strict: bool, codec: str = "utf-8") -> None:
        self._name = name
        self._tally = tally
        self._strict = strict
        self._codec = codec
        errors = "strict" if strict else "replace"
        self._decoder = None if codec == "utf-8" else codecs.getincrementaldecoder(codec)(errors)
        self._pending = b""
        self._offset = 0  # in the text, of the first pending byte

    def decode(self, block: bytes, *, final: bool) -> str:
        return self._utf8(block, final) if self._decoder is None else self._other(block, final)

    def _utf8(self, block: bytes, final: bool) -> str:
        data = self._pending + block
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            if self._strict:
                raise self._invalid(self._offset + error.start, data[error.start : error.end]) from error
            text, used = codecs.utf_8_decode(data, "replace", final)
            # A U+FFFD that is in the file itself is not damage. Its first byte is never a continuation byte,
            # so a search for its encoding finds every occurrence.
            replaced = text.count("\ufffd") - data.count("\ufffd".encode(), 0, used)
            self._tally.counters["invalid_utf8_replaced"] += replaced
        self._pending = data[used:]
        self._offset += used
        return text

    def _other(self, block: bytes, final: bool) -> str:
        assert self._decoder is not None, "UTF-8 is decoded by _utf8"
        try:
            text = self._decoder.decode(block, final)
        except UnicodeDecodeError as error:
            start = self._offset + len(block) - len(error.object)
            raise self._invalid(start + error.start, error.object[error.start : error.end]) from error
        if replaced := text.count("\ufffd"):
            self._tally.counters["invalid_bytes_replaced"] += replaced
        self._offset += len(block)
        return text

    def _invalid(self, offset: int, found: bytes) -> DataError:
        name = "UTF-8" if self._codec == "utf-8" else self._codec
        return DataError(
            expected=f"valid {name} in {self._name}",
            found=f"byte 0x{found.hex()} at offset {offset}",
            do="fix the file, or omit --strict to find its encoding and replace what is invalid",
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
