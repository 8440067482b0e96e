"""Turn test results into one of three verdicts: helps, hurts, or no evidence either way.

"Helps" and "hurts" require a Holm-adjusted p below ALPHA. "No evidence" comes with the number of additional
seeds that would decide the comparison if the observed difference were the true one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hotlap.report import stats
from hotlap.report.machines import difference_within, log_rank_within
from hotlap.report.stats import ALPHA, CONFIDENCE, MOST_SEEDS, NAN, Difference, Values, Waits

Outcome = Literal["helps", "hurts", "no evidence"]


@dataclass(frozen=True)
class Metric:
    key: str
    name: str
    unit: str
    decimals: int
    lower_is_better: bool = True

    def format(self, value: float, *, signed: bool = False) -> str:
        if not math.isfinite(value):
            return "–"
        return f"{value:{'+' if signed else ''},.{self.decimals}f}".replace("-", "−")


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    words: str
    difference: Difference  # candidate minus baseline; for a log-rank test only `test` and `p` are defined
    p_adjusted: float
    effect: tuple[float, float, float]  # Hedges' g and its interval
    more_seeds: int | None  # None: decided, or more than MOST_SEEDS


# Of the runs of the baseline and of each candidate; None: all were trained on one machine, or it does not
# matter.
Machines = Sequence[Sequence[str]] | None


def judge(
    metric: Metric,
    baseline: Values,
    candidates: Sequence[Values],
    pairs: Sequence[bool],
    machines: Machines = None,
) -> list[Verdict]:
    """Compare each candidate with the baseline. `pairs[i]`: candidate i has the same seeds, in order."""
    samples = [
        _compare(baseline, candidate, is_paired, None if machines is None else (machines[0], machines[i + 1]))
        for i, (candidate, is_paired) in enumerate(zip(candidates, pairs, strict=True))
    ]
    adjusted = stats.holm([difference.p for difference, *_ in samples])
    verdicts = []
    for (difference, first, candidate, is_paired), p in zip(samples, adjusted, strict=True):
        outcome = _outcome(p, (difference.mean < 0) == metric.lower_is_better)
        more = None
        if outcome == "no evidence":
            more = _more_seeds(first, candidate, is_paired, ALPHA / len(candidates))
            words = _undecided(more, min(len(first), len(candidate)))
            if machines is not None and math.isnan(difference.mean):
                more, words = None, "not compared: no machine trained both"
        else:
            words = (
                f"{outcome} ({metric.format(difference.mean, signed=True)} {metric.unit}, "
                f"{100 * CONFIDENCE:g} % CI {metric.format(difference.low, signed=True)}"
                f" to {metric.format(difference.high, signed=True)})"
            )
        effect = stats.hedges_g(first, candidate)
        verdicts.append(Verdict(outcome, words, difference, p, effect, more))
    return verdicts


def _compare(
    baseline: Values, candidate: Values, is_paired: bool, machines: tuple[Sequence[str], Sequence[str]] | None
) -> tuple[Difference, Values, Values, bool]:
    """The difference, the two samples that its size is measured in, and whether they are pairs."""
    # Pairs that were trained on one machine each are within machines already.
    if machines is not None and not (is_paired and list(machines[0]) == list(machines[1])):
        difference, plain_baseline, plain_candidate = difference_within(baseline, candidate, machines)
        return difference, plain_baseline, plain_candidate, False
    difference = stats.paired(baseline, candidate) if is_paired else stats.welch(baseline, candidate)
    return difference, baseline, candidate, is_paired


def judge_waits(
    metric: Metric,
    baseline: Waits,
    candidates: Sequence[Waits],
    pairs: Sequence[bool],
    machines: Machines = None,
) -> list[Verdict]:
    """Like `judge`, for time or tokens to target. If any run missed the target, all use the log-rank test."""
    if all(waits.all_reached for waits in (baseline, *candidates)):
        return judge(metric, baseline.until, [waits.until for waits in candidates], pairs, machines)
    results = [
        stats.log_rank(baseline, candidate)
        if machines is None
        else log_rank_within(baseline, candidate, (machines[0], machines[i + 1]))
        for i, candidate in enumerate(candidates)
    ]
    adjusted = stats.holm([p for p, _ in results])
    verdicts = []
    for candidate, (p, ratio), p_adjusted in zip(candidates, results, adjusted, strict=True):
        outcome = _outcome(p_adjusted, ratio > 1)
        more = None
        if outcome == "no evidence":
            reached = float(np.concatenate([baseline.reached, candidate.reached]).mean())
            fewest = min(baseline.count, candidate.count)
            needed = stats.seeds_needed_for_waits(ratio, reached, ALPHA / len(candidates))
            more = None if needed is None else max(1, needed - fewest)
            words = _undecided(more, fewest)
        else:
            words = (
                f"{outcome} (target reached by {candidate.reached.sum()} of {candidate.count} runs"
                f" against {baseline.reached.sum()} of {baseline.count}, log-rank p = {p_adjusted:.2g})"
            )
        difference = Difference("log-rank", NAN, NAN, NAN, p)
        verdicts.append(Verdict(outcome, words, difference, p_adjusted, (NAN, NAN, NAN), more))
    return verdicts


def _outcome(p_adjusted: float, is_improvement: bool) -> Outcome:
    if not p_adjusted < ALPHA:  # nan included
        return "no evidence"
    return "helps" if is_improvement else "hurts"


def _more_seeds(baseline: Values, candidate: Values, is_paired: bool, alpha: float) -> int | None:
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    fewest = min(a.size, b.size)
    if fewest < 2:
        return None
    spread = float((b - a).std(ddof=1)) if is_paired else math.sqrt((a.var(ddof=1) + b.var(ddof=1)) / 2)
    difference = float(b.mean() - a.mean())
    if spread == 0:
        return None if difference == 0 else 1
    needed = stats.seeds_needed(difference / spread, alpha, is_paired=is_paired)
    return None if needed is None else max(1, needed - fewest)


def _undecided(more: int | None, fewest_runs: int) -> str:
    if fewest_runs < 2:
        missing = 2 - fewest_runs
        return f"no evidence either way, at least {missing} more {_seeds(missing)} needed"
    if more is None:
        return f"no evidence either way, more than {MOST_SEEDS} more seeds needed"
    return f"no evidence either way, about {more} more {_seeds(more)} needed"


def _seeds(count: int) -> str:
    return "seed" if count == 1 else "seeds"
