"""Preparing shards twice, at once, interrupted, or where nothing can be written."""

from __future__ import annotations

import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hotlap.corpus import tokenizing
from hotlap.corpus.prepare import ShardSettings, prepare
from hotlap.corpus.sources import FilesSource
from hotlap.data.manifest import Manifest, read_manifest
from hotlap.data.stream import open_split
from hotlap.errors import DataError
from hotlap.files import atomic_directory, locked_beside
from tests.stories import SMALL, STORIES, documents_in, jsonl, shards_of, story


def test_a_second_run_does_nothing_and_other_settings_are_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", STORIES)
    out = tmp_path / "out"
    said: list[str] = []
    first = prepare(FilesSource([path]), SMALL, out, say=said.append)
    written = (out / "train_000000.bin").stat().st_mtime_ns
    assert prepare(FilesSource([path]), SMALL, out, say=said.append) == first
    assert "nothing to do" in said[-1]
    assert (out / "train_000000.bin").stat().st_mtime_ns == written

    other = ShardSettings(vocabulary=310)
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
        patch.setattr("hotlap.files.lock", None)
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

    with locked_beside(tmp_path / "out", pytest.fail), atomic_directory(tmp_path / "out") as work:
        waiting = threading.Thread(target=second)
        waiting.start()
        deadline = time.monotonic() + 30
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "waiting for another process" in said[0]
        prepare(FilesSource([path]), SMALL, tmp_path / "elsewhere")
        for file in (tmp_path / "elsewhere").iterdir():
            file.rename(work / file.name)
    waiting.join(30)
    assert "nothing to do" in said[-1]
    assert results == [read_manifest(tmp_path / "out")]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "elsewhere", "out"]


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
    deadline = time.monotonic() + 200  # training a tokenizer takes long on a busy machine
    while not (out.parent / f".{out.name}.unfinished" / "train_000003.bin").exists():
        assert process.poll() is None, "it ended before it could be interrupted"
        if time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"no shard in time: {process.communicate()}")
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
    settings = ShardSettings(vocabulary=300, shard_tokens=100_000)
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
