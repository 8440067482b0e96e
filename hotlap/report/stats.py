"""The tests behind a verdict, as pure functions on arrays: did a change help, or was it a lucky seed?

SciPy has the distributions and the tests; what it lacks (Holm, Hedges' g with an interval, required seeds)
stands here. A test that the data do not allow (one run, no spread at all) gives nan, never a guess.
Differences are candidate minus baseline.
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
TARGET_ALPHA = 0.01  # one-sided: the level at which this field accepts "mean loss ≤ target"
POWER = 0.8
# Beyond this many seeds the honest answer is "very many", not a number.
MOST_SEEDS = 200
MOST_RELABELLINGS = 20_000
QUADRATURE_NODES = 200

Values = Sequence[float] | Floats
NAN = float("nan")


@dataclass(frozen=True)
class Summary:
    """Mean, standard deviation and confidence interval of the mean; nan where one run gives none."""

    count: int
    mean: float
    sd: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Of two means, with its confidence interval and the two-sided p-value of the named test."""

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


def _has_spread(*samples: Floats) -> bool:
    """Whether values differ by more than rounding; without spread a t statistic means nothing."""
    return any(np.ptp(x) > 1e-12 * max(1.0, float(np.abs(x).max())) for x in samples)


def welch(baseline: Values, candidate: Values) -> Difference:
    """Two independent samples whose variances may differ."""
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    mean = float(b.mean() - a.mean()) if a.size and b.size else NAN
    if min(a.size, b.size) < 2 or not _has_spread(a, b):
        return Difference("Welch", mean, NAN, NAN, NAN)
    result = stats.ttest_ind(b, a, equal_var=False)
    interval = result.confidence_interval(CONFIDENCE)
    return Difference("Welch", mean, float(interval.low), float(interval.high), float(result.pvalue))


def paired(baseline: Values, candidate: Values) -> Difference:
    """The same seeds in the same order: only the differences count."""
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    assert a.size == b.size, "pairs need equally many values"
    mean = float((b - a).mean()) if a.size else NAN
    if a.size < 2 or not _has_spread(b - a):
        return Difference("paired t", mean, NAN, NAN, NAN)
    result = stats.ttest_rel(b, a)
    interval = result.confidence_interval(CONFIDENCE)
    return Difference("paired t", mean, float(interval.low), float(interval.high), float(result.pvalue))


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down adjustment; a p that is nan counts as one comparison and stays nan."""
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
    """p of the one-sided test: small when the mean is below `target` beyond the luck of the seeds."""
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2 or not _has_spread(x):
        return NAN
    return float(stats.ttest_1samp(x, target, alternative="less").pvalue)


def hedges_g(baseline: Values, candidate: Values) -> tuple[float, float, float]:
    """Difference in pooled standard deviations, without small-sample bias, and its confidence interval."""
    a, b = np.asarray(baseline, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    if min(a.size, b.size) < 2 or not _has_spread(a, b):
        return NAN, NAN, NAN
    freedom = a.size + b.size - 2
    pooled = math.sqrt(((a.size - 1) * a.var(ddof=1) + (b.size - 1) * b.var(ddof=1)) / freedom)
    scale = math.sqrt(1 / a.size + 1 / b.size)
    t = float(b.mean() - a.mean()) / (pooled * scale)
    unbiased = math.exp(special.gammaln(freedom / 2) - special.gammaln((freedom - 1) / 2)) / math.sqrt(
        freedom / 2
    )

    # t follows a noncentral t whose centre is the true effect / scale: the interval holds the centres for
    # which this t is in neither tail.
    def centre(tail: float) -> float:
        reach = 8 * math.sqrt(1 + t * t / freedom)
        return float(
            optimize.brentq(
                lambda nc: noncentral_t_below(t, freedom, nc) - tail, t - reach, t + reach, xtol=1e-6
            )
        )

    low, high = centre((1 + CONFIDENCE) / 2), centre((1 - CONFIDENCE) / 2)
    return unbiased * t * scale, unbiased * low * scale, unbiased * high * scale


def noncentral_t_below(t: float, freedom: int, centre: float) -> float:
    """P(T ≤ t): the mean of Φ(t·s − centre) over the spread s that a sample may show.

    SciPy's own `nct` gives nan for one in ten ordinary arguments (version 1.17).
    """
    spreads, weights = _spread_quadrature(freedom)
    return float(weights @ special.ndtr(t * spreads - centre))


@functools.lru_cache(maxsize=1024)
def _spread_quadrature(freedom: int) -> tuple[Floats, Floats]:
    """Nodes and weights for a mean over s = √(χ²/freedom): Gauss-Legendre on its quantiles."""
    nodes, weights = np.polynomial.legendre.leggauss(QUADRATURE_NODES)
    spreads = np.sqrt(special.chdtri(freedom, (1 - nodes) / 2) / freedom)
    return spreads, weights / 2


def power(effect: float, count: int, alpha: float, *, is_paired: bool = False) -> float:
    """Of the two-sided t test with `count` runs a recipe. `effect`: true difference over the spread of one
    run or, where paired, of one pair's difference."""
    freedom = count - 1 if is_paired else 2 * (count - 1)
    centre = abs(effect) * math.sqrt(count if is_paired else count / 2)
    critical = float(special.stdtrit(freedom, 1 - alpha / 2))
    return 1 - noncentral_t_below(critical, freedom, centre) + noncentral_t_below(-critical, freedom, centre)


