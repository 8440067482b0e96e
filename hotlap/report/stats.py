"""The statistical tests behind a verdict, as pure functions on arrays.

SciPy (https://scipy.org) provides the distributions and the basic tests. This file adds Holm's adjustment,
Hedges' g with a confidence interval, and the required number of seeds. A test that the data do not allow (one
run, or no spread) returns nan. Differences are candidate minus baseline.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

from hotlap.runs.reader import Floats

CONFIDENCE = 0.95
ALPHA = 0.05  # two-sided, over all comparisons of a race
TARGET_ALPHA = 0.01  # one-sided: the level required of a speedrun record for "mean loss ≤ target"
POWER = 0.8
MOST_SEEDS = 200  # larger requirements are reported as "more than"
MOST_PERMUTATIONS = 20_000  # of the exact log-rank test
QUADRATURE_NODES = 200

Values = Sequence[float] | Floats
NAN = float("nan")


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation and confidence interval of the mean. nan where undefined."""

    count: int
    mean: float
    sd: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """The difference of two means, its confidence interval, and the two-sided p-value of the named test."""

    test: str
    mean: float
    low: float
    high: float
    p: float


def summarize(values: Values) -> Summary:
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2:
        return Summary(x.size, float(x[0]) if x.size else NAN, NAN, NAN, NAN)
    mean, sd = float(x.mean()), float(x.std(ddof=1))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, x.size - 1)) * sd / math.sqrt(x.size)
    return Summary(x.size, mean, sd, mean - half, mean + half)


def has_spread(*samples: Floats) -> bool:
    """Whether values differ by more than rounding error. Without spread the t statistic is undefined."""
    return any(np.ptp(x) > 1e-12 * max(1.0, float(np.abs(x).max())) for x in samples)


def without_precision_warnings() -> warnings.catch_warnings[None]:
    """SciPy warns where the values of one sample almost agree. `has_spread` refuses where that matters."""
    return warnings.catch_warnings(action="ignore", category=RuntimeWarning)


def welch(baseline: Values, candidate: Values) -> Difference:
    """Welch's t test: two independent samples with unequal variances."""
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    mean = float(b.mean() - a.mean()) if a.size and b.size else NAN
    if min(a.size, b.size) < 2 or not has_spread(a, b):
        return Difference("Welch", mean, NAN, NAN, NAN)
    with without_precision_warnings():
        result = stats.ttest_ind(b, a, equal_var=False)
    interval = result.confidence_interval(CONFIDENCE)
    return Difference("Welch", mean, float(interval.low), float(interval.high), float(result.pvalue))


