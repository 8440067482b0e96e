"""Every figure of the published records, written out, against what the recipes resolve to at `small`."""

import itertools

import pytest

from hotlap.recipes import RECIPES, SIZES, resolve
from hotlap.settings import diff, updated

# name: (date, minutes, val loss, steps, cooldown steps, cooldown fraction)
RUNS = {
    "flex-attention": ("2024-11-19", 5.03, None, 1875, 562, 0.0),
    "window-warmup": ("2024-11-24", 4.66, 3.2759, 1750, 640, 0.0),
    "value-embeds": ("2024-12-04", 4.41, None, 1530, 600, 0.0),
    "unet-value-embeds": ("2024-12-08", 3.95, 3.2773, 1480, 600, 0.0),
    "block-window": ("2024-12-10", 3.80, 3.2756, 1480, 600, 0.0),
    "sparse-value-embeds": ("2024-12-17", 3.57, 3.2794, 1490, 600, 0.0),
    "softcap": ("2025-01-04", 3.40, 3.2785, 1390, 0, 0.4),
}

# name: (Muon lr, Adam beta1, momentum warm-up, momentum form, communication, clip norm)
OPTIMIZERS = {
    "flex-attention": (0.04, 0.9, 500, "sum", "flat", 0.0),
    "window-warmup": (0.05, 0.8, 300, "sum", "flat", 1.0),
    "value-embeds": (0.05, 0.8, 300, "sum", "flat", 1.0),
    "unet-value-embeds": (0.05, 0.8, 300, "lerp", "overlapped", 0.0),
    "block-window": (0.05, 0.8, 300, "lerp", "overlapped", 0.0),
    "sparse-value-embeds": (0.05, 0.8, 300, "lerp", "overlapped", 0.0),
    "softcap": (0.05, 0.8, 300, "lerp", "overlapped", 0.0),
}

NO_TABLES = (None,) * 12
MIRRORED = (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0)
OUTER = (0, 1, 2, None, None, None, None, None, None, 0, 1, 2)

# name: (softcap, table by layer, value mix, layers without attention, rotary, rotary base, bf16 tables)
MODELS = {
    "flex-attention": (30, NO_TABLES, "one", (), "full", 10000, False),
    "window-warmup": (30, NO_TABLES, "one", (), "full", 10000, False),
    "value-embeds": (30, tuple(range(12)), "one", (), "full", 10000, False),
    "unet-value-embeds": (30, MIRRORED, "pair", (), "full", 10000, False),
    "block-window": (30, MIRRORED, "pair", (), "full", 10000, False),
    "sparse-value-embeds": (30, OUTER, "pair", (7,), "half", 1024, False),
    "softcap": (15, OUTER, "pair", (7,), "half", 1024, True),
}


WINDOW_UNITS = {
    "flex-attention": "tokens",
    "window-warmup": "tokens",
    "value-embeds": "tokens",
    "unet-value-embeds": "tokens-and-blocks",
    "block-window": "blocks",
    "sparse-value-embeds": "blocks",
    "softcap": "blocks",
}


def test_the_lineage_is_one_line_from_the_first_record_to_the_last():
    names = list(RUNS)
    assert RECIPES[names[0]].parent is None
    for parent, child in itertools.pairwise(names):
        assert RECIPES[child].parent == parent
    assert RECIPES["sprint"].parent == names[-1]
    assert set(RECIPES) == {"adamw", *names, "sprint"}


@pytest.mark.parametrize("name", RUNS)
def test_published_runs(name):
    record = RECIPES[name].record
    schedule = resolve(name, "small").schedule
    assert (
        record.date,
        record.minutes,
        record.val_loss,
        schedule.steps,
        schedule.cooldown_steps,
        schedule.cooldown_fraction,
    ) == RUNS[name]
    assert (schedule.kind, schedule.warmup_steps) == ("trapezoid", 0)


