"""The page's header: what was found, in words, then the figures of it.

The same line of size and hardware stands below the title here and in pictures of the loss figure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from hotlap.report.analysis import BPB, LOSS, Analysis, Row, RunsByLabel
from hotlap.report.machines import hardware_of
from hotlap.report.markup import facts_list, number, swatch
from hotlap.report.stats import Summary
from hotlap.runs.reader import Run, RunStatus
from hotlap.terminal import printable

MOST_LISTED = 2  # different values in the line of size and hardware

ENDINGS = {
    RunStatus.RUNNING: "Training",
    RunStatus.INTERRUPTED: "Interrupted",
    RunStatus.FINISHED: "Finished",
    RunStatus.TARGET: "Reached its target",
    RunStatus.PATIENCE: "Ended by patience, as validation no longer improved",
    RunStatus.DIVERGED: "Diverged",
}


def described_setting(runs_by_label: RunsByLabel) -> str:
    """Size, parameters, hardware, precision and day of the runs, as far as they are recorded."""
    runs = [run for group in runs_by_label.values() for run in group]
    facts = [
        [str(run.config.size) for run in runs],
        [f"{count / 1e6:,.1f} M parameters" for run in runs if (count := parameters_of(run))],
        [hardware_of(run) for run in runs],
        [str(run.environment.get("precision") or "") for run in runs],
        [run.started[:10] for run in runs],
    ]
    return " · ".join(filter(None, map(_listed, facts)))


def parameters_of(run: Run) -> int:
    """0 if that was not recorded."""
    count = (run.environment.get("model") or {}).get("parameters")
    return count if isinstance(count, int) else 0


def _listed(values: Sequence[str]) -> str:
    """Each value once, and only the first few."""
    different = list(dict.fromkeys(printable(value) for value in values if value))
    more = len(different) - MOST_LISTED
    return ", ".join(different[:MOST_LISTED]) + (f" and {more} more" if more > 0 else "")


def verdict(runs_by_label: RunsByLabel, analysis: Analysis) -> str:
    """The answer in words: of the comparison, or else what came out."""
    if analysis.has_comparison:
        return _verdicts(analysis)
    ((label, runs),) = runs_by_label.items()
    words = _result_of(runs[0]) if len(runs) == 1 else _result_of_seeds(label, analysis.rows[0])
    return (
        f'<p class="result">{words}</p>'
        '<p class="quiet">No verdict: a comparison needs runs of at least two recipes.</p>'
    )


def _result_of(run: Run) -> str:
    """One sentence on how the run ended, or how far it is."""
    bpb, loss = run.last("val_bpb"), run.last("val_loss")
    reached = (
        number(bpb, BPB.decimals, "bits per byte")
        if math.isfinite(bpb)
        else number(loss, LOSS.decimals, "nats of validation loss")
    )
    at = f"<b>{reached}</b>" if math.isfinite(loss) else "no validation yet"
    return f"{ENDINGS[run.status]}: {at} after {number(run.train_s, 1, 's')} of training."


def _result_of_seeds(label: str, row: Row) -> str:
    summary, metric = (row.values["bpb"], BPB) if row.values["bpb"].count else (row.values["loss"], LOSS)
    name = f"{swatch(0)}<b>{escape(label)}</b>"
    if not summary.count:
        return f"{name}: none of {row.runs} runs has ended yet."
    return f"{name}: {metric.name} <b>{_mean(summary, metric.decimals)}</b> over {summary.count} runs."


def _mean(summary: Summary, decimals: int) -> str:
    spread = f" ± {number(summary.sd, decimals)}" if math.isfinite(summary.sd) else ""
    return f"{number(summary.mean, decimals)}{spread}"


def _verdicts(analysis: Analysis) -> str:
    baseline = escape(analysis.rows[0].label)
    items = "".join(
        f'<li class="{row.verdict.outcome.replace(" ", "-")}">{swatch(i)}<b>{escape(row.label)}</b> '
        f"{escape(row.verdict.words)}{_at_equal_time(row)}</li>"
        for i, row in enumerate(analysis.rows)
        if row.verdict
    )
    return (
        f"<p>{escape(analysis.metric.name.capitalize())}, compared with {swatch(0)}<b>{baseline}</b>:</p>"
        f'<ul class="verdicts">{items}</ul>'
    )


def _at_equal_time(row: Row) -> str:
    if row.equal_time is None:
        return ""
    return f"<br><small>at equal time: {escape(row.equal_time.words)}</small>"


def headline(runs_by_label: RunsByLabel) -> str:
    runs = [run for group in runs_by_label.values() for run in group]
    if len(runs) > 1:
        facts = [("labels", str(len(runs_by_label))), ("runs", str(len(runs)))]
        unfinished = sum(not run.is_final for run in runs)
        facts += [("not finished", str(unfinished))] if unfinished else []
        facts.append(("training time", number(sum(run.train_s for run in runs), 0, "s")))
    else:
        (run,) = runs
        done = int(run.train["step"][-1]) if run.train["step"].size else 0
        facts = [
            ("status", run.status),
            ("step", f"{done:,} of {run.config.schedule.steps:,}"),
            ("validation loss", number(run.last("val_loss"), LOSS.decimals)),
            ("bits per byte", number(run.last("val_bpb"), BPB.decimals)),
            *best_validation(run),
            ("training time", number(run.train_s, 1, "s")),
            ("tokens", number(run.tokens, 0)),
            ("parameters", number(parameters_of(run) or math.nan, 0)),
            ("tokens per second", number(run.tokens_per_s, 0)),
        ]
    return facts_list(facts)


def best_validation(run: Run) -> list[tuple[str, str]]:
    """The step of the best validation and its bits per byte or loss, if it is not the last."""
    if run.best is None or run.best == run.validation["step"].size - 1:
        return []
    step, bpb, loss = (run.validation[field][run.best] for field in ("step", "val_bpb", "val_loss"))
    value = (
        number(bpb, BPB.decimals, "bits/byte") if math.isfinite(bpb) else number(loss, LOSS.decimals, "nats")
    )
    return [("best validation", f"{value} at step {step:,.0f}")]


def legend(runs_by_label: RunsByLabel) -> str:
    """One button per label, if there are several."""
    if len(runs_by_label) == 1:
        return ""
    buttons = "".join(
        f'<button type="button" aria-pressed="true" data-label="{escape(label)}">'
        f"{swatch(i)}{escape(label)}</button>"
        for i, label in enumerate(runs_by_label)
    )
    return f'<nav class="legend" aria-label="Show or hide a recipe in every figure">{buttons}</nav>'
