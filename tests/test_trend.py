"""What validations say of a run: its best step, a rise that is no noise, and when patience ends."""

import math

from hotlap.config import EvaluationConfig
from hotlap.train.evaluation import Evaluation
from hotlap.train.trend import LONG_ENOUGH, RISE, Trend, end_after, rise_line


def trend_of(losses: list[float]) -> Trend:
    trend = Trend()
    for step, loss in enumerate(losses):
        trend = trend.after(step, loss, None)
    return trend


def test_the_best_is_the_lowest_and_of_equals_the_first():
    assert (trend_of([4, 3, 2, 2, 5]).best_step, trend_of([4, 3, 2, 2, 5]).best_loss) == (2, 2)
    assert trend_of([math.nan, 3, math.nan]).best_step == 1
    assert trend_of([math.nan, math.inf]).best_step == -1


def test_a_rise_is_told_when_it_is_long_and_more_than_noise():
    high, noise = 2 * RISE + 0.01, 2 * RISE - 0.001
    assert not trend_of([3, 2] + [high] * (LONG_ENOUGH - 1)).warned
    assert trend_of([3, 2] + [high] * LONG_ENOUGH).warned
    assert not trend_of([3, 2] + [noise] * 20).warned
    assert not trend_of([3, 2, high, high, noise, high, high, noise]).warned
    assert not trend_of([3, 2, high, high, 1.9, high, high]).warned


def test_a_warning_is_remembered_also_after_another_best():
    assert trend_of([3, 2, *[4] * LONG_ENOUGH, 1, 4]).warned


def test_patience_counts_validations_since_the_best():
    settings = EvaluationConfig(patience=2)
    evaluation = Evaluation(3.0, None)
    assert end_after(evaluation, trend_of([3, 2, 2.001]), settings) == ""
    assert end_after(evaluation, trend_of([3, 2, 2.001, 2]), settings) == "patience"
    assert end_after(evaluation, trend_of([3, 2, 2.001, 1.9, 4]), settings) == ""
    assert end_after(evaluation, trend_of([3, 2, 4, 4, 4, 4]), EvaluationConfig()) == ""


def test_the_warning_names_the_step_and_what_to_do():
    line = rise_line(Evaluation(2.5, None), trend_of([3, 2, 2.5, 2.5, 2.5]), epochs=12.34)
    for part in ("25% above its best", "step 1", "12.3 epochs", "--steps 1", f"--patience {LONG_ENOUGH}"):
        assert part in line
