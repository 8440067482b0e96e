"""Document sources: a built-in corpus, or the user's own files and directories, in a fixed order.

A source yields text in pieces of bounded size, so a document may be larger than memory. Files come in
argument order and, within a directory, in name order. Skipped and repaired input is counted and listed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from hotlap.corpus import rows
from hotlap.corpus.archives import members
from hotlap.corpus.decoding import BLOCK_BYTES, Decoder, ExpandsTooFarError, Tally
from hotlap.corpus.documents import text_of_document
from hotlap.corpus.encodings import Encoding, find_encoding, named_encoding
from hotlap.corpus.inputs import (
    ARCHIVES,
    HTML,
    KNOWN_SUFFIXES,
    LINES,
    PARQUET,
    STREAMED,
    TABLE,
    TEXT,
    Found,
    Input,
    find_inputs,
)
from hotlap.corpus.pages import declared_charset, text_of_page
from hotlap.corpus.pieces import Piece, document, split_documents
from hotlap.corpus.rows import BadLineError
from hotlap.corpus.survey import Survey
from hotlap.data.manifest import Problem
from hotlap.errors import DataError
from hotlap.files import reading, without_home
from hotlap.progress import ByteProgress

COMPRESSED_TEXT_RATIO = 4  # rough estimate, used for progress and the size of the tokenizer's sample
PROBED_BYTES = 2048


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

    def make_ready(self) -> Survey | None:
        """Prepare for reading, for example by downloading. Returns what is not known before, if anything."""

    def pieces(self, tally: Tally) -> Iterator[Piece]: ...


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

    A file of text is one document, or several if `separator` is given; so is a page, a book and a PDF. Each
    line of a `.jsonl` file and each row of a table is one document, with its text in `field`.

    A file that the user names has to be readable, unless `skip_bad_files`. One in a folder or an archive is
    left out and listed if it is not, unless `strict`.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        field: str = "text",
        separator: str | None = None,
        encoding: str | None = None,
        strict: bool = False,
        skip_bad_files: bool = False,
        skip_bad_lines: bool = False,
        licence: str = "unknown",
    ) -> None:
        self.field = field
        self.separator = separator
        self.encoding = None if encoding is None else named_encoding(encoding)
        self.strict = strict
        self.skip_bad_files = skip_bad_files
        self.skip_bad_lines = skip_bad_lines
        self.licence = licence
        self.files, self._others = find_inputs(paths)
        self._survey: Survey | None = None
        self._encodings: dict[str, Encoding | None] = {}  # of every file that can be read
        self._refused: set[Found] = set()  # archives
        if not self.files:
            raise DataError(
                expected=f"files with the suffix {KNOWN_SUFFIXES}",
                found=f"none in {', '.join(map(str, paths))}",
                do="give files or directories that contain text",
            )
        shown = ", ".join(map(str, paths[:3])) + (", …" if len(paths) > 3 else "")
        self.description = f"{len(self.files)} file{'s' * (len(self.files) > 1)} of {without_home(shown)}"

    @cached_property
    def settings(self) -> Mapping[str, str]:
        """Of the files before they are read: one that changes meanwhile is noticed the next time."""
        digest = hashlib.sha256()
        for file in self.files:
            with reading(file.path):
                status = file.path.stat()
            identity = f"{file.path.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\0"
            digest.update(identity.encode(errors="surrogateescape"))
        settings = {
            "files": f"{len(self.files)}, {digest.hexdigest()[:16]} (paths, sizes and times of change)",
            "field": self.field,
            "separator": repr(self.separator),
            "strict": str(self.strict),
        }
        # Only if given, so that data prepared before they existed is found again.
        if self.encoding is not None:
            settings["encoding"] = self.encoding
        if self.skip_bad_lines:
            settings["skip_bad_lines"] = "True"
        return settings

    @property
    def bytes_to_read(self) -> int:
        return sum(file.path.stat().st_size for file in self.files)

    @property
    def text_bytes(self) -> int:
        def expansion(file: Found) -> int:
            plain = file.kind in STREAMED and not file.compression
            return 1 if plain else COMPRESSED_TEXT_RATIO

        return sum(expansion(file) * file.path.stat().st_size for file in self.files)

    def make_ready(self) -> Survey:
        """Read everything once, to find encodings, damage, sizes and repeated documents."""
        if self._survey is None:
            survey, tally = Survey(), Tally()
            with ByteProgress("looking at the files", self.bytes_to_read) as progress:
                for found in self.files:
                    self._look_at(found, survey, tally)
                    progress.advance_to(tally.bytes_read)
            survey.problems += [
                Problem(str(path), None, "not a format that is read") for path in self._others
            ]
            self._survey = survey
            self._encodings = {account.file: account.encoding for account in survey.accounts}
        return self._survey

    def _look_at(self, found: Found, survey: Survey, tally: Tally) -> None:
        """Survey a file or an archive. What cannot be read is forgotten and listed, or raised."""
        start = survey.mark()
        try:
            for file in self._inputs(found, tally, survey):
                self._look_into(file, survey, tally)
        except BadLineError:
            raise
        except DataError as mistake:
            survey.forget_since(start)
            self._refused.add(found)
            self._refuse(str(found.path), found.is_given, mistake, survey)

    def _look_into(self, file: Input, survey: Survey, tally: Tally) -> None:
        start = survey.mark()
        before = tally.counters.copy()

        def skip_line(mistake: BadLineError) -> None:
            if not self.skip_bad_lines:
                raise mistake
            survey.problems.append(Problem(file.name, mistake.line, mistake.reason))

        try:
            position = tally.bytes_read
            encoding = self._find_encoding(file)
            tally.bytes_read = position  # of the pass, in which a file is then read from its start
            for piece in self._read(file, encoding, tally, skip_line):
                survey.add(piece.text, begins_document=piece.begins_document)
            survey.end_file(file.name, file.kind, encoding, start)
        except (BadLineError, ExpandsTooFarError):
            raise
        except DataError as mistake:
            survey.forget_since(start)
            self._refuse(file.name, file.is_given, mistake, survey)
            return
        replaced = sum(
            (tally.counters - before)[name] for name in ("invalid_utf8_replaced", "invalid_bytes_replaced")
        )
        if replaced:
            reason = f"{replaced} invalid sequence{'s' * (replaced > 1)} replaced by U+FFFD"
            survey.problems.append(Problem(file.name, None, reason))

    def _refuse(self, name: str, is_given: bool, mistake: DataError, survey: Survey) -> None:
        if self.strict or (is_given and not self.skip_bad_files):
            raise mistake
        survey.skip(name, mistake.found)

    def _inputs(self, found: Found, tally: Tally, survey: Survey | None = None) -> Iterator[Input]:
        if found.kind not in ARCHIVES:
            yield found.as_input(tally)
            return

        def skip(name: str, reason: str) -> None:
            if self.strict:
                raise DataError(expected=f"to read {name}", found=reason, do="remove it, or omit --strict")
            if survey is not None:
                survey.skip(name, reason)

        yield from members(found, tally, skip)

    def _find_encoding(self, file: Input) -> Encoding | None:
        if file.kind not in STREAMED:
            return None
        declared = None
        if file.kind == HTML:
            with file.open() as stream:
                declared = declared_charset(stream.read(PROBED_BYTES))
        with file.open() as stream:
            return find_encoding(
                stream, file.name, forced=self.encoding, declared=declared, strict=self.strict
            )

    def pieces(self, tally: Tally) -> Iterator[Piece]:
        survey = self.make_ready()
        if self._others:
            tally.counters["files_of_other_kinds_skipped"] = len(self._others)
        if survey.skipped_files:
            tally.counters["bad_files_skipped"] = survey.skipped_files

        def skip_line(_: BadLineError) -> None:
            tally.counters["bad_lines_skipped"] += 1

        for found in self.files:
            if found not in self._refused:
                for file in self._inputs(found, tally):
                    if file.name in self._encodings:
                        yield from self._read(file, self._encodings[file.name], tally, skip_line)

    def _read(
        self, file: Input, encoding: Encoding | None, tally: Tally, on_bad_line: rows.OnBadLine
    ) -> Iterator[Piece]:
        if file.kind == TEXT:
            yield from split_documents(self._blocks(file, encoding, tally), self.separator, tally)
        elif file.kind == HTML:
            yield from split_documents(
                text_of_page(self._blocks(file, encoding, tally), file.name), None, tally
            )
        elif file.kind in (LINES, TABLE, PARQUET):
            yield from self._rows(file, encoding, tally, on_bad_line)
        else:
            yield from split_documents(text_of_document(file), None, tally)

    def _blocks(self, file: Input, encoding: Encoding | None, tally: Tally) -> Iterator[str]:
        assert encoding is not None, f"the encoding of {file.name} has been found"
        decoder = Decoder(file.name, tally, strict=self.strict, codec=encoding.codec)
        with file.open() as stream:
            stream.read(len(encoding.mark))
            while block := stream.read(BLOCK_BYTES):
                yield decoder.decode(block, final=False)
        yield decoder.decode(b"", final=True)

    def _rows(
        self, file: Input, encoding: Encoding | None, tally: Tally, on_bad_line: rows.OnBadLine
    ) -> Iterator[Piece]:
        if file.kind == PARQUET:
            found = rows.parquet_rows(file, self.field)
        else:
            blocks = self._blocks(file, encoding, tally)
            read = rows.json_rows if file.kind == LINES else rows.csv_rows
            found = read(blocks, file.name, self.field, on_bad_line)
        decoder = Decoder(file.name, tally, strict=self.strict)
        for text, line in found:
            where = f"line {line} of {file.name}" if line else file.name
            yield from document(decoder.check_surrogates(text, where), tally)
