"""`hotlap plan RECIPE`: what a run would need on given GPUs, before renting them. Needs no GPU."""

from __future__ import annotations

import argparse
import json
import math
from typing import TYPE_CHECKING

from hotlap.cli import Parser
from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.gpus import GPUS
from hotlap.recipes import SIZES, check_used, find_recipe, resolve
from hotlap.settings import parse
from hotlap.terminal import make_console

if TYPE_CHECKING:
    from hotlap.plan.machine import Machine


def configure(parser: Parser) -> None:
    parser.takes_settings = True
    parser.usage = "hotlap plan RECIPE [options] [--SETTING VALUE …]"
    parser.add_argument("recipe", metavar="RECIPE", help="see `hotlap recipes`")
    parser.add_argument("--size", help=f"one of {', '.join(SIZES)} (default: small; nano for cpu)")
    parser.add_argument("--gpu", default="H100", help=f"cpu, or one of {', '.join(GPUS)} (default: H100)")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs per node; for cpu: processes (default: 1)")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--link", type=float, metavar="GB/S", help="bandwidth of a GPU's link, per direction")
    parser.add_argument("--price", type=float, help="price of a GPU per hour, for the cost of the run")
    parser.add_argument(
        "--exact", action="store_true", help="also compile the step for the GPU; count memory and launches"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.epilog = "Settings are those of `hotlap train`, such as --batch.sequence-tokens 32768."


def run(args: argparse.Namespace) -> int:
    changes = parse(Config, args.settings)
    for option in ("link", "price"):
        check_positive(f"--{option}", getattr(args, option))
    if find_recipe(args.recipe).ideas:
        raise ConfigError(
            expected="a recipe of the lineage, whose operations are known",
            found=f"{args.recipe}, an idea with code of its own",
            do="plan its parent",
        )
    on_cpu = args.gpu.lower() == "cpu"
    config = resolve(args.recipe, args.size or ("nano" if on_cpu else "small"), changes)
    check_used(config, changes)

    from hotlap.plan.estimate import estimate
    from hotlap.plan.table import as_json, print_table

    console = make_console()
    planned = estimate(config, machine_of(args, config), price_per_hour=args.price)
    exact = None
    if args.exact:
        from hotlap.plan.exact import exact_step

        exact = exact_step(config, planned.machine)
    if args.json:
        console.print_json(json.dumps(as_json(planned, exact)))
    else:
        print_table(console, planned, exact)
    return 0


def machine_of(args: argparse.Namespace, config: Config) -> Machine:
    from hotlap.plan.machine import cpu_machine, gpu_machine

    if args.gpu.lower() == "cpu":
        return cpu_machine(args.gpus, args.nodes, args.link, config.runtime.precision)
    return gpu_machine(args.gpu, args.gpus, args.nodes, args.link, config.runtime.precision)


def check_positive(option: str, value: float | None) -> None:
    if value is not None and not (math.isfinite(value) and value > 0):
        raise ConfigError(expected=f"{option} above 0", found=f"{value:g}", do="give a positive number")
