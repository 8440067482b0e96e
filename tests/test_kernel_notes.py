"""Notes on runs of one comparison that were trained by different kernels."""

import json

import pytest

from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.results import conclude, verdict_lines
from hotlap.report.kernel_notes import kernel_notes
from hotlap.runs.reader import load_run
from tests.synthetic_runs import make_run
from tests.test_machines import with_environment

SLOW_COMPILER = "the C compiler takes too long"
FUSED = {"attention": "C", "QKV of layers 0-3": "C", "MLP of layers 0-3": "C", "loss": "C", "Muon": "C"}
NONE = {
    "attention": "plain: blocked backend",
    "blocks": f"plain: {SLOW_COMPILER}",
    "loss": "chunked PyTorch",
    "Muon": f"plain: {SLOW_COMPILER}",
}
ITS_OWN_MLP = {**FUSED, "MLP of layers 0-3": "plain: SwiGLU has no kernel"}


@pytest.fixture
def notes(tmp_path_factory):
    """Notes on the runs of recipes, given the kernels of each; None: nothing was recorded."""

    def found(**kernels_by_label):
        folder, runs_by_label = tmp_path_factory.mktemp("runs"), {}
        for label, of_runs in kernels_by_label.items():
            for seed, kernels in enumerate(of_runs):
                run = make_run(folder / f"{label}-seed{seed}", seed=seed)
                facts = {} if kernels is None else {"kernels": kernels}
                runs_by_label.setdefault(label, []).append(load_run(with_environment(run, **facts)))
        return kernel_notes(runs_by_label)

    return found


def test_nothing_is_noted_where_all_had_the_kernels_that_their_recipe_has(notes):
    assert notes(a=[FUSED, FUSED], b=[ITS_OWN_MLP, ITS_OWN_MLP]) == []
    assert notes(a=[NONE, NONE], b=[NONE, NONE]) == []
    assert notes(a=[None, None], b=[FUSED, None]) == []


def test_runs_of_one_recipe_with_different_kernels_are_named(notes):
    (note,) = notes(a=[FUSED, NONE, FUSED], b=[FUSED, FUSED, FUSED])
    assert note.startswith("a: its runs had different kernels")
    assert f"a-seed1: none ({SLOW_COMPILER})" in note
    assert "a-seed0, a-seed2: attention C" in note
    (note,) = notes(a=[FUSED, ITS_OWN_MLP])
    assert note.endswith(
        "(a-seed0: MLP of layers 0-3 C; a-seed1: MLP of layers 0-3 plain: SwiGLU has no kernel)"
    )


def test_a_recipe_that_had_none_while_others_had_is_noted(notes):
    (note,) = notes(a=[FUSED, FUSED], b=[NONE, NONE])
    assert note.startswith("not all recipes had kernels")
    assert note.endswith(f"(a: some; b: none ({SLOW_COMPILER}))")


def test_a_run_that_went_on_with_other_kernels_is_noted(tmp_path):
    run = with_environment(make_run(tmp_path / "moved"), kernels=FUSED, earlier=[{"kernels": NONE}])
    (note,) = kernel_notes({"a": [load_run(run)]})
    assert f"moved: none ({SLOW_COMPILER}) then attention C" in note


def test_a_race_says_so_in_its_results_on_the_terminal_and_in_its_report(tmp_path):
    plan = make_plan(["softcap", "adamw"], "pico", 2, {"schedule.steps": 50})
    directory = RaceDirectory(tmp_path / "race")
    directory.write_plan(plan)
    for start in (start for round_ in plan.rounds() for start in round_):
        run = make_run(directory.run(start).path, recipe=start.entry.recipe, seed=start.seed)
        with_environment(run, kernels=NONE if start.name == "adamw-seed1" else FUSED)
    data = conclude(directory, plan)
    words = f"adamw-seed1: none ({SLOW_COMPILER})"
    assert words in json.loads(directory.results_path.read_text())["statistics"]["notes"][0]
    assert any(line.startswith("note: adamw: its runs") and words in line for line in verdict_lines(data))
    assert words in directory.report_path.read_text()
