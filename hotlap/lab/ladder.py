"""A ladder: the same comparison at several sizes, each a race, and how the effect goes with compute.

`<ladder>/<size>/` are races, with their runs and reports. A ladder that was stopped goes on where it was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path
from typing import Any

from hotlap.errors import ConfigError, RaceError
from hotlap.json_files import finite, write_json
from hotlap.lab.comparison import describe, machine_of
from hotlap.lab.scaling import FEWEST_RUNGS, Rung, Scaling, fit, interval, rung, sentence
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import Plan, make_plan
from hotlap.race.results import load_race
from hotlap.recipes import find_size
from hotlap.report.analysis import BPB, LOSS
from hotlap.report.figures import Figure
from hotlap.report.markup import plain_table
from hotlap.report.sheet import Section, write_sheet
from hotlap.report.stats import CONFIDENCE
from hotlap.report.verdict import Metric
from hotlap.runs.reader import Run


def make_ladder(
    specs: Sequence[str],
    sizes: Sequence[str],
    seeds: int,
    settings: Mapping[str, Any],
    steps_share: float,
    procs: int | None = None,
) -> list[Plan]:
    """One plan per size. With `steps_share`, each size trains this share of its steps."""
    for size in sizes:
        find_size(size)
    if len(set(sizes)) < max(FEWEST_RUNGS, len(sizes)):
        raise ConfigError(
            expected=f"--sizes with at least {FEWEST_RUNGS} different sizes",
            found=", ".join(sizes) or "none",
            do="give, for example, --sizes pico,nano,micro",
        )
    if not 0 < steps_share <= 1:
        raise ConfigError(
            expected="--steps-share above 0 and up to 1", found=f"{steps_share:g}", do="change it"
        )
    if steps_share < 1 and "schedule.steps" in settings:
        raise ConfigError(expected="--steps or --steps-share", found="both", do="omit one")
    plans = []
    for size in sizes:
        plan = make_plan(specs, size, seeds, settings, procs)
        if len(plan.entries) != 2:
            raise ConfigError(
                expected="two recipes, a baseline and an idea", found=str(len(plan.entries)), do="give two"
            )
        if steps_share < 1:
            steps = max(1, round(plan.config(plan.rounds()[0][0]).schedule.steps * steps_share))
            plan = make_plan(specs, size, seeds, {**settings, "schedule.steps": steps}, procs)
        plans.append(plan)
    return plans


def metric_of(runs: Sequence[Run]) -> Metric:
    return BPB if all(math.isfinite(run.last("val_bpb")) for run in runs) else LOSS


def rung_of(directory: RaceDirectory, plan: Plan) -> tuple[Rung, Metric, list[Run]]:
    """The effect at one size, from the rounds that have ended."""
    by_label = load_race(directory, plan, whole_rounds=True)
    baseline, candidate = (by_label.get(entry.label, []) for entry in plan.entries)
    runs = [*baseline, *candidate]
    metric = metric_of(runs)
    values = [[run.last(f"val_{metric.key}") for run in side] for side in (baseline, candidate)]
    if not (baseline and all(map(math.isfinite, values[0] + values[1]))):
        raise RaceError(
            expected=f"runs with a finite validation loss in {directory.path}",
            found="none" if not baseline else "a run that diverged",
            do="leave out this size, or change the idea",
        )
    flops_per_token = (baseline[0].environment.get("model") or {}).get("flops_per_token")
    flops = float(flops_per_token or math.nan) * baseline[0].tokens
    return rung(plan.size, flops, *values), metric, runs


def conclude_ladder(path: Path, plans: Sequence[Plan], known_sizes: Mapping[str, float]) -> dict[str, Any]:
    """Fit a line, write `ladder.json` and `report.html`, and return the data of the former.

    known_sizes: FLOPs of a run of the baseline at sizes that a crossing may be compared with.
    """
    found = [rung_of(RaceDirectory(path / plan.size), plan) for plan in plans]
    rungs = sorted((one for one, _, _ in found), key=lambda one: one.flops)
    metrics = {metric for _, metric, _ in found}
    metric = BPB if metrics == {BPB} else LOSS
    scaling = fit(rungs)
    words = sentence(rungs, scaling, metric.unit, known_sizes)
    runs = [run for _, _, of_rung in found for run in of_rung]
    data: dict[str, Any] = finite(
        {
            **describe(plans[0], plans[0].entries[1], RaceDirectory(path / plans[0].size).ideas),
            "size": ", ".join(one.size for one in rungs),
            "metric": metric.key,
            "unit": metric.unit,
            "words": words,
            "rungs": [{**asdict(one), "interval": interval(one)} for one in rungs],
            "scaling": None if scaling is None else asdict(scaling),
            "seeds": min(one.seeds for one in rungs),
            "seconds": sum(run.train_s for run in runs),
            "machine": machine_of(runs[0]),
        }
    )
    write_json(path / "ladder.json", data, RaceError)
    label = data["idea"]["label"]
    sections = [
        Section(
            "ladder",
            "Effect against compute",
            f'<ul class="verdicts"><li><b>{escape(label)}</b> {escape(words)}</li></ul>'
            + _table(rungs, metric, path),
            ladder_figure(rungs, scaling, metric),
            f"Each point: mean difference over seeds with its {100 * CONFIDENCE:g} % confidence interval;"
            " below zero is better. Line: weighted fit in log compute, where it was measured.",
        )
    ]
    write_sheet(path / "report.html", f"{label} against {data['parent']}", "", sections)
    return data


def _table(rungs: Sequence[Rung], metric: Metric, path: Path) -> str:
    rows = [rung_row(one, metric) for one in rungs]
    links = ", ".join(
        f'<a href="{one.size}/report.html">{one.size}</a>'
        for one in rungs
        if (path / one.size / "report.html").exists()
    )
    return plain_table("Effect at each size", ROW_HEADERS, rows) + f"<p>Races: {links}</p>"


ROW_HEADERS = ["size", "FLOPs per run", "seeds", "effect", f"{100 * CONFIDENCE:g} % CI"]


def rung_row(one: Rung, metric: Metric) -> list[str]:
    low, high = (metric.format(end, signed=True) for end in interval(one))
    effect = f"{metric.format(one.effect, signed=True)} {metric.unit}"
    return [one.size, f"{one.flops:.1e}", str(one.seeds), effect, f"{low} to {high}"]


def ladder_figure(rungs: Sequence[Rung], scaling: Scaling | None, metric: Metric) -> Figure:
    arms = [interval(one)[1] - one.effect for one in rungs]
    traces: list[dict[str, Any]] = [
        {
            "type": "scatter",
            "mode": "markers+text",
            "name": "effect",
            "meta": "effect",
            "x": [one.flops for one in rungs],
            "y": [one.effect for one in rungs],
            "text": [one.size for one in rungs],
            "textposition": "top right",
            "error_y": {"type": "data", "array": arms, "thickness": 1.5},
            "marker": {"color": "#0072B2", "size": 11},
        }
    ]
    if scaling is not None:
        ends = [rungs[0].flops, rungs[-1].flops]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": "fit",
                "meta": "fit",
                "x": ends,
                "y": [scaling.at(flops) for flops in ends],
                "line": {"color": "#D55E00", "width": 2},
                "hoverinfo": "skip",
            }
        )
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "training FLOPs of a run"}, "type": "log", "automargin": True},
            "yaxis": {"title": {"text": f"effect in {metric.unit}"}, "automargin": True, "zeroline": True},
        },
    }
