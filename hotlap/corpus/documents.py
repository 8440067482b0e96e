"""The text of books and office documents: `.epub` and `.docx` (zip files of XML), and `.pdf` (through pypdf).

Each is one document, in blocks: the chapters of a book, the paragraphs of a text, the pages of a PDF.
"""

from __future__ import annotations

import logging
import posixpath
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from hotlap.corpus.archives import check_expansion, member_damage_named
from hotlap.corpus.encodings import find_encoding
from hotlap.corpus.inputs import DOCX, EPUB, Input
from hotlap.corpus.pages import declared_charset, text_of_page
from hotlap.corpus.tokenizer import without_surrogates
from hotlap.errors import DataError

_CONTAINER = "META-INF/container.xml"
_ENCRYPTION = "META-INF/encryption.xml"
_WORD_TEXT = "word/document.xml"
_WORD = "{http://schemas.openxmlformats.org/wordprocessingml/2006/main}"
_FALLBACK = "{http://schemas.openxmlformats.org/markup-compatibility/2006}Fallback"


def text_of_document(file: Input) -> Iterator[str]:
    with file.open() as stream:
        if file.kind == EPUB:
            yield from _chapters(stream, file)
        elif file.kind == DOCX:
            yield from _paragraphs(stream, file)
        else:
            yield from _pages(stream, file.name)


@contextmanager
def _opened_zip(stream: BinaryIO, file: Input, kind: str) -> Iterator[zipfile.ZipFile]:
    try:
        # zipfile needs random access, which a member of an archive may not have.
        content = zipfile.ZipFile(stream)
    except zipfile.BadZipFile as error:
        raise _damaged(kind, file.name, str(error)) from error
    with content, member_damage_named(file.name):
        check_expansion(content, file.name, file.size)
        try:
            yield content
        except KeyError as error:
            raise _damaged(kind, file.name, str(error).strip("'\"")) from error
        except ElementTree.ParseError as error:
            raise _damaged(kind, file.name, f"XML with an error: {error}") from error


def _damaged(kind: str, name: str, found: str) -> DataError:
    return DataError(
        expected=f"{kind} at {name}",
        found=" ".join(found.split())[:200],
        do="copy or create it again, remove it or pass --skip-bad-files to `hotlap data prepare`",
    )


def _xml(content: zipfile.ZipFile, member: str) -> ElementTree.Element:
    data = content.read(member)
    if b"<!ENTITY" in data:  # which can grow without bound
        raise ElementTree.ParseError(f"entities are declared in {member}")
    return ElementTree.fromstring(data)


def _chapters(stream: BinaryIO, file: Input) -> Iterator[str]:
    """The chapters of an EPUB, in the order of its spine."""
    with _opened_zip(stream, file, "an EPUB book") as book:
        package = next(
            (
                node.get("full-path", "")
                for node in _xml(book, _CONTAINER).iter()
                if _local(node) == "rootfile"
            ),
            "",
        )
        root = _xml(book, package)
        hrefs = {node.get("id"): node.get("href", "") for node in root.iter() if _local(node) == "item"}
        folder = posixpath.dirname(package)
        encrypted = _encrypted(book)
        between = ""
        for node in root.iter():
            href = hrefs.get(node.get("idref")) if _local(node) == "itemref" else None
            if not href:
                continue
            member = posixpath.normpath(posixpath.join(folder, unquote(href.partition("#")[0])))
            if member in encrypted:
                raise _damaged(
                    "an EPUB book without copy protection", file.name, f"{member}, which is encrypted"
                )
            for text in _page(book, member, file.name):
                yield between + text
                between = ""
            between = "\n"


def _encrypted(book: zipfile.ZipFile) -> set[str]:
    if _ENCRYPTION not in book.namelist():
        return set()
    return {unquote(node.get("URI", "")) for node in _xml(book, _ENCRYPTION).iter()}


def _page(book: zipfile.ZipFile, member: str, name: str) -> Iterator[str]:
    with book.open(member) as page:
        declared = declared_charset(page.read(2048))
    with book.open(member) as page:
        encoding = find_encoding(page, f"{name}/{member}", declared=declared)  # type: ignore[arg-type]
    text = book.read(member)[len(encoding.mark) :].decode(encoding.codec, "replace")
    yield from text_of_page([text], f"{name}/{member}")


def _local(node: ElementTree.Element) -> str:
    """The name of an element without its namespace."""
    return str(node.tag).rpartition("}")[2]


def _paragraphs(stream: BinaryIO, file: Input) -> Iterator[str]:
    """The paragraphs of a Word document, also those in tables, with deleted text left out."""
    with _opened_zip(stream, file, "a Word document") as content, content.open(_WORD_TEXT) as xml:
        between = ""
        within_fallback = 0  # a second version of a drawing, for old programs
        for event, node in ElementTree.iterparse(xml, ["start", "end"]):
            if node.tag == _FALLBACK:
                within_fallback += 1 if event == "start" else -1
                if event == "end":
                    node.clear()
            elif event == "end" and node.tag == f"{_WORD}p" and not within_fallback:
                text = _without_damage("".join(_runs(node)))
                if text.strip():
                    yield between + text
                    between = "\n\n"
                node.clear()


def _runs(paragraph: ElementTree.Element) -> Iterator[str]:
    for node in paragraph.iter():
        if node.tag == f"{_WORD}t":
            yield node.text or ""
        elif node.tag == f"{_WORD}tab" and node.attrib == {}:
            yield "\t"
        elif node.tag in (f"{_WORD}br", f"{_WORD}cr"):
            yield "\n"


def _pages(stream: BinaryIO, name: str) -> Iterator[str]:
    try:
        import pypdf
    except ImportError as error:
        raise DataError(
            expected=f"pypdf, to read {name}",
            found="a PDF, which only pypdf reads: `pip install pypdf`",
            do="install it, remove the file or pass --skip-bad-files to `hotlap data prepare`",
        ) from error
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it repairs most damage, and says so at length
    some = False
    try:
        reader: Any = pypdf.PdfReader(stream)
        if reader.is_encrypted and not reader.decrypt(""):
            raise _damaged("a PDF without a password", name, "an encrypted one")
        for page in reader.pages:
            text = _without_damage(page.extract_text())
            some = some or bool(text.strip())
            yield text + "\n"
    except DataError:
        raise
    except Exception as error:  # which ones depends on the damage
        raise _damaged("a readable PDF", name, f"{type(error).__name__}: {error}") from error
    if not some:
        raise _damaged("a PDF with text", name, "pages without text, perhaps scans")


def _without_damage(text: str) -> str:
    return without_surrogates(text)[0].replace("\0", "")
