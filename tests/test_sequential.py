"""Levels under peeking: against the plain t test, against simulation, and what they promise at any level."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from hotlap.lab.sequential import looks_of, nominal_levels, spent


def test_one_look_is_the_plain_test():
    assert looks_of(2) == (2,)
    assert nominal_levels(2, 0.05) == (0.05,)
    assert nominal_levels(3, 0.01) == (0.01,)


def test_the_first_look_spends_what_it_may_and_later_ones_gain_from_sharing_data():
    levels = nominal_levels(12, 0.05)
    assert looks_of(12) == tuple(range(12 - len(levels) + 1, 13))
    assert levels[0] == pytest.approx(spent(looks_of(12)[0] / 12, 0.05))
    assert max(levels) < 0.05 < sum(levels)
    assert spent(1.0, 0.05) == 0.05


@pytest.mark.parametrize("alpha", [0.05, 0.005])
def test_the_chance_to_cross_at_any_look_is_alpha(alpha):
    rng = np.random.default_rng(1)
    count = 100_000
    differences = rng.normal(size=(count, 8))
    crossed = np.zeros(count, dtype=bool)
    for n, level in zip(looks_of(8), nominal_levels(8, alpha), strict=True):
        p = scipy_stats.ttest_1samp(differences[:, :n], 0, axis=1, alternative="less").pvalue
        crossed |= p <= level
    assert crossed.mean() == pytest.approx(alpha, abs=3.5 * np.sqrt(alpha / count))


@pytest.mark.parametrize("alpha", [0.05, 1e-3, 1e-6])
def test_a_smaller_alpha_needs_smaller_p_values_at_every_look(alpha):
    assert all(a < b for a, b in zip(nominal_levels(12, alpha / 2), nominal_levels(12, alpha), strict=True))
    assert all(level < alpha for level in nominal_levels(12, alpha))