def paired(baseline: Values, candidate: Values) -> Difference:
    """Paired t test: both samples have the same seeds in the same order."""
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    assert a.size == b.size, f"pairs need equal sizes, found {a.size} and {b.size}"
    mean = float((b - a).mean()) if a.size else NAN
    if a.size < 2 or not has_spread(b - a):
        return Difference("paired t", mean, NAN, NAN, NAN)
    with without_precision_warnings():
        result = stats.ttest_rel(b, a)
    interval = result.confidence_interval(CONFIDENCE)
    return Difference("paired t", mean, float(interval.low), float(interval.high), float(result.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment. A nan counts as a comparison and stays nan."""
    ps = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(ps)  # nan last
    adjusted = np.full(ps.size, NAN)
    so_far = 0.0
    for rank, index in enumerate(order):
        if np.isnan(ps[index]):
            break
        so_far = max(so_far, min(1.0, (ps.size - rank) * float(ps[index])))
        adjusted[index] = so_far
    return adjusted.tolist()


def mean_below(values: Values, target: float) -> float:
    """p-value of the one-sided t test of "mean < target"."""
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2 or not has_spread(x):
        return NAN
    return float(stats.ttest_1samp(x, target, alternative="less").pvalue)


def hedges_g(baseline: Values, candidate: Values) -> tuple[float, float, float]:
    """Hedges' g: the difference in pooled standard deviations, bias-corrected, with confidence interval."""
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if min(a.size, b.size) < 2 or not has_spread(a, b):
        return NAN, NAN, NAN
    freedom = a.size + b.size - 2
    pooled = math.sqrt(((a.size - 1) * a.var(ddof=1) + (b.size - 1) * b.var(ddof=1)) / freedom)
    scale = math.sqrt(1 / a.size + 1 / b.size)
    t = float(b.mean() - a.mean()) / (pooled * scale)
    unbiased = math.exp(special.gammaln(freedom / 2) - special.gammaln((freedom - 1) / 2)) / math.sqrt(
        freedom / 2
    )

    # t follows a noncentral t distribution with noncentrality (true effect / scale). The confidence interval
    # contains the noncentralities for which the observed t is in neither tail.
    def center(tail: float) -> float:
        reach = 8 * math.sqrt(1 + t * t / freedom)
        return float(
            optimize.brentq(
                lambda nc: noncentral_t_below(t, freedom, nc) - tail, t - reach, t + reach, xtol=1e-6
            )
        )

    low, high = center((1 + CONFIDENCE) / 2), center((1 - CONFIDENCE) / 2)
    return unbiased * t * scale, unbiased * low * scale, unbiased * high * scale


def noncentral_t_below(t: float, freedom: int, center: float) -> float:
    """P(T ≤ t) of the noncentral t distribution: E[Φ(t·s − center)] over s = √(χ²/freedom).

    SciPy's `nct` (1.17) returns nan for about one in ten ordinary arguments.
    """
    spreads, weights = _spread_quadrature(freedom)
    return float(weights @ special.ndtr(t * spreads - center))


@functools.lru_cache(maxsize=1024)
def _spread_quadrature(freedom: int) -> tuple[Floats, Floats]:
    """Nodes and weights for the expectation over s = √(χ²/freedom): Gauss-Legendre on its quantiles."""
    nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE_NODES)
    spreads = np.sqrt(special.chdtri(freedom, (1 - nodes) / 2) / freedom)
    return spreads, weights / 2


def power(effect: float, count: int, alpha: float, *, is_paired: bool = False) -> float:
    """Power of the two-sided t test with `count` runs per recipe.

    effect: the true difference divided by the standard deviation of a run or, if paired, of a pair's
    difference.
    """
    freedom = count - 1 if is_paired else 2 * (count - 1)
    center = abs(effect) * math.sqrt(count if is_paired else count / 2)
    critical = float(special.stdtrit(freedom, 1 - alpha / 2))
    return 1 - noncentral_t_below(critical, freedom, center) + noncentral_t_below(-critical, freedom, center)


def seeds_needed(effect: float, alpha: float = ALPHA, *, is_paired: bool = False) -> int | None:
    """The fewest runs per recipe that reach POWER for this effect. None: more than MOST_SEEDS."""
    if not power(effect, MOST_SEEDS, alpha, is_paired=is_paired) >= POWER:  # nan included
        return None
    counts = range(2, MOST_SEEDS + 1)
    return counts[
        bisect.bisect_left(counts, POWER, key=lambda n: power(effect, n, alpha, is_paired=is_paired))
    ]


@dataclass(frozen=True)
class Waits:
    """Time or tokens to target of several runs, as right-censored data."""

    until: Floats  # when the target was reached or, if it was not, when observation ended
    reached: npt.NDArray[np.bool_]

    @property
    def count(self) -> int:
        return self.until.size

    @property
    def all_reached(self) -> bool:
        return bool(self.reached.all())


def median_wait(waits: Waits) -> tuple[float, float, float]:
    """Kaplan-Meier median and its confidence interval. inf: not determined by these runs."""
    if not waits.reached.any():
        return math.inf, float(waits.until.min()) if waits.count else NAN, math.inf
    survival = stats.ecdf(_censored(waits)).sf
    with warnings.catch_warnings():  # SciPy warns that there is no interval where survival is 1 or 0
        warnings.simplefilter("ignore", RuntimeWarning)
        bounds = survival.confidence_interval(confidence_level=CONFIDENCE, method="log-log")

    def first_at_half(survival_probabilities: Floats) -> float:
        below = np.flatnonzero(survival_probabilities <= 0.5)
        return float(survival.quantiles[below[0]]) if below.size else math.inf

    none_left = survival.probabilities == 0
    return (
        first_at_half(survival.probabilities),
        first_at_half(np.where(none_left, 0.0, np.nan_to_num(bounds.low.probabilities, nan=1.0))),
        first_at_half(np.where(none_left, 1.0, np.nan_to_num(bounds.high.probabilities, nan=1.0))),
    )


def _censored(waits: Waits) -> stats.CensoredData:
    return stats.CensoredData(uncensored=waits.until[waits.reached], right=waits.until[~waits.reached])


def log_rank(baseline: Waits, candidate: Waits) -> tuple[float, float]:
    """(p, hazard ratio) of the log-rank test. A ratio above 1 means that the candidate is faster.

    At three runs each, the chi-squared approximation has twice the nominal false-positive rate. Few runs
    therefore get the exact permutation p: the fraction of relabelings that are at least as extreme.
    """
    if min(baseline.count, candidate.count) < 2:
        return NAN, NAN
    until = np.concatenate([candidate.until, baseline.until])
    reached = np.concatenate([candidate.reached, baseline.reached])
    hazard = cumulative_hazard(until, reached)  # expected events per run
    expected, others_expected = hazard[: candidate.count].sum(), hazard[candidate.count :].sum()
    if not (expected and others_expected):  # no events, or one side was censored before all of them
        return NAN, NAN
    residuals = reached - hazard
    if math.comb(until.size, candidate.count) <= MOST_PERMUTATIONS:
        relabelings = np.array(list(itertools.combinations(range(until.size), candidate.count)))
        statistics = np.abs(residuals[relabelings].sum(axis=1))
        p = float(np.mean(statistics >= abs(residuals[: candidate.count].sum()) - 1e-9))
    else:
        p = float(stats.logrank(_censored(candidate), _censored(baseline)).pvalue)
    observed, others = float(candidate.reached.sum()), float(baseline.reached.sum())
    if not others:
        return p, math.inf
    return p, float((observed / expected) / (others / others_expected))


def cumulative_hazard(until: Floats, reached: npt.NDArray[np.bool_]) -> Floats:
    """Nelson-Aalen estimate over all runs together, at each run's own time."""
    times = np.unique(until[reached])
    events = (reached & (until == times[:, None])).sum(axis=1)
    at_risk = (until >= times[:, None]).sum(axis=1)
    return np.asarray((events / at_risk) @ (until >= times[:, None]), dtype=np.float64)


def seeds_needed_for_waits(hazard_ratio: float, reached_fraction: float, alpha: float = ALPHA) -> int | None:
    """Runs per recipe by Schoenfeld's formula. None: more than MOST_SEEDS, or undefined."""
    if math.isnan(hazard_ratio) or hazard_ratio == 1 or reached_fraction <= 0:
        return None
    # The fewest runs per recipe with which the exact test can reach `alpha` at all.
    fewest = next(count for count in itertools.count(2) if 2 / math.comb(2 * count, count) < alpha)
    if hazard_ratio in (0, math.inf):
        return fewest
    quantiles = float(stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(POWER))
    events = 4 * (quantiles / math.log(hazard_ratio)) ** 2
    runs = max(fewest, math.ceil(events / (2 * reached_fraction)))
    return runs if runs <= MOST_SEEDS else None
