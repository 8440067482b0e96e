"""The pace of a run that is to end after so many minutes: how many steps are left in the time that is left.

A few times on the way the number of steps is planned again, from the time per step since the last plan. Each
plan is saved with a checkpoint, and a resumed run keeps the plan that it had: what it computes does not
depend on its clock.
"""

from __future__ import annotations

from hotlap.config import Config
from hotlap.settings import updated
from hotlap.train.clock import Clock

# When to plan again, as fractions of the time for training; and how far off the end may be without it.
PLANS = (0.05, 0.12, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.97)
SLACK = 0.02
FEWEST_STEPS = 8  # to tell the time of a step from
# What a command does after its last step beside validating and sampling: it writes the report, and leaves.
# That takes longer where setting up has taken longer.
END_S, END_OF_SETUP = 2.5, 0.15
SAMPLE_S = 0.5  # to generate a sample, until one has been
# If setting up has taken most of the time, train for this fraction of it all the same.
LEAST_TRAINING = 0.2


class Pace:
    """`clock` has the seconds of the command so far, its setting up included."""

    def __init__(self, minutes: float, clock: Clock, step: int) -> None:
        self._clock = clock
        began_s = clock.total_s
        limit_s = 60 * minutes
        # When the last validation and sample are to be done.
        self._done_s = max(limit_s - END_S - END_OF_SETUP * began_s, began_s + LEAST_TRAINING * limit_s)
        self._plans = [began_s + share * (self._done_s - began_s) for share in PLANS]
        self._slack_s = SLACK * limit_s
        self._since = (step, clock.training_s)  # of the last plan
        self._validated = (0, 0.0)  # tokens and seconds
        self._sample_s = SAMPLE_S

    def validated(self, tokens: int, seconds: float) -> None:
        before_tokens, before_s = self._validated
        self._validated = (before_tokens + tokens, before_s + seconds)

    def sampled(self, seconds: float) -> None:
        self._sample_s = seconds

    def new_steps(self, step: int, steps: int, tokens_to_validate: int, samples: int) -> int | None:
        """How many steps end the run in time, if it is time to plan and `steps` do not.

        The tokens are those of all validations that are left, the last one included.
        """
        now_s = self._clock.total_s
        before_step, before_s = self._since
        is_due = now_s >= self._plans[0] if self._plans else False
        # Before the last step in any case: the first guess may have been far too low.
        if step != steps - 1 and not (is_due and step - before_step >= FEWEST_STEPS):
            return None
        self._plans = [at_s for at_s in self._plans if at_s > now_s]
        training_s = self._clock.training_s
        saving_share = self._clock.seconds["saving"] / training_s
        step_s = (training_s - before_s) / (step - before_step) * (1 + saving_share)
        self._since = (step, training_s)
        tokens, seconds = self._validated
        validation_s = tokens_to_validate * seconds / tokens if tokens else 0.0
        left_s = self._done_s - now_s - validation_s - samples * self._sample_s
        planned = step + max(1, round(left_s / step_s))
        return planned if abs(planned - steps) * step_s > self._slack_s else None


def with_steps(config: Config, steps: int) -> Config:
    """The configuration with another number of steps, and what is in proportion to it."""
    factor = steps / config.schedule.steps
    schedule, every = config.schedule, config.evaluation.every_steps
    return updated(
        config,
        {
            "schedule.steps": steps,
            "schedule.warmup_steps": int(schedule.warmup_steps * factor),
            "schedule.cooldown_steps": int(schedule.cooldown_steps * factor),
            "optim.muon.momentum_warmup_steps": round(config.optim.muon.momentum_warmup_steps * factor),
            "evaluation.every_steps": max(1, round(every * factor)) if every else 0,
        },
    )
