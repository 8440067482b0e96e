"""Times within machines: what counts as one, the tests that compare only there, and what a report says."""

import json

import numpy as np
import pytest

from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.results import conclude
from hotlap.report.analysis import analyze
from hotlap.report.machines import (
    count_machines,
    difference_within,
    log_rank_within,
    machine_notes,
    machine_of,
)
from hotlap.report.page import render_page
from hotlap.report.stats import Waits, log_rank
from hotlap.runs.reader import load_run
from tests.synthetic_runs import make_run

SLOW = 3.0  # times as slow as the fast machine


def with_environment(run, **facts):
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))
    return run


def made(tmp_path, recipe, seed, machine, step_s, **options):
    run = make_run(tmp_path / f"{recipe}-{seed}", recipe=recipe, seed=seed, step_s=step_s, **options)
    return load_run(with_environment(run, machine=machine))


def raced(tmp_path, places, factor=0.9, **options):
    """`places[label]`: the machine of each seed; the candidate takes `factor` of the baseline's time."""
    return {
        recipe: [
            made(
                *(tmp_path, recipe, seed, machine),
                0.1 * (1 + 0.002 * (seed % 3)) * (SLOW if machine == "slow" else 1) * (factor if row else 1),
                **options,
            )
            for seed, machine in enumerate(machines)
        ]
        for row, (recipe, machines) in enumerate(places.items())
    }


BALANCED = {"softcap": ["slow", "fast"] * 4, "adamw": ["fast", "slow"] * 4}
UNEQUAL = {"softcap": ["fast"] * 6 + ["slow"] * 2, "adamw": ["slow"] * 6 + ["fast"] * 2}
APART = {"softcap": ["fast"] * 4, "adamw": ["slow"] * 4}
TARGET = {"changes": {"evaluation.target_loss": 4.0}, "status": "target"}


def verdict(runs, metric):
    return analyze(runs, metric).rows[1].verdict


@pytest.mark.parametrize("places", [BALANCED, UNEQUAL], ids=["balanced", "unequal"])
def test_a_recipe_gains_nothing_from_a_faster_machine(tmp_path, places):
    runs = raced(tmp_path, places)
    found = verdict(runs, "tokens_per_s")
    assert (found.outcome, found.difference.test) == ("helps", "t within machines")
    speeds = [run.tokens_per_s for run in runs["softcap"]]
    middle = np.exp(np.mean(np.log(speeds)))
    assert found.difference.mean == pytest.approx(middle * (1 / 0.9 - 1), rel=0.01)
    same = verdict(raced(tmp_path / "same", places, factor=1.0), "tokens_per_s")
    assert same.outcome == "no evidence"


def test_time_to_target_is_compared_within_machines_also_if_some_never_reach_it(tmp_path):
    runs = raced(tmp_path, UNEQUAL, factor=0.5, **TARGET)
    assert verdict(runs, "train_s").outcome == "helps"
    assert verdict(runs, "train_s").difference.test == "t within machines"
    runs = raced(tmp_path / "missed", BALANCED, factor=0.5, **TARGET)
    missed = made(tmp_path, "adamw", 9, "slow", 0.1, changes=TARGET["changes"], final_loss=5.0)
    found = verdict({**runs, "adamw": [*runs["adamw"], missed]}, "train_s")
    assert found.difference.test == "log-rank"
    assert found.outcome == "helps"


def test_losses_and_tokens_are_not_blocked(tmp_path):
    runs = raced(tmp_path, UNEQUAL, **TARGET)
    for metric in ("loss", "tokens"):
        assert verdict(runs, metric).difference.test in ("Welch", "paired t")


def test_one_machine_is_compared_as_ever(tmp_path):
    runs = raced(tmp_path, {name: ["fast"] * 4 for name in BALANCED})
    assert verdict(runs, "tokens_per_s").difference.test == "Welch"
    assert machine_notes(runs) == []


def test_recipes_on_machines_apart_are_not_compared(tmp_path):
    found = verdict(raced(tmp_path, APART), "tokens_per_s")
    assert found.outcome == "no evidence"
    assert found.words == "not compared: no machine trained both"


