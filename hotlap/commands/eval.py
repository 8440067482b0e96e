"""`hotlap eval RUN`: loss and bits per byte of a trained model on validation splits, one line per dataset.

Computed as during training: on the same sequences, with the attention window of the checkpoint's step. With
`--tasks`, the tasks of EleutherAI's harness instead (docs/evaluating.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hotlap.cli import Parser
from hotlap.commands.model_arguments import add_model_arguments, described_step, load_model
from hotlap.errors import ConfigError, DataError
from hotlap.terminal import make_console

if TYPE_CHECKING:
    from hotlap.attention import Backend
    from hotlap.data.stream import TokenStream
    from hotlap.inference.load import LoadedModel


def configure(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--data",
        action="append",
        type=Path,
        metavar="DIR",
        help="prepared data; may be given several times (default: the run's own)",
    )
    parser.add_argument(
        "--tokens", type=int, metavar="N", help="only the first N tokens (default: the whole split)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    tasks = parser.add_argument_group("tasks of EleutherAI's harness, instead of data")
    tasks.add_argument("--tasks", metavar="A,B", help="their names, such as hellaswag")
    tasks.add_argument("--include-path", type=Path, metavar="DIR", help="where your own tasks are")
    tasks.add_argument("--limit", type=at_least(1), metavar="N", help="only the first N examples of each")
    tasks.add_argument(
        "--num-fewshot", type=at_least(0), metavar="N", help="examples in the prompt (default: the task's)"
    )
    tasks.add_argument(
        "--batch-size", type=at_least(1), metavar="N", help="texts in one forward pass (default: 16)"
    )


def at_least(smallest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is not a number of at least {smallest}")
        return int(text)

    return number


def run(args: argparse.Namespace) -> int:
    check_together(args)
    return run_tasks(args) if args.tasks is not None else run_data(args)


def check_together(args: argparse.Namespace) -> None:
    """Refuse options of tasks without --tasks, and options of data with it."""
    if args.tasks is None:
        if alone := given(args, "include_path", "limit", "num_fewshot", "batch_size"):
            raise ConfigError(expected=f"--tasks with {alone}", found="none", do="add --tasks")
    elif of_data := given(args, "data", "tokens"):
        raise ConfigError(
            expected="--tasks, or options of data",
            found=f"--tasks and {of_data}",
            do="evaluate one after the other",
        )


def given(args: argparse.Namespace, *names: str) -> str:
    """Which of these options the user gave, as they are written."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names if getattr(args, name) is not None)


def run_tasks(args: argparse.Namespace) -> int:
    from hotlap.harness.tasks import TaskOptions, Tasks

    names = [name.strip() for name in args.tasks.split(",") if name.strip()]
    if not names:
        raise ConfigError(expected="--tasks with names of tasks", found=f"`{args.tasks}`", do="give one")
    tasks = Tasks(TaskOptions(names, args.include_path, args.limit, args.num_fewshot, args.batch_size))
    loaded = load_model(args)
    results = tasks.evaluate(loaded)
    if args.json:
        answer = {"run": str(args.run), "step": loaded.step, "tasks": results}
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return 0
    table = Table("task", "metric", "value", "±", "examples", title=described_step(loaded))
    for result in results:
        filtered = "" if result["filter"] == "none" else f" ({result['filter']})"
        value, stderr = result["value"], result["stderr"]
        table.add_row(
            result["task"],
            result["metric"] + filtered,
            f"{value:.4f}" if isinstance(value, float) else str(value),
            "" if stderr is None else f"{stderr:.4f}",
            "" if result["examples"] is None else f"{result['examples']:,}",
        )
    make_console().print(table)
    return 0


