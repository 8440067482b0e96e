"""Console output: rich on a terminal, plain uncropped lines elsewhere."""

from __future__ import annotations

import sys

from rich.console import Console

# Wide enough that no table or tree is cropped when the output goes to a file or a pipe.
PLAIN_COLUMNS = 240


def make_console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    return Console(highlight=False, stderr=stderr, width=None if stream.isatty() else PLAIN_COLUMNS)
