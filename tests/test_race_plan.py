"""Plans of races and ablations: what they hold, in what order, and what they refuse before anything runs."""

import json
import os
import subprocess

import pytest

from hotlap.commands.race import parse_seconds
from hotlap.errors import ConfigError, RaceError
from hotlap.progress import silent
from hotlap.race import plan as plans
from hotlap.race.ablation import SETTING_GROUPS, ancestors, group_changes, make_ablation
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import from_json, make_plan, parse_spec, to_json
from hotlap.recipes import RECIPES, resolve
from hotlap.settings import diff, flatten, updated
from tests.synthetic_runs import make_run


def test_runs_are_interleaved_by_seed():
    plan = make_plan(["adamw", "softcap", "block-window"], "pico", 2, {})
    names = [start.name for round_ in plan.rounds() for start in round_]
    assert names == [
        *("adamw-seed0", "softcap-seed0", "block-window-seed0"),
        *("adamw-seed1", "softcap-seed1", "block-window-seed1"),
    ]


def test_a_variant_changes_its_settings_and_wins_over_those_of_the_race():
    settings = {"optim.muon.lr": 0.01, "schedule.steps": 7}
    plan = make_plan(["softcap", "softcap:optim.muon.lr=0.03"], "pico", 2, settings)
    plain, variant = plan.rounds()[1]
    assert [plan.config(s).optim.muon.lr for s in (plain, variant)] == [0.01, 0.03]
    assert {plan.config(s).schedule.steps for s in (plain, variant)} == {7}
    assert (plan.config(variant).seed, variant.name) == (1, "softcap-optim.muon.lr=0.03-seed1")


