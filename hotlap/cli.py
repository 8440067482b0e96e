"""The `hotlap` command: dispatches to a subcommand and prints a `HotlapError` as one line, exit code 2.

Commands that accept settings (`--optim.muon.lr 0.03`) get them as `args.settings`, {name: text}. Every
option that the command does not define is taken as a setting; the command checks it against `Config`.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hotlap import __version__
from hotlap.errors import INTERRUPTED, USER_MISTAKE, ConfigError, HotlapError, memory_errors
from hotlap.settings import nearest
from hotlap.suggestions import is_setting, unknown_option
from hotlap.terminal import printable
from hotlap.waiting import sharing_cores

# The summaries are here and not in the command modules, so that `hotlap --help` imports none of them.
COMMANDS = {
    "recipes": "list the recipes, show one, or compare two",
    "train": "train a recipe at a size",
    "new": "write an idea file to start from: a change of a recipe in code",
    "plan": "estimate memory, FLOPs, traffic, time and cost of a run on given GPUs",
    "launch": "write the file that starts a run on Slurm, in a cloud or in a container",
    "race": "compare recipes over several seeds and test whether the difference is significant",
    "ablate": "undo a recipe's changes one at a time to measure each one's effect",
    "ladder": "compare at several sizes and fit how the effect changes with compute",
    "lab": "show what was tried: every gate, what helped, and at what cost",
    "sample": "generate text with a trained model",
    "play": "go on with what you type, at a prompt",
    "serve": "serve models: a page to play with, and an OpenAI-compatible API",
    "eval": "evaluate a trained model on whole validation splits",
    "export": "export a trained model to a self-contained directory",
    "data": "prepare, inspect and list token data",
    "report": "write an HTML report of one or more runs: curves, statistics, verdicts",
    "watch": "follow runs in the browser while they train, and compare them",
    "doctor": "show what a run would use on this machine, and what could be added",
    "completion": "print the script that completes commands and settings in a shell",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` and can collect unknown options as settings."""

    takes_settings = False

    def error(self, message: str) -> NoReturn:
        raise ConfigError(
            expected=f"valid arguments for `{self.prog}`", found=message, do=f"see `{self.prog} --help`"
        )

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        own, settings = self._split(arguments) if self.takes_settings else (list(arguments), {})
        for name in settings:
            if not is_setting(name):
                raise self._unknown_option(name)
        args, unknown = self.parse_known_args(own)
        for word in unknown:
            if word.startswith("--"):
                raise self._unknown_option(word.removeprefix("--").partition("=")[0])
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        args.settings = settings
        args.words = list(arguments)
        return args

    def _unknown_option(self, name: str) -> ConfigError:
        others = {command: options_of(command_parser(command)) for command in COMMANDS}
        command = self.prog.removeprefix("hotlap ")
        return unknown_option(command, name, options_of(self), others, settings=self.takes_settings)

    def _split(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
        """Split into the command's own arguments and settings. A setting without a value gets ""."""
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
        epilog=f"commands:\n{commands}\n\nRun `hotlap COMMAND --help` for the options of a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hotlap {__version__}")
    parser.add_argument("command", metavar="COMMAND", nargs="?", help="one of the commands below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def dispatch(argv: Sequence[str]) -> int:
    args = build_parser().parse_args(argv)
    if args.command is None:
        raise ConfigError(
            expected="a command",
            found="none",
            do="`hotlap train --minutes 2` trains a model, `hotlap --help` lists all commands",
        )
    if args.command not in COMMANDS:
        known = list(COMMANDS)
        raise ConfigError(
            expected=f"a command ({', '.join(known)})",
            found=f"`{args.command}`",
            do=nearest(args.command, known),
        )
    parser = command_parser(args.command)
    return int(command_module(args.command).run(parser.parse(args.arguments)))


def command_module(command: str) -> Any:
    return importlib.import_module(f"hotlap.commands.{command}")


def command_parser(command: str) -> Parser:
    parser = Parser(
        prog=f"hotlap {command}",
        description=COMMANDS[command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    command_module(command).configure(parser)
    return parser


def options_of(parser: argparse.ArgumentParser) -> set[str]:
    """The names of its options and of its subcommands', without dashes."""
    found = {name.removeprefix("--") for name in parser._option_string_actions if name.startswith("--")}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found = found.union(*(options_of(one) for one in action.choices.values()))
    return found


def main(argv: Sequence[str] | None = None) -> NoReturn:
    try:
        with memory_errors(), sharing_cores():
            code = dispatch(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
    except HotlapError as mistake:
        print(f"hotlap: {printable(str(mistake))}", file=sys.stderr)  # noqa: T201
        code = USER_MISTAKE
    except KeyboardInterrupt:
        print("hotlap: interrupted", file=sys.stderr)  # noqa: T201
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader closed the pipe (`hotlap … | head`). This is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
