"""How validation develops over a run: its best step, whether it has begun to rise, and whether the run ends.

Pure functions of the validations so far. A trend is saved with a checkpoint, so that a resumed run has the
same best step, and neither warns twice nor waits longer than its patience.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hotlap.config import EvaluationConfig
from hotlap.train.evaluation import Evaluation, reaches_target

# A rise counts if the loss is this much above the best, as a factor, in so many validations in a row. On
# fixed tokens only the noise of the weights is left, which moves a loss by less, and not always upwards.
RISE = 1.005
LONG_ENOUGH = 3


@dataclass(frozen=True)
class Trend:
    best_step: int = -1  # -1: no finite validation yet
    best_loss: float = math.inf  # `Evaluation.comparable_loss`
    best_bpb: float | None = None
    above_best: int = 0  # validations since the best one
    rises: int = 0  # of these the last ones in a row that are above it by more than noise
    warned: bool = False

    def after(self, step: int, loss: float, bpb: float | None) -> Trend:
        """The trend with one more validation. Equal to the best is not better."""
        if loss < self.best_loss:
            return Trend(step, loss, bpb, warned=self.warned)
        rises = self.rises + 1 if loss > RISE * self.best_loss else 0
        warned = self.warned or rises >= LONG_ENOUGH
        return Trend(self.best_step, self.best_loss, self.best_bpb, self.above_best + 1, rises, warned)


def end_after(evaluation: Evaluation, trend: Trend, settings: EvaluationConfig) -> str:
    """How the run ends after this validation; empty if it goes on."""
    if settings.stop_at_target and reaches_target(evaluation.loss, evaluation.bpb, settings):
        return "target"
    return "patience" if out_of_patience(trend, settings) else ""


def out_of_patience(trend: Trend, settings: EvaluationConfig) -> bool:
    return 0 < settings.patience <= trend.above_best


def rise_line(evaluation: Evaluation, trend: Trend, epochs: float) -> str:
    """What to tell when validation has risen for long enough to be no noise, and what to do about it."""
    rise = evaluation.comparable_loss / trend.best_loss - 1
    return (
        f"validation is {rise:.0%} above its best, of step {trend.best_step}, and rising: after {epochs:.1f}"
        f" epochs the model learns its text by heart; train shorter (--steps {trend.best_step}) or on more"
        f" text, or end such a run with --patience {LONG_ENOUGH}"
    )
