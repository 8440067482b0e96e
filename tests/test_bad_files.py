"""Input that is damaged, of another kind or not text."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from hotlap.corpus import decoding, rows, sources
from hotlap.corpus.decoding import Tally
from hotlap.corpus.prepare import ShardSettings, prepare
from hotlap.corpus.sources import FilesSource
from hotlap.errors import DataError
from tests.stories import SMALL, STORIES, documents_in, folder_of, jsonl, splits_of


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 3)
    folder = folder_of(tmp_path / "in", STORIES)
    damaged = "ok \ufffd éééééé".encode() + b"\xff\xfe bad \xe2\x82 cut \xf0\x9f\x98"
    (folder / "000.txt").write_bytes(damaged)
    manifest = prepare(FilesSource([folder]), SMALL, tmp_path / "out")
    expected = damaged.decode("utf-8", "replace")
    assert documents_in(tmp_path / "out", "train")[0] == expected
    assert manifest.counters == {"invalid_utf8_replaced": expected.count("\ufffd") - 1}


def test_strict_refuses_invalid_utf8_with_file_and_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 4)
    bad = tmp_path / "bad.txt"
    bad.write_bytes("123é".encode() + b"67\xff9")
    with pytest.raises(DataError, match=r"valid UTF-8 in .*bad\.txt; found byte 0xff at offset 7"):
        prepare(FilesSource([bad], strict=True), SMALL, tmp_path / "out")
    lines = tmp_path / "bad.jsonl"
    lines.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl; found byte 0xff at offset 27"):
        list(FilesSource([lines], strict=True).pieces(Tally()))
    lines.write_text('{"text": "half \\ud800"}\n')
    with pytest.raises(DataError, match=r"line 1 of .*lone surrogates"):
        list(FilesSource([lines], strict=True).pieces(Tally()))
    tally = Tally()
    (piece,) = FilesSource([lines]).pieces(tally)
    assert (piece.text, tally.counters["invalid_utf8_replaced"]) == ("half \ufffd", 1)


def bad_files(directory: Path) -> Iterator[tuple[Path, str]]:
    def file(name: str, content: bytes) -> Path:
        (directory / name).write_bytes(content)
        return directory / name

    compressed = zstandard.compress(os.urandom(50_000).hex().encode())
    zipped = gzip.compress(os.urandom(50_000).hex().encode())
    yield file("empty.txt", b""), r"text in .*empty\.txt; found an empty file"
    yield file("empty.txt.gz", gzip.compress(b"")), r"found an empty file"
    yield file("binary.txt", b"text\0text"), r"binary data \(a NUL byte at offset 4\)"
    yield file("binary.jsonl", b"\x89PNG\0\0"), "binary data"
    yield file("cut.txt.gz", zipped[:-2000]), r"a complete \.gz file at .*cut\.txt\.gz"
    yield file("no.txt.gz", b"no gzip at all"), r"a complete \.gz file at .*found Not a gzipped file"
    yield file("cut.txt.zst", compressed[:-2000]), r"found the file ends inside a frame"
    yield file("no.txt.zst", b"no zstandard"), r"a complete \.zst file at"
    yield file("no.parquet", b"no parquet"), r"a parquet file at .*no\.parquet"
    yield file("wrong.jsonl", b'{"text": "a"}\n{"text": \n'), r"JSON in line 2 of .*wrong\.jsonl"
    yield file("list.jsonl", b"[1, 2]\n"), "an object with a string 'text' in line 1 of .*found list"
    yield (
        file("field.jsonl", b'{"body": "a", "n": 1}\n'),
        "found 'body', 'n'; give the name of the text field with --field",
    )
    yield file("number.jsonl", b'{"text": 1}\n'), "an object with a string 'text'"
    yield file("deep.jsonl", b"[" * 200_000 + b"\n"), r"JSON in line 1 of .*deep\.jsonl"
    yield directory / "missing.txt", "a file or directory .*found nothing"
    yield file("picture.png", b"text"), r"a file with the suffix \.txt.*found .*picture\.png"
    yield file("table.parquet.gz", b"text"), r"text and \.tar also with \.gz or \.zst"
    columns = directory / "columns.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2], "body": ["a", "b"]}), columns)
    yield columns, r"a string column 'text' in .*found 'text' \(int64\), 'body' \(string\)"
    no_text = directory / "no-text.parquet"
    not_utf8 = pyarrow.StringArray.from_buffers(
        1, pyarrow.array([0, 2], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xa9")
    )
    pyarrow.parquet.write_table(pyarrow.table({"text": not_utf8}), no_text)
    yield no_text, r"a parquet file at .*no-text\.parquet; found 'utf-8' codec can't decode byte 0xa9"
    (directory / "nothing").mkdir()
    yield directory / "nothing", "found none in .*nothing"


def test_bad_files_are_refused_each_with_its_own_line(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for path, message in bad_files(tmp_path):
        with pytest.raises(DataError, match=message) as error:
            prepare(
                FilesSource([path]), ShardSettings(vocabulary=257, val_fraction=Fraction(0)), work / "out"
            )
        assert "\n" not in str(error.value), path
        assert not list(work.iterdir()), path


def test_a_line_longer_than_memory_allows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "LONGEST_LINE_CHARACTERS", 1 << 20)
    path = jsonl(tmp_path / "a.jsonl", ["a", "b" * (1 << 20)])
    with pytest.raises(DataError, match=r"fewer than 1,048,576 characters; found a longer one at line 2"):
        list(FilesSource([path]).pieces(Tally()))


def test_bad_files_in_a_folder_are_left_out_and_listed(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", STORIES)
    (folder / "x-empty.txt").touch()
    (folder / "y-binary.txt").write_bytes(b"\0\1")
    manifest = prepare(FilesSource([folder]), SMALL, tmp_path / "out")
    assert manifest.counters == {"bad_files_skipped": 2}
    assert [str(problem).removeprefix(f"{folder}/") for problem in manifest.problems] == [
        "x-empty.txt: an empty file",
        "y-binary.txt: binary data (a NUL byte at offset 0)",
    ]
    with pytest.raises(DataError, match=r"x-empty\.txt; found an empty file"):
        prepare(FilesSource([folder], strict=True), SMALL, tmp_path / "strict")


def test_a_bad_file_that_is_named_is_an_error_unless_it_may_be_skipped(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", STORIES)
    (tmp_path / "empty.txt").touch()
    paths = [folder, tmp_path / "empty.txt"]
    with pytest.raises(DataError, match="--skip-bad-files to `hotlap data prepare`"):
        prepare(FilesSource(paths), SMALL, tmp_path / "out")
    manifest = prepare(FilesSource(paths, skip_bad_files=True), SMALL, tmp_path / "out")
    assert manifest.counters == {"bad_files_skipped": 1}


def test_bad_lines_are_left_out_only_if_told_and_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES)
    bad = ['{"text": 3}', "{", "[1]"]
    path.write_text(path.read_text() + "".join(f"{line}\n" for line in bad))
    with pytest.raises(DataError, match=r"line 41 of .*a\.jsonl; found 'text'; .*--skip-bad-lines"):
        prepare(FilesSource([path]), SMALL, tmp_path / "out")
    manifest = prepare(FilesSource([path], skip_bad_lines=True), SMALL, tmp_path / "out")
    assert manifest.counters == {"bad_lines_skipped": 3}
    assert [(problem.file, problem.line) for problem in manifest.problems] == [
        (str(path), line) for line in (41, 42, 43)
    ]
    assert documents_in(tmp_path / "out", "train") == splits_of(STORIES)[0]


def test_decoding_blocks_of_any_size_gives_the_same_text() -> None:
    data = "aé漢😀\ufffd".encode() + b"\xff\xe2\x82a\xf0\x9f"
    for size in range(1, len(data) + 1):
        tally = Tally()
        decoder = decoding.Decoder("x", tally, strict=False)
        blocks = [data[start : start + size] for start in range(0, len(data), size)]
        text = "".join(decoder.decode(block, final=False) for block in blocks) + decoder.decode(
            b"", final=True
        )
        assert text == data.decode("utf-8", "replace")
        assert tally.counters["invalid_utf8_replaced"] == 3
