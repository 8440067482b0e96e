"""Console output: rich on a terminal, plain uncropped lines elsewhere, and never a control character.

Text of files and of models can contain anything, and a terminal obeys what it is sent: it would move its
cursor, rename its window or put text into the clipboard.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Wide enough that no table or tree is cropped when the output goes to a file or a pipe.
PLAIN_COLUMNS = 240

# Control characters, overrides of the direction of writing, and what UTF-8 cannot encode.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, *, lines: bool = False) -> str:
    r"""The text with its control characters as escapes (`\u001b`), as in JSON. `lines` keeps \n and \t."""
    kept = "\n\t" if lines else ""
    return _UNSAFE.sub(lambda match: match[0] if match[0] in kept else f"\\u{ord(match[0]):04x}", text)


def make_console(*, stderr: bool = False) -> Console:
    """A console that prints text, also in tables, as `printable` makes it."""
    from rich.console import Console
    from rich.text import Text

    class PrintableConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text, lines=True), **options)

    stream = sys.stderr if stderr else sys.stdout
    return PrintableConsole(highlight=False, stderr=stderr, width=None if stream.isatty() else PLAIN_COLUMNS)
