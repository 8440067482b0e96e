"""Documents in rows: lines of `.jsonl`, records of `.csv` and `.tsv`, rows of `.parquet`.

The text of a document is in one field. A line that is not as it should be is a `BadLineError`, which names
the file and the line; the caller may leave such lines out.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from hotlap.corpus.inputs import Input
from hotlap.errors import DataError

LONGEST_LINE_CHARACTERS = 2**26  # a line is parsed in memory
PARQUET_ROWS_AT_ONCE = 64
DELIMITERS = ",;\t|"


class BadLineError(DataError):
    """A line without a document. The rest of its file can be read."""

    def __init__(self, *, expected: str, found: str, do: str, line: int, reason: str) -> None:
        super().__init__(expected=expected, found=found, do=do)
        self.line = line
        self.reason = reason  # for a list of bad lines


class Row(NamedTuple):
    text: str
    line: int  # the first one of the row, from 1; 0 if the format has no lines


OnBadLine = Callable[[BadLineError], None]  # raises it, or notes it and returns

_SKIP = "fix or remove the line, or leave such lines out with `hotlap data prepare --skip-bad-lines`"
_FIELD = "give the name of the text field with --field"


def lines_of(blocks: Iterable[str], name: str) -> Iterator[str]:
    """The lines of a text, each with its end. A line ends with a newline, as in JSON Lines and in CSV."""
    rest: list[str] = []
    held = number = 0

    def keep(part: str) -> None:
        nonlocal held
        rest.append(part)
        held += len(part)
        if held >= LONGEST_LINE_CHARACTERS:
            raise DataError(
                expected=f"lines of fewer than {LONGEST_LINE_CHARACTERS:,} characters",
                found=f"a longer one at line {number + 1} of {name}",
                do="move that document to its own .txt file",
            )

    for block in blocks:
        start = 0
        while (end := block.find("\n", start)) >= 0:
            keep(block[start : end + 1])
            number += 1
            yield "".join(rest)
            rest.clear()
            held, start = 0, end + 1
        keep(block[start:])
    if held:
        yield "".join(rest)


def json_rows(blocks: Iterable[str], name: str, field: str, on_bad_line: OnBadLine) -> Iterator[Row]:
    some = False  # whether a line has had the field
    for number, line in enumerate(lines_of(blocks, name), 1):
        if not line.strip():
            continue
        try:
            yield Row(_json_field(line, field, f"line {number} of {name}", number, some), number)
            some = True
        except BadLineError as mistake:
            on_bad_line(mistake)


def _json_field(line: str, field: str, where: str, number: int, some: bool) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        found = str(error).replace("line 1 column", "column")
        raise BadLineError(
            expected=f"JSON in {where}", found=found, do=_SKIP, line=number, reason=f"no JSON: {found}"
        ) from error
    text = row.get(field) if isinstance(row, dict) else None
    if not isinstance(text, str):
        known = ", ".join(map(repr, row)) if isinstance(row, dict) else type(row).__name__
        raise BadLineError(
            expected=f"an object with a string {field!r} in {where}",
            found=known[:120] or "an empty object",
            do=_SKIP if some else _FIELD,
            line=number,
            reason=f"no string {field!r}",
        )
    return text


def csv_rows(blocks: Iterable[str], name: str, field: str, on_bad_line: OnBadLine) -> Iterator[Row]:
    """The records below a line with the names of the columns; an only column needs no name."""
    csv.field_size_limit(LONGEST_LINE_CHARACTERS)
    lines = lines_of(blocks, name)
    header = next(lines, "")
    delimiter = "\t" if ".tsv" in name.lower() else max(DELIMITERS, key=header.count)
    reader = csv.reader(_without_nul(lines), delimiter=delimiter, strict=True)
    columns = next(csv.reader([header], delimiter=delimiter))
    if field not in columns and len(columns) > 1:
        raise DataError(
            expected=f"a column {field!r} in {name}",
            found=", ".join(map(repr, columns))[:200],
            do="give the name of the column with the text with --field",
        )
    index = columns.index(field) if field in columns else 0
    while True:
        line = reader.line_num + 2  # after the header, from 1
        try:
            record = next(reader)
            if record and len(record) != len(columns):
                raise csv.Error(f"{len(record)} field{'s' * (len(record) > 1)} instead of {len(columns)}")
        except StopIteration:
            return
        except csv.Error as error:
            ends = f", up to line {reader.line_num + 1}" if reader.line_num + 1 > line else ""
            on_bad_line(
                BadLineError(
                    expected=f"{len(columns)} fields in line {line} of {name}",
                    found=f"{error}{ends}",
                    do=_SKIP,
                    line=line,
                    reason=f"{error}{ends}",
                )
            )
            continue
        if record:
            yield Row(record[index], line)


def _without_nul(lines: Iterable[str]) -> Iterator[str]:
    return (line.replace("\0", "\ufffd") for line in lines)


def parquet_rows(file: Input, field: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with file.open() as stream, pyarrow.parquet.ParquetFile(stream) as table:
            _check_column(file.name, field, table.schema_arrow)
            for batch in table.iter_batches(
                batch_size=PARQUET_ROWS_AT_ONCE, columns=[field], use_threads=False
            ):
                for text in batch.column(0).to_pylist():
                    yield Row(text or "", 0)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(
            expected=f"a parquet file at {file.name}",
            found=str(error).splitlines()[0][:200],
            do="copy or create it again",
        ) from error


def _check_column(name: str, field: str, schema: object) -> None:
    import pyarrow

    assert isinstance(schema, pyarrow.Schema), f"expected a pyarrow.Schema, found {type(schema)}"
    is_text = field in schema.names and (
        pyarrow.types.is_string(schema.field(field).type)
        or pyarrow.types.is_large_string(schema.field(field).type)
    )
    if not is_text:
        columns = ", ".join(f"{column.name!r} ({column.type})" for column in schema)
        raise DataError(
            expected=f"a string column {field!r} in {name}",
            found=columns[:200],
            do="give the name of the text column with --field",
        )
