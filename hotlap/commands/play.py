"""`hotlap play RUN`: a prompt at which a trained model goes on with what is typed, as one watches."""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.cli import Parser
from hotlap.commands.model_arguments import add_model_arguments, described_step, load_model
from hotlap.commands.sample import add_sampling_arguments, sample_options
from hotlap.files import cache_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

PROMPT = "> "
HISTORY_LINES = 1000


def configure(parser: Parser) -> None:
    add_model_arguments(parser)
    add_sampling_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from hotlap.inference.session import Session

    options = sample_options(args)
    session = Session(load_model(args), options, write)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot show
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        write(f"{described_step(session.loaded)}: type the start of a text; :help lists what else\n")
    with history() if is_terminal else nullcontext():
        session.run(lambda: input(PROMPT if is_terminal else ""))
    return 0


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


@contextmanager
def history() -> Iterator[None]:
    """Line editing, with the lines of earlier sessions, where Python has readline."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = history_path()
    with suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            readline.write_history_file(path)


def history_path() -> Path:
    return cache_directory() / "play_history"