def test_the_users_home_is_not_in_a_plan(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jo")
    plan = make_plan(["softcap", "adamw"], "pico", 2, {"data.source": "/home/jo/data"})
    assert to_json(plan)["settings"] == {"data.source": "~/data"}
    # As it was written before.
    assert from_json({**to_json(plan), "settings": {"data.source": "/home/jo/data"}}, "race.json") == plan


def test_a_part_without_a_value_names_the_variant():
    assert parse_spec("softcap:slow,optim.muon.lr=0.01") == (
        "softcap:slow",
        "softcap",
        {"optim.muon.lr": 0.01},
    )


@pytest.mark.parametrize("second", ["softcap", "softcap:seed-only", "softcap:model.softcap=15"])
def test_equal_settings_get_labels_and_seeds_of_their_own(second):
    plan = make_plan(["softcap", second, "softcap"], "pico", 3, {})
    assert len({entry.label for entry in plan.entries}) == 3
    seeds = [start.seed for round_ in plan.rounds() for start in round_]
    assert len(set(seeds)) == 9
    assert {plan.config(s).model for s in plan.rounds()[0]} == {resolve("softcap", "pico").model}


@pytest.mark.parametrize(
    "specs, seeds, settings, part",
    [
        ([], 3, {}, "at least one RECIPE"),
        (["softcp"], 3, {}, "did you mean `softcap`"),
        (["softcap:optim.muon.lrr=1"], 3, {}, "did you mean `optim.muon.lr`"),
        (["softcap:drop_attention"], 3, {}, "write drop_attention=VALUE"),
        (["softcap:optim.muon.lr=fast"], 3, {}, "'fast'"),
        (["softcap:"], 3, {}, "RECIPE:setting=value"),
        (["softcap:a,b"], 3, {}, "one name"),
        (["softcap:x,model.softcap=3", "softcap:x,model.softcap=4"], 3, {}, "`softcap:x` twice"),
        (["softcap:seed=3"], 3, {}, "--seeds"),
        (["softcap"], 3, {"seed": 4}, "--seeds"),
        (["softcap"], 1, {}, "--seeds of 2"),
        (["softcap"], 0, {}, "--seeds of 2"),
        (["softcap", "sparse-value-embeds"], 2, {"schedule.cooldown_steps": 500}, "cooldown"),
        (["softcap", "adamw:optim.muon.lr=0.1"], 2, {}, "adamw uses; found `optim.muon.lr`"),
        (["softcap", "adamw"], 2, {"optim.muon.lr": 0.1}, "adamw uses; found `optim.muon.lr`"),
    ],
)
def test_what_cannot_be_raced_is_refused(specs, seeds, settings, part):
    with pytest.raises(ConfigError, match=part):
        make_plan(specs, "pico", seeds, settings)


def test_a_plan_survives_json_and_gives_its_command():
    plan = make_plan(
        ["softcap", "softcap:x,optim.muon.lr=0.1234567890123", "adamw"], "pico", 4, {"schedule.steps": 99}, 2
    )
    again = plans.from_json(json.loads(json.dumps(plans.to_json(plan))), "race.json")
    assert again == plan
    assert plan.command == (
        "hotlap race softcap softcap:x,optim.muon.lr=0.1234567890123 adamw"
        " --size pico --seeds 4 --procs 2 --schedule.steps 99"
    )
    assert (
        again.default_name
        == make_plan(
            ["softcap", "softcap:x,optim.muon.lr=0.1234567890123", "adamw"],
            "pico",
            9,
            {"schedule.steps": 99},
            2,
        ).default_name
    )
    assert plan.default_name != make_plan(["softcap", "adamw"], "pico", 4, {}).default_name


def test_another_plan_under_the_same_name_is_refused_field_by_field(tmp_path):
    directory = RaceDirectory(tmp_path / "race")
    directory.check(make_plan(["softcap"], "pico", 3, {}))
    directory.write_plan(make_plan(["softcap", "softcap:optim.muon.lr=0.03"], "pico", 3, {}))
    directory.check(make_plan(["softcap", "softcap:optim.muon.lr=0.03"], "pico", 3, {}))
    directory.check(make_plan(["softcap", "softcap:optim.muon.lr=0.03"], "pico", 5, {}))
    changed = make_plan(["softcap", "softcap:optim.muon.lr=0.04"], "pico", 2, {"schedule.steps": 9})
    with pytest.raises(RaceError) as caught:
        directory.check(changed)
    for part in (
        "entries.1.changes.optim.muon.lr 0.03 → 0.04",
        "seeds 3 → 2",
        "settings.schedule.steps absent → 9",
    ):
        assert part in str(caught.value)


def test_a_recipe_that_has_changed_since_the_race_began_is_refused(tmp_path):
    plan = make_plan(["softcap"], "pico", 2, {"schedule.steps": 50})
    directory = RaceDirectory(tmp_path)
    directory.write_plan(plan)
    make_run(tmp_path / "softcap-seed0")
    directory.check(plan)
    make_run(tmp_path / "softcap-seed1", seed=1, changes={"model.softcap": 7.0})
    with pytest.raises(RaceError, match=r"model\.softcap 7, now 15"):
        directory.check(plan)


@pytest.mark.parametrize("content", ["{", "[]", '{"size": "pico"}', '{"entries": [{"nope": 1}]}'])
def test_a_damaged_plan_is_refused(tmp_path, content):
    (tmp_path / "race.json").write_text(content)
    with pytest.raises(RaceError, match=r"race\.json"):
        RaceDirectory(tmp_path).read_plan()


def test_a_directory_that_is_no_race_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("of something else")
    with pytest.raises(RaceError, match=r"without race\.json"):
        RaceDirectory(tmp_path).check(make_plan(["softcap"], "pico", 2, {}))
    with pytest.raises(RaceError, match="no such directory"):
        RaceDirectory(tmp_path / "none").read_plan()


def test_a_second_race_in_the_same_directory_is_refused(tmp_path):
    with (
        RaceDirectory(tmp_path).lock(silent),
        pytest.raises(RaceError, match="no other race"),
        RaceDirectory(tmp_path).lock(silent),
    ):
        pass


def test_a_race_waits_for_the_run_that_a_killed_one_left_behind(tmp_path):
    said = []
    left_behind = RaceDirectory(tmp_path).lock(silent)
    left_behind.__enter__()
    gone = subprocess.Popen(["true"])
    gone.wait()
    (tmp_path / "lock").write_text(f"{gone.pid}\n")

    def end_when_told(line):
        said.append(line)
        left_behind.__exit__(None, None, None)

    with RaceDirectory(tmp_path).lock(end_when_told):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
    assert len(said) == 1
    assert "waiting" in said[0]


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("10m", 600), ("1h30m", 5400), ("2h", 7200)])
def test_budgets(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "ten", "10x", "m", "-5m"])
def test_what_is_no_budget_is_refused(text):
    with pytest.raises(ConfigError, match="--budget"):
        parse_seconds(text)


