"""How small a p-value must be at each look, so that looking after every round of seeds stays honest.

A test that is repeated as seeds arrive finds "significance" by luck sooner or later. Alpha spending (Lan and
DeMets 1983, https://doi.org/10.1093/biomet/70.3.659) divides the permitted chance of an error over the looks
in advance, and takes into account that looks share data.

The data are the differences of rounds, tested by one-sample t tests. The usual levels assume known variance;
at a few seeds they err too often. Here the chance of crossing is exact for normal differences of unknown
variance: a sequence of t statistics is a Markov chain under no effect (`_at_most`), so that it can be
followed on a grid, as Armitage, McPherson and Rowe (1969, https://doi.org/10.2307/2343787) do for sums.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import optimize, special

from hotlap.runs.reader import Floats

FIRST_LOOK = 3  # rounds; the t test of two has one degree of freedom and shows next to nothing
SPENDING_POWER = 1.5  # chosen with `python -m bench.gate`
CELLS = 160
REACH = 6.0  # the grid begins this many standard normal quantiles below the middle


def looks_of(most_seeds: int) -> tuple[int, ...]:
    """The numbers of rounds after which the differences are tested."""
    return tuple(range(min(FIRST_LOOK, most_seeds), most_seeds + 1))


def spent(fraction: float, alpha: float) -> float:
    """The chance of an error that may be used up after this fraction of the rounds."""
    return float(alpha * fraction**SPENDING_POWER)


@functools.lru_cache(maxsize=512)
def nominal_levels(most_seeds: int, alpha: float) -> tuple[float, ...]:
    """For each look, the level of its one-sided t test. Under no effect, P(p ≤ level at any look) = alpha."""
    levels: list[float] = []
    looks = looks_of(most_seeds)
    # The state before a look: values r of the statistic (see `_at_most`), and the chance of each, of a test
    # that has not stopped.
    r, chance = np.zeros(0), np.zeros(0)
    spent_before = 0.0
    for n in looks:
        to_spend = spent(n / most_seeds, alpha)
        if not levels:
            level = to_spend
            edges = _edges(level)
            below = special.ndtr(edges)
        else:
            level = _level(r, chance, n, to_spend - spent_before)
            edges = _edges(level)
            below = chance @ _at_most(_r_of(edges, n)[None, :], r[:, None], n)
        chance = np.diff(below, prepend=0.0)
        # Of each cell the middle; of the first, which reaches to minus infinity, its edge.
        r = _r_of(np.concatenate([edges[:1], (edges[1:] + edges[:-1]) / 2]), n)
        levels.append(level)
        spent_before = to_spend
    return tuple(levels)


def _edges(level: float) -> Floats:
    """Upper edges of the cells, as normal quantiles of the p-value, up to the boundary."""
    return np.linspace(-REACH, -float(special.ndtri(level)), CELLS)


def _r_of(quantiles: Floats, n: int) -> Floats:
    """r = (sum of the differences) / √(sum of their squares), from the normal quantile of the t test's p."""
    # The p-value of the nearer tail keeps its digits.
    t = -special.stdtrit(n - 1, special.ndtr(-np.abs(quantiles))) * np.sign(quantiles)
    return np.asarray(t * math.sqrt(n) / np.sqrt(n - 1 + t * t), dtype=np.float64)


def _level(r: Floats, chance: Floats, n: int, to_spend: float) -> float:
    """The level that a test going on from `r` passes at look n with the chance `to_spend`."""

    def excess(quantile: float) -> float:
        above = chance @ (1 - _at_most(_r_of(np.array([quantile]), n), r, n))
        return math.log(max(float(above), 1e-300)) - math.log(to_spend)

    return float(special.ndtr(-optimize.brentq(excess, 0.0, 2 * REACH, xtol=1e-7)))


def _at_most(c: Floats, r: Floats, n: int) -> Floats:
    """P(r of n differences ≤ c), given r of the first n − 1 of them.

    With R² the sum of squares so far and w = (next difference) / R, the next r is (r + w) / √(1 + w²). Under
    no effect the direction of the vector of differences is independent of its length R, so w does not depend
    on r, and w·√(n − 1) has a t distribution with n − 1 degrees of freedom. Solving for w gives one bound or
    two.
    """
    c, r = np.broadcast_arrays(c, r)
    with np.errstate(divide="ignore", invalid="ignore"):
        root = np.abs(c) * np.sqrt(np.maximum(1 + r * r - c * c, 0.0))
        one, other = (-r - root) / (1 - c * c), (-r + root) / (1 - c * c)
    low, high = np.minimum(one, other), np.maximum(one, other)
    below_low, below_high = _w_below(low, n), _w_below(high, n)
    inside = below_high - below_low
    # Beyond ±1 the next r gets only from the same side, and at most to √(1 + r²).
    beyond = np.where((r * c > 0) & (1 + r * r > c * c), inside, 0.0)
    return np.where(
        np.abs(c) < 1,
        np.where(c >= 0, below_high, below_low),
        np.where(c > 0, 1 - beyond, beyond),
    )


def _w_below(w: Floats, n: int) -> Floats:
    return np.asarray(special.stdtr(n - 1, w * math.sqrt(n - 1)), dtype=np.float64)
