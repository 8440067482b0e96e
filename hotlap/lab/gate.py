"""The gate: rounds of seeds of a baseline and one idea, until it is decided whether the idea helps.

A round is one run of each with the same seed. After every round from the third on, `decision` says whether
the question is decided. The level of "helps" comes from the ledger, where the gate is a try of a series.
Data that one gate has seen are spent: another gate on the same comparison needs other seeds.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hotlap.errors import RaceError
from hotlap.json_files import finite
from hotlap.lab.baselines import copy_run, find_run, identity, sources_of
from hotlap.lab.comparison import code_of, describe, machine_of
from hotlap.lab.decision import Decision, Design, Outcome, decide, without_statistics
from hotlap.lab.ledger import Entry, Ledger
from hotlap.lab.sequential import looks_of
from hotlap.progress import Say
from hotlap.race.directory import RaceDirectory
from hotlap.race.engine import Engine
from hotlap.race.plan import Plan, Start, to_json
from hotlap.race.progress import RaceProgress
from hotlap.race.results import conclude, load_race
from hotlap.race.runner import Runner
from hotlap.report.analysis import BPB, LOSS
from hotlap.report.verdict import Metric
from hotlap.runs.reader import Run

SCHEMA = 1  # of the result; grows when a field changes its meaning or goes
EXIT_CODES = {Outcome.HELPS: 0, Outcome.HURTS: 1, Outcome.NO_EFFECT: 1, Outcome.UNDECIDED: 3}


@dataclass(frozen=True)
class Question:
    """What the user asks; the plan has the two entries and the most seeds."""

    plan: Plan
    alpha: float
    least_effect: float

    @property
    def default_name(self) -> str:
        content = {"plan": to_json(self.plan), "alpha": self.alpha, "least_effect": self.least_effect}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:6]
        return f"gate-{self.plan.entries[0].recipe}-{self.plan.size}-{digest}"

    def facts(self, ideas: Path) -> dict[str, Any]:
        """Of the try in the ledger. `ideas`: the directory of the copies of idea files."""
        return {
            **describe(self.plan, self.plan.entries[1], ideas),
            "least_effect": self.least_effect,
            "most_seeds": self.plan.seeds,
            "first_seed": self.plan.entries[0].first_seed,
            "procs": self.plan.procs,
        }


class Gate:
    """A gate in its directory. `begin` enters it in the ledger, `run` trains and decides."""

    def __init__(self, question: Question, directory: RaceDirectory, ledger: Ledger, say: Say) -> None:
        self.question = question
        self.plan = question.plan
        self.directory = directory
        self.ledger = ledger
        self._say = say
        self._try: Entry = {}
        self._verdict: Entry | None = None

    def begin(self) -> None:
        """Take a number and a level in the series, or find those that an earlier call took."""
        self._try, self._verdict = self.ledger.begin(
            self.directory.path.name,
            self.question.facts(self.directory.ideas),
            self.question.alpha,
            self._say,
        )
        self._say(f"gate: {level_in_words(self._try)}")

    @property
    def design(self) -> Design:
        return Design(
            level=float(self._try["level"]),
            alpha=self.question.alpha,
            least_effect=self.question.least_effect,
            most_seeds=self.plan.seeds,
        )

    def run(self, engine: Engine, progress: RaceProgress, budget_s: float | None) -> dict[str, Any]:
        """Train rounds until it is decided or the budget is used up, and return the result."""
        deadline = math.inf if budget_s is None else time.monotonic() + budget_s
        rounds = self.plan.rounds()
        self._carry_out([rounds[0][1]], engine, progress)  # tells data, code and machine
        self._carry_out(rounds[0], engine, progress)
        done = 1
        decision = self._decision()
        while decision is None and done < self.plan.seeds:
            # Until the first look there is nothing to decide; then as many rounds as train at once.
            first_look = looks_of(self.plan.seeds)[0]
            more = max(first_look - done, 1, engine.slots // len(self.plan.entries))
            batch = [start for round_ in rounds[done : done + more] for start in round_]
            if time.monotonic() + self._needed_s(batch, engine, progress) > deadline:
                break
            self._carry_out(batch, engine, progress)
            done = min(done + more, self.plan.seeds)
            decision = self._decision()
        return self._conclude(decision, ran_out=decision is None and done < self.plan.seeds)

    def _needed_s(self, starts: Sequence[Start], engine: Engine, progress: RaceProgress) -> float:
        """When the next look's runs will have ended, as far as earlier ones tell."""
        waiting = [start for start in starts if not self.directory.is_over(start)]
        work_s = Runner(self.plan, self.directory, engine, progress).pace.of(waiting) or 0.0
        return work_s / max(1, min(engine.slots, len(waiting)))

    def _carry_out(self, starts: Sequence[Start], engine: Engine, progress: RaceProgress) -> None:
        for start in starts:
            if start.entry is self.plan.entries[0] and not self.directory.run(start).path.exists():
                self._copy_earlier(start, progress)
        Runner(self.plan, self.directory, engine, progress).carry_out(starts)

    def _copy_earlier(self, start: Start, progress: RaceProgress) -> None:
        if self.plan.entries[0].commit != self.plan.entries[1].commit:
            return  # the idea's run does not tell the code of the baseline's
        first = self.directory.run(Start(self.plan.entries[1], self.plan.entries[1].first_seed))
        wanted = identity(first.read_environment())
        found = find_run(self.plan.config(start), start.name, self.directory.path, wanted)
        if found is None:
            return
        copy_run(found, self.directory.run(start).path)
        progress.done += 1
        progress.say(f"gate: {start}: copied from {found.path.parent.name}: same data, code and machine")

    def _runs(self) -> tuple[list[Run], list[Run]]:
        """The runs of both sides, of the rounds that have ended."""
        by_label = load_race(self.directory, self.plan, whole_rounds=True)
        baseline, candidate = (by_label.get(entry.label, []) for entry in self.plan.entries)
        return baseline, candidate

    def _decision(self) -> Decision | None:
        """None as long as more rounds could decide."""
        baseline, candidate = self._runs()
        field = f"val_{_metric(baseline + candidate).key}"
        for run in baseline:
            if not math.isfinite(run.last(field)):
                raise RaceError(
                    expected="a baseline that trains",
                    found=f"{run.name} without a finite validation loss",
                    do="compare with another recipe, or change its settings",
                )
        differences = [b.last(field) - a.last(field) for a, b in zip(baseline, candidate, strict=True)]
        if not all(map(math.isfinite, differences)):
            return without_statistics(Outcome.HURTS, len(differences), math.nan)
        decision = decide(differences, self.design)
        is_last = decision.rounds >= self.plan.seeds
        return decision if is_last or decision.outcome is not Outcome.UNDECIDED else None

    def _conclude(self, decision: Decision | None, *, ran_out: bool) -> dict[str, Any]:
        baseline, candidate = self._runs()
        if decision is None:
            field = f"val_{_metric(baseline + candidate).key}"
            differences = [b.last(field) - a.last(field) for a, b in zip(baseline, candidate, strict=True)]
            decision = decide(differences, self.design)
        baseline, candidate = baseline[: decision.rounds], candidate[: decision.rounds]
        facts = self._verdict_facts(decision, baseline, candidate, ran_out=ran_out)
        known = self._verdict or {}
        if (known.get("outcome"), known.get("rounds")) != (facts["outcome"], facts["rounds"]):
            self.ledger.end(int(self._try["number"]), self.directory.path.name, facts, self._say)
        if decision.rounds >= 2:
            conclude(self.directory, replace(self.plan, seeds=decision.rounds), notes=self._notes(facts))
        return self._result(facts, [*baseline, *candidate])

    def _verdict_facts(
        self, decision: Decision, baseline: Sequence[Run], candidate: Sequence[Run], *, ran_out: bool
    ) -> dict[str, Any]:
        metric = _metric([*baseline, *candidate])
        copied = sources_of(run.directory for run in baseline)
        facts: dict[str, Any] = finite(
            {
                **asdict(decision),
                "confidence": 1 - self.question.alpha,
                "metric": metric.key,
                "unit": metric.unit,
                "seconds": sum(run.train_s for run in (*baseline, *candidate))
                - sum(run.train_s for run in baseline if sources_of([run.directory])),
                "seconds_per_step": {
                    "baseline": _seconds_per_step(baseline),
                    "idea": _seconds_per_step(candidate),
                },
                "baseline_runs": {"trained": len(baseline) - sum(copied.values()), "copied_from": copied},
                "machine": machine_of(candidate[0]),
                "code": code_of(candidate[0]),
                "words": in_words(decision, metric, self.design, ran_out=ran_out),
            }
        )
        return facts

    def _notes(self, facts: Mapping[str, Any]) -> list[str]:
        return [
            f"gate: {facts['words']}. {level_in_words(self._try)}. The verdict above treats the runs as those"
            " of a race, and does not know that they were looked at after every round."
        ]

    def _result(self, facts: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
        """The JSON object of `--json`; docs/gate.md describes each field."""
        field = f"val_{facts['metric']}"
        started = {key: value for key, value in self._try.items() if key not in ("kind", "gate", "time")}
        result: dict[str, Any] = finite(
            {
                "schema": SCHEMA,
                "outcome": facts["outcome"],
                "exit_code": EXIT_CODES[Outcome(facts["outcome"])],
                "words": facts["words"],
                "level_words": level_in_words(self._try),
                **started,
                **facts,
                "runs": [
                    {
                        "name": run.name,
                        "seed": run.config.seed,
                        "status": run.status,
                        "value": run.last(field),
                        "seconds": run.train_s,
                    }
                    for run in runs
                ],
                "directory": str(self.directory.path),
                "report": str(self.directory.report_path),
            }
        )
        return result


def _metric(runs: Sequence[Run]) -> Metric:
    """Bits per byte where all runs have it. A gate compares the ends of runs, at equal steps."""
    return BPB if all(run.validation["val_bpb"].size and _has_bpb(run) for run in runs) else LOSS


def _has_bpb(run: Run) -> bool:
    return math.isfinite(run.last("val_bpb")) or not math.isfinite(run.last("val_loss"))


def _seconds_per_step(runs: Sequence[Run]) -> float:
    steps = sum(float(run.train["step"].max(initial=0.0)) for run in runs)
    return sum(run.train_s for run in runs) / steps if steps else math.nan


def level_in_words(try_: Entry) -> str:
    found, number = int(try_["discoveries_before"]), int(try_["number"])
    since = try_["tries_since_discovery"]
    history = "the first of its series" if number == 1 else f"{number - 1} before it, {found} of them helped"
    if since is not None:
        history += f", the last {since + 1} {'try' if since == 0 else 'tries'} ago"
    return f"try {number}: “helps” at level {try_['level']:.2g} of {try_['alpha']:g} ({history})"


def in_words(decision: Decision, metric: Metric, design: Design, *, ran_out: bool) -> str:
    if math.isnan(decision.effect):
        return f"{decision.outcome}: a run has no finite validation loss"
    effect = (
        f"{metric.format(decision.effect, signed=True)} {metric.unit} after {decision.rounds}"
        f" {'round' if decision.rounds == 1 else 'rounds'}"
    )
    if math.isfinite(decision.low):
        effect += (
            f", {100 * (1 - design.alpha):g} % CI {metric.format(decision.low, signed=True)}"
            f" to {metric.format(decision.high, signed=True)}"
        )
    if decision.outcome is Outcome.UNDECIDED:
        why = "the budget is used up" if ran_out else f"all {design.most_seeds} seeds are used up"
        return f"undecided: {why} ({effect})"
    if decision.outcome is Outcome.HELPS:
        return f"helps ({effect}, p = {decision.p:.2g}, needed {decision.p_needed:.2g})"
    if decision.outcome is Outcome.HURTS:
        return f"hurts ({effect})"
    if decision.low == decision.high == 0:
        return f"no effect worth having: every round ended at exactly the same value ({effect})"
    return f"no effect worth having: a gain of {design.least_effect:g} is ruled out ({effect})"
