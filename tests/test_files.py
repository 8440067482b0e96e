import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hotlap.errors import CheckpointError, DataError
from hotlap.files import atomic_directory, lock, reading, write_atomically, writing


def refuse(owner):
    raise BlockingIOError(f"held by {owner}")


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_readers_see_a_whole_file_while_many_write_it(tmp_path):
    path = tmp_path / "file"
    contents = [bytes([n]) * 100_000 for n in range(8)]
    write_atomically(path, contents[0])
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write_atomically, path, content) for content in contents * 4]
        while not all(write.done() for write in writes):
            assert path.read_bytes() in contents
    for write in writes:
        write.result()
    assert names(tmp_path) == ["file"]


def test_a_file_is_as_readable_as_the_umask_says(tmp_path):
    (tmp_path / "plain").touch()
    write_atomically(tmp_path / "file", b"")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_directory_is_replaced_as_a_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "data"
    for content in ("first", "second"):
        with atomic_directory(path) as work:
            (work / content).touch()
        assert names(path) == [content]
    with pytest.raises(FileNotFoundError), atomic_directory(path) as work:
        (work / "missing" / "third").touch()
    assert names(path) == ["second"]
    with atomic_directory(path, keep_replaced_as=tmp_path / "kept") as work:
        (work / "fourth").touch()
    assert (names(path), names(tmp_path / "kept")) == (["fourth"], ["second"])
    assert names(path.parent) == ["data"]


def test_a_lock_names_its_holder_and_ends_with_its_file(tmp_path):
    path = tmp_path / "lock"
    with lock(path, refuse), pytest.raises(BlockingIOError, match=f"held by {os.getpid()}"):
        lock(path, refuse)
    lock(path, refuse).close()


def test_one_that_waits_locks_the_new_file_if_the_old_one_was_removed(tmp_path):
    path = tmp_path / "lock"
    waits, locked = threading.Event(), threading.Event()

    def wait():
        with lock(path, lambda _: waits.set()):
            locked.set()
            with pytest.raises(BlockingIOError):
                lock(path, refuse)

    with ThreadPoolExecutor(1) as pool:
        with lock(path, refuse):
            waiting = pool.submit(wait)
            assert waits.wait(30)
            path.unlink()
            assert not locked.is_set()
        waiting.result(30)
    assert locked.is_set()


@pytest.mark.parametrize("error", [DataError, CheckpointError])
def test_errors_of_the_system_become_the_error_asked_for(tmp_path, error):
    with pytest.raises(error, match="found No such file"), reading(tmp_path, error):
        (tmp_path / "nowhere").read_bytes()
    with pytest.raises(error, match="to write"), writing(tmp_path, error, also=(ZeroDivisionError,)):
        raise ZeroDivisionError
    with pytest.raises(ZeroDivisionError), writing(tmp_path, error):
        raise ZeroDivisionError


def test_a_replacement_that_fails_between_its_renames_leaves_the_old_directory(tmp_path, monkeypatch):
    path, rename = tmp_path / "data", Path.rename
    path.mkdir()
    (path / "file").write_text("old")

    def fail_at_the_second(source, target):
        if source.name == ".data.unfinished":
            raise OSError("no space left")
        return rename(source, target)

    monkeypatch.setattr(Path, "rename", fail_at_the_second)
    with pytest.raises(OSError, match="no space"), atomic_directory(path) as work:
        (work / "file").write_text("new")
    assert (path / "file").read_text() == "old"
    assert names(tmp_path) == ["data"]


def test_an_attempt_after_a_kill_between_the_renames_finds_the_old_directory(tmp_path):
    replaced = tmp_path / ".data.replaced"
    replaced.mkdir()
    (replaced / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_directory(tmp_path / "data"):
        raise KeyboardInterrupt
    assert (tmp_path / "data" / "file").read_text() == "old"


@pytest.mark.parametrize("ending", ["unfinished", "replaced"])
def test_a_link_under_a_temporary_name_is_removed_but_never_followed(tmp_path, ending):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("kept")
    (tmp_path / "data").mkdir()
    for target in (precious, tmp_path / "nowhere"):
        (tmp_path / f".data.{ending}").symlink_to(target)
        with atomic_directory(tmp_path / "data") as work:
            (work / "new").touch()
        assert names(tmp_path / "data") == ["new"]
        assert names(tmp_path) == ["data", "precious"]
    assert (precious / "file").read_text() == "kept"


def test_a_link_to_a_directory_stays_and_the_directory_is_replaced(tmp_path):
    link, target = tmp_path / "link", tmp_path / "disk" / "data"
    link.symlink_to(target)
    for content in ("first", "second", "third"):
        with atomic_directory(link) as work:
            (work / content).touch()
        assert names(target) == names(link) == [content]
    assert link.is_symlink()
    assert (names(tmp_path), names(target.parent)) == (["disk", "link"], ["data"])


def test_a_lock_is_not_taken_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("kept")
    (tmp_path / "lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        lock(tmp_path / "lock", refuse)
    assert precious.read_text() == "kept"
