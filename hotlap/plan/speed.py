"""FLOPs of a step and, from assumptions that are stated, its time, that of the run, and the cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hotlap.config import Config
from hotlap.plan.machine import Machine
from hotlap.train.flops import flops_per_token

# Of the bfloat16 peak. The published records ran at 32 to 38 % of an H100's, by our own count of FLOPs.
GPU_FRACTIONS = (0.32, 0.38)
# Of the measured matmul peak: docs/benchmarks.md, part step.
CPU_FRACTIONS = (0.7, 1.0)
# Without tensor cores for float32, a GPU multiplies it as TF32, at half the rate of bfloat16.
FLOAT32_RATE = 0.5
# Of a link's nominal rate that collectives reach, when nothing hides them.
SLOW_LINK_FRACTION = 0.5
# A forward pass in FLOPs, as a fraction of forward and backward.
FORWARD_SHARE = 1 / 3


class Range(NamedTuple):
    low: float
    high: float

    def times(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Speed:
    flops_per_token: float  # forward and backward, mean over the windows of the run
    flops_per_step: float  # of all devices
    fraction_of_peak: Range  # assumed
    peak_tflops: float
    wire_s: float  # per step, at the link's nominal rate
    step_s: Range
    training_s: Range  # of the whole run, as Hotlap's clock counts: without validation
    billed_s: Range  # with validation; set-up and compilation are not counted


def estimate_speed(config: Config, machine: Machine, wire_bytes: float) -> Speed:
    """`wire_bytes` are what one device sends in a step."""
    steps = config.schedule.steps
    per_token = flops_per_token(config, steps)
    per_step = per_token * config.batch.tokens_per_step
    fractions = Range(*(CPU_FRACTIONS if machine.device == "cpu" else GPU_FRACTIONS))
    rate = FLOAT32_RATE if machine.gpu and config.runtime.precision == "float32" else 1.0
    peak = machine.peak_tflops * rate
    wire_s = wire_bytes / (machine.link_gb_per_s * 1e9)
    at_peak_s = per_step / machine.world_size / (peak * 1e12)
    # Fast: all of the wire hidden behind the computation. Slow: none of it, at half of the link's rate.
    fast_s = max(at_peak_s / fractions.high, wire_s)
    slow_s = at_peak_s / fractions.low + wire_s / SLOW_LINK_FRACTION
    step_s = Range(fast_s, slow_s)
    validation_steps = _validation_tokens(config) / config.batch.tokens_per_step * FORWARD_SHARE
    return Speed(
        flops_per_token=per_token,
        flops_per_step=per_step,
        fraction_of_peak=fractions,
        peak_tflops=peak,
        wire_s=wire_s,
        step_s=step_s,
        training_s=step_s.times(steps),
        billed_s=step_s.times(steps + validation_steps),
    )


def _validation_tokens(config: Config) -> int:
    """Of all validations of the run. Unknown, and counted as none, where the whole split is validated."""
    every, steps = config.evaluation.every_steps, config.schedule.steps
    # At step 0, every `every` steps, and at the end.
    validations = 1 if not every else 1 + -(-steps // every)
    return validations * (config.evaluation.tokens or 0)


def cost(speed: Speed, machine: Machine, price_per_hour: float) -> Range:
    """For a price per device and hour."""
    return speed.billed_s.times(machine.world_size * price_per_hour / 3600)