@pytest.mark.parametrize("name", RUNS)
def test_published_optimizers(name):
    optim = resolve(name, "small").optim
    muon, adam = optim.muon, optim.adam
    assert (
        muon.lr,
        adam.beta1,
        muon.momentum_warmup_steps,
        muon.momentum_form,
        muon.communication,
        optim.clip_norm,
    ) == OPTIMIZERS[name]
    assert (muon.momentum_start, muon.momentum_end, muon.nesterov) == (0.85, 0.95, True)
    assert (muon.newton_schulz_steps, muon.coefficients, muon.update_scale) == (5, "quintic", "aspect")
    assert (muon.weight_decay, muon.lr_factors) == (0, {})
    assert (adam.embed_lr, adam.head_lr, adam.scalar_lr) == (0.6, 0.008, 0.04)
    assert (adam.beta2, adam.eps, adam.weight_decay) == (0.95, 1e-8, 0)


@pytest.mark.parametrize("name", RUNS)
def test_published_models(name):
    model = resolve(name, "small").model
    assert (
        model.softcap,
        model.value_table_of_layer,
        model.value_mix,
        model.attention_free_layers,
        model.rotary,
        model.rotary_base,
        model.bf16_embeddings,
    ) == MODELS[name]
    assert model.values == "first-layer" or MODELS[name][1] != NO_TABLES
    assert (model.num_layers, model.width, model.num_heads, model.head_dim, model.kv_heads) == (
        12,
        768,
        6,
        128,
        6,
    )
    assert (model.vocab_size, model.padded_vocab_size, model.mlp_ratio) == (50257, 50304, 4)


@pytest.mark.parametrize("name", RUNS)
def test_published_batches_and_validation(name):
    config = resolve(name, "small")
    assert (config.batch.tokens_per_step, config.batch.sequence_tokens) == (524_288, 65_536)
    assert (config.evaluation.every_steps, config.evaluation.tokens) == (125, 10_485_760)
    assert (config.data.source, config.data.tokenizer, config.data.order) == ("fineweb", "gpt2", "stream")
    assert config.attention.block_size == 128
    assert config.attention.window_unit == WINDOW_UNITS[name]


DIFFS = {
    "window-warmup": {
        "optim.clip_norm",
        "optim.muon.lr",
        "optim.muon.momentum_warmup_steps",
        "optim.adam.beta1",
        "schedule.steps",
        "schedule.cooldown_steps",
        "schedule.window_start_tokens",
        "schedule.window_end_tokens",
    },
    "value-embeds": {"model.values", "schedule.steps", "schedule.cooldown_steps"},
    "unet-value-embeds": {
        "model.values",
        "model.value_mix",
        "attention.window_unit",
        "optim.clip_norm",
        "optim.muon.momentum_form",
        "optim.muon.communication",
        "schedule.steps",
        "data.tail",
    },
    "block-window": {
        "model.value_tables",
        "attention.window_unit",
        "schedule.window_offset_tokens",
        "schedule.window_multiple_tokens",
    },
    "sparse-value-embeds": {
        "model.values",
        "model.drop_attention",
        "model.rotary",
        "model.rotary_base",
        "schedule.steps",
    },
    "softcap": {
        "model.softcap",
        "model.bf16_embeddings",
        "schedule.steps",
        "schedule.cooldown_steps",
        "schedule.cooldown_fraction",
        "schedule.window_start_tokens",
        "schedule.window_end_tokens",
        "schedule.window_offset_tokens",
        "runtime.coordinate_descent",
    },
}


@pytest.mark.parametrize("name", DIFFS)
def test_a_recipe_differs_from_its_parent_in_just_what_it_is_about(name):
    changes = diff(RECIPES[RECIPES[name].parent].config, RECIPES[name].config)
    assert {change.name for change in changes} == DIFFS[name] | {"recipe"}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", RECIPES)
