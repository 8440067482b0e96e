"""Archives and full disks: what is killed or has no room leaves nothing half-written behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hotlap.corpus.own_text import prepared_from
from hotlap.errors import DataError
from tests.stories import shards_of, story

pytestmark = pytest.mark.slow


def archive_of_much(path: Path) -> Path:
    """A tar with members on both sides of what is held in memory."""
    many = "\n\n".join(story(i % 97) for i in range(20_000))
    with tarfile.open(path, "w:gz", compresslevel=1) as content:
        for number in range(3):
            data = f"{number} {many}".encode()
            info = tarfile.TarInfo(f"{number}.txt")
            info.size = len(data)
            content.addfile(info, io.BytesIO(data))
            content.addfile(tarfile.TarInfo(f"{number}-empty.txt"))
    return path


def command(path: Path, out: Path) -> list[str]:
    arguments = ["data", "prepare", path, "--vocab", 300, "--shard-tokens", 200_000, "--out", out]
    return [sys.executable, "-m", "hotlap", *map(str, arguments)]


def killed_when(condition: Callable[[], bool], arguments: list[str], environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
    )
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL


def test_killed_at_any_time_it_leaves_nothing_under_the_name_and_no_temporary_file(tmp_path: Path) -> None:
    path = archive_of_much(tmp_path / "much.tar.gz")
    out, temporary = tmp_path / "out", tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    work = tmp_path / ".out.unfinished"
    for moment in (
        work.exists,  # while it looks at the files
        (work / "train_000002.bin").exists,  # while it writes
    ):
        killed_when(moment, command(path, out), environment)
        assert not out.exists()
        assert not list(temporary.iterdir())
    subprocess.run(command(path, out), env=environment, check=True, capture_output=True)
    subprocess.run(command(path, tmp_path / "again"), env=environment, check=True, capture_output=True)
    assert shards_of(out) == shards_of(tmp_path / "again")
    assert not list(temporary.iterdir())
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names == ["again", "much.tar.gz", "out", "temporary"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small file system can only be mounted by root")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_no_room_for_temporary_files_is_one_line_and_no_damaged_archive(
    tmp_path: Path, small_disk: Path
) -> None:
    path = archive_of_much(tmp_path / "much.tar.gz")
    environment = {**os.environ, "TMPDIR": str(small_disk)}
    done = subprocess.run(
        command(path, tmp_path / "out"), env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert line.startswith(f"hotlap: expected to write {small_disk}; found No space left on device")
    assert not list(small_disk.iterdir())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["disk", "much.tar.gz"]


def test_text_prepared_on_the_way_leaves_nothing_in_a_full_cache(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOTLAP_CACHE", str(small_disk))
    (tmp_path / "book.txt").write_text("".join(story(i % 97) for i in range(20_000)))
    with pytest.raises(DataError, match="No space left on device"):
        prepared_from(tmp_path / "book.txt")
    assert [file.name for file in small_disk.rglob("*")] == ["data"]
