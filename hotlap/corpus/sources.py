"""Document sources: a built-in corpus, or the user's own files and directories, in a fixed order.

A source yields text in pieces of bounded size, so a document may be larger than memory. Files come in
argument order and, within a directory, in name order. Skipped and repaired input is counted.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from hotlap.corpus.decoding import BLOCK_BYTES, COMPRESSIONS, Decoder, Tally, open_decompressed
from hotlap.corpus.textfiles import JSONL_SUFFIX, KNOWN_SUFFIXES, PARQUET_SUFFIX, find_text_files, kind_of
from hotlap.corpus.tokenizer import PIECE_CHARACTERS, cut_length, pieces
from hotlap.errors import DataError
from hotlap.files import reading

LONGEST_LINE_BYTES = 2**26  # a line of JSON is parsed in memory
PARQUET_ROWS_AT_ONCE = 64
COMPRESSED_TEXT_RATIO = 4  # rough estimate, used for progress and the size of the tokenizer's sample


class Piece(NamedTuple):
    text: str
    begins_document: bool


class Source(Protocol):
    @property
    def description(self) -> str: ...
    @property
    def licence(self) -> str: ...
    @property
    def settings(self) -> Mapping[str, str]:
        """Everything that determines the documents, to check whether existing data match the request."""

    @property
    def bytes_to_read(self) -> int:
        """Approximate final value of `Tally.bytes_read`."""

    @property
    def text_bytes(self) -> int:
        """Approximate size of the decoded text in bytes."""

    def make_ready(self) -> None:
        """Prepare for reading, for example by downloading."""

    def pieces(self, tally: Tally) -> Iterator[Piece]: ...


def document(text: str, tally: Tally, *, begins: bool = True) -> Iterator[Piece]:
    """The pieces of a document, or of the rest of one if `begins` is False. Skips and counts a blank one."""
    if begins and not text.strip():
        tally.counters["blank_documents_skipped"] += 1
        return
    for piece in pieces(text):
        yield Piece(piece, begins)
        begins = False


def split_documents(blocks: Iterable[str], separator: str | None, tally: Tally) -> Iterator[Piece]:
    """Split a stream of text into documents at each `separator`, or make it one document if None.

    The pieces of a document do not depend on where the blocks begin and end.
    """
    # Keep a tail as long as the separator in the buffer, to find separators that span two blocks.
    longest = PIECE_CHARACTERS + len(separator or "")
    begins = True
    buffer = ""
    for block in blocks:
        *ended, buffer = (buffer + block).split(separator) if separator else [buffer + block]
        for text in ended:
            yield from document(text, tally, begins=begins)
            begins = True
        while len(buffer) > longest:
            length = cut_length(buffer)
            yield Piece(buffer[:length], begins)
            begins = False
            buffer = buffer[length:]
    yield from document(buffer, tally, begins=begins)


@dataclass(frozen=True)
class TextsSource:
    """Documents that each fit in memory, such as those of a built-in corpus."""

    description: str
    licence: str
    settings: Mapping[str, str]
    text_bytes: int
    fetch: Callable[[], object]
    texts: Callable[[], Iterable[str]]

    @property
    def bytes_to_read(self) -> int:
        return self.text_bytes

    def make_ready(self) -> None:
        self.fetch()

    def pieces(self, tally: Tally) -> Iterator[Piece]:
        for text in self.texts():
            yield from document(text, tally)
            tally.bytes_read += len(text.encode())


class FilesSource:
    """The user's own files.

    A `.txt` or `.md` file is one document, or several if `separator` is given. Each line of a `.jsonl` file
    and each row of a `.parquet` file is one document, with its text in `field`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        field: str = "text",
        separator: str | None = None,
        strict: bool = False,
        skip_bad_files: bool = False,
        licence: str = "unknown",
    ) -> None:
        self.field = field
        self.separator = separator
        self.strict = strict
        self.licence = licence
        self._setup = Tally()
        self.files = find_text_files(paths, self._setup, skip_bad_files=skip_bad_files)
        if not self.files:
            raise DataError(
                expected=f"files with the suffix {KNOWN_SUFFIXES}",
                found=f"none in {', '.join(map(str, paths))}",
                do="give files or directories that contain text",
            )
        shown = ", ".join(map(str, paths[:3])) + (", …" if len(paths) > 3 else "")
        self.description = f"{len(self.files)} file{'s' * (len(self.files) > 1)} of {shown}"

    @property
    def settings(self) -> Mapping[str, str]:
        digest = hashlib.sha256()
        for file in self.files:
            with reading(file):
                status = file.stat()
            identity = f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
            digest.update(identity.encode(errors="surrogateescape"))
        return {
            "files": f"{len(self.files)}, {digest.hexdigest()[:16]} (paths, sizes and times of change)",
            "field": self.field,
            "separator": repr(self.separator),
            "strict": str(self.strict),
        }

    @property
    def bytes_to_read(self) -> int:
        return sum(file.stat().st_size for file in self.files)

    @property
    def text_bytes(self) -> int:
        def expansion(file: Path) -> int:
            plain = file.suffix not in (*COMPRESSIONS, PARQUET_SUFFIX)
            return 1 if plain else COMPRESSED_TEXT_RATIO

        return sum(expansion(file) * file.stat().st_size for file in self.files)

    def make_ready(self) -> None:
        """Nothing to do for local files."""

    def pieces(self, tally: Tally) -> Iterator[Piece]:
        tally.counters.update(self._setup.counters)
        for file in self.files:
            kind = kind_of(file)
            if kind == JSONL_SUFFIX:
                yield from self._lines(file, tally)
            elif kind == PARQUET_SUFFIX:
                yield from self._rows(file, tally)
            else:
                yield from self._text(file, tally)

    def _text(self, file: Path, tally: Tally) -> Iterator[Piece]:
        decoder = Decoder(file, tally, strict=self.strict)

        def blocks() -> Iterator[str]:
            with open_decompressed(file, tally) as stream:
                while block := stream.read(BLOCK_BYTES):
                    yield decoder.decode(block, final=False)
            yield decoder.decode(b"", final=True)

        yield from split_documents(blocks(), self.separator, tally)

    def _lines(self, file: Path, tally: Tally) -> Iterator[Piece]:
        decoder = Decoder(file, tally, strict=self.strict)
        with open_decompressed(file, tally) as stream:
            number = 0
            while line := stream.readline(LONGEST_LINE_BYTES):
                number += 1
                where = f"line {number} of {file}"
                if len(line) == LONGEST_LINE_BYTES:
                    raise DataError(
                        expected=f"lines shorter than {LONGEST_LINE_BYTES >> 20} MiB",
                        found=f"a longer one at {where}",
                        do="move that document to its own .txt file",
                    )
                content = decoder.decode(line, final=True)
                if content.strip():
                    text = decoder.check_surrogates(self._field_of(content, where), where)
                    yield from document(text, tally)

    def _field_of(self, line: str, where: str) -> str:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(
                expected=f"JSON in {where}", found=str(error), do="fix or remove the line"
            ) from error
        text = row.get(self.field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            known = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
            raise DataError(
                expected=f"an object with a string {self.field!r} in {where}",
                found=known[:120] or "an empty object",
                do="give the name of the text field with --field",
            )
        return text

    def _rows(self, file: Path, tally: Tally) -> Iterator[Piece]:
        import pyarrow
        import pyarrow.parquet

        size = file.stat().st_size
        try:
            with reading(file), pyarrow.parquet.ParquetFile(file) as table:
                self._check_column(file, table.schema_arrow)
                before, rows_read = tally.bytes_read, 0
                for batch in table.iter_batches(
                    batch_size=PARQUET_ROWS_AT_ONCE, columns=[self.field], use_threads=False
                ):
                    for text in batch.column(0).to_pylist():
                        yield from document(text or "", tally)
                    rows_read += batch.num_rows
                    tally.bytes_read = before + size * rows_read // table.metadata.num_rows
        except pyarrow.ArrowException as error:
            raise DataError(
                expected=f"a parquet file at {file}",
                found=str(error).splitlines()[0][:200],
                do="copy or create it again",
            ) from error

    def _check_column(self, file: Path, schema: object) -> None:
        import pyarrow

        assert isinstance(schema, pyarrow.Schema), f"expected a pyarrow.Schema, found {type(schema)}"
        is_text = self.field in schema.names and (
            pyarrow.types.is_string(schema.field(self.field).type)
            or pyarrow.types.is_large_string(schema.field(self.field).type)
        )
        if not is_text:
            columns = ", ".join(f"{column.name!r} ({column.type})" for column in schema)
            raise DataError(
                expected=f"a string column {self.field!r} in {file}",
                found=columns[:200],
                do="give the name of the text column with --field",
            )
