"""The decision of a gate, from the differences of its rounds: helps, hurts, no effect worth having, or none.

A round is one run of each side with the same seed; its difference is candidate minus baseline, so that a gain
is negative. Two one-sided tests run side by side, each with an error that holds over all looks: "helps" at
the level that the series allows this try, and "a gain worth having is ruled out" at `alpha`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt
from scipy import special

from hotlap.lab.sequential import looks_of, nominal_levels
from hotlap.report.stats import NAN
from hotlap.runs.reader import Floats


class Outcome(StrEnum):
    HELPS = "helps"
    HURTS = "hurts"
    NO_EFFECT = "no effect worth having"
    UNDECIDED = "undecided"


OUTCOMES = tuple(Outcome)


@dataclass(frozen=True)
class Design:
    """What is fixed before the first round."""

    level: float  # chance of "helps" under no effect, over all looks
    alpha: float  # chance that a gain of `least_effect` or more is missed, over all looks
    least_effect: float  # the smallest gain worth having, in the metric's unit
    most_seeds: int


@dataclass(frozen=True)
class Decision:
    """`low` and `high`: the confidence interval of 1 − alpha, which holds however often it was looked at."""

    outcome: Outcome
    rounds: int
    effect: float  # mean difference, candidate minus baseline
    low: float
    high: float
    p: float  # of the one-sided t test of "no gain" at the last look
    p_needed: float  # what that p had to be at most
    is_equivalent: bool  # whether the whole interval is within ± least_effect


def decide(differences: Sequence[float] | Floats, design: Design) -> Decision:
    """The decision after these rounds. `UNDECIDED` before the last round means: go on."""
    d = np.asarray(differences, dtype=np.float64)
    outcomes, rounds = stops(d[None, :], design)
    n = int(rounds[0])
    mean = float(d[:n].mean()) if n else NAN
    looks = looks_of(design.most_seeds)
    if n < looks[0]:
        return without_statistics(OUTCOMES[outcomes[0]], n, mean)
    at = n - looks[0]
    _, error, _ = _t_test(d[None, :n])
    half = _t_quantile(nominal_levels(design.most_seeds, design.alpha / 2)[at], n) * float(error[0])
    low, high = mean - half, mean + half
    return Decision(
        outcome=OUTCOMES[outcomes[0]],
        rounds=n,
        effect=mean,
        low=low,
        high=high,
        p=float(_p_of_no_gain(d[None, :n])[0]),
        p_needed=nominal_levels(design.most_seeds, design.level)[at],
        is_equivalent=max(-low, high) < design.least_effect,
    )


def without_statistics(outcome: Outcome, rounds: int, effect: float) -> Decision:
    """Before the first look, or where a run has no value."""
    return Decision(outcome, rounds, effect, NAN, NAN, NAN, NAN, is_equivalent=False)


def stops(differences: Floats, design: Design) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(index into OUTCOMES, rounds used) of many gates at once: rows of `differences` are gates."""
    gates, available = differences.shape
    outcomes = np.full(gates, OUTCOMES.index(Outcome.UNDECIDED))
    rounds = np.full(gates, min(available, design.most_seeds))
    helps_levels = nominal_levels(design.most_seeds, design.level)
    miss_levels = nominal_levels(design.most_seeds, design.alpha)
    going_on = np.ones(gates, dtype=np.bool_)
    for n, helps_level, miss_level in zip(
        looks_of(design.most_seeds), helps_levels, miss_levels, strict=True
    ):
        if n > available:
            break
        d = differences[:, :n]
        mean, error, _ = _t_test(d)
        most_gain = -mean + _t_quantile(miss_level, n) * error  # upper confidence bound
        helps = _p_of_no_gain(d) <= helps_level
        # Without any spread there is no t test, but no change at all is no effect.
        without_effect = np.where(error > 0, most_gain < design.least_effect, np.ptp(d, axis=1) == 0)
        without_effect &= (error > 0) | (mean == 0)
        found = np.where(
            without_effect,
            np.where(most_gain < 0, OUTCOMES.index(Outcome.HURTS), OUTCOMES.index(Outcome.NO_EFFECT)),
            OUTCOMES.index(Outcome.HELPS),
        )
        stopping = going_on & (helps | without_effect)
        outcomes[stopping], rounds[stopping] = found[stopping], n
        going_on &= ~stopping
    return outcomes, rounds


def _t_test(differences: Floats) -> tuple[Floats, Floats, Floats]:
    """(mean, standard error, t) of each row; without spread an error of 0 and t = nan."""
    n = differences.shape[1]
    mean = differences.mean(axis=1)
    largest = np.abs(differences).max(axis=1)
    spread = np.ptp(differences, axis=1) > 1e-12 * largest
    error = np.where(spread, differences.std(axis=1, ddof=1) / math.sqrt(n), 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return mean, error, np.where(spread, mean / error, np.nan)


def _p_of_no_gain(differences: Floats) -> Floats:
    """One-sided p-value of "the mean difference is not below zero"; 1 where there is no spread."""
    _, _, t = _t_test(differences)
    p = special.stdtr(differences.shape[1] - 1, t)
    return np.asarray(np.where(np.isnan(p), 1.0, p), dtype=np.float64)


def _t_quantile(level: float, n: int) -> float:
    """The value that t of n differences exceeds with this chance."""
    return -float(special.stdtrit(n - 1, level))
