"""Races carried out: with made-up runs where only order and words matter, with real ones where not."""

import io
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hotlap.errors import RaceError
from hotlap.progress import silent
from hotlap.race.ablation import make_ablation
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.progress import RaceProgress
from hotlap.race.results import conclude, verdict_lines
from hotlap.race.runner import Runner
from tests.command import complaint, hotlap, hotlap_here
from tests.made_up_engine import MadeUpEngine
from tests.training import start as start_command

STEPS = 50  # of made-up runs


@pytest.fixture
def race(tmp_path):
    """race(plan, budget_s) → (names in the order they ran, names left out, what progress said)."""
    directory = RaceDirectory(tmp_path / "race")

    def carry_out(plan, budget_s=None, **made_up):
        directory.check(plan)
        directory.write_plan(plan)
        out = io.StringIO()
        engine = MadeUpEngine(**made_up)
        with directory.lock(silent), RaceProgress(plan, 0, out) as progress, engine:
            left_out = Runner(plan, directory, engine, progress).run(budget_s)
        return engine.order, [s.name for s in left_out], out.getvalue()

    carry_out.directory = directory
    return carry_out


PLAN = make_plan(["softcap", "adamw"], "pico", 3, {"schedule.steps": STEPS, "schedule.warmup_steps": 0})
NAMES = [start.name for round_ in PLAN.rounds() for start in round_]


def test_runs_go_in_turn_and_progress_says_what_is_left(race):
    order, left_out, said = race(PLAN)
    assert order == NAMES
    assert not left_out
    assert said.splitlines()[2].startswith("race: 3 of 6 runs; softcap, seed 1: finished, ")
    assert "about 0:00:0" in said


def test_what_is_over_is_not_repeated_and_the_rest_is_run(race):
    race(PLAN, ends={NAMES[0]: "target"})
    (race.directory.path / NAMES[2] / "summary.json").unlink()
    assert race(PLAN)[0] == [NAMES[2]]
    assert race(PLAN)[0] == []


def test_seeds_can_be_added(race):
    race(PLAN)
    more = make_plan(["softcap", "adamw"], "pico", 4, dict(PLAN.settings))
    assert race(more)[0] == ["softcap-seed3", "adamw-seed3"]


def test_a_budget_leaves_out_whole_rounds(race):
    order, left_out, _ = race(PLAN, budget_s=0)
    assert order == NAMES[:2]
    assert left_out == NAMES[2:]
    assert race(PLAN, budget_s=3600)[0] == NAMES[2:]


def test_the_first_round_is_run_whatever_the_budget(race):
    race(PLAN, budget_s=0)
    (race.directory.path / NAMES[1] / "summary.json").unlink()
    assert race(PLAN, budget_s=0)[0] == NAMES[1:2]


def test_a_race_that_is_refused_leaves_the_plan_of_the_one_that_is_on(race, tmp_path):
    race(PLAN)
    same_but_for_seeds = ["softcap", "adamw", "--size", "pico", "--steps", str(STEPS), "--warmup-steps", "0"]
    with race.directory.lock(silent):
        line = complaint(
            hotlap_here(
                "race", *same_but_for_seeds, "--seeds", "4", "--name", "race", "--runs", str(tmp_path)
            )
        )
    assert "no other race" in line
    assert race.directory.read_plan() == PLAN


def test_only_whole_rounds_count(race):
    race(PLAN)
    (race.directory.path / "adamw-seed2" / "summary.json").unlink()
    rows = conclude(race.directory, PLAN)["statistics"]["rows"]
    assert [(row["label"], row["runs"]) for row in rows] == [("softcap", 2), ("adamw", 2)]


def test_runs_that_are_missing_are_named_in_the_report(race, capsys):
    race(PLAN)
    path = race.directory.path
    shutil.rmtree(path / NAMES[3])
    (path / NAMES[0]).rename(path / "stranger")
    hotlap_here("report", str(path))
    page = (path / "report.html").read_text()
    assert f"runs of the plan that are not counted: {NAMES[0]}, {NAMES[3]}" in page
    assert "runs that are not in the plan: stranger" in page
    shutil.rmtree(path / "stranger")
    notes = conclude(race.directory, PLAN)["statistics"]["notes"]
    assert notes == [f"runs of the plan that are not counted: {', '.join(NAMES[:4])}"]


