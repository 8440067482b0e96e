"""Idea files: what a well-formed one changes, and the one line for each way in which one is ill-formed."""

import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

import hotlap as package
from hotlap.errors import CheckpointError, IdeaError, RaceError
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import from_json, make_plan, to_json
from hotlap.recipes import find_recipe, resolve
from hotlap.recipes.idea_files import read_idea
from hotlap.report.page import render_page
from hotlap.runs.reader import load_run
from hotlap.settings import shown, updated
from hotlap.train.run import RunOptions
from hotlap.train.run import run as run_training
from tests.command import complaint, hotlap, hotlap_here
from tests.training import PLAIN, assert_one_curve, final_weights, losses, pico
from tests.training import train as run_pico

SWIGLU = '''"""A gated MLP."""
import torch.nn.functional as F
from torch import nn
import hotlap

class Gated(nn.Module):
    roles = {"gate.weight": "matrix", "out.weight": "matrix"}

    def __init__(self, config):
        super().__init__()
        self.gate = nn.Linear(config.width, 64, bias=False)
        self.out = nn.Linear(64, config.width, bias=False)

    def forward(self, x):
        return F.linear(F.silu(F.linear(x, self.gate.weight.to(x.dtype))), self.out.weight.to(x.dtype))

idea = hotlap.idea("softcap", mlp=Gated)
'''

EVERYTHING = '''"""Changes one of everything."""
import torch
from hotlap.model.block import Block
from hotlap.model.layers import Table
import hotlap

class Quiet(Block):
    def forward(self, x, x0, skip, value_embedding, rotation, plan):
        return super().forward(x, x0, skip, value_embedding, rotation, plan) * 1.0

class Small(Table):
    def reset_parameters(self):
        torch.nn.init.normal_(self.weight, std=0.1)

def loss(x, targets, cross_entropy):
    return cross_entropy(x, targets) + 0.5 * cross_entropy(x[:-1], targets[1:])

def initialize(model):
    model.skip_weights.fill_(0.25)

def schedule(step, steps):
    return 1 - step / steps

def batch(inputs, targets, step):
    return inputs.roll(1, 1), targets.roll(1, 1)

def sgd(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.01, momentum=0.9)

idea = hotlap.idea(
    "softcap", settings={"model.mlp_ratio": 2}, block=Quiet, embedding=Small, loss=loss,
    initialize=initialize, schedule=schedule, batch=batch,
    roles={"head.weight": "embedding"}, optimizers={"skip_weights": sgd},
)
'''


@pytest.fixture
def write(tmp_path):
    """write(name, source) → the path of an idea file."""

    def write_idea(name, source):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        return path

    return write_idea


def train(path, data, root, steps=3, name="run", **changes):
    recipe = find_recipe(str(path))
    named = {"data.source": str(data), "schedule.steps": steps, "evaluation.tokens": 1024, **PLAIN}
    config = resolve(str(path), "pico", {**named, **changes})
    options = RunOptions(root, name, ideas=recipe.ideas)
    return run_training(config, options, Console(file=io.StringIO()))


ILL_FORMED = {
    "no docstring": (SWIGLU.split("\n", 1)[1], "idea.py:1"),
    "no call": ('"""Nothing."""\nx = 3\n', "idea.py:2; found none"),
    "two ideas": (SWIGLU + 'again = hotlap.idea("softcap")\n', "found 2"),
    "a syntax error": (SWIGLU.replace("class Gated(nn.Module):", "class Gated(nn.Module"), "idea.py:6"),
    "an error while it is read": (
        SWIGLU.replace("idea = ", "x = 1 / 0\nidea = "),
        "idea.py:17; found ZeroDivisionError",
    ),
    "an unknown parent": (
        SWIGLU.replace('"softcap"', '"softcp"'),
        "idea.py:17 .*found `softcp`; did you mean `softcap`",
    ),
    "an unknown setting": (
        SWIGLU.replace("mlp=", 'settings={"model.widht": 3}, mlp='),
        "idea.py:17; .*model.width",
    ),
    "a wrong value": (
        SWIGLU.replace("mlp=", 'settings={"model.width": "wide"}, mlp='),
        "idea.py:17; found 'wide'",
    ),
    "a seed": (SWIGLU.replace("mlp=", 'settings={"seed": 3}, mlp='), "idea.py:17; found `seed`"),
    "an unknown argument": (SWIGLU.replace("mlp=", "mpl="), "idea.py:17; found TypeError: .*mpl"),
    "a wrong constructor": (SWIGLU.replace("(self, config)", "(self)"), r"mlp\(config\) in .*idea.py:9"),
    "a wrong forward": (
        SWIGLU.replace("forward(self, x)", "forward(self, x, y)"),
        r"Gated.forward\(x\) in .*idea.py:14",
    ),
    "no module": (SWIGLU.replace("mlp=Gated", "mlp=3"), r"mlp\(config\) in .*idea.py:17; found 3"),
    "a wrong loss": (
        SWIGLU.replace("mlp=", "loss=lambda x: x, mlp="),
        r"loss\(x, targets, cross_entropy\) in .*:17",
    ),
    "a wrong schedule": (SWIGLU.replace("mlp=", "schedule=lambda step: 1, mlp="), r"schedule\(step, steps\)"),
    "a module of one's own": (
        SWIGLU.replace("import hotlap\n", "import hotlap, my_helpers\n"),
        "idea.py:4; found `my_helpers`",
    ),
    "a part of GPT-2": (SWIGLU.replace('"softcap"', '"adamw"'), "idea.py:17; found adamw, which is GPT-2"),
}

