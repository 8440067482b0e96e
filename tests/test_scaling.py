"""Trends over sizes: the weighted line by hand, and which course the intervals allow."""

import math

import numpy as np
import pytest

from hotlap.lab.scaling import Rung, fit, interval, rung, sentence

SIZES = {"pico": 1e11, "nano": 1e13, "micro": 1e15, "small": 1e18}


def rungs(effects, error=0.001, seeds=5):
    return [
        Rung(size, SIZES[size], effect, error, seeds)
        for size, effect in zip(("pico", "nano", "micro"), effects, strict=True)
    ]


def words(effects, **other):
    of = rungs(effects, **other)
    return sentence(of, fit(of), "bits/byte", SIZES)


def test_the_line_by_hand():
    # Equal weights: x = −2, 0, 2 around 1e13; slope = Σxy/Σx² = (0.06 + 0 − 0.02)/8, the mean at the middle.
    scaling = fit(rungs([-0.03, -0.02, -0.01]))
    assert scaling.slope == pytest.approx(0.005)
    assert (scaling.middle, scaling.at_middle) == (pytest.approx(13), pytest.approx(-0.02))
    half = 2.1788 * 0.001 / math.sqrt(8)  # t at 97.5 % with 3 × 4 degrees of freedom
    assert scaling.slope_interval == pytest.approx((0.005 - half, 0.005 + half), abs=1e-6)
    assert scaling.at(1e15) == pytest.approx(-0.01)
    assert scaling.crossing == pytest.approx(1e17)


def test_precise_rungs_count_more():
    of = [Rung("pico", 1e11, 0.0, 1.0, 5), Rung("nano", 1e13, -0.02, 0.001, 5)]
    scaling = fit([*of, Rung("micro", 1e15, -0.03, 0.001, 5)])
    assert scaling.slope == pytest.approx(-0.005, abs=1e-4)


@pytest.mark.parametrize(
    "effects, expected",
    [
        ([-0.01, -0.02, -0.03], "the gain grows from pico to micro"),
        ([-0.03, -0.02, -0.01], "the gain fades from pico to micro"),
        ([-0.02, -0.0201, -0.0199], "the gain holds from pico to micro"),
        ([0.02, 0.0201, 0.0199], "the loss holds"),
        ([0.01, 0.02, 0.03], "the loss grows"),
        ([0.0002, -0.0003, 0.0001], "cannot be told"),
        ([-0.02, 0.03, -0.02], "cannot be told"),
    ],
)
def test_the_sentence_says_what_the_intervals_allow(effects, expected):
    assert words(effects).startswith(expected)


def test_where_a_fading_effect_would_cross_zero():
    assert "it would cross zero at 1.0e+17 FLOPs, between micro and small, if the line" in words(
        [-0.03, -0.02, -0.01]
    )
    inside = words([-0.02, 0.0, 0.02])
    assert "the gain fades" in inside
    assert "between nano and micro" in inside
    assert "if the line" not in inside


def test_a_line_that_hardly_fades_crosses_zero_nowhere():
    of = rungs([-0.1, -0.09995, -0.0999], error=1e-6)
    assert fit(of).crossing == math.inf
    assert "would cross zero at no size that could be trained" in sentence(of, fit(of), "nats", SIZES)


def test_sizes_that_scatter_more_than_their_seeds_explain_widen_the_interval():
    smooth, rough = fit(rungs([-0.03, -0.02, -0.01])), fit(rungs([-0.03, -0.01, -0.01]))
    assert rough.misfit > 1 >= smooth.misfit
    assert rough.freedom == 1
    assert np.ptp(rough.slope_interval) > 5 * np.ptp(smooth.slope_interval)
    assert rough.course == "cannot be told"


def test_too_few_sizes_or_no_spread_give_no_line():
    assert fit(rungs([-0.03, -0.02, -0.01])[:2]) is None
    assert fit(rungs([-0.03, -0.02, -0.01], error=0.0)) is None
    assert fit(rungs([-0.03, math.nan, -0.01])) is None
    assert sentence([], None, "nats", SIZES).startswith("cannot be told: a trend needs")


def test_a_rung_is_a_paired_comparison():
    one = rung("pico", 1e11, [3.30, 3.20, 3.40], [3.28, 3.19, 3.37])
    assert one.effect == pytest.approx(-0.02)
    assert one.error == pytest.approx(0.01 / math.sqrt(3))
    low, high = interval(one)
    assert (low, high) == pytest.approx((-0.02 - 4.30265 * one.error, -0.02 + 4.30265 * one.error), abs=1e-6)


def test_without_a_trend_few_ladders_see_one():
    rng = np.random.default_rng(2)
    courses = []
    for _ in range(1500):
        d = rng.normal(-0.01, 0.004, (3, 4))
        of = [rung(s, SIZES[s], np.zeros(4), x) for s, x in zip(("pico", "nano", "micro"), d, strict=True)]
        courses.append(fit(of).course)
    assert np.mean([course in ("grows", "fades") for course in courses]) <= 0.065
