"""A folder as people have it: a file of each format and encoding, and some that are no text at all."""

from __future__ import annotations

import csv
import gzip
import io
import json
import stat
import tarfile
import zipfile
from pathlib import Path

import pyarrow
import pyarrow.parquet

FRENCH = "Le déjeuner était prêt à midi. « Où êtes-vous allée ? » demanda-t-elle, très inquiète.\n" * 12
QUOTED = "It’s a “quoted” sentence — with a dash… and a café.\n" * 12
GREEK = "Η Αθήνα είναι η πρωτεύουσα της Ελλάδας. Ο ήλιος λάμπει πάνω από τη θάλασσα.\n" * 12
JAPANESE = "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n" * 12
CHINESE = "今天天气很好，我们一起去公园散步吧。有朋自远方来，不亦乐乎？\n" * 12
WINDOWS = "A line that ends as on Windows.\r\nAnd one more.\r\n\r\nA paragraph.\r\n" * 12

# {file: (text, encoding, how it is listed)}
ENCODED = {
    "plain.txt": ("Plain text, nothing else.\n" * 12, "utf-8", "txt, UTF-8"),
    "french-utf8.txt": (FRENCH + "1", "utf-8", "txt, UTF-8"),
    "bom-utf8.txt": (FRENCH + "2", "utf-8-sig", "txt, UTF-8, by its byte order mark"),
    "notepad.txt": (GREEK + "3", "utf-16", "txt, UTF-16 LE, by its byte order mark"),
    "utf16-be.txt": (GREEK + "4", "utf-16-be", "txt, UTF-16 BE, by its NUL bytes"),
    "utf16-le.txt": (CHINESE + "5", "utf-16-le", "txt, UTF-16 LE, by its NUL bytes"),
    "utf32-bom.txt": (FRENCH + "6", "utf-32", "txt, UTF-32 LE, by its byte order mark"),
    "utf32-be.txt": (CHINESE + "7", "utf-32-be", "txt, UTF-32 BE, by its NUL bytes"),
    "latin-1.txt": (FRENCH + "8", "latin-1", "txt, Latin-1 or cp1252, by its letters"),
    "cp1252.txt": (QUOTED + "9", "cp1252", "txt, Latin-1 or cp1252, by its letters"),
    "greek-cp1253.txt": (GREEK + "10", "cp1253", "txt, cp1253, by its letters"),
    "shift-jis.md": (JAPANESE + "11", "shift_jis", "txt, Shift-JIS (cp932), by its letters"),
    "gb18030.txt": (CHINESE + "12", "gb18030", "txt, GB18030, by its letters"),
    "windows.txt": (WINDOWS, "utf-8", "txt, UTF-8"),
    "greek.txt": (GREEK, "utf-8", "txt, UTF-8"),
    "chinese.txt": (CHINESE, "utf-8", "txt, UTF-8"),
    "five.txt": ("Hello", "utf-8", "txt, UTF-8"),
    "long.txt": ("".join(f"Sentence {i} of a long one. \n" for i in range(7500)), "utf-8", "txt, UTF-8"),
}
TABLE_TEXTS = ['A field, with a comma and a "quote".', "Two\nlines in one field.", "Ένα κείμενο."]
# {file: its text, or the texts of its documents}
DOCUMENTS: dict[str, list[str]] = {
    "page.html": ["A title\n\nOne & two, three.\n\na\nb\n\n1\t2\n"],
    "book.epub": ["Chapter 1\n\nIt began.\n\nChapter 2\n\nIt went on: é.\n"],
    "letter.docx": ["Dear Sir,\n\nA tab:\there.\n\nIn a table."],
    "paper.pdf": ["Printed words on a page.\n"],
    "table.csv": TABLE_TEXTS,
    "table.tsv": ["Tabs between.", "Second row."],
    "rows.parquet": ["A row.", "Another row."],
    "lines.jsonl": ["first", "third"],
    "all.zip/inside/one.txt": ["A text in a zip."],
    "all.zip/inside/two.md": [GREEK + "zip"],
    "more.tar.gz/deep/three.txt": ["A text in a tar."],
    "more.tar.gz/deep/four.txt": [FRENCH + "tar"],
}
PROBLEMS = {
    ("lines.jsonl", 2): "no JSON",
    ("empty.txt", None): "an empty file",
    ("binary.txt", None): "binary data (a NUL byte at offset 8)",
    ("cut.txt.gz", None): "Compressed file ended",
    ("broken.pdf", None): "PdfStreamError",
    ("picture.png", None): "not a format that is read",
    ("hostile.zip/../../climbs.txt", None): "its name leads out of the archive: refused",
    ("hostile.zip//etc/passwd.txt", None): "its name leads out of the archive: refused",
    ("hostile.zip/link.txt", None): "a link: refused",
    ("hostile.zip/nested.zip", None): "an archive inside an archive: extract it first",
    ("more.tar.gz/deep/link.txt", None): "a link: refused",
    ("more.tar.gz/../climbs.txt", None): "its name leads out of the archive: refused",
    ("bomb.zip", None): "more, as in a decompression bomb",
}


