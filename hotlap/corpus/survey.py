"""What a first pass over the user's files finds: which can be read and how, which documents repeat others.

It keeps 24 bytes per document, and no text.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hotlap.corpus.encodings import Encoding
from hotlap.corpus.tokenizer import without_surrogates
from hotlap.data.manifest import FileEntry, Problem

MOST_LISTED = 10_000  # files and problems each; the manifest is read by every run
SHOWN_PROBLEMS = 10


@dataclass(frozen=True)
class Account:
    """A file that can be read."""

    file: str
    kind: str
    encoding: Encoding | None  # None for formats that have their own
    documents: int
    text_bytes: int

    def entry(self) -> FileEntry:
        return FileEntry(self.file, self.read_as, self.documents, self.text_bytes)

    @property
    def read_as(self) -> str:
        kind = self.kind.removeprefix(".")
        return f"{kind}, {self.encoding}" if self.encoding else kind


class Mark(NamedTuple):
    """A point in a survey."""

    accounts: int
    problems: int
    documents: int
    skipped_files: int


class Survey:
    def __init__(self) -> None:
        self.accounts: list[Account] = []
        self.problems: list[Problem] = []
        self.skipped_files = 0
        self.sizes = array("Q")  # bytes of text per document
        self._exact = array("Q")  # a hash of each document
        self._alike = array("Q")  # the same for documents that differ in case, spaces and punctuation only
        self._open: tuple[Any, Any] | None = None
        self._size = 0

    def mark(self) -> Mark:
        """Where the survey is, to go back to with `forget_since`."""
        self._close()
        return Mark(len(self.accounts), len(self.problems), len(self.sizes), self.skipped_files)

    def forget_since(self, mark: Mark) -> None:
        self._close()
        del self.accounts[mark.accounts :], self.problems[mark.problems :]
        for per_document in (self.sizes, self._exact, self._alike):
            del per_document[mark.documents :]
        self.skipped_files = mark.skipped_files

    def skip(self, file: str, reason: str) -> None:
        self.problems.append(Problem(file, None, reason))
        self.skipped_files += 1

    def add(self, text: str, *, begins_document: bool) -> None:
        """One piece of a document."""
        if begins_document:
            self._close()
            self._open = hashlib.blake2b(digest_size=8), hashlib.blake2b(digest_size=8)
        assert self._open is not None, "a document begins with its first piece"
        exact, alike = self._open
        data = without_surrogates(text)[0].encode()
        exact.update(data)
        alike.update(normalized(text))
        self._size += len(data)

    def end_file(self, file: str, kind: str, encoding: Encoding | None, since: Mark) -> None:
        self._close()
        sizes = self.sizes[since.documents :]
        self.accounts.append(Account(file, kind, encoding, len(sizes), sum(sizes)))

    def _close(self) -> None:
        if self._open is None:
            return
        exact, alike = self._open
        self._exact.append(int.from_bytes(exact.digest(), "little"))
        # Without letters and digits there is nothing to compare but the text itself.
        some = alike.digest() != _NOTHING
        self._alike.append(int.from_bytes((alike if some else exact).digest(), "little"))
        self.sizes.append(self._size)
        self._open, self._size = None, 0

    @property
    def documents(self) -> int:
        return len(self.sizes)

    @property
    def text_bytes(self) -> int:
        return sum(self.sizes)

    def document_bytes(self) -> NDArray[np.uint64]:
        return np.frombuffer(self.sizes, np.uint64) if self.sizes else np.zeros(0, np.uint64)

    def alike(self) -> NDArray[np.uint64]:
        """A key per document; documents with the same key are alike."""
        return np.frombuffer(self._alike, np.uint64) if self._alike else np.zeros(0, np.uint64)

    def repeated(self) -> tuple[int, int]:
        """How many documents repeat an earlier one: exactly, and but for case, spaces and punctuation."""
        exact = self.documents - len(set(self._exact))
        return exact, self.documents - len(set(self._alike)) - exact

    def summary(self) -> list[str]:
        """What was read and how, and the first problems, for the screen."""
        files = f"{len(self.accounts):,} file{'s' * (len(self.accounts) != 1)}"
        documents = f"{self.documents:,} document{'s' * (self.documents != 1)}"
        read_as = Counter(account.read_as for account in self.accounts).most_common()
        lines = [f"read       {files}, {documents}"]
        lines += [f"           {count:,} as {name}" for name, count in read_as]
        return lines + problem_lines(self.problems)


def problem_lines(problems: list[Problem] | tuple[Problem, ...]) -> list[str]:
    lines = [f"problem    {problem}" for problem in problems[:SHOWN_PROBLEMS]]
    if len(problems) > SHOWN_PROBLEMS:
        lines.append(f"           and {len(problems) - SHOWN_PROBLEMS} more, listed in the manifest")
    return lines


_NOTHING = hashlib.blake2b(digest_size=8).digest()
_NEITHER_LETTER_NOR_DIGIT = bytes(byte for byte in range(128) if not chr(byte).isalnum())
# In UTF-8: Latin-1's signs, general punctuation, and CJK's space, comma and full stop.
_OTHER_PUNCTUATION = re.compile(
    rb"\xc2[\x80-\xbf]|\xe2[\x80\x81][\x80-\xbf]|\xe3\x80[\x80-\x82]|\xef\xbc\x8c"
)


def normalized(text: str) -> bytes:
    """The letters and digits of a text, in lower case."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", without_surrogates(text)[0]).casefold()
    data = text.lower().encode().translate(None, _NEITHER_LETTER_NOR_DIGIT)
    return data if data.isascii() else _OTHER_PUNCTUATION.sub(b"", data)
