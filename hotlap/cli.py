"""`hotlap`: finds the command, runs it, and turns a user's mistake into one line and exit code 2.

Commands that take settings (`--optim.muon.lr 0.03`) get them as `args.settings`, {name: text}: whatever
option is not the command's own is a setting, checked against the configuration by the command.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hotlap import __version__
from hotlap.errors import INTERRUPTED, USER_MISTAKE, ConfigError, HotlapError
from hotlap.settings import nearest
from hotlap.waiting import wait_passively

# One line each stands here, not in the modules, so that `hotlap --help` imports none of them.
COMMANDS = {
    "recipes": "list the recipes, show one, or compare two",
    "train": "train a recipe at a size",
    "race": "run recipes against each other over seeds, and say whether a difference is luck",
    "ablate": "take a recipe's changes back one by one: which bought what",
    "sample": "let a trained model write",
    "eval": "measure a trained model on whole validation splits",
    "export": "write a trained model as a directory to give away",
    "data": "prepare, inspect and list token data",
    "report": "write one page of one or many runs: curves, statistics, verdicts",
    "watch": "follow a run in the browser while it trains",
    "doctor": "say what a run would use on this machine",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises its complaints and, where asked to, sets unknown options apart."""

    takes_settings = False

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            expected=f"arguments of `{self.prog}`", found=message, do=f"see `{self.prog} --help`"
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        own, settings = self._split(arguments) if self.takes_settings else (list(arguments), {})
        args = self.parse_args(own)
        args.settings = settings
        args.words = list(arguments)
        return args

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """The command's own arguments, and the settings among them, "" for one without a value."""
        own: list[str] = []
        settings: dict[str, str] = {}
        rest = list(arguments)
        while rest:
            word = rest.pop(0)
            name, equals, value = word.partition("=")
            if not word.startswith("--") or name in self._option_string_actions:
                own.append(word)
                continue
            if not equals:
                value = rest.pop(0) if rest and not rest[0].startswith("--") else ""
            name = name.removeprefix("--")
            if name in settings:
                raise ConfigError(expected="each setting once", found=f"`{name}` twice", do="remove one")
            settings[name] = value
        return own, settings


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
    parser.add_argument("command", metavar="COMMAND", nargs="?", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def dispatch(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.command not in COMMANDS:
        known = list(COMMANDS)
        raise ConfigError(
            expected=f"a command ({', '.join(known)})",
            found=f"`{args.command}`" if args.command else "none",
            do=nearest(args.command or "", known),
        )
    module = importlib.import_module(f"hotlap.commands.{args.command}")
    parser = Parser(
        prog=f"hotlap {args.command}",
        description=COMMANDS[args.command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    return int(module.run(parser.parse(args.arguments)))


def main(argv: Sequence[str] | None = None) -> NoReturn:
    wait_passively()  # no command has imported torch yet
    try:
        code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except HotlapError as mistake:
        print(f"hotlap: {mistake}", file=sys.stderr)  # noqa: T201
        code = USER_MISTAKE
    except KeyboardInterrupt:
        print("hotlap: interrupted", file=sys.stderr)  # noqa: T201
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of our output went away (`hotlap … | head`): not an error of this command.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
