"""Decisions of a gate: cases by hand, and simulated gates that look after every round."""

import math

import numpy as np
import pytest

from hotlap.lab.decision import OUTCOMES, Design, Outcome, decide, stops

DESIGN = Design(level=0.05, alpha=0.05, least_effect=0.005, most_seeds=12)
CLEAR_GAIN = [-0.020, -0.021, -0.019, -0.0205, -0.0195, -0.0202]


def test_a_clear_gain_helps_at_the_first_look_that_shows_it():
    decision = decide(CLEAR_GAIN, DESIGN)
    assert decision.outcome is Outcome.HELPS
    assert decision.rounds < len(CLEAR_GAIN)
    assert decision == decide(CLEAR_GAIN[: decision.rounds], DESIGN)
    assert decision.p <= decision.p_needed
    assert decision.low < decision.effect < decision.high < 0


def test_the_same_rounds_do_not_help_at_a_lower_level():
    noisy = [-0.020, -0.028, -0.012, -0.024]
    assert decide(noisy, DESIGN).outcome is Outcome.HELPS
    strict = decide(noisy, Design(1e-5, 0.05, 0.005, 12))
    assert strict.outcome is Outcome.UNDECIDED
    assert strict.p > strict.p_needed


def test_what_is_worse_hurts_and_what_is_equal_has_no_effect_worth_having():
    assert decide([-d for d in CLEAR_GAIN], DESIGN).outcome is Outcome.HURTS
    equal = decide([0.0002, -0.0003, 0.0001, 0.0001, -0.0002], DESIGN)
    assert equal.outcome is Outcome.NO_EFFECT
    assert equal.is_equivalent


def test_a_certain_gain_that_is_too_small_is_not_worth_having():
    tiny = decide([-0.0020, -0.0021, -0.0019, -0.0020], DESIGN)
    assert tiny.outcome is Outcome.NO_EFFECT
    assert tiny.high < 0
    worth = Design(0.05, 0.05, 0.0005, 12)
    assert decide([-0.0020, -0.0021, -0.0019, -0.0020], worth).outcome is Outcome.HELPS


def test_a_small_loss_is_no_effect_but_not_equivalent():
    """A gain worth having is ruled out; a loss of that size is not."""
    decision = decide([0.004, 0.006, 0.002, 0.007, 0.001], Design(0.05, 0.05, 0.005, 12))
    assert decision.outcome in (Outcome.NO_EFFECT, Outcome.HURTS)
    assert not decision.is_equivalent


@pytest.mark.parametrize("differences", [[], [-1.0], [-1.0, -1.1]])
def test_before_the_first_look_nothing_is_decided(differences):
    decision = decide(differences, DESIGN)
    assert decision.outcome is Outcome.UNDECIDED
    assert decision.rounds == len(differences)
    assert math.isnan(decision.p)


def test_no_change_at_all_is_no_effect_and_no_spread_is_no_evidence():
    same = decide([0.0] * 5, DESIGN)
    assert (same.outcome, same.low, same.high) == (Outcome.NO_EFFECT, 0, 0)
    assert decide([-0.3] * 12, DESIGN).outcome is Outcome.UNDECIDED


def test_seeds_beyond_the_plan_do_not_count():
    rng = np.random.default_rng(0)
    noise = rng.normal(size=12)
    few = Design(0.001, 0.05, 0.0, 6)
    assert decide(noise, few) == decide(noise[:6], few)


def shares(effect, design, count=4000, seed=3):
    d = np.diff(np.random.default_rng(seed).normal(size=(2, count, design.most_seeds)), axis=0)[0]
    outcomes, rounds = stops(d - effect, design)
    return {o: float(np.mean(outcomes == i)) for i, o in enumerate(OUTCOMES)}, float(rounds.mean())


def test_without_effect_few_gates_help_although_they_look_after_every_round():
    found, _ = shares(0.0, Design(0.05, 0.05, 0.0, 12))
    assert found[Outcome.HELPS] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    assert found[Outcome.HURTS] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)
    strict, _ = shares(0.0, Design(0.005, 0.05, 0.0, 12))
    assert strict[Outcome.HELPS] <= 0.005 + 3 * math.sqrt(0.005 / 4000)


def test_an_effect_of_two_standard_deviations_is_found_with_fewer_runs_than_a_fixed_design_needs():
    found, rounds = shares(2.0, Design(0.05, 0.05, 0.0, 12))
    assert found[Outcome.HELPS] > 0.9
    assert rounds < 10  # Welch's test needs ten seeds for the power that this has; see bench.gate


def test_a_gain_worth_having_is_rarely_ruled_out():
    found, _ = shares(1.0, Design(0.05, 0.05, 1.0, 12))
    assert found[Outcome.NO_EFFECT] + found[Outcome.HURTS] <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)


def test_no_effect_is_told_when_seeds_suffice():
    found, _ = shares(0.0, Design(0.05, 0.05, 2.0, 12))
    assert found[Outcome.NO_EFFECT] > 0.9