def test_the_difference_is_that_of_least_squares():
    rng = np.random.default_rng(1)
    machines = ["a"] * 4 + ["b"] * 3 + ["c"] * 2, ["a"] * 2 + ["b"] * 5 + ["d"]
    constant = {"a": 1.0, "b": 0.2, "c": 2.0, "d": 0.5}
    samples = [
        np.exp([constant[name] + 0.3 * is_candidate + rng.normal(0, 0.1) for name in names])
        for is_candidate, names in enumerate(machines)
    ]
    found, plain_a, plain_b = difference_within(*samples, machines)
    design = np.array(
        [
            [is_candidate, *(name == one for one in constant)]
            for is_candidate, names in enumerate(machines)
            for name in names
        ],
        dtype=float,
    )
    y = np.log(np.concatenate(samples))
    coefficients, (square,), *_ = np.linalg.lstsq(design, y, rcond=None)
    scale = np.exp(np.log(samples[0]).mean())
    assert found.mean == pytest.approx(scale * np.expm1(coefficients[0]))
    freedom = y.size - design.shape[1]
    error = np.sqrt(square / freedom * np.linalg.inv(design.T @ design)[0, 0])
    from scipy import stats

    assert found.p == pytest.approx(2 * stats.t.sf(abs(coefficients[0]) / error, freedom))
    half = stats.t.ppf(0.975, freedom) * error
    assert found.high == pytest.approx(scale * np.expm1(coefficients[0] + half))
    assert np.concatenate([plain_a, plain_b - coefficients[0]]) == pytest.approx(y - design @ coefficients)


def test_without_a_difference_one_in_twenty_is_called_one():
    rng = np.random.default_rng(2)
    machines = ["a"] * 5 + ["b"] * 2, ["a"] * 2 + ["b"] * 5
    speed = {"a": 0.0, "b": 1.0}
    ps = [
        difference_within(
            *(np.exp([speed[name] + rng.normal(0, 0.05) for name in names]) for names in machines), machines
        )[0].p
        for _ in range(2000)
    ]
    assert 0.035 < np.mean(np.array(ps) < 0.05) < 0.065


def test_the_log_rank_test_within_one_machine_is_the_plain_one():
    rng = np.random.default_rng(3)
    a, b = (Waits(rng.exponential(1, 6), rng.random(6) < 0.8) for _ in range(2))
    assert log_rank_within(a, b, (["x"] * 6, ["x"] * 6)) == pytest.approx(log_rank(a, b))


def test_the_log_rank_test_within_machines_is_fair_exact_or_sampled():
    rng = np.random.default_rng(4)
    for runs in (4, 12):  # 4: all relabelings; 12: a sample of them
        machines = ["a"] * (runs - 1) + ["b"], ["a"] + ["b"] * (runs - 1)
        few = []
        for _ in range(60):
            waits = [
                Waits(
                    np.array([rng.exponential(10 if name == "b" else 1) for name in names]),
                    np.ones(runs, dtype=bool),
                )
                for names in machines
            ]
            few.append(log_rank_within(*waits, machines)[0])
        assert np.mean(np.array(few) < 0.05) <= 0.15
    assert np.isnan(log_rank_within(*waits, (["a"] * 12, ["b"] * 12))[0])


def test_a_run_that_moved_is_on_a_machine_of_its_own(tmp_path):
    run = make_run(tmp_path / "moved")
    with_environment(run, machine="m1", cores=2, earlier=[{"machine": "m0", "device": "cpu", "cores": 4}])
    assert (
        machine_of(load_run(run)) == "m0 (unknown hardware, 4 cores) then m1 (A processor <of note>, 2 cores)"
    )
    with_environment(run, machine="\x1b[31m", device_name="m\x07")
    assert "\x1b" not in machine_of(load_run(run))


def test_the_notes_say_whether_recipes_met_the_same_machines(tmp_path):
    (note,) = machine_notes(raced(tmp_path / "a", BALANCED))
    assert note.startswith("each recipe met the same machines (slow (A processor")
    runs = raced(tmp_path / "b", UNEQUAL)
    (note,) = machine_notes(runs)
    assert note.startswith("the recipes did not meet the same machines (")
    assert "fast (A processor <of note>): softcap 6, adamw 2; slow" in note
    assert note.replace("<", "&lt;").replace(">", "&gt;") in render_page(runs, "race")
    assert list(count_machines(runs).values()) == [{"softcap": 6, "adamw": 2}, {"softcap": 2, "adamw": 6}]


def test_a_race_says_so_in_its_results(tmp_path):
    plan = make_plan(["softcap", "adamw"], "pico", 2, {"schedule.steps": 50})
    directory = RaceDirectory(tmp_path / "race")
    directory.write_plan(plan)
    for start, machine in zip((s for r in plan.rounds() for s in r), ("m0", "m1", "m0", "m1"), strict=True):
        run = make_run(directory.run(start).path, recipe=start.entry.recipe, seed=start.seed)
        with_environment(run, machine=machine)
    data = conclude(directory, plan)
    assert {run["name"]: run["machine"][:2] for run in data["runs"]} == {
        "softcap-seed0": "m0",
        "softcap-seed1": "m0",
        "adamw-seed0": "m1",
        "adamw-seed1": "m1",
    }
    assert data["statistics"]["notes"][0].startswith("the recipes did not meet the same machines")
    assert "m1 (A processor" in directory.report_path.read_text().replace("&lt;", "<")
