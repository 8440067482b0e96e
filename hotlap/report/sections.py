"""The page's text and tables as HTML fragments, one function per section. All text passes through `escape`.

A section without content says so in one sentence. Fragments are independent of each other, because the live
page replaces them one at a time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hotlap.files import without_folders
from hotlap.report import stats
from hotlap.report.analysis import (
    BPB,
    LOSS,
    SPEED,
    TIME,
    TOKENS,
    Analysis,
    Row,
    RunsByLabel,
    settings_that_differ,
)
from hotlap.report.idea_section import ideas
from hotlap.report.lead import described_setting, headline, legend, verdict
from hotlap.report.machines import machine_of
from hotlap.report.markup import Cell, folded, number, plain_table, sortable_table, swatch
from hotlap.report.parameters_section import parameters
from hotlap.report.samples_section import samples
from hotlap.report.stats import CONFIDENCE, TARGET_ALPHA, Summary, Waits
from hotlap.report.verdict import Metric
from hotlap.settings import flatten, shown

FRAGMENTS = (
    *("setting", "verdict", "headline", "legend", "statistics", "runs", "parameters", "samples"),
    *("configuration", "ideas", "environment", "notes"),
)


def build_fragments(runs_by_label: RunsByLabel, analysis: Analysis) -> dict[str, str]:
    return {
        "setting": escape(described_setting(runs_by_label)),
        "verdict": verdict(runs_by_label, analysis),
        "headline": headline(runs_by_label),
        "legend": legend(runs_by_label),
        "statistics": statistics(analysis),
        "runs": runs_table(runs_by_label),
        "parameters": parameters(runs_by_label),
        "samples": samples(runs_by_label),
        "configuration": configuration(runs_by_label),
        "ideas": ideas(runs_by_label),
        "environment": environment(runs_by_label),
        "notes": "".join(f"<p>{escape(note)}</p>" for note in analysis.notes),
    }


def statistics(analysis: Analysis) -> str:
    if sum(row.runs for row in analysis.rows) < 2:
        return "<p>No statistics for a single run: report it together with other seeds or recipes.</p>"
    described = [
        metric for metric in (BPB, LOSS) if any(row.values[metric.key].count for row in analysis.rows)
    ]
    headers = ["recipe", "runs", *(metric.name for metric in described)]
    headers += [TIME.name, TOKENS.name, f"p, mean ≤ {analysis.target.value:g}"] if analysis.target else []
    headers.append(SPEED.name)
    if analysis.has_comparison:
        headers += ["difference", "p (Holm)", "effect size g", "test", "verdict"]
    rows = [_statistics_row(i, row, analysis, described) for i, row in enumerate(analysis.rows)]
    percent = f"{100 * CONFIDENCE:g} %"
    target = (
        f" “p, mean ≤ {analysis.target.value:g}” is the one-sided test of the final {analysis.target.kind};"
        f" a speedrun record requires p below {TARGET_ALPHA:g}. It is omitted if a run stopped at the target,"
        " because stopping there biases the final value. If some runs did not reach the target, the time is"
        " the median over all runs instead of the mean: a finished run counts as never reaching it, an"
        " unfinished run as not having reached it yet."
        if analysis.target
        else ""
    )
    note = (
        f"<p class=quiet>Mean ± standard deviation, with the {percent} confidence interval of the mean below."
        f" The verdict depends on {escape(analysis.metric.name)} only.{target}</p>"
    )
    return sortable_table("Statistics by recipe", headers, rows) + note


def _statistics_row(index: int, row: Row, analysis: Analysis, described: Sequence[Metric]) -> list[Cell]:
    cells: list[Cell] = [(swatch(index) + escape(row.label), row.label), (str(row.runs), float(row.runs))]
    cells += [_summary_cell(row.values[metric.key], metric) for metric in described]
    if analysis.target:
        cells += [_wait_cell(row.waits["train_s"], TIME), _wait_cell(row.waits["tokens"], TOKENS)]
        p = row.below_target_p
        cells.append(_p_cell(math.nan if p is None else p))
    cells.append(_summary_cell(row.values["tokens_per_s"], SPEED))
    if not analysis.has_comparison:
        return cells
    if row.verdict is None:
        return [*cells, *[("–", None)] * 4, ("baseline", None)]
    difference, metric = row.verdict.difference, analysis.metric
    g, low, high = row.verdict.effect
    return [
        *cells,
        (
            _with_interval(
                metric.format(difference.mean, signed=True), difference.low, difference.high, metric.decimals
            ),
            difference.mean,
        ),
        _p_cell(row.verdict.p_adjusted),
        (_with_interval(number(g, 2), low, high, 2), g),
        (escape(difference.test), difference.test),
        (escape(row.verdict.words), row.verdict.outcome),
    ]


def _with_interval(text: str, low: float, high: float, decimals: int) -> str:
    if not (math.isfinite(low) and math.isfinite(high)):
        return text
    return f"{text}<small>{number(low, decimals)} to {number(high, decimals)}</small>"


def _summary_cell(summary: Summary, metric: Metric) -> Cell:
    text = metric.format(summary.mean)
    if math.isfinite(summary.sd):
        text += f" ± {metric.format(summary.sd)}"
    return _with_interval(text, summary.low, summary.high, metric.decimals), summary.mean


def _wait_cell(waits: Waits, metric: Metric) -> Cell:
    """The mean if every run reached the target, otherwise the median, which needs only half of them."""
    if waits.all_reached:
        return _summary_cell(stats.summarize(waits.until), metric)
    median, low, high = stats.median_wait(waits)
    reached = f"reached by {int(waits.reached.sum())} of {waits.count}"
    if not math.isfinite(median):
        return f"unknown<small>{reached}</small>", math.inf
    upper = metric.format(high) if math.isfinite(high) else "?"
    return f"median {metric.format(median)}<small>{metric.format(low)} to {upper}; {reached}</small>", median


def _p_cell(p: float) -> Cell:
    if math.isnan(p):
        return "–", None
    return ("&lt; 0.0001" if p < 1e-4 else f"{p:.4f}"), p


def runs_table(runs_by_label: RunsByLabel) -> str:
    rows: list[list[Cell]] = []
    for index, (label, runs) in enumerate(runs_by_label.items()):
        for run in runs:
            loss, bpb, speed = run.last("val_loss"), run.last("val_bpb"), run.tokens_per_s
            rows.append(
                [
                    (swatch(index) + escape(run.name), run.name),
                    (escape(label), label),
                    (str(run.config.seed), float(run.config.seed)),
                    (escape(run.status), run.status),
                    (number(loss, LOSS.decimals), loss),
                    (number(bpb, BPB.decimals), bpb),
                    (number(run.train_s, 1), run.train_s),
                    (number(speed, 0), speed),
                    (", ".join(map(str, run.resumed_at)) or "–", float(len(run.resumed_at))),
                    (escape(machine_of(run)), machine_of(run)),
                ]
            )
    headers = ["run", "recipe", "seed", "status", "loss", "bits/byte", "training s", "tokens/s"]
    headers += ["resumed at", "machine"]
    return sortable_table("Runs", headers, rows)


def configuration(runs_by_label: RunsByLabel) -> str:
    labels = list(runs_by_label)
    every = plain_table(
        "Every setting",
        ["setting", labels[0]],
        [
            [name, without_folders(shown(value))]
            for name, value in flatten(runs_by_label[labels[0]][0].config).items()
        ],
    )
    whole = folded("configuration", f"every setting of {labels[0]}", every)
    if len(labels) == 1:
        return whole
    changes = settings_that_differ(runs_by_label)
    if not changes:
        return "<p>No settings differ except the seed.</p>" + whole
    table = plain_table(
        "Settings that differ",
        ["setting", *labels],
        [[name, *(without_folders(shown(value)) for value in values)] for name, values in changes],
    )
    return table + whole


def environment(runs_by_label: RunsByLabel) -> str:
    runs = [run for group in runs_by_label.values() for run in group]
    flat = [dict(_flat(facts)) for run in runs for facts in run.environments]
    names = list(dict.fromkeys(name for facts in flat for name in facts))
    if not names:
        return "<p>The environment has not been recorded.</p>"
    rows = []
    for name in names:
        # List distinct values in the order of the runs, and only the first few.
        values = list(dict.fromkeys(facts.get(name, "–") for facts in flat))
        more = f" and {len(values) - 3} more" if len(values) > 3 else ""
        rows.append([name, "; ".join(values[:3]) + more])
    return plain_table("Environment", ["fact", "value"], rows)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in data.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        elif prefix + key not in ("routing", "earlier", "ideas"):
            yield prefix + key, without_folders(value if isinstance(value, str) else json.dumps(value))