def test_any_recipe_resolves_at_any_size(name, size):
    config = resolve(name, size)
    assert (config.recipe, config.size) == (name, size)
    own = RECIPES[name].at_size.get(size, {})
    assert config.model.num_layers == own.get("model.num_layers", SIZES[size].num_layers)
    assert config.model.width == own.get("model.width", SIZES[size].width)


def test_small_leaves_a_recipe_as_it_is_but_for_what_it_changes_there():
    for name, recipe in RECIPES.items():
        assert resolve(name, "small") == updated(recipe.config, recipe.at_size.get("small", {}))


@pytest.mark.parametrize("name", RUNS)
def test_published_loaders_compilers_and_checkpoints(name):
    config = resolve(name, "small")
    before_the_rule = ("flex-attention", "window-warmup", "value-embeds")
    assert config.data.tail == ("carry" if name in before_the_rule else "drop")
    assert config.runtime.coordinate_descent == (name == "softcap")
    # The last two saved nothing during a run on their 8 GPUs. With fewer a run takes longer and is kept safe.
    none_during_run = name in ("sparse-value-embeds", "softcap")
    assert config.checkpoint.minutes_between(world_size=8) == (0 if none_during_run else 10)
    assert config.checkpoint.minutes_between(world_size=7) == 10
    for size in ("pico", "nano", "medium"):
        assert resolve(name, size).checkpoint.minutes_between(world_size=8) == 10


def test_the_records_rules_give_way_to_what_is_asked_for():
    assert resolve("softcap", "small", {"data.order": "shuffled"}).data.tail == "carry"
    often = resolve("softcap", "small", {"checkpoint.every_minutes": 5.0})
    assert often.checkpoint.minutes_between(world_size=8) == 5


@pytest.mark.parametrize(
    "changes, world_size, words",
    [
        ({}, 1, "every 10 minutes, when validation improves and at the end"),
        ({}, 8, "at the end only, as the record, with 8 ranks or more"),
        ({"checkpoint.every_minutes": 2.5}, 8, "every 2.5 minutes, when validation improves and at the end"),
        ({"checkpoint.every_minutes": 0.0}, 1, "when validation improves and at the end"),
        ({"checkpoint.every_minutes": 0.0, "checkpoint.keep_best": False}, 1, "at the end only"),
        (
            {"checkpoint.every_steps": 50, "checkpoint.keep_best": False},
            1,
            "every 50 steps, every 10 minutes and at the end",
        ),
        ({"checkpoint.every_steps": 50}, 8, "every 50 steps and at the end"),
    ],
)
def test_when_a_run_is_saved_is_told_in_words(changes, world_size, words):
    assert resolve("softcap", "small", changes).checkpoint.describe(world_size) == words


def test_what_a_recipe_changes_at_a_size_gives_way_to_what_is_asked_for():
    own = RECIPES["sprint"].at_size["nano"]
    assert resolve("sprint", "nano").model.num_layers == own["model.num_layers"] == 2
    asked = resolve("sprint", "nano", {"model.num_layers": 6, "schedule.steps": 2 * own["schedule.steps"]})
    assert asked.model.num_layers == 6
    warmup = resolve("sprint", "nano").optim.muon.momentum_warmup_steps
    assert asked.optim.muon.momentum_warmup_steps == pytest.approx(2 * warmup, abs=1)


def test_a_changed_number_of_steps_keeps_the_shares_of_the_phases():
    schedule = resolve("window-warmup", "small", {"schedule.steps": 175}).schedule
    assert (schedule.steps, schedule.cooldown_steps) == (175, 64)
    given = resolve("window-warmup", "small", {"schedule.steps": 175, "schedule.cooldown_steps": 10}).schedule
    assert given.cooldown_steps == 10


def test_a_shorter_run_keeps_the_shares_of_its_phases():
    schedule = resolve("window-warmup", "nano").schedule
    assert schedule.cooldown_steps / schedule.steps == pytest.approx(640 / 1750, abs=0.002)
