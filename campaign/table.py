"""The table of docs/reliability.md, from the results of a campaign."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from campaign.ledger import Ledger, Trial
from campaign.outcomes import Outcome

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"
START, END = "<!-- campaign:start -->", "<!-- campaign:end -->"


def rows(ledger: Ledger) -> list[list[str]]:
    trials = list(ledger.trials.values())
    groups: dict[tuple[str, str], list[Trial]] = {}
    for trial in trials:
        groups.setdefault((trial.part, group(trial)), []).append(trial)
    lines = [[part, name, *figures(members)] for (part, name), members in sorted(groups.items())]
    for part in sorted({part for part, _ in groups}):
        lines.append([part, "all", *figures([trial for trial in trials if trial.part == part])])
    return [*lines, ["all", "", *figures(trials)]]


def group(trial: Trial) -> str:
    """The damaged file, by the directory that it is in, whichever command reads it; or the fault."""
    if trial.part == "inputs":
        path = Path(trial.subject.partition(" ")[2])
        directory = "checkpoint" if path.parent.name.startswith("step-") else path.parent.name
        is_run = path.parent.parent.name == "race" or directory == "lap"
        return f"{'run' if is_run else directory or 'text'}/{re.sub(r'_[0-9]+', '', path.name)}"
    job, _, fault = trial.subject.partition(": ")
    return f"{fault}: {job}" if fault == "kill" else fault or job


def figures(trials: list[Trial]) -> list[str]:
    counts = Counter(trial.verdict.outcome for trial in trials)
    hours = sum(trial.seconds for trial in trials) / 3600
    return [
        f"{len(trials):,}",
        *(f"{counts[outcome]:,}" if counts[outcome] else "" for outcome in Outcome),
        f"{hours:.2f}",
    ]


def as_text(ledger: Ledger) -> str:
    headers = ["part", "file or fault", "trials", *Outcome, "hours"]
    lines = [headers, ["---"] * 2 + ["---:"] * (len(headers) - 2), *rows(ledger)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(ledger: Ledger) -> None:
    last = ledger.sessions[-1]
    where = (
        f"{last['date']}, hotlap {last['hotlap']}, torch {last['torch']}, Python {last['python']},"
        f" {last['cores']} cores of {last['machine']}, seed {last['seed']}."
    )
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(START)
    after = rest.partition(END)[2]
    content = f"{before}{START}\n{where}\n\n{as_text(ledger)}\n{END}{after}"
    PAGE.write_text(content, encoding="utf-8")
