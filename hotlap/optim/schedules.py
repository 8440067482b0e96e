"""Learning rate and momentum as pure functions of the step.

`step` counts from 0 and is the number of updates done before it. The rounding is that of the published
records.
"""

from __future__ import annotations

import math

from hotlap.config import MuonConfig, ScheduleConfig


def lr_multiplier(step: int, schedule: ScheduleConfig) -> float:
    """What every learning rate is multiplied by in the update that follows `step` others."""
    if schedule.kind == "triangular":
        return triangular(step, schedule.steps, schedule.warmup_steps)
    if schedule.kind == "cosine":
        return cosine(step, schedule.steps, schedule.warmup_steps, schedule.final_lr_fraction)
    cooldown_steps = schedule.cooldown_steps or schedule.cooldown_fraction * schedule.steps
    return trapezoid(step, schedule.steps, schedule.warmup_steps, cooldown_steps)


def trapezoid(step: int, steps: int, warmup_steps: int, cooldown_steps: float) -> float:
    """Up over the first steps, one, then down over the last ones so that step `steps` would be at zero."""
    rising = (step + 1) / warmup_steps if warmup_steps else 1.0
    falling = (steps - step) / cooldown_steps if cooldown_steps else 1.0
    return min(1.0, rising, falling)


def triangular(step: int, steps: int, warmup_steps: int) -> float:
    """Up over the first steps, then straight down, so that step `steps` would be at zero."""
    return trapezoid(step, steps, warmup_steps, cooldown_steps=steps - warmup_steps)


def cosine(step: int, steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Up over the first steps, never from zero, then half a cosine wave down to `final_fraction`."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2


def momentum(step: int, muon: MuonConfig) -> float:
    """Muon's momentum, on a straight line from its start to its end."""
    done = min(step / muon.momentum_warmup_steps, 1.0) if muon.momentum_warmup_steps else 1.0
    return (1 - done) * muon.momentum_start + done * muon.momentum_end
