"""The results of races in the ledger: one line for each entry that was compared with the baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotlap.lab.comparison import code_of, describe, machine_of
from hotlap.lab.ledger import Ledger
from hotlap.progress import Say
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import Plan
from hotlap.race.results import load_race
from hotlap.report.analysis import METRICS


def add_race(
    ledger: Ledger, directory: RaceDirectory, plan: Plan, results: Mapping[str, Any], say: Say
) -> None:
    """`results`: what `conclude` returned."""
    statistics = results["statistics"]
    verdicts = {row["label"]: row["verdict"] for row in statistics["rows"] if row["verdict"]}
    runs = load_race(directory, plan, whole_rounds=True)
    for entry in plan.entries[1:]:
        verdict = verdicts.get(entry.label)
        if verdict is None:
            continue
        of_entry = runs[entry.label]
        difference = verdict["difference"]
        facts = {
            **describe(plan, entry, directory.ideas),
            "race": directory.path.name,
            "metric": statistics["metric"],
            "unit": METRICS[statistics["metric"]].unit,
            "outcome": verdict["outcome"],
            "words": verdict["words"],
            "effect": difference["mean"],
            "low": difference["low"],
            "high": difference["high"],
            "p": verdict["p_adjusted"],
            "seeds": len(of_entry),
            "seconds": sum(run.train_s for run in of_entry),
            "machine": machine_of(of_entry[0]),
            "code": code_of(of_entry[0]),
        }
        ledger.add("race", facts, say)
