"""Which documents are for validation: whole ones at even distances, or the tail of the text if there are few.

A document that repeats one of training is kept out of validation, which would otherwise measure memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hotlap.corpus.pieces import Piece
from hotlap.corpus.survey import Survey
from hotlap.errors import DataError

# Whole documents are used if they have this much text, or half of the share that they should have.
ENOUGH_BYTES = 2000
# A tail has at least this much text, or this share of all of it.
LEAST_TAIL_BYTES, LARGEST_TAIL = 1000, Fraction(1, 5)
SEARCHED_CHARACTERS = 2**17  # for the end of a paragraph

# Where a tail may begin, best first: after a blank line, a line, a sentence, a word.
_BOUNDARIES = [
    re.compile(pattern)
    for pattern in (
        r"(?:\r\n|\n|\r)[ \t]*(?:\r\n|\n|\r)\s*(?=\S)",
        r"(?:\r\n|\n|\r)\s*(?=\S)",
        r"(?:[.!?][\"'”’)»]*\s+|[。！？]\s*)(?=\S)",
        r"\s+(?=\S)",
    )
]
BOUNDARY_NAMES = ("a paragraph", "a line", "a sentence", "a word", "a character")


def is_validation(index: int, val_fraction: Fraction) -> bool:
    """Whether the document with this index (from 0) belongs to the validation split.

    True where round(index · val_fraction) increases: for 1/20, documents 10, 30, 50 and so on.
    """
    part, whole = val_fraction.as_integer_ratio()
    # floor(i·part/whole + 1/2) in integer arithmetic
    return (2 * index * part + whole) // (2 * whole) > (2 * (index - 1) * part + whole) // (2 * whole)


@dataclass(frozen=True)
class ByRule:
    """Whole documents, by `is_validation`. For a corpus, of which nothing else is known before it is read."""

    val_fraction: Fraction

    def assign(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        """Pair each piece with the split of its document."""
        index = -1
        split = ""
        for piece in pieces:
            if piece.begins_document:
                index += 1
                split = "val" if is_validation(index, self.val_fraction) else "train"
            yield split, piece


@dataclass(frozen=True)
class Chosen:
    """Whole documents, chosen one by one."""

    for_validation: NDArray[np.bool_]  # per document
    moved: int = 0  # documents of the rule that repeat one of training

    def assign(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        index = -1
        for piece in pieces:
            index += piece.begins_document
            if index == len(self.for_validation):
                raise DataError(
                    expected=f"{index:,} documents, as when the files were looked at",
                    found="more: a file has changed since",
                    do="repeat the command when nothing writes to them",
                )
            yield "val" if self.for_validation[index] else "train", piece


@dataclass(frozen=True)
class Tail:
    """Everything after a position is for validation: the end of a document, and the documents after it."""

    document: int
    characters: int  # of that document, before the position
    text_bytes: int  # of the tail
    boundary: str = BOUNDARY_NAMES[0]  # after which it is

    def assign(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Piece]]:
        index, before = -1, 0  # `before`: characters of the document before the piece
        for piece in pieces:
            if piece.begins_document:
                index, before = index + 1, 0
            left = self.characters - before  # of the piece, for training
            before += len(piece.text)
            if index != self.document or left >= len(piece.text):
                yield "train" if index <= self.document else "val", piece
            elif left <= 0:
                yield "val", Piece(piece.text, piece.begins_document or left == 0)
            else:
                yield "train", Piece(piece.text[:left], piece.begins_document)
                yield "val", Piece(piece.text[left:], True)


Plan = ByRule | Chosen | Tail


def plan_splits(
    survey: Survey, val_fraction: Fraction, read: Callable[[], Iterable[Piece]], *, keep_duplicates: bool
) -> tuple[Plan, list[str]]:
    """The plan for the user's own documents, and what to tell of it. `read` reads them again."""
    notes: list[str] = []
    exact, alike = survey.repeated()
    if exact or alike:
        notes.append(
            f"repeated   {exact + alike} documents: {exact} exactly,"
            f" {alike} but for case, spaces, punctuation"
        )
    if not val_fraction:
        return ByRule(val_fraction), [*notes, "validation none: --val-fraction 0"]
    chosen = choose_documents(survey, val_fraction, keep_duplicates=keep_duplicates)
    if chosen is not None:
        if chosen.moved:
            notes.append(
                f"validation without {chosen.moved} documents that training has too"
                " (--keep-duplicates: with them)"
            )
        return chosen, notes
    tail = find_tail(read(), tail_start(survey.text_bytes, val_fraction), survey.text_bytes)
    if repeats_training(survey, tail) and not keep_duplicates:
        return ByRule(Fraction(0)), [
            *notes,
            "validation none: the end of the text repeats documents before it",
        ]
    where = f"after {tail.boundary}" if tail.characters else "between documents"
    notes.append(
        f"validation the last {tail.text_bytes:,} bytes, cut {where}: too few documents to hold some out"
    )
    return tail, notes