ILL_FORMED_MODELS = {
    "a parameter without a role": (
        SWIGLU.replace('"gate.weight": "matrix", ', ""),
        "`blocks.0.mlp.gate.weight`, .*idea.py:9; found none",
    ),
    "an unknown role": (
        SWIGLU.replace('"gate.weight": "matrix"', '"gate.weight": "matrx"'),
        "idea.py:9; found `matrx`",
    ),
    "an error when built": (
        SWIGLU.replace("config.width, 64", "config.widht, 64"),
        "idea.py:11; found AttributeError.*widht",
    ),
    "an error when called": (SWIGLU.replace("F.silu(", "F.silo("), "idea.py:15; found AttributeError"),
    "a wrong shape": (
        SWIGLU.replace("return F.linear", "return x.T + F.linear"),
        "idea.py:15; found RuntimeError",
    ),
    "a loss that is not finite": (
        SWIGLU.replace("return F.linear(", "return float('nan') * F.linear("),
        "idea.py:17; found nan",
    ),
    "a parameter that is not used": (
        SWIGLU.replace(
            "        self.out =",
            "        self.idle = nn.Parameter(self.gate.weight.detach().clone())\n        self.out =",
        ).replace("roles = {", 'roles = {"idle": "matrix", '),
        "idea.py:9; found none of `blocks.0.mlp.idle`",
    ),
    "a pattern of nothing": (
        SWIGLU.replace("mlp=", 'roles={"gates.*": "matrix"}, mlp='),
        "idea.py:17; found `gates.*`",
    ),
    "a schedule below 0": (
        SWIGLU.replace("mlp=", "schedule=lambda step, steps: 1 - step, mlp="),
        "idea.py:17; found -1 at step 2 of 3",
    ),
    "a batch of another shape": (
        SWIGLU.replace("mlp=", "batch=lambda i, t, step: (i[:, 1:], t), mlp="),
        "idea.py:17; found",
    ),
    "an optimizer of nothing": (
        SWIGLU.replace("mlp=", 'optimizers={"head.*": lambda named: 3}, mlp='),
        "idea.py:17; found int",
    ),
}


