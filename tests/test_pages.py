"""Text of HTML pages, whatever the markup and wherever the blocks end."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from hotlap.corpus.pages import declared_charset, text_of_page
from hotlap.errors import DataError

PAGE = (
    "<!DOCTYPE html><html><head><title>Not this</title><style>p > a {}</style></head><body>\n"
    "<nav><ul><li>Home</li><li>About us</li></ul></nav>"
    "<p>One <i>two</i>three &amp; four&nbsp;five.</p><p>Six<br>seven</p><pre>a\n  b</pre>"
    "<script>if (a < b) document.write('<p>Not this</p>')</script><!-- nor this --><p>Fin\u00e9"
)
TEXT = "Home\nAbout us\n\nOne twothree & four\u00a0five.\n\nSix\nseven\n\na\n  b\n\nFin\u00e9\n"


def text_of(page: str, size: int = 10**6) -> str:
    return "".join(text_of_page((page[at : at + size] for at in range(0, len(page), size)), "x"))


def test_a_page_becomes_paragraphs_wherever_its_blocks_end() -> None:
    for size in (1, 2, 7, 10**6):
        assert text_of(PAGE, size) == TEXT


MARKUP = [
    *(
        "<p>",
        "</p>",
        "<",
        ">",
        "<!",
        "<![CDATA[",
        "]]>",
        "<!--",
        "-->",
        "&",
        "&amp",
        ";",
        "a ",
        "<td>",
        "<br/>",
    ),
    *("<script>", "</script>", "<pre>", "</pre", "'", '"', "<?x", "\n", "<a b=", "<![x["),
]


@given(parts=st.lists(st.sampled_from(MARKUP), max_size=30))
def test_any_markup_gives_text_or_one_line(parts: list[str]) -> None:
    with contextlib.suppress(DataError):
        assert isinstance(text_of("".join(parts), 5), str)


def test_the_declared_encoding_is_found() -> None:
    assert declared_charset(b'<html><meta charset="windows-1253">') == "windows-1253"
    assert declared_charset(b"<?xml version='1.0' encoding='koi8-r'?>") == "koi8-r"
    typed = b'<meta http-equiv="Content-Type" content="text/html; charset=ISO-8859-1">'
    assert declared_charset(typed) == "cp1252"
    assert declared_charset(b"<p>charset") is None
