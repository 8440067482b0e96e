"""Which kernels trained a run, and notes on runs of one comparison that had different ones.

Kernels and plain PyTorch compute the same up to rounding, but not at the same speed. A machine may lack
kernels (no compiler, or one that took too long), and then equal seeds no longer agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotlap.runs.reader import Run
from hotlap.terminal import printable

PLAIN = "plain: "
CONSEQUENCE = "times do not compare and equal seeds differ by rounding"
ANYWHERE = ("attention", "loss")  # parts that are described by more than what the kernels in C do


def kernels_of(environment: Mapping[str, Any]) -> dict[str, str]:
    """{part: what runs it} of one process that trained; empty if that was not recorded."""
    kernels = environment.get("kernels")
    return {str(k): str(v) for k, v in kernels.items()} if isinstance(kernels, Mapping) else {}


def kernel_notes(runs_by_label: Mapping[str, Sequence[Run]]) -> list[str]:
    """Notes on runs of one label that had different kernels, and on labels of which only some had any.

    Otherwise labels may differ: a recipe can have parts without a kernel.
    """
    notes = []
    labels_by_lack: dict[str, list[str]] = {}  # of labels that always had the same kernels
    for label, runs in runs_by_label.items():
        used = [kernels for run in runs for kernels in _trained_by(run)]
        if not used:
            continue
        if all(kernels == used[0] for kernels in used):
            labels_by_lack.setdefault(_lack(used[0]), []).append(label)
        else:
            notes.append(f"{label}: its runs had different kernels, so that {CONSEQUENCE} ({_listed(runs)})")
    if len(labels_by_lack) > 1:
        listed = "; ".join(
            f"{', '.join(labels)}: {f'none ({lack})' if lack else 'some'}"
            for lack, labels in labels_by_lack.items()
        )
        notes.append(f"not all recipes had kernels, so that {CONSEQUENCE} ({printable(listed)})")
    return notes


def _trained_by(run: Run) -> list[dict[str, str]]:
    """The kernels of each process that trained the run, in order, as far as they were recorded."""
    return [kernels for kernels in map(kernels_of, run.environments) if kernels]


def _listed(runs: Sequence[Run]) -> str:
    """The runs by their kernels, of which only the parts are named that not all had alike."""
    shared = set.intersection(*(set(kernels.items()) for run in runs for kernels in _trained_by(run)))

    def words(kernels: Mapping[str, str]) -> str:
        if lack := _lack(kernels):
            return f"none ({lack})"
        return ", ".join(f"{part} {how}" for part, how in kernels.items() if (part, how) not in shared)

    names: dict[str, list[str]] = {}
    for run in runs:
        described = " then ".join(dict.fromkeys(words(kernels) for kernels in _trained_by(run)))
        names.setdefault(described or "not recorded", []).append(run.name)
    return printable("; ".join(f"{', '.join(of)}: {described}" for described, of in names.items()))


def _lack(kernels: Mapping[str, str]) -> str:
    """Why the process had no kernels: the one reason for the blocks and all optimizers; empty if it had."""
    reasons = {how for part, how in kernels.items() if part not in ANYWHERE}
    (reason,) = reasons if len(reasons) == 1 else ("",)
    return reason.removeprefix(PLAIN) if reason.startswith(PLAIN) else ""
