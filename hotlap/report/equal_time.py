"""The second question of a race: what remains of a verdict at equal steps if both sides train equally long.

A slower recipe would do fewer steps in the same time, with its schedule shortened to fit. Runs of equal steps
cannot show that loss, but they bound it: a curve that is read before its end, in mid-schedule, is above what
a run made for that time would reach. So a slower recipe that is ahead even there helps, and one that is
behind at equal steps hurts; in between, the race that would tell is named.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hotlap.report import stats
from hotlap.report.kernel_notes import PLAIN, kernels_of
from hotlap.report.machines import machine_of
from hotlap.report.stats import ALPHA
from hotlap.report.verdict import Metric, Outcome, Verdict, judge
from hotlap.runs.reader import Floats, Run

SMALLEST_DIFFERENCE = 0.01  # of the time per step; less is as fast
AS_FAST_IN_TORCH = "torch's fused one is as fast"


TimeOutcome = Outcome | Literal["open"]


@dataclass(frozen=True)
class EqualTime:
    outcome: TimeOutcome
    words: str
    step_s: float  # seconds per step
    baseline_step_s: float
    unfair: tuple[str, ...]  # parts that run plain on one side only, because they have no kernel


def compare_at_equal_time(
    metric: Metric,
    labels: tuple[str, str],
    baseline: Sequence[Run],
    candidate: Sequence[Run],
    verdict: Verdict,
    *,
    comparisons: int,
) -> EqualTime | None:
    """None if the runs do not allow it: several machines, other numbers of steps, a target."""
    steps = {run.config.schedule.steps for run in (*baseline, *candidate)}
    machines = {machine_of(run) for run in (*baseline, *candidate)}
    if (
        len(machines) != 1
        or len(steps) != 1
        or metric.key not in ("bpb", "loss")
        or not (baseline and candidate)
    ):
        return None
    paces = [np.array([_step_s(run) for run in runs]) for runs in (baseline, candidate)]
    if not all(np.isfinite(pace).all() and (pace > 0).all() for pace in paces):
        return None
    before, after = (float(pace.mean()) for pace in paces)
    slower = after / before - 1
    outcome: TimeOutcome
    if abs(slower) < SMALLEST_DIFFERENCE:
        outcome, why = verdict.outcome, "as at equal steps, it is as fast"
    elif _is_noise(*paces):
        outcome, why = verdict.outcome, "as at equal steps; the times vary too much to be told apart"
    elif verdict.outcome == ("hurts" if slower > 0 else "helps"):
        outcome, why = verdict.outcome, f"as at equal steps, and it is {'slower' if slower > 0 else 'faster'}"
    else:
        outcome, why = _read_off(metric, labels, baseline, candidate, slower, comparisons)
    unfair = (
        *_plain_only_in(candidate, baseline, labels[1]),
        *_plain_only_in(baseline, candidate, labels[0]),
    )
    words = f"{outcome if outcome != 'no evidence' else 'no evidence either way'} ({why}); "
    percent = f"{100 * slower:+.0f}".replace("-", "−")
    words += f"{1000 * after:.1f} against {1000 * before:.1f} ms per step ({percent} %)"
    if unfair:
        words += (
            f"; unfair: {', '.join(unfair)}, while the other side's is fused: repeat it with --kernels off"
        )
    return EqualTime(outcome, words, after, before, unfair)


def _read_off(
    metric: Metric,
    labels: tuple[str, str],
    baseline: Sequence[Run],
    candidate: Sequence[Run],
    slower: float,
    comparisons: int,
) -> tuple[TimeOutcome, str]:
    """Compare both at the time when the faster one ended. The slower one's loss there is an upper bound."""
    field, is_slower = f"val_{metric.key}", slower > 0
    fast, slow = (baseline, candidate) if is_slower else (candidate, baseline)
    end_s = float(np.mean([run.train_s for run in fast]))
    ends = [run.last(field) for run in fast]
    cut = [float(np.interp(end_s, run.validation["train_s"], run.validation[field])) for run in slow]
    values = (ends, cut) if is_slower else (cut, ends)
    (found,) = judge(metric, values[0], [values[1]], [False])
    steps = baseline[0].config.schedule.steps
    done = 100 / (1 + slower) if is_slower else 100 * (1 + slower)
    wanted = "helps" if is_slower else "hurts"
    if found.outcome == wanted and found.p_adjusted * comparisons < ALPHA:
        of = labels[1] if is_slower else labels[0]
        return wanted, f"even with {of}'s schedule cut at {done:.0f} %"
    return "open", f"to tell, race {labels[1]} with schedule.steps={round(steps / (1 + slower))} too"


def _is_noise(before: Floats, after: Floats) -> bool:
    with warnings.catch_warnings():  # SciPy warns of a sample without spread
        warnings.simplefilter("ignore", RuntimeWarning)
        return stats.welch(before, after).p >= ALPHA


def _step_s(run: Run) -> float:
    steps = float(run.train["step"][-1]) if run.train["step"].size else float("nan")
    return run.train_s / steps if steps else float("nan")


def _plain_only_in(runs: Sequence[Run], others: Sequence[Run], label: str) -> list[str]:
    """What runs plain in `runs` for want of a kernel, and not in `others`, of which parts are fused."""
    here, there = kernels_of(runs[0].environment), kernels_of(others[0].environment)
    if all(value.startswith(PLAIN) for value in there.values()):
        return []
    here, there = _plain_parts(here), _plain_parts(there)
    return [f"{kind} of {label} is plain ({why})" for kind, why in here.items() if kind not in there]


def _plain_parts(kernels: Mapping[str, str]) -> dict[str, str]:
    """{kind of part: why it is plain}, without the layers."""
    return {
        name.partition(" of ")[0]: value.removeprefix(PLAIN)
        for name, value in kernels.items()
        if value.startswith(PLAIN) and AS_FAST_IN_TORCH not in value
    }
