"""`hotlap train RECIPE`: resolves the configuration and, with `--dry-run`, prints it instead of training."""

from __future__ import annotations

import argparse
import json

from hotlap.cli import Parser
from hotlap.config import Config
from hotlap.recipes import SIZES, find_recipe, resolve
from hotlap.settings import describe_type, flatten, parse, settings_of, shown, to_json, updated
from hotlap.terminal import make_console


def configure(parser: Parser) -> None:
    parser.takes_settings = True
    parser.usage = "hotlap train RECIPE [--size SIZE] [--dry-run] [--SETTING VALUE …]"
    parser.add_argument("recipe", metavar="RECIPE", help="see `hotlap recipes`")
    parser.add_argument("--size", help=f"one of {', '.join(SIZES)} (default: nano on a CPU, small on CUDA)")
    parser.add_argument("--dry-run", action="store_true", help="print the configuration and stop")
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    settings = "\n".join(f"  --{s.name}  {s.doc} ({describe_type(s.type)})" for s in settings_of(Config))
    parser.epilog = (
        "settings (the last part of a name is enough where only one setting has it: --steps 100):\n"
        + settings
    )


def run(args: argparse.Namespace) -> int:
    config = resolve_arguments(args)
    console = make_console()
    if args.json:
        console.print_json(json.dumps(to_json(config)))
        return 0
    for name, value in flatten(config).items():
        console.print(f"{name} = {shown(value)}", markup=False, soft_wrap=True)
    return 0


def resolve_arguments(args: argparse.Namespace) -> Config:
    """The configuration that the recipe, the size and the settings given amount to."""
    find_recipe(args.recipe)
    changes = parse(Config, args.settings)
    size = args.size or default_size(changes.get("runtime.device", "auto"))
    return updated(resolve(args.recipe, size), changes)


def default_size(device: str) -> str:
    from hotlap.hardware import select_device

    return "small" if select_device(device).type == "cuda" else "nano"
