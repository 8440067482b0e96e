"""A folder with every format and encoding and much that is no text: prepared, and every oddity named."""

from __future__ import annotations

import dataclasses
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from hotlap.corpus.inspect import as_lines, inspect_directory
from hotlap.corpus.prepare import AUTO, ShardSettings, prepare
from hotlap.corpus.sources import FilesSource
from hotlap.data.manifest import read_manifest
from hotlap.errors import DataError
from tests.odd_texts import DOCUMENTS, ENCODED, PROBLEMS, write_odd_texts
from tests.stories import documents_in

pytest.importorskip("pypdf", reason="pypdf, which reads PDF files, is not installed")


def test_everything_is_read_as_it_was_written_and_every_oddity_is_named(tmp_path: Path) -> None:
    folder = write_odd_texts(tmp_path / "in")
    said: list[str] = []
    settings = ShardSettings(AUTO, Fraction(0))
    prepare(FilesSource([folder], skip_bad_lines=True), settings, tmp_path / "out", say=said.append)
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    listed = {entry.file.removeprefix(f"{folder}/"): entry for entry in manifest.files}

    expected = {name: [text] for name, (text, _, _) in ENCODED.items()} | DOCUMENTS
    assert set(listed) == set(expected)
    documents = iter(documents_in(tmp_path / "out", "train"))
    for name, entry in listed.items():
        found = [next(documents) for _ in range(entry.documents)]
        assert found == expected[name], name
        assert entry.text_bytes == sum(len(text.encode()) for text in found)
    assert next(documents, None) is None
    for name, (_, _, read_as) in ENCODED.items():
        assert listed[name].read_as == read_as

    problems = {
        (problem.file.removeprefix(f"{folder}/"), problem.line): problem.reason
        for problem in manifest.problems
    }
    assert set(problems) == set(PROBLEMS)
    for place, reason in PROBLEMS.items():
        assert problems[place].startswith(reason), place
    shown = [line for line in said if line.startswith("problem ")]
    assert len(shown) == 10
    assert any(line.endswith(f"and {len(PROBLEMS) - 10} more, listed in the manifest") for line in said)
    assert any("vocabulary 1024 tokens" in line for line in said)
    lines = as_lines(inspect_directory(tmp_path / "out"))
    assert any("greek-cp1253.txt: txt, cp1253, by its letters" in line for line in lines)


def test_an_encoding_can_be_forced_and_a_second_run_finds_the_first(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes("πλ".encode("iso8859-7") * 300)
    settings = ShardSettings(AUTO, Fraction(0))
    prepare(FilesSource([path], encoding="iso8859-7"), settings, tmp_path / "out")
    assert documents_in(tmp_path / "out", "train") == ["πλ" * 300]
    said: list[str] = []
    prepare(FilesSource([path], encoding="iso8859-7"), settings, tmp_path / "out", say=said.append)
    assert said == [f"{tmp_path / 'out'} is complete, with these settings: nothing to do"]
    with pytest.raises(DataError, match="encoding iso8859-7 instead of unset"):
        prepare(FilesSource([path]), settings, tmp_path / "out")


def test_without_pypdf_a_pdf_is_left_out_and_the_package_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_odd_texts(tmp_path / "in")
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(DataError, match="pip install pypdf"):
        prepare(FilesSource([folder / "paper.pdf"]), ShardSettings(AUTO), tmp_path / "out")
    survey = FilesSource([folder], skip_bad_lines=True).make_ready()
    (problem,) = [problem for problem in survey.problems if problem.file.endswith("paper.pdf")]
    assert "pip install pypdf" in problem.reason


def test_an_archive_that_is_cut_or_expands_too_far_is_refused_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_odd_texts(tmp_path / "in")
    whole = (folder / "more.tar.gz").read_bytes()
    (folder / "cut.tar.gz").write_bytes(whole[:-40])
    with pytest.raises(DataError, match=r"cut\.tar\.gz; found"):
        FilesSource([folder / "cut.tar.gz"]).make_ready()
    monkeypatch.setattr("hotlap.corpus.archives.FREE_EXPANSION_BYTES", 2000)
    monkeypatch.setattr("hotlap.corpus.archives.LARGEST_EXPANSION", 1)
    with pytest.raises(DataError, match="as in a decompression bomb; extract it yourself"):
        FilesSource([folder / "more.tar.gz"]).make_ready()
    survey = FilesSource([folder], skip_bad_lines=True).make_ready()
    assert not [account for account in survey.accounts if "more.tar.gz" in account.file]


def test_an_old_manifest_without_lists_of_files_loads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n\n" * 300)
    manifest = prepare(FilesSource([tmp_path / "a.txt"]), ShardSettings(AUTO), tmp_path / "out")
    from hotlap.data.manifest import write_manifest

    old = dataclasses.replace(manifest, files=(), problems=(), notes=())
    write_manifest(tmp_path / "out", old)
    assert b'"files": [' not in (tmp_path / "out" / "manifest.json").read_bytes()
    assert read_manifest(tmp_path / "out") == old
