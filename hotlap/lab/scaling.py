"""How an effect changes with compute: a weighted straight line in log compute, and a careful sentence.

Effects are candidate minus baseline, so that a gain is negative. With three or four sizes little can be told,
and the words are chosen so that they say no more than the intervals do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import special

from hotlap.report.stats import CONFIDENCE, NAN
from hotlap.runs.reader import Floats

Course = Literal["grows", "holds", "fades", "cannot be told"]
FEWEST_RUNGS = 3
# An effect holds if its change over the sizes measured is shown to be less than this share of it.
HOLDS_WITHIN = 0.5


@dataclass(frozen=True)
class Rung:
    size: str
    flops: float  # of one baseline run: training FLOPs of the model
    effect: float
    error: float  # standard error of the effect
    seeds: int


@dataclass(frozen=True)
class Scaling:
    """effect = at_middle + slope × (log10 of FLOPs − middle); intervals are CONFIDENCE ones."""

    middle: float
    at_middle: float
    at_middle_interval: tuple[float, float]
    slope: float  # change of the effect for ten times the compute
    slope_interval: tuple[float, float]
    misfit: float  # how far the rungs scatter around the line, in standard errors; 1 is as expected
    freedom: int
    crossing: float | None  # FLOPs at which the line crosses zero, on the side to which the effect fades
    course: Course

    def at(self, flops: float) -> float:
        return self.at_middle + self.slope * (math.log10(flops) - self.middle)


def fit(rungs: Sequence[Rung]) -> Scaling | None:
    """None with fewer than three sizes of different compute, or where an effect has no error."""
    compute = np.log10([rung.flops for rung in rungs])
    effects = np.array([rung.effect for rung in rungs])
    errors = np.array([rung.error for rung in rungs])
    if len(set(compute.tolist())) < FEWEST_RUNGS or not (np.isfinite(effects).all() and (errors > 0).all()):
        return None
    weights = 1 / errors**2
    middle = float(weights @ compute / weights.sum())
    x = compute - middle
    at_middle = float(weights @ effects / weights.sum())
    slope = float(weights @ (x * effects) / (weights @ (x * x)))
    residuals = (effects - at_middle - slope * x) / errors
    misfit = float(np.sqrt((residuals**2).sum() / (len(rungs) - 2)))
    # Sizes that scatter more than their seeds explain widen the intervals; then it is sizes that count.
    freedom = sum(rung.seeds - 1 for rung in rungs) if misfit <= 1 else len(rungs) - 2
    half = float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2)) * max(1.0, misfit)
    slope_half = half / math.sqrt(float(weights @ (x * x)))
    middle_half = half / math.sqrt(float(weights.sum()))
    slope_interval = (slope - slope_half, slope + slope_half)
    at_middle_interval = (at_middle - middle_half, at_middle + middle_half)
    course = _course(compute, middle, at_middle, at_middle_interval, slope, slope_interval)
    return Scaling(
        middle=middle,
        at_middle=at_middle,
        at_middle_interval=at_middle_interval,
        slope=slope,
        slope_interval=slope_interval,
        misfit=misfit,
        freedom=freedom,
        crossing=_flops_at(middle - at_middle / slope) if course == "fades" else None,
        course=course,
    )


def _flops_at(log10: float) -> float:
    """Infinite where a line that hardly fades would cross zero beyond what a float holds."""
    return 10**log10 if log10 < sys.float_info.max_10_exp else math.inf


def _course(
    compute: Floats,
    middle: float,
    at_middle: float,
    at_middle_interval: tuple[float, float],
    slope: float,
    slope_interval: tuple[float, float],
) -> Course:
    if slope_interval[0] * slope_interval[1] > 0:
        at_smallest = at_middle + slope * (float(compute.min()) - middle)
        return "grows" if at_smallest * slope > 0 else "fades"
    low, high = at_middle_interval
    most_change = max(map(abs, slope_interval)) * float(np.ptp(compute))
    if low * high > 0 and most_change < HOLDS_WITHIN * abs(at_middle):
        return "holds"
    return "cannot be told"


def sentence(rungs: Sequence[Rung], scaling: Scaling | None, unit: str, sizes: Mapping[str, float]) -> str:
    """`sizes`: FLOPs of a run at each known size, to say where a fading effect would cross zero."""
    if scaling is None:
        return f"cannot be told: a trend needs at least {FEWEST_RUNGS} sizes whose effects have a spread"
    low, high = scaling.slope_interval
    change = (
        f"{_signed(scaling.slope)} {unit} for ten times the compute, {100 * CONFIDENCE:g} % CI {_signed(low)}"
    )
    change += f" to {_signed(high)}"
    first, last = rungs[0].size, rungs[-1].size
    what = "gain" if scaling.at(rungs[0].flops) < 0 else "loss"
    if scaling.course == "grows":
        return f"the {what} grows from {first} to {last} ({change})"
    if scaling.course == "holds":
        return (
            f"the {what} holds from {first} to {last}: it changes by less than"
            f" {100 * HOLDS_WITHIN:g} % of itself ({change})"
        )
    if scaling.course == "fades":
        assert scaling.crossing is not None, "what fades crosses zero"
        where = _place(scaling.crossing, sizes)
        beyond = (
            "" if scaling.crossing <= rungs[-1].flops else ", if the line went on beyond what was measured"
        )
        return f"the {what} fades from {first} to {last} ({change}); it would cross zero {where}{beyond}"
    return f"cannot be told whether the effect changes with size ({change})"


def _place(flops: float, sizes: Mapping[str, float]) -> str:
    if math.isinf(flops):
        return "at no size that could be trained"
    at = f"at {flops:.1e} FLOPs"
    ordered = sorted(sizes.items(), key=lambda item: item[1])
    below = [name for name, of_size in ordered if of_size <= flops]
    above = [name for name, of_size in ordered if of_size > flops]
    if below and above:
        return f"{at}, between {below[-1]} and {above[0]}"
    return f"{at}, beyond {below[-1]}" if below else f"{at}, below {above[0]}" if above else at


def _signed(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:+.4f}".replace("-", "−")


def rung(size: str, flops: float, baseline: Sequence[float], candidate: Sequence[float]) -> Rung:
    """The effect at one size, from rounds of seeds."""
    d = np.array(candidate) - np.array(baseline)
    error = float(d.std(ddof=1) / math.sqrt(d.size)) if d.size > 1 else NAN
    return Rung(size, flops, float(d.mean()), error, d.size)


def interval(one: Rung) -> tuple[float, float]:
    """The CONFIDENCE interval of an effect at one size."""
    half = float(special.stdtrit(one.seeds - 1, (1 + CONFIDENCE) / 2)) * one.error if one.seeds > 1 else NAN
    return one.effect - half, one.effect + half