def run_data(args: argparse.Namespace) -> int:
    loaded = load_model(args)
    directories: list[Path] = args.data or [training_directory(loaded)]
    # All are opened before the first is evaluated, so that a mistake shows at once.
    splits = [open_validation(loaded, directory) for directory in directories]
    backend = install_kernels(loaded)
    results = [
        {"data": str(directory), **measure(loaded, backend, val, args.tokens)}
        for directory, val in zip(directories, splits, strict=True)
    ]
    if args.json:
        answer = {"run": str(args.run), "step": loaded.step, "sources": results}
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return 0
    columns = ("data", "loss", "bits per byte", "tokens", "left out", "bytes")
    table = Table(*columns, title=described_step(loaded))
    for result in results:
        bpb, text_bytes = result["bpb"], result["bytes"]
        table.add_row(
            result["data"],
            "no validation split" if result["loss"] is None else f"{result['loss']:.4f}",
            "unknown" if bpb is None else f"{bpb:.4f}",
            f"{result['tokens']:,}",
            f"{result['tokens_left_out']:,}",
            "unknown" if text_bytes is None else f"{text_bytes:,}",
        )
    make_console().print(table)
    return 0


def training_directory(loaded: LoadedModel) -> Path:
    from hotlap.runs.recorded import recorded_directory

    directory = recorded_directory(loaded.stored.training.get("data") or {})
    if directory is None or not directory.is_dir():
        raise DataError(
            expected="the data that the run was trained on",
            found=f"nothing at {directory}" if directory else "no record of where it is",
            do="give a directory with --data",
        )
    return directory


def open_validation(loaded: LoadedModel, directory: Path) -> TokenStream | None:
    """The validation split, None if there is none; refused if its tokenizer is not the model's."""
    from hotlap.train import lap

    val = lap.open_validation(directory, loaded.config.model.vocab_size)
    if (
        val is not None
        and val.manifest is not None
        and val.manifest.tokenizer.sha256 != loaded.tokenizer.fingerprint
    ):
        raise DataError(
            expected=f"data for the model's tokenizer {loaded.tokenizer.name}"
            f" ({loaded.tokenizer.fingerprint[:16]}…)",
            found=f"{val.manifest.tokenizer.name} ({val.manifest.tokenizer.sha256[:16]}…) in {directory}",
            do="prepare the text with the tokenizer of the run",
        )
    return val


def install_kernels(loaded: LoadedModel) -> Backend:
    """What validation during training used here; returns the attention backend."""
    from hotlap.kernels import choose_backend, install

    config = loaded.config
    # `auto` is flex where it is available; a model that was trained with flex can be evaluated without it.
    name = "auto" if config.attention.backend == "flex" else config.attention.backend
    backend = choose_backend(name, loaded.device, saved_bytes=0)
    install(loaded.model, backend=backend, tokens=config.validation_sequence_tokens)
    return backend


def measure(
    loaded: LoadedModel, backend: Backend, val: TokenStream | None, tokens: int | None
) -> dict[str, Any]:
    from hotlap.data.validation import BLOCK_TOKENS, validation_batches
    from hotlap.train.batch_loss import BatchLoss
    from hotlap.train.evaluation import evaluate
    from hotlap.train.lap import bytes_per_token, end_of_text_of
    from hotlap.train.masking import Masking

    if val is None or len(val) <= BLOCK_TOKENS:
        return {"loss": None, "bpb": None, "tokens": 0, "tokens_left_out": 0, "bytes": None}
    config = loaded.config
    masking = Masking(config, backend, end_of_text_of(val, config.data.tokenizer), loaded.device)
    masking.set_step(loaded.step)
    batches = validation_batches(val, tokens, config.validation_sequence_tokens, device=loaded.device)
    text_bytes = bytes_per_token(val, config.data.bytes_per_token)
    evaluation = evaluate(BatchLoss(loaded.model, masking), batches, text_bytes)
    return {
        "loss": evaluation.loss,
        "bpb": evaluation.bpb,
        "tokens": batches.tokens,
        "tokens_left_out": batches.tokens_left_out,
        "bytes": None if text_bytes is None else round(text_bytes * batches.tokens),
    }
