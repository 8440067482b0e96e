"""The arguments of `sample`, `eval`, `export` and `serve` that say which trained model to load, and where."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.cli import Parser

if TYPE_CHECKING:
    from hotlap.inference.load import LoadedModel


def add_model_arguments(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's directory, or an exported model's")
    add_loading_arguments(parser)


def add_loading_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--checkpoint",
        default="auto",
        metavar="auto|best|latest|PATH",
        help="which checkpoint of a run (default: auto, the best, or the latest if none was validated)",
    )
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="run the idea files that come with the model (docs/ideas.md)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps (default: auto)")
    parser.add_argument("--precision", help="auto, float32 or bfloat16 (default: as the run was trained)")


def described_step(loaded: LoadedModel) -> str:
    """Which step of the run the model is of, as the commands print it."""
    return f"step {loaded.step}" + (", the best of its run" if loaded.stored.is_best else "")


def load_model(args: argparse.Namespace) -> LoadedModel:
    from hotlap.inference.load import load

    return load(
        args.run,
        checkpoint=args.checkpoint,
        device=args.device,
        precision=args.precision,
        trust_code=args.trust_code,
    )
