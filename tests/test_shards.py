import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap import files
from hotlap.data.shards import (
    HEADER_BYTES,
    HEADER_INTS,
    NARROW,
    WIDE,
    ShardWriter,
    find_shards,
    map_tokens,
    read_header,
    shard_name,
    variant_for,
    write_shard,
)
from hotlap.errors import DataError


def raw_shard(path, magic, version, count, tokens):
    """A shard by hand, from the description of the format alone."""
    header = np.zeros(HEADER_INTS, "<i4")
    header[:3] = magic, version, count
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


@pytest.mark.parametrize("vocab_size, variant", [(1, NARROW), (65536, NARROW), (65537, WIDE), (2**31, WIDE)])
def test_the_token_width_follows_from_the_vocabulary(vocab_size, variant):
    assert variant_for(vocab_size) is variant


@pytest.mark.parametrize("vocab_size", [0, -1, 2**31 + 1])
def test_an_impossible_vocabulary_is_refused(vocab_size):
    with pytest.raises(DataError, match=r"a vocabulary of 1 to"):
        variant_for(vocab_size)


@pytest.mark.parametrize("magic, version, dtype", [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_shards_that_users_have_are_read(tmp_path, magic, version, dtype):
    tokens = np.array([50256, 15496, 995, 0, 65535], dtype)
    mapped = map_tokens(raw_shard(tmp_path / "fineweb_train_000001.bin", magic, version, 5, tokens))
    assert mapped.dtype == np.dtype(dtype)
    assert mapped.tolist() == tokens.tolist()
    assert not mapped.flags.writeable


@pytest.mark.parametrize("vocab_size", [300, 100_000])
def test_what_is_written_is_the_format_to_the_byte(tmp_path, vocab_size):
    write_shard(tmp_path / "ours.bin", [299, 0, 7], vocab_size)
    variant = variant_for(vocab_size)
    by_hand = raw_shard(
        tmp_path / "by_hand", variant.magic, variant.version, 3, np.array([299, 0, 7], variant.dtype)
    )
    assert (tmp_path / "ours.bin").read_bytes() == by_hand.read_bytes()


@given(
    pieces=st.lists(st.lists(st.integers(0, 69_999), max_size=20), min_size=1, max_size=5), wide=st.booleans()
)
def test_pieces_read_back_as_one_shard(tmp_path_factory, pieces, wide):
    vocab_size = 70_000 if wide else 65_536
    pieces = [[token % vocab_size for token in piece] for piece in pieces] + [[1]]
    path = tmp_path_factory.mktemp("shard") / shard_name("train", 0)
    with ShardWriter(path, vocab_size) as writer:
        for piece in pieces:
            writer.append(np.array(piece, np.int64))
    assert map_tokens(path).tolist() == [token for piece in pieces for token in piece]
    assert read_header(path).tokens == writer.tokens == sum(map(len, pieces))


def test_a_shard_has_its_name_only_when_it_is_complete(tmp_path):
    path = tmp_path / shard_name("train", 3)
    writer = ShardWriter(path, 10)
    writer.append([1, 2])
    assert find_shards(tmp_path, "train") == []
    writer.commit()
    assert find_shards(tmp_path, "train") == [path]
    assert list(tmp_path.iterdir()) == [path]


def test_a_failure_leaves_nothing_and_keeps_what_was_there(tmp_path):
    path = tmp_path / shard_name("train", 0)
    write_shard(path, [5], 10)
    with pytest.raises(DataError, match=r"found id 10"), ShardWriter(path, 10) as writer:
        writer.append([1, 2, 10])
    assert map_tokens(path).tolist() == [5]
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_clear_line_and_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    with pytest.raises(
        DataError, match=r"to write .*train_000000.bin; found No space left on device; make room"
    ):
        write_shard(tmp_path / shard_name("train", 0), [1], 10)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_while_tokens_are_written(tmp_path):
    # /dev/full refuses what a buffer flushes to it, as a full disk does.
    path = tmp_path / shard_name("train", 0)
    files.partial_path(path).symlink_to("/dev/full")
    with pytest.raises(DataError, match=r"No space left on device"), ShardWriter(path, 10) as writer:
        writer.append(np.zeros(1_000_000, np.uint16))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tokens", [[10], [3, -1], [2**40]])
def test_a_token_outside_of_the_vocabulary_is_not_written(tmp_path, tokens):
    with pytest.raises(DataError, match=r"token ids from 0 to 9 .*found id"):
        write_shard(tmp_path / "train.bin", tokens, 10)
    assert list(tmp_path.iterdir()) == []


def test_a_shard_without_tokens_is_not_written(tmp_path):
    with pytest.raises(DataError, match=r"at least one token in .*train.bin; found none"):
        write_shard(tmp_path / "train.bin", [], 10)
    assert list(tmp_path.iterdir()) == []


class TestBadShards:
    tokens = np.arange(10, dtype="<u2")

    def test_truncated(self, tmp_path):
        path = raw_shard(tmp_path / "train.bin", 20240520, 1, 10, self.tokens)
        path.write_bytes(path.read_bytes()[:-3])
        with pytest.raises(
            DataError, match=r"expected 1044 bytes in .*train.bin.* 10 tokens.*found 1041 bytes"
        ):
            map_tokens(path)

    @pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1])
    def test_truncated_in_the_header(self, tmp_path, size):
        path = tmp_path / "train.bin"
        path.write_bytes(bytes(size))
        with pytest.raises(DataError, match=rf"header of 1024 bytes in .*train.bin; found {size} bytes"):
            map_tokens(path)

    @pytest.mark.parametrize("magic, version", [(20240521, 1), (20240520, 7), (20240801, 1), (0, 0)])
    def test_wrong_magic_or_version(self, tmp_path, magic, version):
        path = raw_shard(tmp_path / "train.bin", magic, version, 10, self.tokens)
        with pytest.raises(
            DataError, match=rf"magic 20240520 .*found magic {magic} version {version}; this is no"
        ):
            map_tokens(path)

    @pytest.mark.parametrize("count", [9, 11, 2**31 - 1])
    def test_header_count_is_not_the_file_size(self, tmp_path, count):
        path = raw_shard(tmp_path / "train.bin", 20240520, 1, count, self.tokens)
        with pytest.raises(DataError, match=rf"for the {count} tokens its header counts; found 1044 bytes"):
            map_tokens(path)

    @pytest.mark.parametrize("count", [0, -5])
    def test_zero_tokens(self, tmp_path, count):
        path = raw_shard(tmp_path / "train.bin", 20240520, 1, count, self.tokens[:0])
        with pytest.raises(DataError, match=rf"at least one token in .*found a count of {count}"):
            map_tokens(path)

    def test_missing(self, tmp_path):
        with pytest.raises(DataError, match=r"a readable file .*none.bin; found No such file"):
            map_tokens(tmp_path / "none.bin")


def test_a_split_is_found_by_name_in_name_order(tmp_path):
    for name in (
        "fineweb_val_000000.bin",
        "fineweb_train_000002.bin",
        "fineweb_train_000001.bin",
        "train.txt",
    ):
        (tmp_path / name).touch()
    assert [p.name for p in find_shards(tmp_path, "train")] == [
        "fineweb_train_000001.bin",
        "fineweb_train_000002.bin",
    ]
    assert [p.name for p in find_shards(tmp_path, "val")] == ["fineweb_val_000000.bin"]


def test_a_name_with_both_splits_in_it_is_refused(tmp_path):
    (tmp_path / "interval_train_000000.bin").touch()
    with pytest.raises(DataError, match=r"either train or val .*found both in .*interval_train_000000.bin"):
        find_shards(tmp_path, "val")
