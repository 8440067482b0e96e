"""`hotlap recipes`: show the recipes as a tree, one recipe in full, or the diff of two."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from hotlap.cli import Parser
from hotlap.recipes import RECIPES, SIZES, Recipe, find_recipe, resolve
from hotlap.settings import diff, flatten, shown, to_json
from hotlap.terminal import make_console


def configure(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="action", parser_class=Parser, metavar="show|diff")
    parser.add_argument("--json", action="store_true", help="print JSON")
    show = commands.add_parser("show", help="show all settings of a recipe at a size")
    show.add_argument("recipe", metavar="RECIPE")
    compare = commands.add_parser("diff", help="show the settings that differ between two recipes")
    compare.add_argument("first", metavar="A")
    compare.add_argument("second", metavar="B")
    for command in (show, compare):
        command.add_argument("--size", default="small", help=f"one of {', '.join(SIZES)} (default: small)")
        command.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    console = make_console()
    if args.action == "show":
        _show(console, args)
    elif args.action == "diff":
        _diff(console, args)
    elif args.json:
        console.print_json(json.dumps([_summary(recipe) for recipe in RECIPES.values()]))
    else:
        _tree(console)
    return 0


def _tree(console: Console) -> None:
    root = Tree("recipes (published minutes on 8×H100 to a FineWeb validation loss of 3.28)")
    branches: dict[str | None, Tree] = {None: root}
    for recipe in RECIPES.values():
        record = recipe.record
        facts = f"{record.date}, {record.minutes:.2f} min" if record else "no record"
        label = f"[bold]{recipe.name}[/bold]  {facts}  {escape(recipe.summary)}"
        branches[recipe.name] = branches[recipe.parent].add(label)
    console.print(root, soft_wrap=True)


def _summary(recipe: Recipe) -> dict[str, Any]:
    return {
        "name": recipe.name,
        "parent": recipe.parent,
        "summary": recipe.summary,
        "source": recipe.source,
        "record": vars(recipe.record) if recipe.record else None,
    }


def _show(console: Console, args: argparse.Namespace) -> None:
    recipe = find_recipe(args.recipe)
    config = resolve(args.recipe, args.size)
    if args.json:
        console.print_json(json.dumps({**_summary(recipe), "config": to_json(config)}))
        return
    console.print(f"[bold]{recipe.name}[/bold] at {args.size}: {escape(recipe.summary)}", soft_wrap=True)
    console.print(f"source: {recipe.source}", soft_wrap=True)
    for name, value in flatten(config).items():
        console.print(f"  {name} = {escape(shown(value))}", soft_wrap=True)
    _show_ideas(console, recipe, args.size)


def _diff(console: Console, args: argparse.Namespace) -> None:
    changes = [
        change
        for change in diff(resolve(args.first, args.size), resolve(args.second, args.size))
        if change.name != "recipe"
    ]
    if args.json:
        console.print_json(json.dumps([change._asdict() for change in changes]))
        return
    first, second = find_recipe(args.first), find_recipe(args.second)
    table = Table("setting", first.name, second.name, box=None)
    for change in changes:
        table.add_row(change.name, shown(change.before), shown(change.after))
    console.print(table if changes else "no settings differ")
    for recipe in (first, second):
        _show_ideas(console, recipe, args.size)


def _show_ideas(console: Console, recipe: Recipe, size: str) -> None:
    """What each idea of a recipe changes, side by side with its parent."""
    if recipe.ideas:
        from hotlap.train.idea_difference import difference_table

        for file in recipe.ideas:
            console.print(difference_table(file, size))
