"""The text of an HTML page, read as a stream: markup, scripts and styles are left out, paragraphs kept apart.

Built on Python's own parser, which accepts any page and is fed in blocks, so memory is bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html.parser import HTMLParser

from hotlap.errors import DataError

_WITHOUT_TEXT = frozenset(["script", "style", "template", "title"])
# One text, so that the list stays on a few lines.
_PARAGRAPHS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote body dd details div dl dt fieldset figcaption figure footer form"
        " h1 h2 h3 h4 h5 h6 header hr main nav ol p pre section table ul",
    )
)
_LINES = frozenset(["br", "li", "option", "tr", "summary", "caption"])
_CELLS = frozenset(["td", "th"])
_BLANKS = re.compile(r"[ \t\n\r\f]+")
_DECLARED = re.compile(
    rb"""<(?:meta[^>]*\scharset|\?xml[^>]*\sencoding)\s*=\s*["']?\s*([\w.:-]+)|;\s*charset=([\w.:-]+)""", re.I
)
DECLARED_WITHIN_BYTES = 2048


def declared_charset(start: bytes) -> str | None:
    """The encoding that a page states for itself."""
    found = _DECLARED.search(start[:DECLARED_WITHIN_BYTES])
    if found is None:
        return None
    name = (found[1] or found[2]).decode("ascii", "replace").lower()
    # As browsers do: pages that say Latin-1 have cp1252's quotation marks.
    return "cp1252" if name in ("iso-8859-1", "latin1", "latin-1", "us-ascii") else name


class _Text(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self._parts: list[str] = []
        self._skipping: list[str] = []  # open elements without text
        self._in_pre = 0
        self._break = ""  # to be written before the next text
        self._space = False
        self._started = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in _WITHOUT_TEXT:
            self._skipping.append(tag)
        self._in_pre += tag == "pre"
        self._boundary(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self._boundary(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self._skipping:
            del self._skipping[self._skipping.index(tag) :]
        if tag == "pre":
            self._in_pre = max(0, self._in_pre - 1)
        self._boundary(tag)

    def _boundary(self, tag: str) -> None:
        if tag in _PARAGRAPHS:
            self._break = "\n\n"
        elif tag in _LINES and tag != "br":
            self._break = self._break or "\n"
        elif tag == "br":
            self._break = "\n" if self._break in ("", "\t") else self._break
        elif tag in _CELLS:
            self._break = self._break or "\t"

    def handle_data(self, data: str) -> None:
        if self._skipping:
            return
        if self._in_pre:
            text = data
        else:
            text = _BLANKS.sub(" ", data)
            stripped = text.strip(" ")
            if not stripped:
                self._space = self._space or bool(text)
                return
            self._space, before = text.endswith(" "), self._space or text.startswith(" ")
            text = " " * (before and not self._break and self._started) + stripped
        if not text:
            return
        if self._break and self._started:
            self._parts.append(self._break)
        self._break, self._started = "", True
        self._parts.append(text)

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text


def text_of_page(blocks: Iterable[str], name: str) -> Iterator[str]:
    """The text of a page that is given in blocks of any size, ended by a newline. `name`: for messages."""
    parser = _Text()
    some = False
    try:
        for block in blocks:
            parser.feed(block)
            if text := parser.take():
                some = True
                yield text
        parser.close()
    except AssertionError as error:  # the parser's own, for a declaration that it does not know
        raise DataError(
            expected=f"a page of HTML at {name}",
            found=f"markup that cannot be read: {error}",
            do="fix or remove it, or pass --skip-bad-files to `hotlap data prepare`",
        ) from error
    text = parser.take()
    if some or text:
        yield text + "\n"
