"""`hotlap completion bash|zsh|fish`: prints a script with which the shell completes commands and settings.

The script has all words in it, so that the Tab key waits for no Python. It is made from the parsers, and has
to be made again after an update.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args, get_origin

from hotlap.cli import COMMANDS, Parser, command_parser
from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.recipes import RECIPES, SIZES
from hotlap.settings import settings_of

BASH = """\
# Completion of `hotlap` for bash: add to ~/.bashrc  eval "$(hotlap completion bash)"
_hotlap() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{commands}"
    else
        case "${{COMP_WORDS[1]}} $before" in
{values}
        *)
            case "${{COMP_WORDS[1]}} $current" in
{options}
{words}
            esac ;;
        esac
    fi
    COMPREPLY=()
    while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$words" -- "$current")
}}
complete -o default -F _hotlap hotlap
"""
ZSH = """\
# Completion of `hotlap` for zsh: add to ~/.zshrc  eval "$(hotlap completion zsh)"
autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""
FISH = """\
# Completion of `hotlap` for fish:  hotlap completion fish > ~/.config/fish/completions/hotlap.fish
"""


class Option(NamedTuple):
    name: str  # without dashes
    text: str
    takes_value: bool
    values: tuple[str, ...]  # that are known


class Completed(NamedTuple):
    """What can follow a command."""

    words: tuple[str, ...]  # subcommands, recipes
    options: tuple[Option, ...]


def configure(parser: Parser) -> None:
    parser.add_argument("shell", metavar="|".join(SCRIPTS), help="the shell that is to complete")


def run(args: argparse.Namespace) -> int:
    if args.shell not in SCRIPTS:
        raise ConfigError(
            expected=f"one of the shells {', '.join(SCRIPTS)}",
            found=f"`{args.shell}`",
            do="name one of them; others are not supported",
        )
    table = {command: completed(command_parser(command)) for command in COMMANDS}
    sys.stdout.write(SCRIPTS[args.shell](table))
    return 0


def completed(parser: Parser) -> Completed:
    options = {option.name: option for option in options_with_values(parser)}
    if parser.takes_settings:
        for item in settings_of(Config):
            name = item.name.replace("_", "-")
            values = tuple(map(str, get_args(item.type))) if get_origin(item.type) is Literal else ()
            options.setdefault(name, Option(name, item.doc, True, values or of_bool(item.type)))
    return Completed(tuple(dict.fromkeys(positional_words(parser))), tuple(options.values()))


def of_bool(kind: object) -> tuple[str, ...]:
    return ("true", "false") if kind is bool else ()


def options_with_values(parser: argparse.ArgumentParser) -> Iterator[Option]:
    for action in parser._actions:
        for name in action.option_strings:
            if name.startswith("--"):
                known = SIZES if name == "--size" else action.choices or ()
                takes_value = action.nargs != 0
                yield Option(name[2:], action.help or "", takes_value, tuple(map(str, known)))
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from options_with_values(one)


def positional_words(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if action.option_strings:
            continue
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices
            for one in action.choices.values():
                yield from positional_words(one)
        elif action.choices:
            yield from map(str, action.choices)
        elif "|" in str(action.metavar):
            yield from str(action.metavar).split("|")
        if str(action.metavar) in ("RECIPE", "A", "B"):
            yield from RECIPES


def bash_script(table: dict[str, Completed]) -> str:
    values, options, words = [], [], []
    for command, can in table.items():
        after = {option: f'"{command} --{option.name}"' for option in can.options if option.takes_value}
        known = [option for option in after if option.values]
        values += [f'        {after[option]}) words="{" ".join(option.values)}" ;;' for option in known]
        if unknown := [pattern for option, pattern in after.items() if not option.values]:
            values.append(f"        {'|'.join(unknown)}) ;;")
        names = " ".join(f"--{option.name}" for option in can.options)
        options.append(f'            "{command} --"*) words="{names}" ;;')
        words.append(f'            "{command} "*) words="{" ".join(can.words)}" ;;')
    return BASH.format(
        commands=" ".join(table),
        values="\n".join(values),
        options="\n".join(options),
        words="\n".join(words),
    )


def zsh_script(table: dict[str, Completed]) -> str:
    return ZSH + bash_script(table).split("\n", 1)[1]


def fish_script(table: dict[str, Completed]) -> str:
    lines = [
        f"complete -c hotlap -f -n __fish_use_subcommand -a {command} -d {fish_quoted(COMMANDS[command])}"
        for command in table
    ]
    for command, can in table.items():
        after = f'complete -c hotlap -n "__fish_seen_subcommand_from {command}"'
        if can.words:
            lines.append(f"{after} -a {fish_quoted(' '.join(can.words))}")
        for option in can.options:
            values = f" -x -a {fish_quoted(' '.join(option.values))}" if option.values else " -r"
            takes = values if option.takes_value else ""
            lines.append(f"{after} -l {option.name}{takes} -d {fish_quoted(option.text)}")
    return FISH + "\n".join(lines) + "\n"


def fish_quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


SCRIPTS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
