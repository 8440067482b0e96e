"""What of a text may be shown while it is written, against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotlap.corpus.tokenizer import train_tokenizer
from hotlap.inference.options import SampleOptions
from hotlap.serve.choice import Choice, WrittenToken

TOKENIZER = train_tokenizer(["abab cab 日 aabb ccab abcabc"] * 3, 264)
TEXTS = st.text("abc 日", max_size=30)


def written(text: str, stops: list[str], max_tokens: int = 1000) -> tuple[list[str], Choice]:
    """The pieces of a text that a model writes token by token, taken after each."""
    choice = Choice(0, [0], SampleOptions(), TOKENIZER, max_tokens=max_tokens, stop=stops)
    pieces = []
    for token in TOKENIZER.encode(text).tolist():
        choice.add(WrittenToken(token, choice.offset))
        pieces.append(choice.take().text)
        if choice.ending is not None:
            return pieces, choice
    choice.close("stop")
    return [*pieces, choice.take().text], choice


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, stops=st.lists(st.text("abc 日", min_size=1, max_size=4), max_size=3))
def test_a_text_is_cut_at_its_first_stop_and_no_piece_of_a_stop_is_shown(text, stops):
    pieces, choice = written(text, stops)
    shown = "".join(pieces)
    if not any(stop in text for stop in stops):
        assert shown == text
    else:
        # Where two stops overlap, the one that is complete first ends the text.
        ends = [text.index(stop) + len(stop) for stop in stops if stop in text]
        cuts = {text.index(stop) for stop in stops if stop in text}
        assert shown in {text[:cut] for cut in cuts}
        assert choice.num_tokens <= len(TOKENIZER.encode(text))
        assert len(shown) <= min(ends)
        assert choice.ending == "stop"
    assert not any(stop in shown for stop in stops)


@given(text=TEXTS)
@settings(deadline=None)
def test_without_stops_every_whole_character_is_shown_at_once(text):
    choice = Choice(0, [0], SampleOptions(), TOKENIZER, max_tokens=1000)
    tokens, shown = TOKENIZER.encode(text).tolist(), ""
    for count, token in enumerate(tokens, start=1):
        choice.add(WrittenToken(token, choice.offset))
        shown += choice.take().text
        whole = TOKENIZER.decode_bytes(tokens[:count]).decode("utf-8", "ignore")
        assert shown == whole


def test_the_start_of_a_stop_is_held_until_it_is_none():
    choice = Choice(0, [0], SampleOptions(), TOKENIZER, max_tokens=1000, stop=["bbb"])
    shown = []
    for letter in "abbcabbb":
        (token,) = TOKENIZER.encode(letter).tolist()
        choice.add(WrittenToken(token, choice.offset))
        piece = choice.take()
        shown.append((piece.text, len(piece.tokens)))
    assert shown == [("a", 1), ("", 0), ("", 0), ("bbc", 3), ("a", 1), ("", 0), ("", 0), ("", 0)]
    assert choice.ending == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_a_character_that_is_cut_off_by_the_limit_is_shown_as_one_that_is_missing(max_tokens):
    tokens = TOKENIZER.encode("🎉").tolist()
    assert len(tokens) == 4
    choice = Choice(0, [0], SampleOptions(), TOKENIZER, max_tokens=max_tokens)
    for token in tokens[:max_tokens]:
        choice.add(WrittenToken(token, choice.offset))
    piece = choice.take()
    assert (piece.text, piece.ending, len(piece.tokens)) == ("\ufffd", "length", max_tokens)