def choose_documents(survey: Survey, val_fraction: Fraction, *, keep_duplicates: bool) -> Chosen | None:
    """Whole documents for validation, none of them alike one of training; None if they are too few."""
    keys = np.arange(survey.documents) if keep_duplicates else survey.alike()
    by_rule = rule_for_each(survey.documents, val_fraction)
    repeats = by_rule & np.isin(keys, keys[~by_rule])
    chosen = Chosen(by_rule & ~repeats, int(repeats.sum()))
    if is_enough(survey, val_fraction, chosen.for_validation):
        return chosen
    # Many repeat others: apply the rule to the distinct documents, and leave copies together.
    _, firsts, which = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(np.argsort(firsts))  # of each distinct document, by its first occurrence
    together = rule_for_each(len(firsts), val_fraction)[order[which]]
    return Chosen(together) if is_enough(survey, val_fraction, together) else None


def rule_for_each(documents: int, val_fraction: Fraction) -> NDArray[np.bool_]:
    """`is_validation` for each of so many documents."""
    part, whole = val_fraction.as_integer_ratio()
    from_one_before = np.arange(-1, documents, dtype=np.int64)
    chosen: NDArray[np.bool_] = np.diff((2 * from_one_before * part + whole) // (2 * whole)) > 0
    return chosen


def is_enough(survey: Survey, val_fraction: Fraction, chosen: NDArray[np.bool_]) -> bool:
    chosen_bytes = int(survey.document_bytes()[chosen].sum())
    return chosen_bytes > 0 and chosen_bytes >= min(ENOUGH_BYTES, float(val_fraction) * survey.text_bytes / 2)


def repeats_training(survey: Survey, tail: Tail) -> bool:
    """Whether the documents of a tail repeat earlier ones."""
    keys = survey.alike()
    return bool(np.isin(keys[tail.document :], keys[: tail.document]).any())


def tail_start(text_bytes: int, val_fraction: Fraction) -> int:
    """The byte of the whole text at which to look for the start of a tail."""
    least = min(Fraction(LEAST_TAIL_BYTES), LARGEST_TAIL * text_bytes)
    return text_bytes - round(max(val_fraction * text_bytes, least))


def find_tail(pieces: Iterable[Piece], start_bytes: int, text_bytes: int) -> Tail:
    """The tail that begins at the first good position after `start_bytes`, with half of the rest at least."""
    index, seen_bytes, before = -1, 0, 0
    window, window_start, window_bytes = ("", -1, start_bytes)  # its start, in characters of the document
    most_bytes = (text_bytes - start_bytes) // 2

    def boundary(searched: str, of: int) -> Tail | None:
        """The first boundary of the best kind that there is, out of the first `of` kinds."""
        for pattern, name in zip(_BOUNDARIES[:of], BOUNDARY_NAMES, strict=False):
            if found := pattern.search(searched):
                left = text_bytes - window_bytes - len(searched[: found.end()].encode())
                return Tail(index, window_start + found.end(), left, name)
        return None

    for piece in pieces:
        if piece.begins_document:
            if window_start >= 0 or seen_bytes >= start_bytes:
                return boundary(window, 1) or Tail(index + 1, 0, text_bytes - seen_bytes)
            index, before = index + 1, 0
        data = piece.text.encode()
        if window_start >= 0:
            window += piece.text
        elif seen_bytes + len(data) > start_bytes:
            head = data[: max(0, start_bytes - seen_bytes)].decode("utf-8", "ignore")
            window_start, window = before + len(head), piece.text[len(head) :]
            window_bytes = seen_bytes + len(head.encode())
        seen_bytes += len(data)
        before += len(piece.text)
        searched = window.encode()[:most_bytes].decode("utf-8", "ignore")[:SEARCHED_CHARACTERS]
        if window_start >= 0 and len(searched) < len(window):
            break
    else:
        searched = window
    within = Tail(index, max(window_start, 0), text_bytes - window_bytes, BOUNDARY_NAMES[-1])
    return boundary(searched, len(_BOUNDARIES)) or within
