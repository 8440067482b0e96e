"""Learning rate and momentum as pure functions of the step.

`step` is the number of updates done so far, so the first update has step 0. Rounding follows the
records of modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt).
"""

from __future__ import annotations

import math

from hotlap.config import MuonConfig, ScheduleConfig


def lr_multiplier(step: int, schedule: ScheduleConfig) -> float:
    """The factor on every learning rate for the update at `step`."""
    if schedule.kind == "triangular":
        return triangular(step, schedule.steps, schedule.warmup_steps)
    if schedule.kind == "cosine":
        return cosine(step, schedule.steps, schedule.warmup_steps, schedule.final_lr_fraction)
    cooldown_steps = schedule.cooldown_steps or schedule.cooldown_fraction * schedule.steps
    return trapezoid(step, schedule.steps, schedule.warmup_steps, cooldown_steps)


def trapezoid(step: int, steps: int, warmup_steps: int, cooldown_steps: float) -> float:
    """Linear warmup to 1, constant, then linear cooldown that would reach 0 at step `steps`."""
    rising = (step + 1) / warmup_steps if warmup_steps else 1.0
    falling = (steps - step) / cooldown_steps if cooldown_steps else 1.0
    return min(1.0, rising, falling)


def triangular(step: int, steps: int, warmup_steps: int) -> float:
    """Linear warmup to 1, then linear decay that would reach 0 at step `steps`."""
    return trapezoid(step, steps, warmup_steps, cooldown_steps=steps - warmup_steps)


def cosine(step: int, steps: int, warmup_steps: int, final_fraction: float) -> float:
    """Linear warmup from above 0 to 1, then cosine decay to `final_fraction`."""
    if step < warmup_steps:
        return (step + 1) / (warmup_steps + 1)
    progress = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return final_fraction + (1 - final_fraction) * (1 + math.cos(math.pi * progress)) / 2


def momentum(step: int, muon: MuonConfig) -> float:
    """Muon's momentum: a linear warmup from `momentum_start` to `momentum_end`, then constant."""
    done = min(step / muon.momentum_warmup_steps, 1.0) if muon.momentum_warmup_steps else 1.0
    return (1 - done) * muon.momentum_start + done * muon.momentum_end