def test_a_changed_label_is_refused(race):
    race(PLAN)
    plan = race.directory.plan_path
    plan.write_text(plan.read_text().replace('"label": "adamw"', '"label": "adam"'))
    with pytest.raises(RaceError, match=r"unmodified content in .*race\.json"):
        race.directory.read_plan()


def test_a_diverged_run_is_a_result(race):
    order, _, said = race(PLAN, ends={NAMES[1]: "diverged"})
    assert order == NAMES
    assert "adamw, seed 0: diverged" in said
    assert any("diverged: adamw-seed0" in line for line in verdict_lines(conclude(race.directory, PLAN)))
    assert race(PLAN)[0] == []


def test_a_run_that_fails_otherwise_ends_the_race_with_its_last_line(race):
    with pytest.raises(RaceError, match=r"exit code 2 and `hotlap: expected luck`; see .*softcap-seed1\.txt"):
        race(PLAN, ends={"softcap-seed1": None})


def test_a_difference_is_told_in_words_and_in_json(race):
    losses = {name: (3.30 if "softcap" in name else 3.60) + 0.01 * int(name[-1]) for name in NAMES}
    race(PLAN, losses=losses)
    data = conclude(race.directory, PLAN)
    assert json.loads(race.directory.results_path.read_text()) == data
    assert "  adamw: hurts (+0.1050 bits/byte, 95 % CI" in "\n".join(verdict_lines(data))
    assert race.directory.report_path.stat().st_size > 10_000
    assert {run["name"] for run in data["runs"]} == set(NAMES)


def test_a_recipe_against_itself_gives_no_evidence(race):
    plan = make_plan(["softcap", "softcap:seed-only"], "pico", 3, dict(PLAN.settings))
    order, _, _ = race(plan)
    assert {"softcap-seed0", "softcap-seed-only-seed1000"} <= set(order)
    lines = "\n".join(verdict_lines(conclude(race.directory, plan)))
    assert "softcap:seed-only: no evidence either way" in lines


def test_an_ablation_says_what_each_change_does(race):
    plan, _ = make_ablation("softcap", None, "pico", 3, {"schedule.steps": STEPS})
    losses = {}
    for start in (start for round_ in plan.rounds() for start in round_):
        added = {"without model.softcap": 0.2, "without window": -0.2, "without cooldown": 0.001 * start.seed}
        losses[start.name] = 3.3 + 0.01 * start.seed + added.get(start.entry.label, 0)
    race(plan, losses=losses)
    lines = verdict_lines(conclude(race.directory, plan))
    assert len(lines) == len(plan.entries)
    words = dict(line.strip().split(": ", 1) for line in lines[1:])
    assert words["model.softcap 30 → 15"].startswith("helps; undoing it hurts (+0.07")
    (window,) = (text for change, text in words.items() if "window_start_tokens" in change)
    assert window.startswith("hurts; undoing it helps (−0.07")
    (cooldown,) = (text for change, text in words.items() if "cooldown" in change)
    assert cooldown.startswith("no evidence either way")
    assert words["model.bf16_embeddings false → true"].startswith("has no effect")


# --- with real runs ---


def race_command(data: Path, steps: int, *words: str) -> list[str]:
    settings = {
        "--data.source": str(data),
        "--steps": str(steps),
        "--threads": "1",
        "--precision": "float32",
        "--compile": "off",
        "--evaluation.tokens": "1024",
    }
    return [*words, "--size", "pico", *(word for pair in settings.items() for word in pair)]


