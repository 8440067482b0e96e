import json

import pytest

from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.recipes import resolve
from hotlap.settings import (
    Change,
    as_text,
    diff,
    flatten,
    from_json,
    full_name,
    parse,
    settings_of,
    to_json,
    updated,
)


def test_every_setting_has_a_one_line_doc_and_a_type_that_can_be_described():
    from hotlap.settings import describe_type

    for item in settings_of(Config):
        assert item.doc
        assert "\n" not in item.doc
        assert describe_type(item.type)


def test_json_round_trip_keeps_every_value():
    config = updated(
        resolve("softcap", "nano"), {"optim.muon.lr_factors": {"mlp": 2.0}, "evaluation.target_bpb": 1.5}
    )
    assert from_json(Config, json.loads(json.dumps(to_json(config)))) == config


@pytest.mark.parametrize("recipe", ["softcap", "adamw"])
def test_values_as_text_are_read_back_to_the_last_digit(recipe):
    changes = {"optim.muon.lr": 1 / 30, "optim.muon.lr_factors": {"mlp": 1 / 3, "head": 2.0}, "seed": 3}
    config = updated(resolve(recipe, "pico"), changes)
    texts = {name: as_text(value) for name, value in flatten(config).items()}
    assert updated(Config(), parse(Config, texts)) == config


def test_diff_lists_what_changed_and_nothing_else():
    before = Config()
    after = updated(before, {"optim.muon.lr": 0.03, "seed": 4})
    assert diff(before, after) == [Change("seed", 0, 4), Change("optim.muon.lr", 0.05, 0.03)]


def test_changes_are_judged_together_not_one_by_one():
    # 768 is no multiple of 7 heads and 700 none of 6: only both together are valid.
    assert updated(Config(), {"model.width": 700, "model.num_heads": 7}).model.head_dim == 100


def test_text_becomes_the_declared_type():
    changes = parse(
        Config,
        {
            "steps": "1_000",
            "optim.muon.lr": "3e-2",
            "model.drop-attention": "true",
            "num_kv_heads": "none",
            "target-bpb": "1.4",
            "lr_factors": "mlp=2,q=0.5",
        },
    )
    assert changes == {
        "schedule.steps": 1000,
        "optim.muon.lr": 0.03,
        "model.drop_attention": True,
        "model.num_kv_heads": None,
        "evaluation.target_bpb": 1.4,
        "optim.muon.lr_factors": {"mlp": 2.0, "q": 0.5},
    }


def test_a_last_name_that_several_settings_have_is_refused_with_all_of_them():
    with pytest.raises(ConfigError, match=r"evaluation\.every_steps, checkpoint\.every_steps"):
        full_name(Config, "every_steps")


@pytest.mark.parametrize(
    "name, suggestion",
    [("optim.muon.lrr", "optim.muon.lr"), ("softcp", "model.softcap"), ("model.widht", "model.width")],
)
def test_an_unknown_name_is_refused_with_the_nearest(name, suggestion):
    with pytest.raises(ConfigError, match=f"did you mean `{suggestion}`"):
        full_name(Config, name)


@pytest.mark.parametrize(
    "name, text",
    [
        ("schedule.steps", "ten"),
        ("model.drop_attention", "maybe"),
        ("attention.backend", "fast"),
        ("optim.muon.lr", "x"),
        ("optim.muon.lr_factors", "a"),
    ],
)
def test_text_of_the_wrong_kind_is_refused_by_the_settings_name(name, text):
    with pytest.raises(ConfigError, match=f"`{name}` as .*{text}"):
        parse(Config, {name: text})


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data["model"].update(widht=3), "model.widht.*width"),
        (lambda data: data.pop("model"), "`model`"),
        (lambda data: data.pop("recipe"), "`recipe`"),
        (lambda data: data["model"].update(width="768"), "model.width.*whole number"),
        (lambda data: data["model"].update(width=True), "model.width"),
        (lambda data: data.update(model=3), "model"),
    ],
)
def test_damaged_json_is_refused_by_the_settings_name(damage, message):
    data = to_json(Config())
    damage(data)
    with pytest.raises(ConfigError, match=message):
        from_json(Config, data)


@pytest.mark.parametrize("text", [str(2**63), str(-(2**63)), "9" * 400, "9" * 5000])
def test_a_whole_number_of_more_than_64_bits_is_refused(text):
    with pytest.raises(ConfigError, match=r"`schedule\.steps` as whole number"):
        parse(Config, {"schedule.steps": text})


@pytest.mark.parametrize("name", ["schedule.steps", "optim.muon.lr"])
def test_a_number_of_more_than_64_bits_in_json_is_refused(name):
    content = to_json(Config())
    *sections, last = name.split(".")
    inner = content
    for section in sections:
        inner = inner[section]
    inner[last] = 10**400
    with pytest.raises(ConfigError, match=name):
        from_json(Config, content)


def test_json_that_is_older_than_a_setting_gives_it_its_default():
    changed = updated(Config(), {"model.width": 96, "model.num_heads": 2})
    data = to_json(changed)
    del data["model"]["bigram_rows"]
    assert from_json(Config, data) == changed


def test_flatten_gives_the_values_of_nested_settings():
    assert flatten(Config())["optim.muon.lr"] == 0.05
