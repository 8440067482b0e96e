"""The gate with made-up runs: rounds, verdicts, exit codes, copied baselines; and for real from a shell."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hotlap.commands import gate as gate_command
from hotlap.errors import RaceError
from hotlap.lab.gate import EXIT_CODES, Gate, Question
from hotlap.lab.ledger import Ledger
from hotlap.progress import silent
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.progress import RaceProgress
from tests.command import complaint, hotlap_here
from tests.made_up_engine import MadeUpEngine
from tests.synthetic_runs import LOSS_TO_BPB

IDEA = "softcap:fast,optim.muon.lr=0.03"
SETTINGS = {"schedule.steps": 30, "schedule.warmup_steps": 0}
NOISE = [0.004, -0.003, 0.001, -0.002, 0.005, -0.004, 0.002, -0.001, 0.003, -0.005, 0.0, 0.001]


def question(specs=("softcap", IDEA), seeds=12, least_effect=0.005, first_seed=0):
    plan = make_plan(specs, "pico", seeds, SETTINGS, first_seed=first_seed)
    return Question(plan, alpha=0.05, least_effect=least_effect)


def losses(plan, gain, noise=0.004):
    """Losses of runs in which the second entry gains this many nats, give or take."""
    made = {}
    for number, (a, b) in enumerate(plan.rounds()):
        made[a.name] = 3.3 + NOISE[number % 12]
        made[b.name] = 3.3 + NOISE[number % 12] - gain + noise * NOISE[(number * 5 + 3) % 12] / 0.005
    return made


@pytest.fixture
def carry_out(tmp_path):
    """carry_out(question, gain) → (result, names in the order they were trained, what was said)."""

    def run(asked, gain=0.1, budget_s=None, slots=1, name=None, **made_up):
        directory = RaceDirectory(tmp_path / (name or asked.default_name))
        engine = MadeUpEngine(slots, losses=losses(asked.plan, gain), **made_up)
        said = []
        out = io.StringIO()
        gate = Gate(asked, directory, Ledger(tmp_path), said.append)
        with directory.lock(silent), RaceProgress(asked.plan, 0, out) as progress, engine:
            gate.begin()
            directory.write_plan(asked.plan)
            result = gate.run(engine, progress, budget_s)
        return result, engine.order, "\n".join([*said, out.getvalue()])

    return run


def test_a_gain_stops_early_and_the_ledger_has_it(carry_out, tmp_path):
    result, order, said = carry_out(question())
    assert result["outcome"] == "helps"
    assert result["exit_code"] == 0
    assert result["rounds"] < 12
    assert len(order) == 2 * result["rounds"]
    assert order[0] == "softcap-fast-seed0", "the idea's first run tells the machine"
    assert result["effect"] == pytest.approx(-0.1 * LOSS_TO_BPB, abs=0.01)
    assert result["low"] < result["effect"] < result["high"] < 0
    assert result["p"] <= result["p_needed"]
    assert "try 1: “helps” at level" in said
    (tried,) = Ledger(tmp_path).tries()
    assert tried.outcome == "helps"
    assert tried.began["idea"]["changes"] == ["optim.muon.lr 0.05 → 0.03"]
    assert json.loads(json.dumps(result)) == result
    page = (tmp_path / question().default_name / "report.html").read_text()
    assert "gate: helps" in page
    assert "runs of the plan that are not counted" not in page


def test_a_loss_does_not_help_and_an_equal_idea_has_no_effect(carry_out):
    worse, _, _ = carry_out(question(), gain=-0.1)
    assert (worse["outcome"], worse["exit_code"]) == ("hurts", 1)
    equal, _, _ = carry_out(question(least_effect=0.05, first_seed=12), gain=0.0)
    assert (equal["outcome"], equal["exit_code"]) == ("no effect worth having", 1)
    assert equal["is_equivalent"]


def test_a_budget_leaves_it_undecided_and_the_same_command_goes_on(carry_out, tmp_path):
    first, order, _ = carry_out(question(), budget_s=0)
    assert (first["outcome"], first["exit_code"], first["rounds"]) == ("undecided", 3, 1)
    assert "the budget is used up" in first["words"]
    assert len(order) == 2
    second, more, _ = carry_out(question())
    assert second["outcome"] == "helps"
    assert not set(order) & set(more), "no run is repeated"
    (tried,) = Ledger(tmp_path).tries()
    assert tried.outcome == "helps"
    third, none, _ = carry_out(question())
    assert none == []
    assert third == second
    assert len(Ledger(tmp_path).entries()) == 3, "a verdict is added once"


def test_an_idea_that_trains_not_at_all_hurts(carry_out):
    result, order, _ = carry_out(question(), gain=float("nan"))
    assert (result["outcome"], result["rounds"]) == ("hurts", 1)
    assert "no finite validation loss" in result["words"]
    assert len(order) == 2


def test_without_any_change_the_words_say_so(carry_out, tmp_path):
    asked = question(("softcap", "softcap:same,runtime.threads=1"))
    same = {start.name: 3.3 + NOISE[start.seed % 12] for r in asked.plan.rounds() for start in r}
    directory = RaceDirectory(tmp_path / "same")
    gate = Gate(asked, directory, Ledger(tmp_path), silent)
    with directory.lock(silent), RaceProgress(asked.plan, 0, io.StringIO()) as progress:
        gate.begin()
        directory.write_plan(asked.plan)
        result = gate.run(MadeUpEngine(losses=same), progress, None)
    assert result["outcome"] == "no effect worth having"
    assert "exactly the same value" in result["words"]


def test_baseline_runs_are_copied_from_an_earlier_gate_and_said_to_be(carry_out):
    first, _, _ = carry_out(question())
    other = question(("softcap", "softcap:slow,optim.muon.lr=0.02"))
    second, order, said = carry_out(other)
    assert second["outcome"] == "helps"
    copied = min(first["rounds"], second["rounds"])
    assert sum(name.startswith("softcap-seed") for name in order) == second["rounds"] - copied
    assert second["baseline_runs"]["copied_from"] == {question().default_name: copied}
    assert f"softcap, seed 0: copied from {question().default_name}" in said
    assert second["runs"][0]["value"] == first["runs"][0]["value"]


@pytest.mark.parametrize("fact", ["torch", "data", "validation", "code"])
def test_baseline_runs_of_other_code_data_or_machines_are_trained_again(carry_out, tmp_path, fact):
    carry_out(question())
    for path in (tmp_path / question().default_name).glob("softcap-seed*/environment.json"):
        content = json.loads(path.read_text())
        if fact == "validation":
            content["data"]["val_fingerprint"] = "other"
        else:
            content[fact] = {"fingerprint": "other", "package": "other"} if fact != "torch" else "9.9"
        path.write_text(json.dumps(content))
        (path.parent / "summary.json").write_text(json.dumps({"status": "finished"}))
    second, order, _ = carry_out(question(("softcap", "softcap:slow,optim.muon.lr=0.02")))
    assert second["baseline_runs"]["copied_from"] == {}
    assert "softcap-seed0" in order


def test_two_slots_train_a_round_at_once(carry_out):
    one, _, _ = carry_out(question())
    two, order, _ = carry_out(question(first_seed=12), slots=4)
    assert two["outcome"] == one["outcome"]
    assert order[0] == "softcap-fast-seed12"


def test_a_recipe_against_itself_gets_other_seeds(carry_out):
    result, order, _ = carry_out(question(("softcap", "softcap:again"), least_effect=0.05), gain=0.0)
    assert "softcap-again-seed1000" in order
    assert result["idea"]["sentence"] == "softcap again, with other seeds"


def test_a_diverged_baseline_is_refused(carry_out, tmp_path):
    asked = question()
    nan = {
        start.name: float("nan") for r in asked.plan.rounds() for start in r if start.entry.label == "softcap"
    }
    directory = RaceDirectory(tmp_path / "bad")
    gate = Gate(asked, directory, Ledger(tmp_path), silent)
    with directory.lock(silent), RaceProgress(asked.plan, 0, io.StringIO()) as progress:
        gate.begin()
        directory.write_plan(asked.plan)
        with pytest.raises(RaceError, match="a baseline that trains"):
            gate.run(MadeUpEngine(losses=nan), progress, None)


def test_exit_codes_are_those_of_the_documentation():
    page = (Path(__file__).parents[1] / "docs" / "gate.md").read_text()
    for outcome, code in EXIT_CODES.items():
        assert f"| {code} | *{outcome}*" in page, outcome


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["softcap"], "two recipes with --gate"),
        (["softcap", "softcap:again", "adamw"], "two recipes with --gate"),
        (["softcap", "softcap:again", "--alpha", "0.7"], "--alpha between 0 and 0.5"),
        (["softcap", "softcap:again", "--least-effect", "-1"], "--least-effect of 0 or more"),
        (["softcap", "softcap:again", "--seeds", "1"], "--seeds of 2"),
        (["softcap", "softcap:again", "--target-bpb", "2"], "a gate without a target"),
        (["softcap", "softcap:again", "--budget", "soon"], "--budget as a time"),
        (["softcap", "nothing"], "`nothing`"),
        (["softcap", "softcap:again", "--resume", "x"], "without --resume"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(tmp_path, arguments, part):
    assert part in complaint(hotlap_here("race", *arguments, "--gate", "--size", "pico", cwd=tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--json", "--alpha=0.1", "--least-effect=0.1", "--first-seed=3"])
def test_options_of_a_gate_need_one(tmp_path, option):
    assert "add --gate" in complaint(hotlap_here("race", "softcap", option, cwd=tmp_path))


def test_the_defaults_are_those_of_the_documentation():
    page = (Path(__file__).parents[1] / "docs" / "gate.md").read_text()
    assert f"--alpha` ({gate_command.DEFAULT_ALPHA})" in page
    assert f"--least-effect` ({gate_command.DEFAULT_LEAST_EFFECT})" in page
    assert f"--seeds` ({gate_command.DEFAULT_MOST_SEEDS})" in page


def script() -> str:
    page = (Path(__file__).parents[1] / "docs" / "gate.md").read_text()
    (found,) = re.findall(r"```sh\n(best=.*?)```", page, flags=re.DOTALL)
    assert len(found.splitlines()) <= 10
    return found


def run_script(folder, path, **environment):
    (folder / "keep.sh").write_text(script())
    return subprocess.run(
        ["sh", "keep.sh", "softcap:optim.muon.lr=0.03", "softcap:model.softcap=20"],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": f"{path}:{os.environ['PATH']}", **environment},
    )


@pytest.mark.parametrize(
    "codes, kept",
    [
        ((1, 3), "softcap\n"),
        ((0, 1), "softcap:optim.muon.lr=0.03\n"),
        ((3, 0), "softcap:model.softcap=20\n"),
        ((0, 0), "softcap:model.softcap=20\n"),
    ],
)
def test_the_script_keeps_an_idea_only_if_the_gate_says_so(tmp_path, codes, kept):
    command = tmp_path / "hotlap"
    command.write_text(
        f'#!/bin/sh\necho "$@" >>calls\ncase $3 in *lr*) exit {codes[0]};; *) exit {codes[1]};; esac\n'
    )
    command.chmod(0o755)
    done = run_script(tmp_path, tmp_path)
    assert (done.returncode, done.stdout) == (0, kept)
    first, second = (tmp_path / "calls").read_text().splitlines()
    assert first == "race softcap softcap:optim.muon.lr=0.03 --gate --json"
    better = "softcap:optim.muon.lr=0.03" if codes[0] == 0 else "softcap"
    assert second.startswith(f"race {better} softcap:model.softcap=20")


def test_the_script_stops_at_a_mistake(tmp_path):
    command = tmp_path / "hotlap"
    command.write_text("#!/bin/sh\nexit 2\n")
    command.chmod(0o755)
    assert (run_script(tmp_path, tmp_path).returncode, (tmp_path / "calls").exists()) == (2, False)


@pytest.mark.slow
def test_the_script_tries_two_ideas_for_real(tiny_data, tmp_path):
    options = (
        f"--size pico --seeds 3 --steps 3 --evaluation.tokens 1024 --threads 1 --data.source {tiny_data}"
    )
    done = run_script(tmp_path, Path(sys.executable).parent, OPTIONS=options, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    tries = Ledger(tmp_path / "runs").tries()
    assert len(tries) == 2
    helped = [one.began["idea"]["label"] for one in tries if one.outcome == "helps"]
    assert done.stdout.strip() == (helped[-1] if helped else "softcap")
    result = json.loads((tmp_path / "verdict.json").read_text())
    assert result["schema"] == 1
    assert result["outcome"] == tries[1].outcome
    if not helped:
        assert result["baseline_runs"]["copied_from"], "the second gate has the baseline of the first"


def test_every_field_of_the_result_is_documented(carry_out):
    page = (Path(__file__).parents[1] / "docs" / "gate.md").read_text()
    result, _, _ = carry_out(question())
    assert {name for name in result if f"`{name}`" not in page} == set()
