"""`hotlap ablate RECIPE`: undo the recipe's changes one at a time and race each result against the recipe."""

from __future__ import annotations

import argparse

from hotlap.cli import Parser
from hotlap.commands.race import add_options, common_options, race_directory, run_race


def configure(parser: Parser) -> None:
    parser.usage = "hotlap ablate RECIPE [--against ANCESTOR] [options] [--SETTING VALUE …]"
    parser.add_argument("recipe", metavar="RECIPE", help="see `hotlap recipes`")
    parser.add_argument(
        "--against",
        metavar="ANCESTOR",
        help="undo the changes made since this ancestor (default: the parent)",
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    from hotlap.race.ablation import make_ablation
    from hotlap.recipes import find_recipe

    find_recipe(args.recipe)
    size, seeds, settings = common_options(args)
    plan, skipped = make_ablation(args.recipe, args.against, size, seeds, settings, args.procs)
    return run_race(plan, race_directory(args, plan), args.on, args.budget, notes=skipped)
