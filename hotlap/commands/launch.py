"""`hotlap launch slurm|sky|docker RECIPE`: writes the file that starts a run elsewhere."""

from __future__ import annotations

import argparse
import re
import shlex
import sys
from pathlib import Path

from hotlap.cli import Parser
from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.files import write_atomically, writing
from hotlap.gpus import GPUS, find_gpu
from hotlap.jobs import Job, dockerfile, sky_task, slurm_script
from hotlap.recipes import SIZES, check_used, find_recipe, resolve
from hotlap.settings import full_name, parse
from hotlap.terminal import make_console

TARGETS = {
    "slurm": "a batch script for Slurm",
    "sky": "a task for SkyPilot",
    "docker": "a Dockerfile",
}
# Where a job may be taken away at any moment, the records' rule to save at the end only costs all of it.
SAVES = {"checkpoint.every_minutes": "2"}


def configure(parser: Parser) -> None:
    parser.takes_settings = True
    parser.usage = f"hotlap launch {'|'.join(TARGETS)} RECIPE [options] [--SETTING VALUE …]"
    listed = ", ".join(f"{name}: {text}" for name, text in TARGETS.items())
    parser.add_argument("target", metavar="|".join(TARGETS), help=listed)
    parser.add_argument("recipe", metavar="RECIPE", help="see `hotlap recipes`")
    parser.add_argument("--size", help=f"one of {', '.join(SIZES)} (default: small; nano with --device cpu)")
    parser.add_argument("--data", metavar="PATH|CORPUS", help="as for `hotlap train`, as it is called there")
    parser.add_argument("--name", help="name of the run (default: RECIPE-SIZE)")
    parser.add_argument("--runs", help="directory of all runs, as it is called there (default: runs)")
    parser.add_argument("--log", action="append", default=[], metavar="TRACKER", help="as for `hotlap train`")
    parser.add_argument("--nodes", type=int, default=1, help="number of nodes (default: 1)")
    parser.add_argument("--gpus", type=int, help="GPUs per node (default: 8; docker: 1)")
    parser.add_argument("--gpu", help=f"sky: one of {', '.join(GPUS)} (default: H100)")
    parser.add_argument("--spot", action="store_true", help="sky: cheaper machines that may be taken away")
    parser.add_argument("--volume", help="sky: the volume that keeps data and runs; --spot needs one")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="docker: of its torch (default: cuda)")
    parser.add_argument("--out", type=Path, help="write to this file (default: print)")
    parser.epilog = "Settings are those of `hotlap train`, such as --batch.sequence-tokens 32768."


def run(args: argparse.Namespace) -> int:
    check_options(args)
    text = rendered(args, job_of(args))
    if args.out is None:
        sys.stdout.write(text)
        return 0
    if args.out.exists():
        raise ConfigError(
            expected=f"a new file {args.out}", found="one that exists", do="remove it, or choose another name"
        )
    with writing(args.out, ConfigError):
        write_atomically(args.out, text.encode())
    make_console().print(f"wrote {args.out}; its first lines say how to start it", markup=False)
    return 0


def check_options(args: argparse.Namespace) -> None:
    if args.target not in TARGETS:
        raise ConfigError(
            expected=f"one of {', '.join(TARGETS)}", found=f"`{args.target}`", do="see `hotlap launch --help`"
        )
    belongs = {"--gpu": "sky", "--spot": "sky", "--volume": "sky", "--device": "docker"}
    for option, target in belongs.items():
        if getattr(args, option.removeprefix("--")) and args.target != target:
            raise ConfigError(
                expected=f"{option} with {target} only", found=f"it with {args.target}", do="leave it out"
            )
    for option in ("nodes", "gpus"):
        number = getattr(args, option)
        if number is not None and number < 1:
            raise ConfigError(
                expected=f"--{option} of 1 or more", found=str(number), do="give a positive number"
            )
    if args.target == "docker" and args.nodes > 1:
        raise ConfigError(
            expected="one node for docker", found=f"--nodes {args.nodes}", do="use slurm or sky for several"
        )
    if args.spot and args.volume is None:
        raise ConfigError(
            expected="--volume with --spot, to find the run again on the next machine",
            found="none",
            do="make one with `sky volumes apply`, and name it",
        )
    if args.volume is not None and args.runs is not None:
        raise ConfigError(
            expected="--runs or --volume, which has the runs", found="both", do="leave out --runs"
        )
    if args.volume is not None and not re.fullmatch(r"[A-Za-z0-9][\w.-]*", args.volume):
        raise ConfigError(
            expected="the name of a volume of SkyPilot",
            found=repr(args.volume),
            do="see `sky volumes ls`",
        )


def job_of(args: argparse.Namespace) -> Job:
    """Checks the run as `hotlap train` would, as far as it can be known here."""
    from hotlap.plan.machine import gpu_machine
    from hotlap.runs.directory import check_name
    from hotlap.runs.trackers import check_names
    from hotlap.train.run import check_ranks

    on_cpu = args.device == "cpu"
    size = args.size or ("nano" if on_cpu else "small")
    settings = {full_name(Config, name): value for name, value in args.settings.items()}
    gpus = args.gpus or (1 if args.target == "docker" else 8)
    recipe = find_recipe(args.recipe)
    changes = parse(Config, args.settings)
    config = resolve(args.recipe, size, changes)
    check_used(config, changes)
    check_ranks(config, args.nodes * gpus)
    if args.target == "sky":
        gpu_machine(gpu_name(args), gpus, args.nodes, None, config.runtime.precision)  # refuses some GPUs
    name = args.name or f"{recipe.name}-{size}"
    check_name(name)
    check_names(args.log)  # it is the other machine that needs the package
    own = {option: getattr(args, option) for option in ("data", "runs")}
    given = {**{option: value for option, value in own.items() if value}, **SAVES, **settings}
    options = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", value)]
    options += [word for tracker in args.log for word in ("--log", tracker)]
    # It becomes a comment, which a line break would end.
    command = shlex.join(["hotlap", "launch", *args.words]).replace("\n", "\\n")
    return Job(args.recipe, size, name, args.nodes, gpus, tuple(options), command)


def rendered(args: argparse.Namespace, job: Job) -> str:
    if args.target == "slurm":
        return slurm_script(job)
    if args.target == "docker":
        return dockerfile(job, args.device or "cuda")
    return sky_task(job, find_gpu(gpu_name(args)), volume=args.volume, spot=args.spot)


def gpu_name(args: argparse.Namespace) -> str:
    return args.gpu or "H100"
