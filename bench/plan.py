"""How close is `hotlap plan` to the public logs of the records, in memory and in time?

    python -m bench.plan [--exact] [--write]      seconds; needs no GPU

`--write` puts the tables into docs/gpus.md, between its markers. `--exact` adds the table of compiled steps,
which takes minutes, g++ and Triton.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench.recipes_table import markdown
from hotlap.plan.estimate import Estimate, estimate
from hotlap.plan.exact import exact_step
from hotlap.plan.machine import gpu_machine
from hotlap.recipes import resolve
from hotlap.report.page import write_atomically

PAGE = Path(__file__).parents[1] / "docs" / "gpus.md"
MIB = 2**20


class PublicLog(NamedTuple):
    """Of a record on eight H100s, at 65,536 tokens per GPU."""

    step_ms: float  # mean of the run
    peak_mib: int | None  # allocated on one GPU; None: not logged


# From the logs in https://github.com/KellerJordan/modded-nanogpt/tree/master/records.
PUBLIC_LOGS = {
    "flex-attention": PublicLog(161.8, None),
    "window-warmup": PublicLog(160.6, None),
    "value-embeds": PublicLog(174.1, None),
    "unet-value-embeds": PublicLog(161.1, None),
    "block-window": PublicLog(157.4, 34_239),
    "sparse-value-embeds": PublicLog(144.0, 31_361),
    "softcap": PublicLog(148.1, 31_563),
}

# (GPU, number of them) of the table that shows what `small` needs elsewhere.
PLACES = (
    ("3090", 1),
    ("4090", 1),
    ("4090", 4),
    ("5090", 1),
    ("A100", 1),
    ("A100", 8),
    ("H100", 1),
    ("H100", 8),
)


def planned(recipe: str, gpu: str, gpus: int) -> Estimate:
    """A plan with the split that fits."""
    config, machine = resolve(recipe, "small"), gpu_machine(gpu, gpus, 1)
    found = estimate(config, machine)
    if found.split is None or found.fits:
        return found
    return estimate(resolve(recipe, "small", {"batch.sequence_tokens": found.split.sequence_tokens}), machine)


def compared_with_logs() -> str:
    rows = []
    for recipe, log in PUBLIC_LOGS.items():
        plan = planned(recipe, "H100", 8)
        mib = plan.memory.peak_bytes / MIB
        ratio = "" if log.peak_mib is None else f"{mib / log.peak_mib - 1:+.1%}"
        published = "not logged" if log.peak_mib is None else f"{log.peak_mib:,}"
        fraction = plan.speed.flops_per_step / 8 / (log.step_ms / 1e3) / (plan.speed.peak_tflops * 1e12)
        low, high = plan.speed.step_s.times(1e3)
        step = f"{low:.0f}–{high:.0f}"
        rows.append(
            [f"`{recipe}`", f"{mib:,.0f}", published, ratio, step, f"{log.step_ms:g}", f"{fraction:.1%}"]
        )
    header = ["recipe", "peak MiB", "log", "ratio", "ms per step", "log", "of the peak in the log"]
    return markdown(header, rows)


def elsewhere() -> str:
    rows = []
    for gpu, gpus in PLACES:
        plan = planned("softcap", gpu, gpus)
        batch = plan.config.batch
        memory = f"{plan.memory.peak_bytes / MIB:,.0f} of {plan.machine.usable_bytes / MIB:,.0f}"
        low, high = plan.speed.training_s.times(1 / 60)
        minutes = f"{low:,.1f}–{high:,.1f}"
        rows.append([f"{gpus} × {gpu}", f"{batch.sequence_tokens:,}", memory, plan.loss.how, minutes])
    return markdown(["GPUs", "sequence tokens", "peak of usable MiB", "logits", "minutes"], rows)


def compiled_steps() -> str:
    """Of `softcap` on an H100: one graph on one rank, parts on several."""
    rows = []
    for gpus in (1, 8):
        step = exact_step(resolve("softcap", "small"), gpu_machine("H100", gpus, 1))
        launches = [f"{phase.total:,}" for phase in step.phases]
        outside = f"{step.launches_outside_matmuls:,}"
        moved = f"{step.bytes_outside_matmuls / 1e9:,.0f}"
        row = [f"`{step.mode}`", f"{step.graphs}", f"{step.kernels}", *launches, outside, moved]
        rows.append([*row, f"{step.peak_mib:,.0f}"])
    header = ["compiled", "graphs", "kernels", "forward", "backward", "update", "outside matmuls", "GB there"]
    return markdown([*header, "peak MiB"], rows)


TABLES = {"logs": compared_with_logs, "elsewhere": elsewhere}
EXACT_TABLES = {"exact": compiled_steps}  # that take minutes


def with_tables(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with each table between its two markers."""
    for name, table in tables.items():
        start, end = f"<!-- plan-{name}:start -->", f"<!-- plan-{name}:end -->"
        assert page.count(start) == page.count(end) == 1, f"{PAGE} needs {start} and {end}, once each"
        before, rest = page.split(start)
        page = f"{before}{start}\n{table()}\n{end}{rest.split(end)[1]}"
    return page


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the tables to docs/gpus.md")
    parser.add_argument("--exact", action="store_true", help="also compile steps, in minutes")
    arguments = parser.parse_args(words)
    tables = {**TABLES, **(EXACT_TABLES if arguments.exact else {})}
    made = {name: table() for name, table in tables.items()}
    for text in made.values():
        print(f"{text}\n")
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        written = with_tables(page, {name: partial(str, text) for name, text in made.items()})
        write_atomically(PAGE, written.encode())


if __name__ == "__main__":
    main()
