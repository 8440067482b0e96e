"""What becomes validation: whole documents, or the tail of a text of few; nothing that training has too."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotlap.corpus.pieces import Piece
from hotlap.corpus.prepare import AUTO, ShardSettings, prepare
from hotlap.corpus.sources import FilesSource
from hotlap.corpus.splits import Chosen, Tail, find_tail, is_validation, rule_for_each
from hotlap.corpus.survey import Survey, normalized
from hotlap.errors import DataError
from tests.stories import SMALL, STORIES, documents_in, folder_of

BOOK = "".join(f"Paragraph {i} has a sentence. And another, {i * 37 % 101}.\n\n" for i in range(300))


def prepared(
    tmp_path: Path, texts: list[str], settings: ShardSettings = SMALL
) -> tuple[list[str], list[str], str]:
    """The documents of both splits, and what was said."""
    said: list[str] = []
    folder = folder_of(tmp_path / "in", texts)
    manifest = prepare(FilesSource([folder]), settings, tmp_path / "out", say=said.append)
    val = documents_in(tmp_path / "out", "val") if manifest.of_split("val") else []
    return documents_in(tmp_path / "out", "train"), val, "\n".join(said)


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_one_file_is_enough_and_its_last_paragraphs_are_for_validation(tmp_path: Path, line_end: str) -> None:
    book = BOOK.replace("\n", line_end)
    (train,), (val,), said = prepared(tmp_path, [book])
    assert train + val == book
    assert val.startswith("Paragraph 28")
    assert 900 < len(val) <= 1000
    assert f"validation the last {len(val)} bytes, cut after a paragraph" in said


def test_a_few_documents_end_in_validation(tmp_path: Path) -> None:
    train, val, said = prepared(tmp_path, [BOOK, BOOK[::-1], "Last words.\n" * 5])
    assert "".join(train + val) == BOOK + BOOK[::-1] + "Last words.\n" * 5
    assert len(train) == 2
    assert len(val) == 2
    assert val[1] == "Last words.\n" * 5
    assert "too few documents to hold some out" in said


@given(
    text=st.text(alphabet="ab. \n", min_size=40, max_size=300).filter(lambda text: bool(text.strip())),
    cuts=st.lists(st.integers(0, 300), max_size=4),
    start=st.integers(1, 38),
)
def test_a_tail_loses_nothing_wherever_the_pieces_end(text: str, cuts: list[int], start: int) -> None:
    def pieces(at: list[int]) -> list[Piece]:
        ends = sorted({min(cut, len(text)) for cut in at} | {0, len(text)})
        return [Piece(text[a:b], a == 0) for a, b in itertools.pairwise(ends)]

    tail = find_tail(pieces(cuts), start, len(text))
    assert tail == find_tail(pieces([]), start, len(text))
    assert 0 < tail.characters < len(text)
    assert tail.text_bytes == len(text) - tail.characters
    for some in ([], cuts):
        split: dict[str, str] = {"train": "", "val": ""}
        begins = {"train": 0, "val": 0}
        for name, piece in tail.assign(pieces(some)):
            split[name] += piece.text
            begins[name] += piece.begins_document
        assert split["train"] + split["val"] == text
        assert len(split["train"]) == tail.characters
        assert begins == {"train": 1, "val": 1}


def test_a_text_without_paragraphs_is_cut_at_what_it_has() -> None:
    for text, boundary in (
        ("line\n" * 50, "a line"),
        ("A sentence. " * 30, "a sentence"),
        ("句子。" * 60, "a sentence"),
        ("word " * 60, "a word"),
        ("x" * 300, "a character"),
    ):
        data = len(text.encode())
        tail = find_tail([Piece(text, True)], data * 8 // 10, data)
        assert tail.boundary == boundary
        assert 0.8 <= len(text[: tail.characters].encode()) / data <= 0.9
        assert tail.text_bytes == len(text[tail.characters :].encode())


def test_documents_that_repeat_training_are_kept_out_of_validation(tmp_path: Path) -> None:
    texts = [*STORIES]
    texts[10] = texts[3].upper().replace(" ", "\n")  # alike
    texts[35] = texts[34]  # both in training
    train, val, said = prepared(tmp_path, texts)
    assert val == [texts[30]]
    assert texts[10] in train
    assert len(train) == 39
    assert "repeated   2 documents: 1 exactly, 1 but for case, spaces, punctuation" in said
    assert "validation without 1 documents that training has too" in said


def test_repeated_documents_stay_in_validation_if_told(tmp_path: Path) -> None:
    texts = [*STORIES]
    texts[10] = texts[3]
    settings = ShardSettings(300, keep_duplicates=True)
    _, val, _ = prepared(tmp_path, texts, settings)
    assert val == [texts[10], texts[30]]


def test_one_document_many_times_has_no_validation(tmp_path: Path) -> None:
    train, val, said = prepared(tmp_path, [STORIES[0]] * 20, ShardSettings(AUTO))
    assert (len(train), val) == (20, [])
    assert "validation none: the end of the text repeats documents before it" in said


def test_copies_of_a_document_stay_on_one_side(tmp_path: Path) -> None:
    texts = [STORIES[index % 23] for index in range(23 * 20)]
    train, val, said = prepared(tmp_path, texts)
    assert val == [STORIES[10]] * 20
    assert len(train) == 22 * 20
    assert "repeated   437 documents: 437 exactly" in said


def test_a_tiny_document_is_no_validation_split(tmp_path: Path) -> None:
    texts = [story * 9 for story in STORIES[:12]]
    texts[10] = "Hello"
    _, val, said = prepared(tmp_path, texts)
    assert "too few documents to hold some out" in said
    assert sum(map(len, val)) > 1000


def test_the_rule_over_many_documents_is_the_one_for_each() -> None:
    for fraction in (Fraction(1, 20), Fraction(1, 2), Fraction(3, 7)):
        chosen = [is_validation(index, fraction) for index in range(200)]
        assert rule_for_each(200, fraction).tolist() == chosen


def test_what_is_alike() -> None:
    assert normalized("Don’t  STOP —\nnow…") == normalized("dont stop, now.") == b"dontstopnow"
    assert normalized("Cafe\u0301") == normalized("CAFÉ")
    assert normalized("a 1") != normalized("a 2")
    assert normalized("今天，好。") == normalized("今天 好")


def test_a_text_too_short_to_train_on_is_refused(tmp_path: Path) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(DataError, match="at least one document with text; found 0 documents"):
        prepare(FilesSource([tmp_path / "blank.txt"]), ShardSettings(AUTO), tmp_path / "out")


def test_a_tail_in_a_later_document_gives_it_whole() -> None:
    tail = Tail(1, 0, 2)
    pieces = [Piece("a", True), Piece("b", False), Piece("c", True), Piece("d", True)]
    assert [split for split, _ in tail.assign(pieces)] == ["train", "train", "val", "val"]


def test_a_file_that_grows_between_the_passes_is_refused() -> None:
    chosen = Chosen(np.array([False, True]))
    pieces = [Piece(text, True) for text in "abc"]
    assert list(chosen.assign(pieces[:2])) == [("train", pieces[0]), ("val", pieces[1])]
    with pytest.raises(DataError, match=r"expected 2 documents, .* has changed since"):
        list(chosen.assign(pieces))


def test_a_document_of_many_gigabytes_has_its_whole_size() -> None:
    survey = Survey()
    start = survey.mark()
    survey.add("a", begins_document=True)
    survey._size += 2**33  # instead of reading that much
    survey.end_file("big.txt", ".txt", None, start)
    assert survey.text_bytes == int(survey.document_bytes().sum()) == 2**33 + 1
