"""Which encoding a file has: found in texts of several languages, refused in what is no text."""

from __future__ import annotations

import io
import os

import pytest

from hotlap.corpus import encodings
from hotlap.corpus.encodings import find_encoding, named_encoding
from hotlap.errors import ConfigError, DataError
from tests.odd_texts import CHINESE, FRENCH, GREEK, JAPANESE, QUOTED

RUSSIAN = "Все счастливые семьи похожи друг на друга. "
TEXTS = [
    (FRENCH, ["latin-1", "utf-16-le", "utf-32-be", "utf-8-sig"]),
    (QUOTED, ["cp1252", "utf-16-be"]),
    (GREEK, ["cp1253", "utf-16-le", "utf-32-le"]),
    (GREEK.replace("Η Αθήνα", "Άλλη"), ["cp1253", "iso8859-7"]),
    (JAPANESE, ["shift_jis", "utf-16-be"]),
    (CHINESE, ["gb18030", "utf-16-le", "utf-16-be", "utf-32-le"]),
    (RUSSIAN, ["cp1251", "koi8-r"]),
]


@pytest.mark.parametrize("text, codecs", TEXTS, ids=[text[:8] for text, _ in TEXTS])
@pytest.mark.parametrize("characters", [40, 500, 200_000])
def test_the_text_comes_back_from_every_encoding(text: str, codecs: list[str], characters: int) -> None:
    text = (text * (characters // len(text) + 1))[:characters]
    for codec in codecs:
        data = text.encode(codec)
        found = find_encoding(io.BytesIO(data), "x")
        assert data[len(found.mark) :].decode(found.codec) == text, (codec, found)


def test_one_letter_at_the_end_of_a_long_file_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encodings, "BLOCK_BYTES", 1000)
    data = b"Nothing but ASCII, for a long time.\n" * 500 + "Enfin, l'été.\n".encode("latin-1")
    assert find_encoding(io.BytesIO(data), "x").codec == "cp1252"
    assert find_encoding(io.BytesIO(data[:-3]), "x").codec == "cp1252"
    assert find_encoding(io.BytesIO(data[:-14]), "x") == encodings.UTF8


def test_utf8_with_damage_stays_utf8() -> None:
    assert find_encoding(io.BytesIO(FRENCH.encode() + b"\xff"), "x").codec == "utf-8"


def test_what_is_no_text_is_refused() -> None:
    for data, message in (
        (b"", "an empty file"),
        (b"text\0text", r"a NUL byte at offset 4"),
        (bytes(range(256)) * 40, "binary data"),
        (os.urandom(9000).replace(b"\0", b"a"), "text in none; give `hotlap data prepare` its --encoding"),
    ):
        with pytest.raises(DataError, match=message):
            find_encoding(io.BytesIO(data), "x")


def test_a_choice_is_followed_but_for_a_mark() -> None:
    assert find_encoding(io.BytesIO(b"abc"), "x", forced="cp1253").codec == "cp1253"
    assert find_encoding(io.BytesIO(b"\xef\xbb\xbfabc"), "x", forced="cp1253").codec == "utf-8"
    assert named_encoding("Greek") == "iso8859-7"
    for wrong in ("klingon", "base64"):
        with pytest.raises(ConfigError, match=f"found `{wrong}`"):
            named_encoding(wrong)