def finish(arguments: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    result = hotlap(*arguments, cwd=cwd, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    return result


def written(race: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in race.glob("*/summary.json")}


@pytest.mark.slow
def test_a_race_goes_on_when_called_again_also_beside_a_run_that_diverges(tiny_data, tmp_path):
    specs = ["softcap", "softcap:wild,optim.adam.head_lr=1e38"]
    words = race_command(tiny_data, 2, "race", *specs, "--seeds", "2", "--name", "race")
    first = finish([*words, "--budget", "1s"], tmp_path)
    race = tmp_path / "runs" / "race"
    assert "skipped because of the budget of 1s: 2 runs (softcap-seed1, softcap-wild-seed1)" in first.stdout
    assert "softcap:wild, seed 0: diverged" in first.stderr
    assert "note: softcap:wild: diverged: softcap-wild-seed0" in first.stdout
    before = written(race)
    assert set(before) == {"softcap-seed0", "softcap-wild-seed0"}
    second = finish(["race", "--resume", "runs/race"], tmp_path)
    assert "3 of 4 runs; softcap, seed 1: finished" in second.stderr
    after = written(race)
    assert len(after) == 4
    assert {name: after[name] for name in before} == before
    assert json.loads((race / "results.json").read_text())["statistics"]["rows"][0]["runs"] == 2
    assert "softcap:wild: diverged" in hotlap("report", str(race)).stdout
    other = race_command(tiny_data, 3, "race", *specs, "--seeds", "2", "--name", "race")
    assert "settings.schedule.steps 2 → 3" in complaint(hotlap_here(*other, cwd=tmp_path))
    assert written(race) == after


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["race"], "at least one RECIPE"),
        (["race", "softcp"], "did you mean `softcap`"),
        (["race", "softcap", "--size", "pcio"], "did you mean `pico`"),
        (["race", "softcap", "--seeds", "1", "--size", "pico"], "--seeds of 2"),
        (["race", "softcap:nope=1", "--size", "pico"], "`nope`"),
        (["race", "softcap", "--nope", "1", "--size", "pico"], "`--nope`"),
        (["race", "softcap", "--size", "pico", "--budget", "soon"], "--budget"),
        (["race", "softcap", "--size", "pico", "--budget", "0m"], "--budget"),
        (["race", "softcap", "--size", "pico", "--name", "../race"], "a run name"),
        (["race", "softcap", "--size", "pico", "--procs", "3"], "found 3 processes"),
        (["race", "--resume", "nowhere"], "nowhere"),
        (["race", "softcap", "--resume", "nowhere"], "--resume DIR alone"),
        (["ablate"], "RECIPE"),
        (["ablate", "flex-attention", "--size", "pico"], "which has none"),
        (["ablate", "softcap", "--against", "adamw", "--size", "pico"], "an ancestor of softcap"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(tmp_path, arguments, part):
    assert part in complaint(hotlap_here(*arguments, cwd=tmp_path))
    assert not any(tmp_path.iterdir())


def wait_until(condition, process) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("left_behind", [False, True], ids=["with its run", "the race alone"])
def test_a_killed_race_goes_on_and_repeats_nothing(tiny_data, tmp_path, left_behind):
    words = race_command(
        *(tiny_data, 12, "race", "softcap", "unet-value-embeds", "--seeds", "2", "--name", "race"),
        *("--batch.tokens-per-step", "512", "--cooldown-steps", "0", "--cooldown-fraction", "0.4"),
        *("--checkpoint.every-steps", "2"),
    )
    race = tmp_path / "runs" / "race"
    process = start_command(words, tmp_path)
    half_done = race / "unet-value-embeds-seed1"
    wait_until(lambda: any(half_done.glob("checkpoints/step-*")), process)
    run = psutil.Process(process.pid).children()[0]
    os.kill(process.pid, signal.SIGKILL)
    if not left_behind:
        run.kill()
    process.communicate()
    before = written(race)
    assert set(before) == {"softcap-seed0", "unet-value-embeds-seed0", "softcap-seed1"}
    result = finish(words, tmp_path)
    after = written(race)
    assert len(after) == 4
    assert {name: after[name] for name in before} == before
    expected = "waiting for the run" if left_behind else "unet-value-embeds, seed 1: resumes from its last"
    assert expected in result.stderr
    metrics = (half_done / "metrics.jsonl").read_text()
    assert ('"resume"' in metrics) == (not left_behind)


@pytest.mark.slow
def test_ctrl_c_stops_a_race_with_its_run_saved(tiny_data, tmp_path):
    words = race_command(tiny_data, 400, "race", "softcap", "--name", "race")
    process = start_command(words, tmp_path)
    metrics = tmp_path / "runs" / "race" / "softcap-seed0" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and '"train"' in metrics.read_text(), process)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "resume with: hotlap race --resume runs/race" in err
    assert any(metrics.parent.glob("checkpoints/step-*"))


@pytest.mark.slow
def test_ablate_names_each_change_and_its_effect(tiny_data, tmp_path):
    words = race_command(tiny_data, 45, "ablate", "softcap", "--seeds", "2", "--name", "parts")
    result = finish(words, tmp_path)
    changes = json.loads((tmp_path / "runs" / "parts" / "results.json").read_text())["changes"]
    assert len(changes) == 5
    for change in changes:
        assert f"{change['change']}: {change['words']}" in result.stdout
    words_of = {change["label"]: change["words"] for change in changes}
    assert words_of["without model.bf16_embeddings"].startswith("has no effect")
