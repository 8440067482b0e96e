"""`hotlap`: finds the command, runs it, and turns a user's mistake into one line and exit code 2."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hotlap import __version__
from hotlap.errors import ConfigError, HotlapError
from hotlap.settings import nearest

# Help texts stand here, not in the modules, so that `hotlap --help` imports none of them.
COMMANDS = {
    "recipes": "list the recipes, show one, or compare two",
    "train": "train a recipe at a size",
    "data": "prepare, inspect and list token data",
    "doctor": "say what a run would use on this machine",
}

USER_MISTAKE = 2


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaints are `ConfigError`s, with the nearest known word suggested."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            expected=f"arguments of `{self.prog}`", found=message, do=f"see `{self.prog} --help`"
        )


def build_parser() -> Parser:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    parser = Parser(
        prog="hotlap",
        description="Train small GPT language models against the clock.",
        epilog=f"commands:\n{commands}\n\n`hotlap COMMAND --help` describes one.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hotlap {__version__}")
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def dispatch(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.command not in COMMANDS:
        known = list(COMMANDS)
        raise ConfigError(
            expected=f"a command ({', '.join(known)})",
            found=f"`{args.command}`",
            do=nearest(args.command, known),
        )
    module = importlib.import_module(f"hotlap.commands.{args.command}")
    parser = Parser(prog=f"hotlap {args.command}", description=COMMANDS[args.command])
    module.configure(parser)
    return int(module.run(parser.parse_args(args.arguments)))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except HotlapError as mistake:
        print(f"hotlap: {mistake}", file=sys.stderr)  # noqa: T201
        code = USER_MISTAKE
    except BrokenPipeError:
        # The reader of our output went away (`hotlap … | head`): not an error of this command.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
