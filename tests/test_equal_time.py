"""The verdict at equal time: what runs of equal steps can and cannot say, and when the times are unfair."""

import json

import pytest

from hotlap.report.analysis import analyze, to_json
from hotlap.report.page import render_page
from hotlap.runs.reader import load_run
from tests.synthetic_runs import make_run

SEEDS = range(5)


@pytest.fixture
def compare(tmp_path):
    """compare(final loss, seconds per step, kernels): against a baseline of 3.3 at 0.1 s per step."""

    def build(final_loss, step_s, kernels=None, steps=50):
        sides = {
            "softcap": (3.3, 0.1, {"MLP of layers 0-3": "C"}, 50),
            "mine": (final_loss, step_s, kernels, steps),
        }
        runs = {}
        for label, (loss, seconds, facts, count) in sides.items():
            runs[label] = []
            for seed in SEEDS:
                path = make_run(
                    tmp_path / f"{label}-{seed}",
                    seed=seed,
                    steps=count,
                    final_loss=loss + 0.002 * (seed * seed % 5),
                    step_s=seconds * (1 + 0.001 * (seed * 3 % 5)),
                    changes={} if label == "softcap" else {"model.softcap": 9.0},
                )
                environment = path / "environment.json"
                content = {
                    **json.loads(environment.read_text()),
                    "kernels": facts or {"MLP of layers 0-3": "C"},
                }
                environment.write_text(json.dumps(content))
                runs[label].append(load_run(path))
        analysis = analyze(runs)
        return analysis.rows[1], runs, analysis

    return build


@pytest.mark.parametrize(
    "final_loss, step_s, at_steps, at_time, part",
    [
        (3.2, 0.1, "helps", "helps", "it is as fast"),
        (3.2, 0.09, "helps", "helps", "as at equal steps, and it is faster"),
        (3.4, 0.11, "hurts", "hurts", "as at equal steps, and it is slower"),
        (3.29, 0.13, "helps", "open", "race mine with schedule.steps=38 too"),
        (3.3, 0.1, "no evidence", "no evidence", "no evidence either way (as at equal"),
        (2.9, 0.11, "helps", "helps", "even with mine's schedule cut at 91 %"),
        (3.31, 0.075, "hurts", "open", "schedule.steps=67 too"),
        (3.8, 0.09, "hurts", "hurts", "even with softcap's schedule cut at 90 %"),
    ],
)
def test_runs_of_equal_steps_bound_the_verdict_at_equal_time(
    compare, final_loss, step_s, at_steps, at_time, part
):
    row, _, _ = compare(final_loss, step_s)
    assert row.verdict.outcome == at_steps
    assert row.equal_time.outcome == at_time
    assert part in row.equal_time.words
    assert "against 100.2 ms per step" in row.equal_time.words


@pytest.mark.parametrize(
    "kernels, unfair",
    [
        ({"MLP of layers 0-3": "C"}, False),
        ({"MLP of layers 0-1": "C", "AdamW": "plain: torch's fused one is as fast"}, False),
        ({"MLP of layers 0-3": "plain: Gated has no kernel"}, True),
        ({"MLP of layers 0-3": "C", "NorMuon": "plain: NorMuon has no kernel"}, True),
    ],
)
def test_times_of_fused_and_plain_parts_are_unfair(compare, kernels, unfair):
    row, runs, analysis = compare(3.2, 0.12, kernels)
    assert bool(row.equal_time.unfair) == unfair
    assert ("--kernels off" in row.equal_time.words) == unfair
    assert ("--kernels off" in render_page(runs, "race")) == unfair
    assert to_json(analysis)["rows"][1]["equal_time"]["step_s"] == row.equal_time.step_s


def test_runs_of_other_numbers_of_steps_have_no_line(compare):
    assert compare(3.2, 0.1, steps=40)[0].equal_time is None


def test_times_that_vary_too_much_are_not_called_equal(compare):
    _, runs, _ = compare(3.2, 0.12)
    for seed, run in enumerate(runs["mine"]):
        run.train["train_s"][:] *= 1 + 3 * (seed == 4)
        run.validation["train_s"][:] *= 1 + 3 * (seed == 4)
    row = analyze(runs).rows[1]
    assert row.equal_time.outcome == "helps"
    assert "the times vary too much" in row.equal_time.words