def write_odd_texts(folder: Path) -> Path:
    folder.mkdir()
    for name, (text, encoding, _) in ENCODED.items():
        (folder / name).write_bytes(text.encode(encoding))
    (folder / "page.html").write_bytes(
        "<html><head><meta charset=iso-8859-1><title>No text</title><style>p {}</style></head><body><h1>A\n"
        "title</h1><script>no('text')</script><p>One &amp; <b>two</b>,\n three.<ul><li>a<li>b</ul>"
        "<table><tr><td>1<td>2</table></html>".encode("latin-1")
    )
    (folder / "book.epub").write_bytes(
        epub(["<h1>Chapter 1</h1><p>It began.", "<h1>Chapter 2</h1><p>It went on: é."])
    )
    (folder / "letter.docx").write_bytes(docx())
    (folder / "paper.pdf").write_bytes(pdf("Printed words on a page."))
    with (folder / "table.csv").open("w", encoding="utf-8-sig", newline="") as file:
        csv.writer(file, delimiter=";").writerows([["id", "text"], *enumerate(TABLE_TEXTS)])
    (folder / "table.tsv").write_text("text\tnumber\nTabs between.\t1\nSecond row.\t2\n")
    table = pyarrow.table({"text": DOCUMENTS["rows.parquet"]})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")
    (folder / "lines.jsonl").write_text(
        f"{json.dumps({'text': 'first'})}\nno JSON\n{json.dumps({'text': 'third'})}"
    )
    with zipfile.ZipFile(folder / "all.zip", "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("inside/one.txt", "A text in a zip.")
        content.writestr("inside/two.md", (GREEK + "zip").encode("utf-16"))
        content.writestr("__MACOSX/inside/._one.txt", b"\0\1")
    write_tar(folder / "more.tar.gz")
    write_hostile_zip(folder / "hostile.zip")
    with zipfile.ZipFile(folder / "bomb.zip", "w", zipfile.ZIP_DEFLATED) as content:
        content.writestr("bomb.txt", bytes(2**20) * 80)
    (folder / "empty.txt").touch()
    (folder / "binary.txt").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 9)
    (folder / "cut.txt.gz").write_bytes(gzip.compress(FRENCH.encode())[:-9])
    (folder / "broken.pdf").write_bytes(b"%PDF-1.4\n")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def epub(chapters: list[str]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as book:
        book.writestr("mimetype", "application/epub+zip")
        book.writestr(
            "META-INF/container.xml",
            '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
            '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>',
        )
        # The spine, not the order in the archive, is the order of the chapters.
        for number in reversed(range(len(chapters))):
            page = f"<?xml version='1.0' encoding='utf-8'?><html><body>{chapters[number]}</body></html>"
            book.writestr(f"OEBPS/text {number}.xhtml", page)
        items = "".join(f'<item id="c{n}" href="text%20{n}.xhtml"/>' for n in range(len(chapters)))
        spine = "".join(f'<itemref idref="c{n}"/>' for n in range(len(chapters)))
        book.writestr(
            "OEBPS/book.opf",
            f'<package xmlns="http://www.idpf.org/2007/opf"><manifest>{items}</manifest><spine>{spine}</spine></package>',
        )
    return out.getvalue()


def docx() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as document:
        document.writestr(
            "word/document.xml",
            '<w:document xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"><w:body>'
            "<w:p><w:r><w:t>Dear </w:t></w:r><w:r><w:t>Sir,</w:t></w:r></w:p><w:p/>"
            "<w:p><w:r><w:t>A tab:</w:t><w:tab/><w:t>here.</w:t><w:delText>gone</w:delText></w:r></w:p>"
            "<w:tbl><w:tr><w:tc><w:p><w:r><w:t>In a table.</w:t></w:r></w:p></w:tc></w:tr></w:tbl>"
            "</w:body></w:document>",
        )
    return out.getvalue()


def pdf(text: str) -> bytes:
    """A page with one line."""
    stream = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET".encode()
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Kids[3 0 R]/Count 1>>",
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 612 792]/Contents 4 0 R/Resources<</Font<</F1 5 0 R>>>>>>",
        b"<</Length %d>>stream\n%s\nendstream" % (len(stream), stream),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    out, offsets = bytearray(b"%PDF-1.4\n"), []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj%sendobj\n" % (number, content)
    start = len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1)
    out += b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    out += b"trailer<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, start)
    return bytes(out)


def write_tar(path: Path) -> None:
    with tarfile.open(path, "w:gz") as content:

        def add(name: str, data: bytes, **facts: object) -> None:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in facts.items():
                setattr(info, key, value)
            content.addfile(info, io.BytesIO(data))

        add("deep/three.txt", b"A text in a tar.")
        add("deep/link.txt", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd")
        add("../climbs.txt", b"climbs")
        add("deep/four.txt", (FRENCH + "tar").encode("latin-1"))


def write_hostile_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as content:
        content.writestr("../../climbs.txt", "climbs")
        content.writestr("/etc/passwd.txt", "root")
        link = zipfile.ZipInfo("link.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        content.writestr(link, "/etc/passwd")
        content.writestr("nested.zip", b"PK")