@pytest.mark.parametrize("kind", ILL_FORMED)
def test_an_ill_formed_file_is_one_line_with_its_place(kind, write):
    source, part = ILL_FORMED[kind]
    with pytest.raises(IdeaError, match=part) as caught:
        find_recipe(str(write("idea", source)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ILL_FORMED_MODELS)
def test_an_ill_formed_model_is_one_line_with_its_place_and_leaves_no_run(kind, write, tiny_data, tmp_path):
    source, part = ILL_FORMED_MODELS[kind]
    path = write("idea", source)
    with pytest.raises(IdeaError, match=part) as caught:
        train(path, tiny_data, tmp_path / "runs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_an_ill_formed_idea_on_the_command_line_is_one_line_and_exit_code_2(write):
    path = write("idea", ILL_FORMED["no docstring"][0])
    for command in (
        ["train"],
        ["race", "softcap"],
        ["ablate"],
        ["recipes", "show"],
        ["recipes", "diff", "softcap"],
    ):
        assert "idea.py:1; found none" in complaint(hotlap_here(*command, str(path)))


def test_a_race_says_what_is_wrong_with_an_idea_before_it_begins(write, tmp_path):
    path = write("idea", ILL_FORMED_MODELS["a parameter without a role"][0])
    words = ["race", "softcap", str(path), "--size", "pico", "--runs", str(tmp_path / "runs")]
    assert "idea.py:9" in complaint(hotlap_here(*words))
    assert not (tmp_path / "runs").exists()


def test_a_missing_file_and_the_name_of_a_recipe_are_refused(write):
    with pytest.raises(IdeaError, match=r"readable file nowhere\.py"):
        find_recipe("nowhere.py")
    with pytest.raises(IdeaError, match="found `softcap`; rename the file"):
        find_recipe(str(write("softcap", SWIGLU)))


def test_an_idea_that_changes_everything_changes_each_of_it(write, tiny_data, tmp_path):
    lap = train(write("everything", EVERYTHING), tiny_data, tmp_path).lap
    assert type(lap.model.blocks[0]).__name__ == "Quiet"
    assert type(lap.model.embed).__name__ == "Small"
    assert lap.model.blocks[0].mlp.expand.weight.shape == (128, 64)
    routes = {route.name: route for route in lap.routing.routes}
    assert (routes["skip_weights"].optimizer, routes["skip_weights"].lr) == ("SGD", 0.01)
    assert routes["head.weight"].role == "embedding"
    assert [lap.lr_multiplier(step) for step in range(3)] == pytest.approx([1, 2 / 3, 1 / 3])
    assert {part.name: part.reason for part in lap.installed.parts}[
        "block of layers 0-3"
    ] == "Quiet has no kernel"
    # Two targets to train on, of two unrelated tokens each; validation keeps the ordinary loss.
    run = tmp_path / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    by_kind = {kind: next(line for line in lines if line["kind"] == kind) for kind in ("train", "validation")}
    assert by_kind["train"]["loss"] == pytest.approx(1.5 * by_kind["validation"]["val_loss"], rel=0.01)


def test_initial_weights_are_the_ideas(write, tiny_data, tmp_path):
    source = EVERYTHING.replace("step / steps", "1").replace("lr=0.01", "lr=0.0")
    train(write("everything", source), tiny_data, tmp_path)
    assert final_weights(tmp_path / "run")["skip_weights"].tolist() == [0.25, 0.25]


def test_an_idea_that_repeats_its_parent_trains_bit_for_bit_as_it(write, tiny_data, tmp_path):
    same = '''"""Nothing else than the parent."""
import hotlap
from hotlap.model.mlp import MLP
from hotlap.model.head import cross_entropy
idea = hotlap.idea("softcap", mlp=MLP, loss=lambda x, targets, cross_entropy: cross_entropy(x, targets))
'''
    train(write("same", same), tiny_data, tmp_path, name="idea")
    config = resolve(
        "softcap",
        "pico",
        {"data.source": str(tiny_data), "schedule.steps": 3, "evaluation.tokens": 1024, **PLAIN},
    )
    run_training(config, RunOptions(tmp_path, "parent"), Console(file=io.StringIO()))
    assert losses(tmp_path / "idea") == losses(tmp_path / "parent")
    with_idea, without = final_weights(tmp_path / "idea"), final_weights(tmp_path / "parent")
    assert all(torch.equal(with_idea[name], without[name]) for name in without)


def test_ideas_compose_and_refuse_to_contradict(write):
    wide = write(
        "wide",
        '"""Wider."""\nimport hotlap\nidea = hotlap.idea("softcap", settings={"model.mlp_ratio": 8})\n',
    )
    gated = write("gated", SWIGLU)
    recipe = find_recipe(f"{wide}+{gated}")
    assert (recipe.name, recipe.parent, recipe.summary) == ("wide+gated", "softcap", "Wider.; A gated MLP.")
    config = resolve(f"{wide}+{gated}", "pico")
    assert config.model.mlp_ratio == 8
    assert [name.partition("@")[0] for name in config.ideas] == ["wide", "gated"]
    other = write("other", SWIGLU.replace("64", "32"))
    with pytest.raises(IdeaError, match=r"one `mlp`; found two in .*gated.py:17 and .*other.py:17"):
        find_recipe(f"{gated}+{other}")
    elsewhere = write("elsewhere", SWIGLU.replace('"softcap"', '"sprint"'))
    with pytest.raises(IdeaError, match="one parent; found softcap and sprint"):
        find_recipe(f"{wide}+{elsewhere}")


def test_the_parents_settings_at_a_size_are_kept(write):
    path = write("short", '"""Nothing."""\nimport hotlap\nidea = hotlap.idea("sprint")\n')
    idea, parent = resolve(str(path), "nano"), resolve("sprint", "nano")
    assert updated(idea, {"recipe": "sprint", "ideas": ()}) == parent


def test_a_run_keeps_its_idea_and_goes_on_with_the_copy(write, tiny_data, tmp_path):
    path = write("gated", SWIGLU)
    directory = train(path, tiny_data, tmp_path, steps=3).directory
    copy = directory.ideas / read_idea(path).copy_name
    assert copy.read_text() == SWIGLU
    path.unlink()
    words = ["train", "--resume", str(directory.path), "--steps", "4", "--allow-change"]
    assert hotlap_here(*words).returncode == 0
    assert len(losses(directory.path)) == 4
    copy.write_text(SWIGLU + "# changed\n")
    assert copy.name in complaint(hotlap_here(*words[:-3], "--steps", "5", "--allow-change"))


def test_a_file_that_was_changed_since_is_refused_by_name_unless_allowed(write, tiny_data, tmp_path):
    path = write("gated", SWIGLU)
    directory = train(path, tiny_data, tmp_path, steps=3).directory
    write("gated", SWIGLU.replace("silu", "gelu"))
    settings = [
        f"--data.source={tiny_data}",
        "--steps=3",
        "--evaluation.tokens=1024",
        *(f"--{k}={v}" for k, v in PLAIN.items()),
    ]
    words = ["train", str(path), "--size", "pico", *settings, "--resume", str(directory.path)]
    line = complaint(hotlap_here(*words))
    assert f"{path} as it was when {directory.path} was started" in line
    assert "--allow-change" in line
    words[words.index("--steps=3")] = "--steps=4"
    assert hotlap_here(*words, "--allow-change").returncode == 0
    assert read_idea(path).copy_name in os.listdir(directory.ideas)


def test_a_race_keeps_its_ideas_and_refuses_a_changed_file_by_name(write, tmp_path):
    path = write("gated", SWIGLU)
    plan = make_plan(["softcap", str(path), f"{path}:optim.muon.lr=0.1"], "pico", 2, {})
    assert [entry.label for entry in plan.entries] == ["softcap", "gated", "gated:optim.muon.lr=0.1"]
    assert from_json(json.loads(json.dumps(to_json(plan))), "race.json") == plan
    assert plan.command == f"hotlap race softcap {path} {path}:optim.muon.lr=0.1 --size pico --seeds 2"
    directory = RaceDirectory(tmp_path / "race")
    directory.check(plan)
    directory.write_plan(plan)
    write("gated", SWIGLU.replace("silu", "gelu"))
    changed = make_plan(["softcap", str(path), f"{path}:optim.muon.lr=0.1"], "pico", 2, {})
    assert changed.default_name == plan.default_name
    with pytest.raises(
        RaceError, match=r"gated\.py as it was when the race began, gated@.* found a changed file"
    ):
        directory.check(changed)


def test_an_ablation_undoes_the_code_and_each_setting(write):
    from hotlap.race.ablation import make_ablation

    path = write(
        "gated", SWIGLU.replace("mlp=", 'settings={"model.mlp_ratio": 3, "model.softcap": 9.0}, mlp=')
    )
    plan, skipped = make_ablation(str(path), None, "pico", 2, {})
    assert not skipped
    found = {entry.label: plan.config(start) for start in plan.rounds()[0] for entry in [start.entry]}
    assert list(found) == ["gated", "without gated", "without model.mlp_ratio", "without model.softcap"]
    assert (found["without gated"].ideas, found["without gated"].model.mlp_ratio) == ((), 3)
    assert found["without gated"].recipe == "softcap"
    assert found["without model.softcap"].model.softcap == 15
    assert found["without model.softcap"].ideas == found["gated"].ideas != ()


def test_a_model_with_code_is_loaded_only_when_told_to(write, tiny_data, tmp_path):
    run = train(write("gated", SWIGLU), tiny_data, tmp_path).directory.path
    exported = tmp_path / "exported"
    assert "--trust-code" in complaint(hotlap_here("export", str(run), str(exported)))
    assert hotlap_here("export", str(run), str(exported), "--trust-code").returncode == 0
    shutil.rmtree(run)
    with pytest.raises(CheckpointError, match=r"leave to run the code of gated@.*trust_code=True"):
        package.load(exported)
    model = package.load(exported, trust_code=True, device="cpu")
    assert type(model.model.blocks[0].mlp).__name__ == "Gated"
    assert model.generate("the", max_tokens=3)
    (copy,) = (exported / "ideas").iterdir()
    copy.write_text(copy.read_text() + "import os\n")
    with pytest.raises(IdeaError, match="another content"):
        package.load(exported, trust_code=True)


def test_header_and_environment_say_what_an_idea_changes(write, tiny_data, tmp_path):
    path = write("everything", EVERYTHING)
    run = train(path, tiny_data, tmp_path).directory
    header = run.log_path.read_text()
    assert "on softcap, from" in header
    assert "block is Quiet" in header
    assert "model.mlp_ratio = 2" in header
    facts = run.read_environment()
    assert facts["code"]["ideas"] == [read_idea(path).identity]
    (idea,) = facts["ideas"]
    by_part = {row["what"]: row for row in idea["differences"]}
    assert by_part["settings"] == {
        "what": "settings",
        "before": "model.mlp_ratio = 4",
        "after": "model.mlp_ratio = 2",
    }
    assert by_part["block"]["before"].startswith("class Block(nn.Module)")
    assert by_part["block"]["after"].startswith("class Quiet(Block)")
    assert idea["source"] == EVERYTHING


def test_the_ideas_that_come_with_the_project_are_well_formed():
    for path in sorted((Path(__file__).parents[1] / "ideas").glob("*.py")):
        assert find_recipe(str(path)).parent == "softcap"


def test_kernels_can_be_switched_off(tiny_data, tmp_path):
    curves = {}
    for kernels in ("auto", "off"):
        lap = run_pico(pico(tiny_data, 3, runtime__kernels=kernels), tmp_path, kernels).lap
        curves[kernels] = losses(tmp_path / kernels)
        assert all(not part.kernel for part in lap.installed.parts) == (kernels == "off")
    assert_one_curve(curves["off"], curves["auto"])


def test_a_new_idea_runs_as_it_is(tmp_path, tiny_data):
    for name, parent in (("mine", "softcap"), ("old", "adamw")):
        made = hotlap_here("new", "idea", name, "--parent", parent, cwd=tmp_path)
        assert f"hotlap race {parent} ideas/{name}.py" in made.stdout
        assert train(tmp_path / "ideas" / f"{name}.py", tiny_data, tmp_path, name=name).status == "finished"
    assert "exists" in complaint(hotlap_here("new", "idea", "mine", cwd=tmp_path))
    assert "rename the file" in complaint(hotlap_here("new", "idea", "softcap", cwd=tmp_path))


def test_recipes_show_and_diff_have_both_sides(write):
    path = str(write("gated", SWIGLU))
    shown = hotlap_here("recipes", "show", path, "--size", "pico").stdout
    assert "gated at pico: A gated MLP." in shown
    both = hotlap_here("recipes", "diff", "softcap", path, "--size", "pico").stdout
    assert "class Gated" in both
    assert "class MLP" in both


def test_the_page_has_the_source_and_both_sides(write, tiny_data, tmp_path):
    source = SWIGLU.replace("A gated MLP.", "A <b>gated</b> MLP.")
    run = train(write("gated", source), tiny_data, tmp_path).directory.path
    page = render_page({"gated": [load_run(run)]}, "gated")
    assert "A &lt;b&gt;gated&lt;/b&gt; MLP." in page
    assert '<td class="added">class Gated(nn.Module):</td>' in page
    assert '<td class="removed">class MLP(nn.Module):</td>' in page
    assert "the whole file gated@" in page


@pytest.mark.slow
def test_two_ranks_train_an_idea_as_one_does(write, tiny_data, tmp_path):
    path = write("everything", EVERYTHING.replace("batch=batch,", ""))
    settings = [f"--data.source={tiny_data}", "--steps=6", "--evaluation.tokens=1024"]
    settings += [f"--{name}={shown(value)}" for name, value in PLAIN.items()]
    for name, more in (("one", []), ("two", ["--procs", "2"])):
        words = ["train", str(path), "--size", "pico", *settings, "--runs", str(tmp_path), "--name", name]
        done = hotlap(*words, *more)
        assert done.returncode == 0, done.stderr
    assert_one_curve(losses(tmp_path / "two"), losses(tmp_path / "one"))


@pytest.mark.slow
def test_a_run_with_an_idea_resumes_bit_for_bit(write, tiny_data, tmp_path):
    path = write("everything", EVERYTHING)
    train(path, tiny_data, tmp_path, steps=6, name="whole")
    train(path, tiny_data, tmp_path, steps=6, name="halves", **{"checkpoint.every_steps": 3})
    halves = tmp_path / "halves"
    words = ["train", "--resume", str(halves / "checkpoints" / "step-000003")]
    assert hotlap_here(*words).returncode == 0
    assert losses(halves) == losses(tmp_path / "whole")
    found, expected = final_weights(halves), final_weights(tmp_path / "whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
