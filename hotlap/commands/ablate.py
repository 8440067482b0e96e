"""`hotlap ablate RECIPE`: takes the recipe's changes back one at a time and races what remains against it."""

from __future__ import annotations

import argparse

from hotlap.cli import Parser
from hotlap.commands.race import add_options, carry_out, common_options, race_directory


def configure(parser: Parser) -> None:
    parser.usage = "hotlap ablate RECIPE [--against ANCESTOR] [options] [--SETTING VALUE …]"
    parser.add_argument("recipe", metavar="RECIPE", help="see `hotlap recipes`")
    parser.add_argument(
        "--against", metavar="ANCESTOR", help="take back all since then (default: the parent)"
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    from hotlap.race.ablation import make_ablation
    from hotlap.recipes import find_recipe

    find_recipe(args.recipe)
    size, seeds, settings = common_options(args)
    plan, left_out = make_ablation(args.recipe, args.against, size, seeds, settings, args.procs)
    return carry_out(plan, race_directory(args, plan), args.budget, notes=left_out)
