"""`hotlap export RUN DIR`: writes a model to share, then loads it again and compares its logits."""

from __future__ import annotations

import argparse
from pathlib import Path

from hotlap.cli import Parser
from hotlap.commands.model_arguments import add_model_arguments, described_step, load_model
from hotlap.terminal import make_console


def configure(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("directory", metavar="DIR", type=Path, help="to write; must not exist")


def run(args: argparse.Namespace) -> int:
    from hotlap.inference.export import export, refuse_existing

    refuse_existing(args.directory)
    loaded = load_model(args)
    export(loaded, args.directory)
    size_mib = sum(path.stat().st_size for path in args.directory.iterdir()) / 2**20
    make_console().print(
        f"exported {described_step(loaded)} to {args.directory} ({size_mib:.1f} MiB); loaded again,"
        " its logits equal the run's bit for bit",
        markup=False,
        soft_wrap=True,
    )
    return 0
