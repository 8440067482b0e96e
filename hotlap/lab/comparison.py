"""What a gate, race or ladder compares, in words and as hashes, for the ledger and for scripts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotlap.files import without_folders
from hotlap.json_files import canonical, finite
from hotlap.race.idea_copies import ideas_of
from hotlap.race.plan import Entry, Plan, Start
from hotlap.recipes import find_recipe
from hotlap.runs.reader import Run
from hotlap.settings import diff, flatten, shown, updated

HASH_DIGITS = 16
# What a reader of a result needs to know about the machine; no paths.
MACHINE = ("system", "device", "device_name", "cores", "threads", "torch", "precision")


def describe(plan: Plan, candidate: Entry, ideas: Path) -> dict[str, Any]:
    """The candidate of a comparison with the plan's first entry: names, one sentence, changes, hashes.

    ideas: the directory of the copies of idea files.
    """
    baseline = plan.entries[0]
    before, after = (updated(plan.config(Start(entry, 0)), {"seed": 0}) for entry in (baseline, candidate))
    changes = [change for change in diff(before, after) if change.name not in ("seed", "recipe")]
    listed = [
        without_folders(f"{change.name} {shown(change.before)} → {shown(change.after)}") for change in changes
    ]
    return {
        "idea": {
            "label": without_folders(candidate.label),
            "sentence": _sentence(baseline, candidate, listed, ideas),
            "changes": listed,
            "hash": _hash({change.name: change.after for change in changes}),
        },
        "parent": without_folders(baseline.label),
        "size": plan.size,
        "comparison": _hash(
            {
                "before": flatten(before),
                "after": flatten(after),
                "procs": plan.procs,
                "commits": [baseline.commit, candidate.commit],
            }
        ),
    }


def _sentence(baseline: Entry, candidate: Entry, changes: Sequence[str], ideas: Path) -> str:
    """Of the idea files, or of the recipe if it is another than the baseline's; otherwise what is changed."""
    if candidate.ideas != baseline.ideas and candidate.ideas:
        return "; ".join(file.sentence for file in ideas_of(candidate, ideas))
    if candidate.recipe != baseline.recipe:
        of_recipe = find_recipe(candidate.recipe).summary
        own = [f"{name} = {shown(value)}" for name, value in candidate.changes.items()]
        return "; ".join([of_recipe, *own])
    return "; ".join(changes) or f"{baseline.recipe} again, with other seeds"


def machine_of(run: Run) -> dict[str, Any]:
    plain: dict[str, Any] = finite({name: run.environment.get(name) for name in MACHINE})
    return plain


def code_of(run: Run) -> str | None:
    """The fingerprint of the code that trained a run, or the commit of the package's checkout."""
    code = run.environment.get("code")
    found = code.get("fingerprint") if isinstance(code, dict) else run.environment.get("git_commit")
    return None if found is None else str(found)


def _hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(finite(content)).encode()).hexdigest()[:HASH_DIGITS]
