"""FineWeb's ready shards from a local server that speaks the hub's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hotlap.corpus import hub
from hotlap.corpus.catalog import ensure_prepared, prepared_directory
from hotlap.corpus.hub import HUB_CORPORA, HubSource
from hotlap.corpus.prepare import ShardSettings, prepare
from hotlap.corpus.tokenizer import Tokenizer, train_tokenizer
from hotlap.data.manifest import Manifest, read_manifest
from hotlap.data.shards import write_shard
from hotlap.data.stream import open_split
from hotlap.errors import ConfigError, DataError
from tests.hub_server import REVISION, HubServer, serving

FINEWEB = HUB_CORPORA["fineweb"]
TRAIN_1, TRAIN_2, VAL = "fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"


def prepare_fineweb(num_shards: int, directory: Path) -> Manifest:
    return prepare(HubSource(FINEWEB, num_shards), ShardSettings("gpt2"), directory)


@pytest.fixture(scope="module")
def stand_in() -> Tokenizer:
    """In the place of GPT-2's tokenizer, so that these tests need no package index."""
    return train_tokenizer(["the quick brown fox jumps over the lazy dog " * 5], 262)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: Tokenizer) -> Iterator[HubServer]:
    files = {}
    rng = np.random.default_rng(1)
    for name, count in ((TRAIN_1, 30_000), (TRAIN_2, 20_000), (VAL, 5_000)):
        tokens = rng.integers(0, stand_in.vocab_size, count)
        tokens[:: count // 10] = stand_in.end_of_text
        write_shard(tmp_path / name, tokens, stand_in.vocab_size)
        files[name] = (tmp_path / name).read_bytes()
    monkeypatch.setattr(hub, "fetch_gpt2_tokenizer", lambda _say: stand_in)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(FINEWEB.repository, files) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


def test_two_shards_arrive_with_a_manifest_of_their_own(
    server: HubServer, tmp_path: Path, stand_in: Tokenizer
) -> None:
    out = tmp_path / "out"
    manifest = prepare_fineweb(2, out)
    assert {file.name: file.read_bytes() for file in out.glob("*.bin")} == server.files
    assert read_manifest(out) == manifest
    assert REVISION in manifest.source
    assert "ODC-By" in manifest.licence
    train = open_split(out, "train")
    tokens = train.read(0, len(train))
    assert len(tokens) == 50_000
    ends = int((tokens == stand_in.end_of_text).sum())
    assert train.documents == ends
    assert train.text_bytes == len(stand_in.decode_bytes(tokens)) - ends * len("<|endoftext|>")
    assert len(open_split(out, "val")) == 5_000


def test_a_second_time_needs_no_server(server: HubServer, tmp_path: Path) -> None:
    first = prepare_fineweb(1, tmp_path / "out")
    server.requests.clear()
    assert prepare_fineweb(1, tmp_path / "out") == first
    assert server.requests == []


def test_more_shards_fetch_only_what_is_missing(server: HubServer) -> None:
    ensure_prepared("fineweb", "gpt2", 1)
    server.requests.clear()
    directory = ensure_prepared("fineweb", "gpt2", 2)
    assert directory == prepared_directory("fineweb", "gpt2", 2)
    assert [file for method, file, _ in server.requests if method == "GET"] == [TRAIN_2]


def test_a_broken_transfer_goes_on_where_it_stopped(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library keeps whole chunks of what has arrived; its own are larger than these shards.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)
    server.break_once.add(TRAIN_1)
    prepare_fineweb(1, tmp_path / "out")
    assert (tmp_path / "out" / TRAIN_1).read_bytes() == server.files[TRAIN_1]
    first, second = server.downloads(TRAIN_1)
    assert first is None
    assert second is not None
    assert 0 < int(second.removeprefix("bytes=").removesuffix("-")) < len(server.files[TRAIN_1])


def test_a_wrong_checksum_is_refused_and_nothing_of_the_file_is_kept(
    server: HubServer, tmp_path: Path
) -> None:
    server.flip_once.add(TRAIN_1)
    with pytest.raises(DataError, match=rf"sha256 [0-9a-f]{{64}} for {TRAIN_1}.*nothing was kept"):
        prepare_fineweb(1, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "cache").rglob(TRAIN_1))
    prepare_fineweb(1, tmp_path / "out")
    assert (tmp_path / "out" / TRAIN_1).read_bytes() == server.files[TRAIN_1]
    assert server.downloads(VAL) == [None]  # the file that was right is not fetched again


def test_a_damaged_file_in_the_cache_is_fetched_again(server: HubServer, tmp_path: Path) -> None:
    prepare_fineweb(1, tmp_path / "out")
    (cached,) = (tmp_path / "cache" / "hub").rglob(VAL)
    content = cached.read_bytes()
    cached.unlink()
    cached.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    prepare_fineweb(1, tmp_path / "again")
    assert (tmp_path / "again" / VAL).read_bytes() == server.files[VAL]
    assert len(server.downloads(VAL)) == 2


def test_more_shards_than_there_are_is_one_line(server: HubServer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"fineweb_train_000003\.bin from kjj0/fineweb10B-gpt2") as error:
        prepare_fineweb(3, tmp_path / "out")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_server_out_of_reach_is_one_line(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DataError, match="check the network, HF_ENDPOINT") as error:
        prepare_fineweb(1, tmp_path / "out")
    assert "\n" not in str(error.value)


def test_tokens_that_are_not_gpt2s_are_refused(
    server: HubServer, tmp_path: Path, stand_in: Tokenizer
) -> None:
    write_shard(tmp_path / "other.bin", [0, stand_in.vocab_size], stand_in.vocab_size + 1)
    server.files[TRAIN_1] = (tmp_path / "other.bin").read_bytes()
    with pytest.raises(DataError, match=rf"ids below {stand_in.vocab_size} in {TRAIN_1}"):
        prepare_fineweb(1, tmp_path / "out")


def test_ready_made_shards_have_one_vocabulary_and_at_least_one_shard(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the vocabulary gpt2 for fineweb"):
        prepared_directory("fineweb", 4096)
    with pytest.raises(ConfigError, match="1 shard or more"):
        prepare_fineweb(0, tmp_path / "out")