def seeds_needed(effect: float, alpha: float = ALPHA, *, is_paired: bool = False) -> int | None:
    """The fewest runs a recipe that find an effect with the usual power; None: more than MOST_SEEDS."""
    if not power(effect, MOST_SEEDS, alpha, is_paired=is_paired) >= POWER:  # nan included
        return None
    counts = range(2, MOST_SEEDS + 1)
    return counts[
        bisect.bisect_left(counts, POWER, key=lambda n: power(effect, n, alpha, is_paired=is_paired))
    ]


@dataclass(frozen=True)
class Waits:
    """Time (or tokens) to target of several runs; where not reached, how long a run counts as on its way."""

    until: Floats
    reached: npt.NDArray[np.bool_]

    @property
    def count(self) -> int:
        return self.until.size

    @property
    def all_reached(self) -> bool:
        return bool(self.reached.all())


def median_wait(waits: Waits) -> tuple[float, float, float]:
    """Kaplan-Meier median and its confidence interval; inf: beyond what the runs can tell."""
    if not waits.reached.any():
        return math.inf, float(waits.until.min()) if waits.count else NAN, math.inf
    survival = stats.ecdf(_censored(waits)).sf
    with warnings.catch_warnings():  # SciPy warns that the interval does not exist where survival is 1 or 0
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
    """(p, hazard ratio): a ratio above 1 means that the candidate reaches the target sooner.

    The chi-squared approximation calls equal recipes different twice too often at three runs each, so few
    runs get the exact p: the share of all ways to hand out the labels that are as uneven as this one.
    """
    if min(baseline.count, candidate.count) < 2:
        return NAN, NAN
    until = np.concatenate([candidate.until, baseline.until])
    reached = np.concatenate([candidate.reached, baseline.reached])
    hazard = _cumulative_hazard(until, reached)  # arrivals that each run should have had by its time
    expected, others_expected = hazard[: candidate.count].sum(), hazard[candidate.count :].sum()
    if not (expected and others_expected):  # no arrivals, or one side had left before them
        return NAN, NAN
    surplus = reached - hazard
    if math.comb(until.size, candidate.count) <= MOST_RELABELLINGS:
        labellings = np.array(list(itertools.combinations(range(until.size), candidate.count)))
        uneven = np.abs(surplus[labellings].sum(axis=1))
        p = float(np.mean(uneven >= abs(surplus[: candidate.count].sum()) - 1e-9))
    else:
        p = float(stats.logrank(_censored(candidate), _censored(baseline)).pvalue)
    observed, others = float(candidate.reached.sum()), float(baseline.reached.sum())
    if not others:
        return p, math.inf
    return p, float((observed / expected) / (others / others_expected))


def _cumulative_hazard(until: Floats, reached: npt.NDArray[np.bool_]) -> Floats:
    """Nelson-Aalen over all runs together, at each run's own time."""
    moments = np.unique(until[reached])
    arrivals = (reached & (until == moments[:, None])).sum(axis=1)
    still_running = (until >= moments[:, None]).sum(axis=1)
    return np.asarray((arrivals / still_running) @ (until >= moments[:, None]), dtype=np.float64)


def seeds_needed_for_waits(hazard_ratio: float, reached_share: float, alpha: float = ALPHA) -> int | None:
    """Schoenfeld's count of arrivals, as runs a recipe; None: more than MOST_SEEDS, or nothing to go by."""
    if math.isnan(hazard_ratio) or hazard_ratio == 1 or reached_share <= 0:
        return None
    # Runs a recipe whose most uneven order is rare enough for the exact test.
    fewest = next(count for count in itertools.count(2) if 2 / math.comb(2 * count, count) < alpha)
    if hazard_ratio in (0, math.inf):
        return fewest
    quantiles = float(stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(POWER))
    arrivals = 4 * (quantiles / math.log(hazard_ratio)) ** 2
    runs = max(fewest, math.ceil(arrivals / (2 * reached_share)))
    return runs if runs <= MOST_SEEDS else None
