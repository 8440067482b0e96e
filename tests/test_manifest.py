import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.data.manifest import (
    MANIFEST_NAME,
    Manifest,
    ShardEntry,
    TokenizerEntry,
    read_manifest,
    verify_file,
    write_manifest,
)
from hotlap.errors import DataError
from hotlap.json_files import seal, unseal
from tests.token_data import write_directory

texts = st.text(max_size=20)
numbers = st.integers(0, 2**53)
sha256s = st.text("0123456789abcdef", min_size=64, max_size=64)
unknown_or = st.none() | numbers
shards = st.builds(
    ShardEntry,
    file=st.uuids().map(str),
    split=st.sampled_from(["train", "val"]),
    tokens=numbers.filter(bool),
    documents=unknown_or,
    text_bytes=unknown_or,
    sha256=sha256s,
)
manifests = st.builds(
    Manifest,
    tokenizer=st.builds(
        TokenizerEntry, name=texts, sha256=sha256s, file=st.none() | st.just("tokenizer.json")
    ),
    vocab_size=st.integers(51_000, 2**31),
    end_of_text=st.integers(0, 50_999),
    shards=st.lists(shards, min_size=1, max_size=4, unique_by=lambda shard: shard.file).map(tuple),
    source=texts,
    licence=texts,
    counters=st.dictionaries(texts, numbers, max_size=3),
)


@given(manifests)
def test_a_manifest_reads_back_as_written(tmp_path_factory, manifest):
    directory = tmp_path_factory.mktemp("manifest")
    write_manifest(directory, manifest)
    assert read_manifest(directory) == manifest
    assert [path.name for path in directory.iterdir()] == [MANIFEST_NAME]


def test_no_manifest_is_none(tmp_path):
    assert read_manifest(tmp_path) is None


def test_shards_of_a_split_come_in_name_order(tmp_path):
    manifest = write_directory(tmp_path, train=[[1], [2], [3]])
    shuffled = replace(manifest, shards=manifest.shards[::-1])
    names = ["train_000000.bin", "train_000001.bin", "train_000002.bin"]
    assert [entry.file for entry in shuffled.of_split("train")] == names


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("format", "other", "'hotlap-tokens' as `format`.*found 'other'"),
        ("version", 2, "version 1 of .*found 2"),
        ("vocab_size", 0, "an integer of at least 1 as `vocab_size`.*found 0"),
        ("vocab_size", 100.0, "an integer of at least 1 as `vocab_size`.*found 100.0"),
        ("vocab_size", True, "an integer of at least 1 as `vocab_size`.*found True"),
        ("vocab_size", 2**40, "a vocabulary of 1 to"),
        ("end_of_text", 100, "an id below 100 as `end_of_text`.*found 100"),
        ("end_of_text", None, "an integer of at least 0 as `end_of_text`.*found None"),
        ("source", 3, "a string as `source`.*found 3"),
        ("shards", [], "a list of shards as `shards`"),
        ("shards", [3], "an object as `shards.0`.*found 3"),
        ("tokenizer", "gpt2", "an object as `tokenizer`"),
        ("counters", {"replaced": "3"}, "an integer of at least 0 as `counters.replaced`.*found '3'"),
        ("surprise", 1, r"no unknown fields.*found \['surprise'\]"),
    ],
)
def test_a_wrong_field_is_refused_even_under_a_right_checksum(tmp_path, field, value, message):
    write_directory(tmp_path, train=[[1, 2]])
    path = tmp_path / MANIFEST_NAME
    path.write_bytes(seal({**unseal(path.read_bytes()), field: value}))
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("file", "../train_000000.bin"),
        ("file", "/etc/passwd"),
        ("file", ".."),
        ("file", ""),
        ("split", "test"),
        ("tokens", 0),
        ("documents", -1),
        ("sha256", "0" * 63),
        ("sha256", "G" * 64),
    ],
)
def test_a_wrong_field_of_a_shard_is_refused(tmp_path, field, value):
    write_directory(tmp_path, train=[[1, 2]])
    path = tmp_path / MANIFEST_NAME
    content = unseal(path.read_bytes())
    content["shards"][0][field] = value
    path.write_bytes(seal(content))
    with pytest.raises(DataError, match=rf"as `shards\.0\.{field}`"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("field", ["format", "version", "tokenizer", "vocab_size", "shards", "counters"])
def test_a_missing_field_is_refused(tmp_path, field):
    write_directory(tmp_path, train=[[1, 2]])
    path = tmp_path / MANIFEST_NAME
    content = unseal(path.read_bytes())
    del content[field]
    path.write_bytes(seal(content))
    with pytest.raises(DataError, match=rf"expected a value as `{field}` in .*manifest.json; found 'none'"):
        read_manifest(tmp_path)


def test_a_file_listed_twice_is_refused(tmp_path):
    write_directory(tmp_path, train=[[1, 2]])
    path = tmp_path / MANIFEST_NAME
    content = unseal(path.read_bytes())
    content["shards"].append(content["shards"][0])
    path.write_bytes(seal(content))
    with pytest.raises(DataError, match=r"each file once"):
        read_manifest(tmp_path)


def test_a_value_changed_by_hand_is_noticed(tmp_path):
    write_directory(tmp_path, train=[[1, 2]])
    path = tmp_path / MANIFEST_NAME
    content = json.loads(path.read_text())
    content["vocab_size"] = 101
    path.write_text(json.dumps(content))
    with pytest.raises(
        DataError, match=r"manifest\.json; found content that does not match its own checksum"
    ):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"[]", b"{}", b"3", b"null"])
def test_what_is_no_manifest_at_all_is_refused(tmp_path, content):
    (tmp_path / MANIFEST_NAME).write_bytes(content)
    with pytest.raises(
        DataError, match=r"an unmodified manifest .*found (no |JSON that is nested too deeply)"
    ):
        read_manifest(tmp_path)


def test_a_file_is_verified_against_its_entry(tmp_path):
    manifest = write_directory(tmp_path, train=[[1, 2]])
    entry = manifest.shards[0]
    verify_file(tmp_path, entry)
    with pytest.raises(DataError, match=r"expected 3 tokens in .*train_000000\.bin.*found 2"):
        verify_file(tmp_path, replace(entry, tokens=3))
    path = tmp_path / entry.file
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    with pytest.raises(DataError, match=r"sha256 .*train_000000\.bin.*the file is damaged or was modified"):
        verify_file(tmp_path, entry)
