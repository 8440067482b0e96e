"""What `hotlap train` prints when a run has ended: its results, a sample, and where the report is."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hotlap.commands.serve import missing_packages
from hotlap.extras import installer

if TYPE_CHECKING:
    from hotlap.runs.directory import RunDirectory
    from hotlap.runs.reader import Run
    from hotlap.train.run import Result


def finish(result: Result, directory: RunDirectory, console: Console) -> None:
    """Print the results and a sample of the best weights, and write the report."""
    from hotlap.report.page import write_report
    from hotlap.runs.reader import load_run

    run = load_run(directory.path)
    console.print(results_table(result.summary))
    if run.samples:
        of_step, text = closing_sample(run, directory)
        console.print(f"\n[bold]sample{escape(of_step)}[/bold]\n{escape(text)}\n")
    write_report({run.name: [run]}, directory.report_path, run.name)
    console.print(f"report: {directory.report_path}", soft_wrap=True)
    if run.samples:
        console.print(next_steps(directory.path), markup=False, soft_wrap=True)


def next_steps(run: Path) -> str:
    name, missing = own_name(), missing_packages()
    first = f"; first {installer()} {' '.join(missing)}" if missing else ""
    return f"next: {name} play {run}, or in a browser {name} serve {run}{first}"


def own_name() -> str:
    """How to call this program again: as it was called where no shell would find it, as under `make`."""
    program = Path(sys.argv[0])
    return str(program) if program.name == "hotlap" and shutil.which("hotlap") is None else "hotlap"


def closing_sample(run: Run, directory: RunDirectory) -> tuple[str, str]:
    """Of which step it is, in words, and the text: of the best checkpoint, which may not be the last."""
    from hotlap.inference.load import checkpoint_path, load

    best = checkpoint_path(directory)
    last = run.samples[-1]
    if best.name == f"step-{last.step:06d}":
        return "", last.text
    loaded = load(directory.path, checkpoint=best.name, device=run.config.runtime.device)
    return f" of step {loaded.step}, the best", loaded.generate()[0]


def results_table(summary: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    seconds = "  ".join(f"{phase} {value:.1f} s" for phase, value in summary["seconds"].items())
    share = "unknown fraction" if summary["peak_fraction"] is None else f"{summary['peak_fraction']:.0%}"
    rows = {
        "validation": validation_line(summary),
        "best": best_line(summary),
        "ended": "by patience: validation no longer improved" if summary["status"] == "patience" else "",
        "target": target_line(summary["target"]),
        "tokens": f"{summary['tokens']:,} in {summary['steps']} steps",
        "speed": f"{summary['tokens_per_s']:,.0f} tokens per second, {share} of the matmul peak",
        "time": seconds,
        "memory": f"{summary['peak_rss_mib']:,.0f} MiB peak resident memory",
    }
    for label, value in rows.items():
        if value:
            table.add_row(label, value)
    return table


def validation_line(summary: dict[str, Any]) -> str:
    if summary["val_loss"] is None:
        return "none: the data has no validation split" if summary["val_tokens"] == 0 else "not finite"
    bpb = "unknown" if summary["val_bpb"] is None else f"{summary['val_bpb']:.4f}"
    return f"loss {summary['val_loss']:.4f}, bits per byte {bpb}"


def best_line(summary: dict[str, Any]) -> str:
    """The best validation, if it was not the last."""
    best = summary["best"]
    if best is None or best["step"] == summary["steps"]:
        return ""
    bpb = "unknown" if best["bpb"] is None else f"{best['bpb']:.4f}"
    return f"step {best['step']}: loss {best['loss']:.4f}, bits per byte {bpb}"


def target_line(target: dict[str, Any] | None) -> str:
    if target is None:
        return ""
    if not target["reached"]:
        return f"{target['kind']} {target['value']} not reached"
    return f"{target['kind']} {target['value']} reached in {target['train_s']:.1f} s of training"