def test_an_ablation_takes_back_each_change_once():
    plan, left_out = make_ablation("softcap", None, "pico", 2, {})
    assert not left_out
    assert [entry.label for entry in plan.entries] == [
        "softcap",
        "without model.softcap",
        "without model.bf16_embeddings",
        "without optim.muon.momentum_warmup_steps",
        "without cooldown",
        "without window",
    ]
    taken_back = {name for entry in plan.entries for name in entry.changes}
    parent, full = resolve("sparse-value-embeds", "pico"), resolve("softcap", "pico")
    not_learned = {"recipe": parent.recipe, "runtime.coordinate_descent": False}
    assert taken_back == {change.name for change in diff(parent, full)} - set(not_learned)
    everything = {name: value for entry in plan.entries for name, value in entry.changes.items()}
    assert updated(full, {**everything, **not_learned}) == parent
    assert plan.entries[4].removes == "schedule.cooldown_steps 40 → 0, schedule.cooldown_fraction 0 → 0.4"


@pytest.mark.parametrize("recipe", [name for name in RECIPES if ancestors(name)])
@pytest.mark.parametrize("size", ["pico", "nano", "small"])
def test_every_recipe_can_be_taken_apart_back_to_the_root(recipe, size):
    plan, left_out = make_ablation(recipe, ancestors(recipe)[-1], size, 2, {})
    assert not left_out
    for start in plan.rounds()[0]:
        plan.config(start)


def test_what_cannot_be_taken_back_alone_is_reported():
    plan, left_out = make_ablation("softcap", None, "pico", 2, {"schedule.cooldown_fraction": 0.4})
    assert not any("cooldown" in entry.label for entry in plan.entries)
    (line,) = left_out
    assert line.startswith("schedule.cooldown_steps 40 → 0")
    assert "the cooldown in steps or as a fraction" in line


def test_an_ablation_changes_no_setting_that_has_no_effect():
    with pytest.raises(ConfigError, match=r"softcap uses; found `optim\.muon\.lr`"):
        make_ablation("softcap", None, "pico", 2, {"optim.matrices": "adamw", "optim.muon.lr": 0.1})
    plan, left_out = make_ablation("softcap", None, "pico", 2, {"optim.matrices": "adamw"})
    assert "without model.softcap" in [entry.label for entry in plan.entries]
    (line,) = left_out
    assert line.startswith("optim.muon.momentum_warmup_steps")
    assert "AdamW updates the matrices" in line


def test_a_plan_that_was_written_before_such_settings_were_refused_is_refused_too():
    plan = plans.Plan("pico", 2, (plans.Entry("adamw", "adamw", {"optim.muon.lr": 0.1}),))
    with pytest.raises(ConfigError, match="AdamW updates the matrices"):
        plans.from_json(json.loads(json.dumps(plans.to_json(plan))), "plan.json")


def test_settings_of_the_whole_race_are_no_change_of_the_recipe():
    plan, _ = make_ablation("softcap", None, "pico", 2, {"model.softcap": 20.0})
    assert "without model.softcap" not in [entry.label for entry in plan.entries]


@pytest.mark.parametrize(
    "recipe, against, part",
    [
        ("adamw", None, "adamw, which has none"),
        ("softcap", "adamw", "an ancestor of softcap"),
        ("softcap", "softcap", "an ancestor of softcap"),
        ("softcap", "blok-window", "did you mean `block-window`"),
        ("softcp", None, "did you mean `softcap`"),
    ],
)
def test_what_cannot_be_ablated_is_refused(recipe, against, part):
    with pytest.raises(ConfigError, match=part):
        make_ablation(recipe, against, "pico", 2, {})


def test_settings_that_belong_together_exist_and_stand_in_one_group():
    settings = [setting for group in SETTING_GROUPS for setting in group.settings]
    assert len(set(settings)) == len(settings)
    assert set(settings) <= set(flatten(resolve("softcap", "pico")))


def test_a_change_of_one_setting_of_a_group_is_named_by_it():
    changes = diff(resolve("block-window", "pico"), resolve("sparse-value-embeds", "pico"))
    names = [part.name for part in group_changes(changes) if part.name != "recipe"]
    assert names == ["rotary", "model.values", "model.drop_attention", "schedule.cooldown_steps"]
