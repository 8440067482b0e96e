"""Levels of a series: cases by hand, their sum, and a small simulated series of ideas."""

import numpy as np
import pytest
from scipy import special

from bench.gate import LEVELS, all_series, best_of_one, normal, summary
from hotlap.lab.discoveries import DECAY, START_SHARE, level_of_try, share


def test_shares_of_an_event_add_up_to_one():
    first = sum(share(number) for number in range(1, 2000))
    assert first + special.zeta(DECAY, 2000) / special.zeta(DECAY) == pytest.approx(1)


def test_levels_fall_without_discoveries_and_rise_after_one():
    levels = [level_of_try(number, [], 0.05) for number in range(1, 201)]
    assert levels == sorted(levels, reverse=True)
    assert levels[0] == pytest.approx(START_SHARE * 0.05 * share(1))
    assert sum(levels) < START_SHARE * 0.05
    assert level_of_try(11, [10], 0.05) == pytest.approx(levels[10] + (1 - START_SHARE) * 0.05 * share(1))
    second = level_of_try(11, [3, 10], 0.05)
    expected = levels[10] + (1 - START_SHARE) * 0.05 * share(8) + 0.05 * share(1)
    assert second == pytest.approx(expected)


def test_a_discovery_counts_only_for_tries_that_began_after_it_was_known():
    assert level_of_try(5, [7], 0.05) == level_of_try(5, [], 0.05)
    assert level_of_try(7, [7], 0.05) == level_of_try(7, [], 0.05)


@pytest.mark.parametrize("found", [[], [1], [1, 2, 3], [5, 20, 21]])
def test_the_levels_spent_never_exceed_alpha_per_discovery(found):
    """What LORD++ rests on: the levels add up to at most alpha for each discovery, or one alpha."""
    total = sum(level_of_try(number, found, 0.05) for number in range(1, 400))
    assert total <= 0.05 * max(1, len(found)) + 1e-12


def test_of_a_series_few_accepted_ideas_are_false():
    rng = np.random.default_rng(4)
    level = LEVELS["gates at the levels of LORD++"]
    found, _, false_share, _ = summary(all_series(normal(), rng, 60, level=level))
    assert found >= 7
    assert false_share <= 0.05
    _, falsely, share_of_one, _ = summary(best_of_one(normal(), rng, 60))
    assert falsely > 80
    assert share_of_one > 0.85
