"""What to train for so much compute on so much text: the best of the measured laps, and what it reached.

Compute is counted in steps of one configuration, `BASE`, which are timed on the machine at hand, so that a
table from one machine serves another. Between the measured laps bits per byte are interpolated, over the
logarithms of compute and text; beyond them they are extrapolated, and said to be.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap.config import Config
from hotlap.dial.text import Text

LAPS = Path(__file__).with_name("laps.json")
BASE = ("sprint", "nano")  # recipe and size
# The best is chosen of the laps whose compute is in this range of what there is. Trained for longer than it
# was measured, a lap on a small text learns it by heart; for shorter, it only learns less.
NEAR = (1 / 1.3, 2.0)
BY_HEART = 1.1  # times the bits per byte of a cheaper lap: no candidate
# With this much more compute than its lap had, a model is made larger, and has dropout by its epochs.
LONGER = 1.5
DROPOUTS = ((5, 0.3), (10, 0.5), (20, 0.6), (40, 0.7))
ROUNDING = 1.2  # of sizes of texts
HEAD_DIM = 64
STEP_TOKENS = 2048
# A text that compresses worse than the measured one is harder for a model too, by about the root of that.
ROOT = 0.5
# The range of what is expected: of seeds and between the laps; of texts that compress otherwise; and of a
# validation of so many bytes, whose tokens are few.
SPREAD, OTHER_TEXT, OF_ROOT_BYTES = 0.03, 1.0, 2.0
BEYOND = 0.5  # of the mean gain per factor of compute is expected beyond the longest lap


@dataclass(frozen=True)
class Lap:
    text_bytes: int  # of training text
    base_steps: float  # its compute
    steps: int
    relative_step: float  # time of a step over that of `BASE`
    bpb: float
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    measured: str  # when, and on what
    compressed: Mapping[int, float]  # {training bytes: `Text.compressed_bpb` of the measured text}
    laps: Sequence[Lap]


@dataclass(frozen=True)
class Choice:
    settings: Mapping[str, Any]
    relative_step: float
    bpb: tuple[float, float] | None  # low and high; None: nothing is validated
    extrapolated: tuple[str, ...]  # beyond which measured limits


@functools.cache
def table() -> Table:
    content = json.loads(LAPS.read_text(encoding="utf-8"))
    return Table(
        content["measured"],
        {int(size): bpb for size, bpb in content["compressed"].items()},
        [Lap(**lap) for lap in content["laps"]],
    )


def choose(text: Text, base_steps: float, measured: Table | None = None) -> Choice:
    """`base_steps`: how many steps of `BASE` there is time for."""
    measured = measured or table()
    sizes = sorted({lap.text_bytes for lap in measured.laps})
    nearest = min(sizes, key=lambda size: abs(math.log(size / text.train_bytes)))
    lap = best_lap([lap for lap in measured.laps if lap.text_bytes == nearest], base_steps)
    settings, relative_step = fitted(lap, base_steps, text)
    extrapolated = []
    if not sizes[0] / ROUNDING <= text.train_bytes <= sizes[-1] * ROUNDING:
        extrapolated.append(f"texts of {sizes[0] / 1e3:g} kB to {sizes[-1] / 1e6:g} MB")
    longest = max(lap.base_steps for lap in measured.laps if lap.text_bytes == nearest)
    if base_steps > LONGER * longest:
        extrapolated.append(f"{longest:,.0f} steps of compute")
    expected = None
    if text.val_bytes:
        middle = expected_bpb(measured.laps, text.train_bytes, base_steps)
        harder = (text.compressed_bpb / at_size(measured.compressed, text.train_bytes)) ** ROOT
        width = (
            SPREAD
            + OTHER_TEXT * abs(math.log(harder))
            + OF_ROOT_BYTES / math.sqrt(text.val_bytes)
            + 0.02 * len(extrapolated)
        )
        expected = (middle * harder * math.exp(-width), middle * harder * math.exp(width))
    return Choice(settings, relative_step, expected, tuple(extrapolated))


def best_lap(laps: Sequence[Lap], base_steps: float) -> Lap:
    """The best of those with about as much compute, or the one that is nearest."""
    low, high = (factor * base_steps for factor in NEAR)
    sound = [lap for lap in laps if not learned_by_heart(lap, laps)]
    near = [lap for lap in sound if low <= lap.base_steps <= high]
    if near:
        return min(near, key=lambda lap: lap.bpb)
    return min(sound, key=lambda lap: abs(math.log(lap.base_steps / base_steps)))


def learned_by_heart(lap: Lap, laps: Sequence[Lap]) -> bool:
    """Whether it is far above a lap on the same text that had less compute."""
    return lap.bpb > BY_HEART * min(other.bpb for other in laps if other.base_steps <= lap.base_steps)


def fitted(lap: Lap, base_steps: float, text: Text) -> tuple[dict[str, Any], float]:
    """Settings and relative time of a step: the lap's, and a larger model where there is far more time.

    With the fourth root of the compute the width grows as is usual for compute-optimal models: weights with
    its root. Text that is seen more often than by the lap gets at least the dropout that laps of so many
    epochs have.
    """
    settings, relative_step = dict(lap.settings), lap.relative_step
    beyond = base_steps / lap.base_steps / LONGER
    if beyond > 1:
        width = settings["model.width"]
        wider = HEAD_DIM * max(1, round(width * beyond**0.25 / HEAD_DIM))
        if wider > width:
            settings |= {"model.width": wider, "model.num_heads": wider // HEAD_DIM}
            relative_step *= (wider / width) ** 2
        epochs = base_steps / relative_step * STEP_TOKENS / text.train_tokens
        least = max((dropout for least, dropout in DROPOUTS if epochs >= least), default=0.0)
        settings["model.dropout"] = max(settings.get("model.dropout", 0.0), least)
        if least:
            settings["model.bigram_rows"] = 0
    return settings, relative_step


def expected_bpb(laps: Sequence[Lap], text_bytes: int, base_steps: float) -> float:
    """Between what is expected on the next smaller and on the next larger text."""
    sizes = {lap.text_bytes for lap in laps}
    return at_size(
        {size: expected_at([lap for lap in laps if lap.text_bytes == size], base_steps) for size in sizes},
        text_bytes,
    )


def expected_at(laps: Sequence[Lap], base_steps: float) -> float:
    """On a text that has given what it can, of the lap that is chosen; else between the laps."""
    points, chosen = frontier(laps), best_lap(laps, base_steps)
    is_limited = (chosen.base_steps, chosen.bpb) not in points
    return chosen.bpb if is_limited else bpb_at(points, base_steps)


def frontier(laps: Sequence[Lap]) -> list[tuple[float, float]]:
    """(compute, bits per byte) of the laps that no cheaper one beats, by compute."""
    ordered = sorted((lap.base_steps, lap.bpb) for lap in laps)
    best = itertools.accumulate((bpb for _, bpb in ordered), min)
    return [point for point, least in zip(ordered, best, strict=True) if point[1] == least]


def bpb_at(points: Sequence[tuple[float, float]], base_steps: float) -> float:
    """Interpolated over the logarithm of compute; beyond the points, by their mean slope."""
    logs = [(math.log(compute), bpb) for compute, bpb in points]
    x, first, last = math.log(base_steps), logs[0], logs[-1]
    for before, after in itertools.pairwise(logs):
        if before[0] <= x <= after[0]:
            return line(before, after, x)
    # Of points that are close together a slope would be noise.
    slope = (last[1] - first[1]) / (last[0] - first[0]) if last[0] - first[0] > math.log(2) else 0.0
    return first[1] + slope * (x - first[0]) if x < first[0] else last[1] + BEYOND * slope * (x - last[0])


def at_size(values: Mapping[int, float], size: int) -> float:
    """Interpolated over the logarithm of the size; the nearest value beyond them."""
    known = sorted(values)
    size = min(max(size, known[0]), known[-1])
    for before, after in itertools.pairwise(known):
        if size <= after:
            ends = [(math.log(one), values[one]) for one in (before, after)]
            return line(ends[0], ends[1], math.log(size))
    return values[known[0]]


def line(first: tuple[float, float], second: tuple[float, float], x: float) -> float:
    return first[1] + (second[1] - first[1]) * (x - first[0]) / (second[0] - first[0])


def described(choice: Choice, text: Text, config: Config, minutes: float) -> list[str]:
    """What was chosen, and what to expect."""
    model, steps = config.model, config.schedule.steps
    epochs = steps * config.batch.tokens_per_step / text.train_tokens
    tables = f"{model.bigram_rows:,} bigrams" if model.bigram_rows else "no bigrams"
    lines = [
        f"chosen     {config.recipe} with {model.num_layers} layers × {model.width}, {tables}, dropout"
        f" {model.dropout:g}; about {steps:,} steps of {config.batch.tokens_per_step:,} tokens, {epochs:.3g}"
        f" epochs, for {60 * minutes:g} s and {text.train_bytes / 1e3:,.0f} kB of text",
    ]
    if choice.bpb is None:
        return [*lines, "expected   nothing to compare with: the data has no validation split"]
    beyond = f"; extrapolated beyond {' and '.join(choice.extrapolated)}" if choice.extrapolated else ""
    low, high = choice.bpb
    return [*lines, f"expected   {low:.2f} to {high:.2f} bits per byte, by measured laps{beyond}"]
