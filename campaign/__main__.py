"""Run the campaign, or what is left of it, and write its table.

python -m campaign [PART …] [--minutes M] [--share S] [--results FILE] [--write]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Protocol

import torch

from campaign import table
from campaign.commands import preload
from campaign.faults import make_faults
from campaign.inputs import damaged_inputs
from campaign.jobs import make_jobs
from campaign.ledger import Ledger, Trial
from campaign.outcomes import GOOD, LONGEST_DETAIL, Outcome, Verdict
from campaign.soak import Soak
from campaign.stage import make_stage
from hotlap import __version__
from hotlap.hardware import device_name, usable_cores

RESULTS = Path("campaign-results.jsonl")
PARTS = ("inputs", "faults", "soak")
SOAK_STEPS = 20_000


class Subject(Protocol):
    part: str
    name: str
    trials: int

    def run(self, number: int, chance: Random) -> Verdict: ...


def all_subjects(stage: Path, root: Path, soak_steps: int) -> list[Subject]:
    return [
        *damaged_inputs(stage, root / "inputs"),
        *make_faults(make_jobs(stage, root / "faults")),
        Soak(stage, root / "soak", soak_steps),
    ]


def in_turn(subjects: list[Subject], share: float) -> Iterator[tuple[Subject, int]]:
    """All trials of all subjects, mixed: one that is stopped early has tried some of everything."""
    order = []
    for place, subject in enumerate(subjects):
        count = max(1, round(subject.trials * share))
        order += [((number + 0.5) / count, place, number) for number in range(count)]
    for _, place, number in sorted(order):
        yield subjects[place], number


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--minutes", type=float, help="start no trial after this time")
    parser.add_argument("--share", type=float, default=1.0, help="the fraction of the trials to run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--soak-steps", type=int, default=SOAK_STEPS)
    parser.add_argument("--only", default="", help="subjects whose name has this text")
    parser.add_argument("--again", action="store_true", help="repeat the trials that found something")
    parser.add_argument("--results", type=Path, default=RESULTS, help=f"go on with this file ({RESULTS})")
    parser.add_argument("--place", type=Path, default=Path("campaign-place"), help="directory to work in")
    parser.add_argument("--write", action="store_true", help="write the table to docs/reliability.md")
    args = parser.parse_args()
    ledger = Ledger(args.results)
    preload()
    root = args.place.absolute()
    stage = make_stage(root / "stage")
    subjects: list[Subject] = [
        subject
        for subject in all_subjects(stage, root, args.soak_steps)
        if (not args.parts or subject.part in args.parts) and args.only in subject.name
    ]
    ledger.begin(described(args.seed))
    run_all(subjects, ledger, args)
    print(table.as_text(ledger))
    if args.write:
        table.write(ledger)
    sys.exit(any(trial.verdict.outcome not in GOOD for trial in ledger.trials.values()))


def run_all(subjects: list[Subject], ledger: Ledger, args: argparse.Namespace) -> None:
    began = time.monotonic()
    for subject, number in in_turn(subjects, args.share):
        if args.minutes is not None and time.monotonic() - began > 60 * args.minutes:
            return
        known = ledger.trials.get((subject.part, subject.name, number))
        if known is not None and not (args.again and known.verdict.outcome not in GOOD):
            continue
        started = time.monotonic()
        try:
            verdict = subject.run(number, Random(f"{args.seed} {subject.part} {subject.name} {number}"))
        except RuntimeError as error:  # the command does not work on what is undamaged
            verdict = Verdict(Outcome.LOST, "nothing", str(error)[-LONGEST_DETAIL:])
        trial = Trial(subject.part, subject.name, number, verdict, time.monotonic() - started)
        ledger.record(trial)
        if verdict.outcome not in GOOD:
            print(
                f"{trial.subject} {trial.number}: {verdict.outcome}: {verdict.fault}: {verdict.detail}",
                flush=True,
            )


def described(seed: int) -> dict[str, object]:
    return {
        "date": datetime.date.today().isoformat(),
        "seed": seed,
        "hotlap": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": usable_cores(),
        "machine": device_name(torch.device("cpu")),
        "threads": os.environ.get("OMP_NUM_THREADS", "as many as cores"),
    }


if __name__ == "__main__":
    main()
