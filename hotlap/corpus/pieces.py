"""Documents as pieces of bounded size, so that one may be larger than memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hotlap.corpus.decoding import Tally
from hotlap.corpus.tokenizer import PIECE_CHARACTERS, cut_length, pieces


class Piece(NamedTuple):
    text: str
    begins_document: bool


def document(text: str, tally: Tally, *, begins: bool = True) -> Iterator[Piece]:
    """The pieces of a document, or of the rest of one if `begins` is False. Skips and counts a blank one."""
    if begins and not text.strip():
        tally.counters["blank_documents_skipped"] += 1
        return
    for piece in pieces(text):
        yield Piece(piece, begins)
        begins = False


def split_documents(blocks: Iterable[str], separator: str | None, tally: Tally) -> Iterator[Piece]:
    """Split a stream of text into documents at each `separator`, or make it one document if None.

    The pieces of a document do not depend on where the blocks begin and end.
    """
    # Keep a tail as long as the separator in the buffer, to find separators that span two blocks.
    longest = PIECE_CHARACTERS + len(separator or "")
    begins = True
    buffer = ""
    for block in blocks:
        *ended, buffer = (buffer + block).split(separator) if separator else [buffer + block]
        for text in ended:
            yield from document(text, tally, begins=begins)
            begins = True
        while len(buffer) > longest:
            length = cut_length(buffer)
            yield Piece(buffer[:length], begins)
            begins = False
            buffer = buffer[length:]
    yield from document(buffer, tally, begins=begins)
