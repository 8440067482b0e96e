import os
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.data import verification
from hotlap.data.manifest import MANIFEST_NAME, UNFINISHED_NAME
from hotlap.data.shards import write_shard
from hotlap.data.stream import open_split
from hotlap.errors import DataError
from tests.token_data import stream_of, write_directory


@given(data=st.data(), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_a_read_is_a_slice_of_all_shards_end_to_end(data, lengths):
    stream = stream_of(*lengths)
    assert len(stream) == sum(lengths)
    start = data.draw(st.integers(0, len(stream) - 1))
    count = data.draw(st.integers(1, len(stream) - start))
    assert stream.read(start, count).tolist() == list(range(start, start + count))
    starts = np.array(data.draw(st.lists(st.integers(0, len(stream) - count), max_size=8)), np.int64)
    assert stream.gather(starts, count).tolist() == [list(range(s, s + count)) for s in starts]


def test_a_read_inside_of_a_shard_does_not_copy():
    stream = stream_of(10, 10)
    assert np.shares_memory(stream.read(12, 8), stream.shards[1])


def test_a_prepared_directory_says_what_it_holds(tmp_path):
    manifest = write_directory(tmp_path, train=[[1, 2, 3], [4, 5]], val=[[9]])
    train = open_split(tmp_path, "train", vocab_size=100)
    assert train.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    assert (train.documents, train.text_bytes, train.end_of_text) == (3, 50, 0)
    assert train.manifest == manifest
    assert open_split(tmp_path, "val").read(0, 1).tolist() == [9]


def test_a_bare_directory_works_and_says_what_is_unknown(tmp_path):
    write_shard(tmp_path / "fineweb_train_000001.bin", [4, 5], 10)
    write_shard(tmp_path / "fineweb_train_000000.bin", [1, 2, 3], 10)
    stream = open_split(tmp_path, "train", vocab_size=10)
    assert stream.read(0, 5).tolist() == [1, 2, 3, 4, 5]
    assert stream.documents is stream.text_bytes is stream.end_of_text is stream.manifest is None


def test_the_fingerprint_tells_data_apart(tmp_path):
    prints = set()
    for name, train in (("a", [[1, 2, 3]]), ("b", [[1, 2, 4]]), ("c", [[1, 2], [3]])):
        (tmp_path / name).mkdir()
        write_directory(tmp_path / name, train=train)
        prints.add(open_split(tmp_path / name, "train").fingerprint)
        assert open_split(tmp_path / name, "train").fingerprint in prints
    assert len(prints) == 3


def test_bare_shards_of_the_same_length_are_told_apart(tmp_path):
    prints = []
    for tokens in ([1, 2, 3], [1, 2, 4], [1, 2, 3]):
        write_shard(tmp_path / "train_0.bin", tokens, 10)
        prints.append(open_split(tmp_path, "train", vocab_size=10).fingerprint)
    assert prints[0] == prints[2] != prints[1]


class TestBadInput:
    def test_no_directory(self, tmp_path):
        with pytest.raises(DataError, match=r"a directory of token shards at .*nowhere; found nothing"):
            open_split(tmp_path / "nowhere", "train")

    def test_unknown_split(self, tmp_path):
        with pytest.raises(DataError, match=r"a split \(train, val\); found 'test'"):
            open_split(tmp_path, "test")

    def test_no_shard_matching(self, tmp_path):
        write_shard(tmp_path / "some_train.bin", [1], 10)
        with pytest.raises(DataError, match=r"a shard of the val split in .*found no \*val\*\.bin"):
            open_split(tmp_path, "val")

    def test_no_shard_of_the_split_in_the_manifest(self, tmp_path):
        write_directory(tmp_path, train=[[1]], val=[])
        with pytest.raises(
            DataError, match=r"a shard of the val split in .*found none in its manifest\.json"
        ):
            open_split(tmp_path, "val")

    def test_token_id_outside_of_the_vocabulary_without_a_manifest(self, tmp_path):
        write_shard(tmp_path / "train_0.bin", [1, 2], 200)
        write_shard(tmp_path / "train_1.bin", [1, 100, 3], 200)
        with pytest.raises(DataError, match=r"below the vocabulary size 100 in .*train_1\.bin; found id 100"):
            open_split(tmp_path, "train", vocab_size=100)
        assert len(open_split(tmp_path, "train", vocab_size=101)) == 5

    def test_token_id_that_no_int32_holds(self, tmp_path):
        path = tmp_path / "train_0.bin"
        write_shard(path, [1, 2], 100_000)
        path.write_bytes(path.read_bytes()[:-1] + b"\x80")
        with pytest.raises(DataError, match=r"below the vocabulary size 2147483648 in .*found id 2147483650"):
            open_split(tmp_path, "train")

    @pytest.mark.parametrize("vocab_size", [99, 101])
    def test_manifest_of_another_vocabulary_than_the_model(self, tmp_path, vocab_size):
        write_directory(tmp_path, train=[[1]], vocab_size=vocab_size)
        with pytest.raises(
            DataError, match=rf"vocabulary of 100 tokens; found a vocabulary of {vocab_size} in"
        ):
            open_split(tmp_path, "train", vocab_size=100)

    def test_shards_of_two_widths(self, tmp_path):
        write_shard(tmp_path / "train_0.bin", [1], 10)
        write_shard(tmp_path / "train_1.bin", [1], 100_000)
        with pytest.raises(DataError, match=r"with 16-bit tokens; found 32-bit tokens in train_1\.bin"):
            open_split(tmp_path, "train")

    def test_a_listed_shard_is_missing(self, tmp_path):
        write_directory(tmp_path, train=[[1], [2]])
        (tmp_path / "train_000001.bin").unlink()
        with pytest.raises(DataError, match=r"a readable file .*train_000001\.bin; found No such file"):
            open_split(tmp_path, "train")

    def test_a_shard_is_not_listed(self, tmp_path):
        write_directory(tmp_path, train=[[1], [2]])
        write_shard(tmp_path / "train_000002.bin", [1], 100)
        with pytest.raises(
            DataError, match=r"only the shards that .* lists; found train_000002\.bin as well"
        ):
            open_split(tmp_path, "train")

    def test_a_shard_of_another_length_than_listed(self, tmp_path):
        write_directory(tmp_path, train=[[1, 2]])
        write_shard(tmp_path / "train_000000.bin", [1, 2, 3], 100)
        with pytest.raises(
            DataError, match=r"expected 2 tokens in .*according to its manifest\.json; found 3"
        ):
            open_split(tmp_path, "train")

    def test_a_shard_of_other_content_than_listed(self, tmp_path):
        write_directory(tmp_path, train=[[1, 2]])
        write_shard(tmp_path / "train_000000.bin", [1, 3], 100)
        with pytest.raises(
            DataError, match=r"sha256 .*train_000000\.bin, according to its manifest\.json; found"
        ):
            open_split(tmp_path, "train")

    def test_an_interrupted_preparation(self, tmp_path):
        write_directory(tmp_path, train=[[1, 2]])
        (tmp_path / UNFINISHED_NAME).touch()
        with pytest.raises(DataError, match=r"completely prepared data in .*found unfinished\.json"):
            open_split(tmp_path, "train")


class TestMemory:
    """Full reads are done once per file, as long as it stays the same."""

    @pytest.fixture(autouse=True)
    def _settled_at_once(self, monkeypatch):
        monkeypatch.setattr(verification, "SETTLED_SECONDS", -1.0)

    @pytest.fixture
    def hashed(self, monkeypatch):
        names = []

        def counting_sha256(path):
            names.append(path.name)
            return original(path)

        import hotlap.data.stream as stream_module

        original = stream_module.file_sha256
        monkeypatch.setattr(stream_module, "file_sha256", counting_sha256)
        return names

    def test_an_unchanged_file_is_read_once(self, tmp_path, hashed):
        write_directory(tmp_path, train=[[1, 2], [3]])
        for _ in range(3):
            open_split(tmp_path, "train")
        assert sorted(hashed) == ["train_000000.bin", "train_000001.bin"]

    def test_a_changed_file_is_read_again_and_refused(self, tmp_path, hashed):
        write_directory(tmp_path, train=[[1, 2], [3]])
        open_split(tmp_path, "train")
        path = tmp_path / "train_000001.bin"
        times = path.stat()
        with path.open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(b"\x04")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as `cp -p` and `rsync -t` do
        with pytest.raises(DataError, match=r"sha256 .*train_000001\.bin"):
            open_split(tmp_path, "train")
        assert hashed.count("train_000001.bin") == 2
        assert hashed.count("train_000000.bin") == 1

    def test_a_damaged_memory_is_forgotten(self, tmp_path, hashed):
        write_directory(tmp_path, train=[[1, 2]])
        open_split(tmp_path, "train")
        memory = tmp_path / verification.CACHE_NAME
        memory.write_bytes(memory.read_bytes().replace(b"identity", b"identitz"))
        open_split(tmp_path, "train")
        assert len(hashed) == 2

    def test_a_recent_file_is_not_remembered(self, tmp_path, hashed, monkeypatch):
        monkeypatch.setattr(verification, "SETTLED_SECONDS", 3600.0)
        write_directory(tmp_path, train=[[1, 2]])
        open_split(tmp_path, "train")
        open_split(tmp_path, "train")
        assert len(hashed) == 2
        assert not (tmp_path / verification.CACHE_NAME).exists()

    def test_a_directory_that_cannot_be_written_still_opens(self, tmp_path, hashed, monkeypatch):
        def refuse(self, content):
            raise PermissionError(13, "Permission denied")

        write_directory(tmp_path, train=[[1, 2]])
        monkeypatch.setattr(Path, "write_bytes", refuse)
        open_split(tmp_path, "train")
        open_split(tmp_path, "train")
        assert len(hashed) == 2

    def test_the_largest_id_of_bare_shards_is_remembered_with_its_file(self, tmp_path):
        write_shard(tmp_path / "train_0.bin", [1, 50], 200)
        open_split(tmp_path, "train", vocab_size=100)
        open_split(tmp_path, "train", vocab_size=100)
        with pytest.raises(DataError, match=r"found id 50"):
            open_split(tmp_path, "train", vocab_size=50)
        write_shard(tmp_path / "train_0.bin", [1, 100], 200)
        with pytest.raises(DataError, match=r"found id 100"):
            open_split(tmp_path, "train", vocab_size=100)


def damage(path: Path, chance: random.Random) -> str:
    """Change a file as broken disks, copies and hands do."""
    content = bytearray(path.read_bytes())
    kind = chance.choice(["flip", "flip", "byte", "truncate", "extend", "cut", "zeros", "swap", "header"])
    place = chance.randrange(len(content))
    if kind == "flip":
        content[place] ^= 1 << chance.randrange(8)
    elif kind == "byte":
        content[place] = chance.randrange(256)
    elif kind == "truncate":
        del content[place:]
    elif kind == "extend":
        content += chance.randbytes(chance.randrange(1, 9))
    elif kind == "cut":
        del content[place : place + chance.randrange(1, 9)]
    elif kind == "zeros":
        length = min(chance.randrange(1, 600), len(content) - place)
        content[place : place + length] = bytes(length)
    elif kind == "swap":
        other = chance.randrange(len(content))
        content[place], content[other] = content[other], content[place]
    else:
        content[chance.randrange(12)] = chance.randrange(256)
    path.write_bytes(content)
    return kind


@pytest.mark.parametrize("remembered", [False, True])
def test_500_damaged_shards_and_manifests_never_give_wrong_tokens(tmp_path, monkeypatch, remembered):
    if remembered:
        monkeypatch.setattr(verification, "SETTLED_SECONDS", -1.0)
    chance = random.Random(7)
    shards = [[chance.randrange(100) for _ in range(length)] for length in (300, 1, 517)]
    write_directory(tmp_path, train=shards)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    expected = [token for shard in shards for token in shard]
    open_split(tmp_path, "train")
    outcomes, messages = {"refused": 0, "right": 0}, []
    for number in range(500):
        names = ["train_000000.bin", "train_000001.bin", "train_000002.bin", MANIFEST_NAME, MANIFEST_NAME]
        path = tmp_path / chance.choice(names)
        kinds = [damage(path, chance) for _ in range(chance.choice([1, 1, 1, 2]))]
        os.utime(path, ns=(number, number))  # a clock may not tick between two changes as quick as these
        try:
            stream = open_split(tmp_path, "train", vocab_size=100)
        except DataError as error:
            outcomes["refused"] += 1
            messages.append(str(error))
        else:
            outcomes["right"] += 1
            assert stream.read(0, len(stream)).tolist() == expected, (
                f"damage {number}: {kinds} of {path.name}"
            )
            assert (stream.documents, stream.text_bytes) == (6, 8180)
        path.write_bytes(whole[path.name])
    assert not any("\n" in message for message in messages)
    assert outcomes["refused"] > 400
    assert outcomes["right"] > 5  # bytes replaced by themselves, and spaces between a manifest's values
