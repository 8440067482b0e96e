"""The schedules of every published record, against tables worked out by hand from the published formulas."""

import math
from fractions import Fraction

import pytest

from hotlap.attention.visibility import window_tokens
from hotlap.config import MuonConfig, ScheduleConfig
from hotlap.optim.schedules import lr_multiplier, momentum
from hotlap.recipes import RECIPES

# recipe → step → (learning rate multiplier, Muon momentum, window in the record's unit). The steps are the
# first two, the two around the end of the momentum's warm-up, the first of the cooldown (still at one), the
# one after it, and the last.
TABLES = {
    "flex-attention": {
        0: (1, 0.85, 1024),
        1: (1, 0.8502, 1024),
        299: (1, 0.9098, 1024),
        300: (1, 0.91, 1024),
        1313: (1, 0.95, 1024),
        1314: (Fraction(561, 562), 0.95, 1024),
        1874: (Fraction(1, 562), 0.95, 1024),
    },
    "window-warmup": {
        0: (1, 0.85, 64),
        1: (1, Fraction(2551, 3000), 64),
        299: (1, Fraction(2849, 3000), 320),
        300: (1, 0.95, 320),
        1110: (1, 0.95, 1152),
        1111: (Fraction(639, 640), 0.95, 1152),
        1749: (Fraction(1, 640), 0.95, 1728),
    },
    "value-embeds": {
        0: (1, 0.85, 64),
        1: (1, Fraction(2551, 3000), 64),
        299: (1, Fraction(2849, 3000), 384),
        300: (1, 0.95, 384),
        930: (1, 0.95, 1088),
        931: (Fraction(599, 600), 0.95, 1088),
        1529: (Fraction(1, 600), 0.95, 1728),
    },
    "unet-value-embeds": {
        0: (1, 0.85, 64),
        1: (1, Fraction(2551, 3000), 64),
        299: (1, Fraction(2849, 3000), 384),
        300: (1, 0.95, 384),
        880: (1, 0.95, 1088),
        881: (Fraction(599, 600), 0.95, 1088),
        1479: (Fraction(1, 600), 0.95, 1728),
    },
    "block-window": {
        0: (1, 0.85, 1),
        1: (1, Fraction(2551, 3000), 1),
        299: (1, Fraction(2849, 3000), 3),
        300: (1, 0.95, 3),
        880: (1, 0.95, 9),
        881: (Fraction(599, 600), 0.95, 9),
        1479: (Fraction(1, 600), 0.95, 14),
    },
    "sparse-value-embeds": {
        0: (1, 0.85, 1),
        1: (1, Fraction(2551, 3000), 1),
        299: (1, Fraction(2849, 3000), 3),
        300: (1, 0.95, 3),
        890: (1, 0.95, 9),
        891: (Fraction(599, 600), 0.95, 9),
        1489: (Fraction(1, 600), 0.95, 14),
    },
    "softcap": {
        0: (1, 0.85, 1),
        1: (1, Fraction(2551, 3000), 1),
        299: (1, Fraction(2849, 3000), 3),
        300: (1, 0.95, 3),
        834: (1, 0.95, 9),
        835: (Fraction(555, 556), 0.95, 9),
        1389: (Fraction(1, 556), 0.95, 14),
    },
}

# The formulas as published, in floating point, over the fraction x of the run that is done.
WINDOWS = {
    "window-warmup": lambda x: 64 * math.floor((64 + 1728 * x) / 64),
    "value-embeds": lambda x: 64 * math.floor((64 + 1728 * x) / 64),
    "unet-value-embeds": lambda x: 64 * math.floor((64 + 1728 * x) / 64),
    "block-window": lambda x: math.floor(((1 - x) * 64 + x * 1792 + 64) / 128),
    "sparse-value-embeds": lambda x: math.floor(((1 - x) * 64 + x * 1792 + 64) / 128),
    "softcap": lambda x: math.floor(((1 - x) * 128 + x * 1856) / 128),
}


def window(step: int, recipe: str) -> int:
    config = RECIPES[recipe].config
    tokens = window_tokens(step, config.schedule)
    return tokens // config.attention.block_size if config.attention.window_unit == "blocks" else tokens


@pytest.mark.parametrize("recipe", TABLES)
def test_the_schedules_of_a_record_are_the_published_ones(recipe):
    config = RECIPES[recipe].config
    assert max(TABLES[recipe]) == config.schedule.steps - 1
    for step, (multiplier, beta, size) in TABLES[recipe].items():
        assert lr_multiplier(step, config.schedule) == pytest.approx(float(multiplier), abs=1e-12), step
        assert momentum(step, config.optim.muon) == pytest.approx(float(beta), abs=1e-12), step
        assert window(step, recipe) == size, step


@pytest.mark.parametrize("recipe", WINDOWS)
def test_the_window_of_every_step_is_the_published_one(recipe):
    steps = RECIPES[recipe].config.schedule.steps
    assert [window(s, recipe) for s in range(steps + 1)] == [
        WINDOWS[recipe](s / steps) for s in range(steps + 1)
    ]


def test_every_recipe_has_a_schedule_that_is_never_zero_and_never_above_one():
    for recipe in RECIPES.values():
        schedule = recipe.config.schedule
        values = [lr_multiplier(step, schedule) for step in range(schedule.steps)]
        assert min(values) > 0
        assert max(values) == 1


def test_a_trapezoid_rises_stays_and_falls():
    schedule = ScheduleConfig(steps=10, warmup_steps=4, cooldown_steps=2)
    values = [lr_multiplier(step, schedule) for step in range(10)]
    assert values == [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 0.5]


def test_a_cooldown_fraction_is_its_number_of_steps():
    as_steps = ScheduleConfig(steps=50, cooldown_steps=20)
    as_fraction = ScheduleConfig(steps=50, cooldown_fraction=0.4)
    for step in range(50):
        assert lr_multiplier(step, as_steps) == pytest.approx(lr_multiplier(step, as_fraction), abs=1e-12)


def test_a_triangle_rises_then_falls_straight():
    schedule = ScheduleConfig(steps=10, kind="triangular", warmup_steps=2)
    values = [lr_multiplier(step, schedule) for step in range(10)]
    assert values == [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]


def test_a_cosine_rises_and_ends_at_its_fraction():
    schedule = ScheduleConfig(steps=12, kind="cosine", warmup_steps=2, final_lr_fraction=0.1)
    values = [lr_multiplier(step, schedule) for step in range(13)]
    assert values[:3] == pytest.approx([1 / 3, 2 / 3, 1])
    assert values[7] == pytest.approx(0.55)
    assert values[12] == pytest.approx(0.1)
    assert values[2:] == sorted(values[2:], reverse=True)


def test_no_warm_up_of_momentum_means_its_end():
    assert momentum(0, MuonConfig(momentum_warmup_steps=0)) == 0.95


def test_a_window_can_shrink_and_is_rounded_down():
    schedule = ScheduleConfig(
        steps=4, window_start_tokens=256, window_end_tokens=128, window_multiple_tokens=64
    )
    assert [window_tokens(step, schedule) for step in range(5)] == [256, 192, 192, 128, 128]
