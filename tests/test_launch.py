"""What ranks and their launcher tell each other."""

import pytest

from hotlap.distributed.launch import (
    FAILURE_FILE_VARIABLE,
    first_failure,
    lost_connection_file,
    read_failure,
    tell_launcher,
)
from hotlap.errors import ConfigError, ConnectionLostError

MISTAKE = ConfigError(expected="a", found="b", do="c")


@pytest.fixture
def failure_file(tmp_path, monkeypatch):
    path = tmp_path / "failure.json"
    monkeypatch.setenv(FAILURE_FILE_VARIABLE, str(path))
    return path


def test_the_first_mistake_is_told_with_its_rank(failure_file, monkeypatch):
    assert read_failure(failure_file) is None
    for rank in "31":
        monkeypatch.setenv("RANK", rank)
        assert tell_launcher(MISTAKE)
    assert str(read_failure(failure_file)) == "expected a; found on rank 3 b; c"


def test_a_lost_connection_is_told_but_not_instead_of_its_cause(failure_file, monkeypatch):
    lost = ConnectionLostError(expected="x", found="y", do="z")
    for rank, error in (("0", lost), ("1", MISTAKE)):
        monkeypatch.setenv("RANK", rank)
        assert tell_launcher(error)
    assert str(read_failure(failure_file)) == "expected a; found on rank 1 b; c"
    assert str(read_failure(lost_connection_file(failure_file))) == "expected x; found on rank 0 y; z"


def test_a_launcher_and_a_rank_without_one_have_nobody_to_tell(failure_file, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert not tell_launcher(MISTAKE)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv(FAILURE_FILE_VARIABLE, str(failure_file.parent / "gone" / "failure.json"))
    assert not tell_launcher(MISTAKE)
    monkeypatch.delenv(FAILURE_FILE_VARIABLE)
    assert not tell_launcher(MISTAKE)
    assert not failure_file.exists()


def test_a_rank_that_is_killed_while_it_tells_leaves_nothing(failure_file, monkeypatch):
    def killed_halfway(*_):
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr("json.dump", killed_halfway)
    monkeypatch.setattr("os.link", killed_halfway)
    with pytest.raises(KeyboardInterrupt):
        tell_launcher(MISTAKE)
    assert not failure_file.exists()


@pytest.mark.parametrize("content", [b"", b'{"rank": "0", "expec', b"[]", b"{}", b"\xff"])
def test_what_cannot_be_read_tells_nothing(failure_file, content):
    failure_file.write_bytes(content)
    assert read_failure(failure_file) is None


@pytest.mark.parametrize(
    "failures, first",
    [
        ([(0, 1, 50), (1, -9, 50)], (1, -9)),  # rank 0 noticed the kill
        ([(0, 1, 50), (1, -9, 80)], (0, 1)),  # torch killed rank 1, which did not end
        ([(0, -15, 51), (1, 1, 50)], (1, 1)),  # torch ended rank 0
        ([(0, 2, 50), (1, 2, 49)], (1, 2)),
        ([(0, 2, 50), (1, 1, 51)], (1, 1)),  # rank 0 lost its connection to rank 1
    ],
)
def test_the_failure_that_is_told_is_the_one_that_caused_the_others(failures, first):
    assert first_failure(failures) == first
