"""The statistics against SciPy, against cases worked by hand, and on simulated races."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from hotlap.report.stats import (
    Waits,
    hedges_g,
    holm,
    log_rank,
    mean_below,
    median_wait,
    paired,
    power,
    seeds_needed,
    seeds_needed_for_waits,
    summarize,
    welch,
)
from hotlap.report.verdict import Metric, judge, judge_waits

LOSS = Metric("loss", "final loss", "nats", 4)
A, B, CLEARLY_LOWER = [3.28, 3.30, 3.27, 3.29], [3.25, 3.26, 3.22], [3.24, 3.25, 3.23]


def waits(until, reached):
    return Waits(np.array(until, dtype=float), np.array(reached, dtype=bool))


def test_summary_by_hand():
    # Mean 3, variance (1+0+1)/2 = 1; t at 97.5 % with 2 degrees of freedom is 4.3027, over √3.
    summary = summarize([2.0, 3.0, 4.0])
    assert (summary.count, summary.mean, summary.sd) == (3, 3.0, 1.0)
    assert summary.low == pytest.approx(3 - 4.30265 / math.sqrt(3), abs=1e-4)
    assert summary.high == pytest.approx(3 + 4.30265 / math.sqrt(3), abs=1e-4)


def test_one_run_has_a_mean_and_nothing_else():
    summary = summarize([3.3])
    assert (summary.count, summary.mean) == (1, 3.3)
    assert all(math.isnan(x) for x in (summary.sd, summary.low, summary.high))
    assert math.isnan(welch([3.3], [3.1, 3.2]).p)
    assert math.isnan(paired([3.3], [3.1]).p)
    assert math.isnan(mean_below([3.2], 3.28))
    assert math.isnan(hedges_g([3.3], [3.1, 3.2])[0])
    assert math.isnan(summarize([]).mean)


def test_welch_by_hand_and_by_scipy():
    result = welch(A, B)
    # Means 3.285 and 3.24333; variances 1.66667e-4 and 4.33333e-4; se² = 4.16667e-5 + 1.44444e-4.
    se = math.sqrt(1.66667e-4 / 4 + 4.33333e-4 / 3)
    freedom = se**4 / ((1.66667e-4 / 4) ** 2 / 3 + (4.33333e-4 / 3) ** 2 / 2)
    assert result.mean == pytest.approx(-0.0416667, abs=1e-6)
    assert result.p == pytest.approx(2 * scipy_stats.t.sf(0.0416667 / se, freedom), rel=1e-3)
    half = scipy_stats.t.ppf(0.975, freedom) * se
    assert (result.low, result.high) == pytest.approx((result.mean - half, result.mean + half), abs=1e-5)
    assert result.p == pytest.approx(scipy_stats.ttest_ind(B, A, equal_var=False).pvalue)


def test_paired_is_a_one_sample_test_of_the_differences():
    a, b = [3.30, 3.20, 3.40], [3.28, 3.19, 3.37]
    result = paired(a, b)
    assert result.mean == pytest.approx(-0.02)
    assert result.p == pytest.approx(scipy_stats.ttest_1samp(np.subtract(b, a), 0).pvalue)
    assert result.low < result.mean < result.high
    assert result.p < welch(a, b).p


def test_values_that_almost_agree_are_compared_without_a_warning():
    almost = [2.8014, 2.8014 + 1e-15, 2.8014 - 1e-15]  # runs that diverged before they had learned anything
    assert welch([1.55, 1.56, 1.57], almost).p < 1e-3
    assert paired([1.55, 1.56, 1.57], almost).p < 1e-3


def test_no_spread_is_not_evidence():
    assert math.isnan(welch([3.0, 3.0], [2.0, 2.0]).p)
    assert math.isnan(paired([1.0, 2.0, 3.0], [1.0, 2.0, 3.0]).p)
    assert math.isnan(mean_below([3.0, 3.0, 3.0], 3.28))


@pytest.mark.parametrize(
    "given_p, adjusted",
    [
        ([0.01, 0.04, 0.03], [0.03, 0.06, 0.06]),
        ([0.01, 0.02, 0.03, 0.005], [0.03, 0.04, 0.04, 0.02]),
        ([0.5, 0.9], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([], []),
    ],
)
def test_holm_by_hand(given_p, adjusted):
    assert holm(given_p) == pytest.approx(adjusted)


def test_holm_counts_what_could_not_be_tested():
    first, second = holm([0.02, math.nan])
    assert first == pytest.approx(0.04)
    assert math.isnan(second)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_keeps_the_order_and_lies_between_p_and_bonferroni(ps):
    adjusted = holm(ps)
    for p, q in zip(ps, adjusted, strict=True):
        assert p <= q <= min(1.0, len(ps) * p) + 1e-12
    assert [adjusted[i] for i in np.argsort(ps, kind="stable")] == sorted(adjusted)


def test_the_target_test_is_one_sided():
    losses = [3.2759, 3.2773, 3.2756, 3.2794, 3.2785]
    x = np.array(losses)
    t = (x.mean() - 3.28) / (x.std(ddof=1) / math.sqrt(5))
    assert mean_below(losses, 3.28) == pytest.approx(scipy_stats.t.cdf(t, 4))
    assert mean_below(losses, 3.28) < 0.05
    assert mean_below(losses, 3.27) > 0.95


def test_hedges_g_by_hand():
    # Means 2 and 4, both variances 1: d = 2, J(4) = Γ(2)/(√2·Γ(1.5)) = 0.797885.
    g, low, high = hedges_g([1.0, 2.0, 3.0], [3.0, 4.0, 5.0])
    assert g == pytest.approx(2 * 0.797885, abs=1e-5)
    # The interval's ends, put back as true effects, have the observed t at their tails.
    scale, t, j = math.sqrt(2 / 3), 2 / math.sqrt(2 / 3), 0.797885
    assert scipy_stats.nct.cdf(t, 4, low / j / scale) == pytest.approx(0.975, abs=1e-4)
    assert scipy_stats.nct.cdf(t, 4, high / j / scale) == pytest.approx(0.025, abs=1e-4)


def test_power_of_the_textbook_cases():
    # Two-sided 5 %, 80 % power: 64 a group for half a standard deviation, 17 for one, 26 for 0.8.
    assert [seeds_needed(effect) for effect in (0.5, 1.0, 0.8)] == [64, 17, 26]
    # Paired: 34 pairs for half a standard deviation of the difference.
    assert seeds_needed(0.5, is_paired=True) == 34
    assert power(1.0, 17, 0.05) == pytest.approx(0.807, abs=0.001)
    assert seeds_needed(0.0) is None
    assert seeds_needed(0.01) is None
    assert seeds_needed(40.0) == 2


def test_seeds_needed_matches_the_tests_own_success_rate():
    rng = np.random.default_rng(1)
    a, b = rng.normal(0, 1, (4000, 17)), rng.normal(1, 1, (4000, 17))
    found = np.mean(scipy_stats.ttest_ind(a, b, axis=1, equal_var=False).pvalue < 0.05)
    assert found == pytest.approx(0.8, abs=0.03)


def test_median_wait_by_hand():
    median, low, high = median_wait(waits([10, 20, 30, 40, 50], [1, 1, 1, 1, 1]))
    assert median == 30
    assert low < median < high
    # One of five leaves at 15 unreached: survival 4/5, then 4/5·2/3 = .533, then 4/5·1/3 = .267 at 30.
    assert median_wait(waits([10, 15, 20, 30, 40], [1, 0, 1, 1, 0]))[0] == 30
    assert median_wait(waits([10, 20, 30], [1, 0, 0]))[0] == math.inf
    assert median_wait(waits([20, 30], [0, 0])) == (math.inf, 20.0, math.inf)


def test_log_rank_by_hand():
    # Arrivals 1, 2 (candidate) before 3, 4 (baseline): E = 2/4 + 1/3 = .8333, O = 2, and the others O = 2,
    # E = 3.1667. Of the 6 labellings 2 are as uneven.
    p, ratio = log_rank(waits([3, 4], [1, 1]), waits([1, 2], [1, 1]))
    assert ratio == pytest.approx((2 / 0.83333) / (2 / 3.16667), rel=1e-4)
    assert p == pytest.approx(2 / 6)


def test_log_rank_for_many_runs_is_scipys():
    rng = np.random.default_rng(0)
    a, b = rng.exponential(10, 40), rng.exponential(4, 40)
    p, ratio = log_rank(waits(np.minimum(a, 12), a < 12), waits(np.minimum(b, 12), b < 12))
    theirs = scipy_stats.logrank(
        scipy_stats.CensoredData(uncensored=a[a < 12], right=[12.0] * int((a >= 12).sum())),
        scipy_stats.CensoredData(uncensored=b[b < 12], right=[12.0] * int((b >= 12).sum())),
    )
    assert p == pytest.approx(theirs.pvalue)
    assert ratio > 1.5


def test_exact_log_rank_tends_to_scipys():
    rng = np.random.default_rng(3)
    a, b = rng.exponential(10, 8), rng.exponential(6, 8)
    exact, _ = log_rank(waits(a, a > 0), waits(b, b > 0))
    theirs = scipy_stats.logrank(a, b).pvalue
    assert exact == pytest.approx(theirs, abs=0.05)


def test_log_rank_without_arrivals_or_with_too_few_runs():
    assert math.isnan(log_rank(waits([9, 9], [0, 0]), waits([9, 9], [0, 0]))[0])
    assert math.isnan(log_rank(waits([9], [1]), waits([9, 9], [1, 1]))[0])
    assert log_rank(waits([9] * 4, [0] * 4), waits([5] * 4, [1] * 4))[1] == math.inf


@pytest.mark.parametrize("runs", [4, 10])  # with an exact p, and with SciPy's
def test_log_rank_of_runs_that_left_before_the_first_arrival(runs):
    left, arrived = waits([5] * runs, [0] * runs), waits([9] * runs, [1] * runs)
    for baseline, candidate in ((arrived, left), (left, arrived)):
        assert all(math.isnan(x) for x in log_rank(baseline, candidate))
        (verdict,) = judge_waits(LOSS, baseline, [candidate], [False])
        assert verdict.outcome == "no evidence"


def test_runs_for_a_hazard_ratio_by_schoenfeld():
    # 4·(1.95996 + 0.84162)² / ln(2)² = 65.3 arrivals, half of them a recipe.
    assert seeds_needed_for_waits(2.0, 1.0) == 33
    assert seeds_needed_for_waits(0.5, 0.5) == 66
    assert seeds_needed_for_waits(1.0, 1.0) is None
    assert seeds_needed_for_waits(math.nan, 1.0) is None
    # Three against three have 20 orders, so that the rarest two have a tenth of the chance.
    assert seeds_needed_for_waits(math.inf, 0.5) == seeds_needed_for_waits(0.0, 0.5) == 4
    assert seeds_needed_for_waits(1e9, 1.0) == 4
    assert seeds_needed_for_waits(math.inf, 0.5, alpha=0.05 / 7) == 6


def test_a_verdict_says_what_was_measured():
    helps, hurts = judge(LOSS, A, [CLEARLY_LOWER, [3.4, 3.41, 3.39]], [False, False])
    assert helps.outcome == "helps"
    assert helps.words.startswith("helps (−0.0450 nats, 95 % CI −0.06")
    assert hurts.words.startswith("hurts (+0.1150 nats, 95 % CI +0.")
    assert helps.p_adjusted >= helps.difference.p
    assert helps.more_seeds is None


def test_higher_is_better_for_speed():
    (verdict,) = judge(
        Metric("s", "speed", "tokens/s", 0, lower_is_better=False), [1, 2, 3], [[9, 10, 11]], [False]
    )
    assert verdict.outcome == "helps"
    assert "+8 tokens/s" in verdict.words


def test_an_undecided_verdict_names_the_seeds():
    a, b = [1.0, 2.0, 3.0], [1.5, 2.5, 3.5]
    (verdict,) = judge(LOSS, a, [b], [False])
    # Half a standard deviation: 64 runs each, 3 there.
    assert verdict.words == "no evidence either way, about 61 more seeds needed"
    assert verdict.more_seeds == 61


@pytest.mark.parametrize(
    "a, b, words",
    [
        ([3.3], [3.1], "no evidence either way, at least 1 more seed needed"),
        ([], [], "no evidence either way, at least 2 more seeds needed"),
        ([3.0, 3.0], [3.0, 3.0], "no evidence either way, more than 200 more seeds needed"),
        ([3.0, 3.0], [2.0, 2.0], "no evidence either way, about 1 more seed needed"),
    ],
)
def test_verdicts_that_no_test_can_give(a, b, words):
    (verdict,) = judge(LOSS, a, [b], [False])
    assert (verdict.outcome, verdict.words) == ("no evidence", words)


def test_the_more_comparisons_the_stricter():
    alone = judge(LOSS, A, [CLEARLY_LOWER], [False])[0]
    among = judge(LOSS, A, [CLEARLY_LOWER] + [A] * 30, [False] * 31)[0]
    assert alone.outcome == "helps"
    assert among.outcome == "no evidence"


def test_censored_waits_are_judged_not_dropped():
    never = waits([60] * 5, [0] * 5)
    fast = waits([30, 31, 32, 33, 34], [1] * 5)
    (verdict,) = judge_waits(LOSS, never, [fast], [False])
    assert verdict.words == ("helps (target reached by 5 of 5 runs against 0 of 5, log-rank p = 0.0079)")
    (verdict,) = judge_waits(LOSS, fast, [never], [False])
    assert verdict.outcome == "hurts"
    (verdict,) = judge_waits(LOSS, fast, [waits([30, 31, 32, 33, 60], [1, 1, 1, 1, 0])], [False])
    assert verdict.outcome == "no evidence"
    (verdict,) = judge_waits(LOSS, waits([9, 8, 7], [1] * 3), [waits([4, 5, 6], [1] * 3)], [False])
    assert verdict.difference.test == "Welch"


def simulated(effect_sd, *, is_paired, labels=2, repetitions=500, seeds=5):
    """Outcomes of races whose losses are normal; all candidates differ from the baseline by the effect."""
    rng = np.random.default_rng(7)
    outcomes = []
    for _ in range(repetitions):
        races = rng.normal(3.3, 0.01, (labels, seeds))
        races[1:] -= effect_sd * 0.01
        verdicts = judge(LOSS, races[0], list(races[1:]), [is_paired] * (labels - 1))
        outcomes.append({verdict.outcome for verdict in verdicts})
    return outcomes


@pytest.mark.parametrize("is_paired, labels", [(False, 2), (True, 2), (False, 4)])
def test_equal_recipes_are_rarely_told_apart(is_paired, labels):
    outcomes = simulated(0, is_paired=is_paired, labels=labels)
    assert sum("helps" in outcome for outcome in outcomes) <= 0.05 * 500
    # Both directions together stay near the level, within what 500 repetitions can show.
    assert sum("no evidence" not in outcome or len(outcome) > 1 for outcome in outcomes) <= 0.075 * 500


@pytest.mark.parametrize("is_paired", [False, True])
def test_an_effect_of_two_standard_deviations_is_mostly_found_with_five_seeds(is_paired):
    outcomes = simulated(2, is_paired=is_paired)
    assert sum(outcome == {"helps"} for outcome in outcomes) > 0.55 * 500
    assert not any("hurts" in outcome for outcome in outcomes)


@pytest.mark.parametrize("effect_s, low, high", [(0, 0.0, 0.05), (-2, 0.55, 1.0)])
def test_censored_races(effect_s, low, high):
    rng = np.random.default_rng(11)
    helped = 0
    for _ in range(500):
        a, b = rng.normal(10, 1, 5), rng.normal(10 + effect_s, 1, 5)
        both = [waits(np.minimum(x, 10.8), x <= 10.8) for x in (a, b)]
        helped += judge_waits(LOSS, both[0], [both[1]], [False])[0].outcome == "helps"
    assert low * 500 <= helped <= high * 500
