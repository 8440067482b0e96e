"""Compares runs: groups them by label, summarizes each label, and judges each against the first one.

One metric decides. It is chosen by how the runs were configured, never by their results: time to target if
they have one, otherwise final bits per byte, otherwise final loss. The other metrics are shown but not
tested, because among many metrics one would differ by chance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from hotlap.errors import ReportError
from hotlap.files import without_folders
from hotlap.json_files import finite
from hotlap.report import stats
from hotlap.report.equal_time import EqualTime, compare_at_equal_time
from hotlap.report.kernel_notes import kernel_notes
from hotlap.report.machines import machine_notes, machine_of
from hotlap.report.stats import Summary, Waits
from hotlap.report.verdict import Metric, Verdict, judge, judge_waits
from hotlap.runs.reader import Run
from hotlap.settings import diff, flatten, shown, updated

LOSS = Metric("loss", "final loss", "nats", 4)
BPB = Metric("bpb", "final bits/byte", "bits/byte", 4)
TIME = Metric("train_s", "time to target", "s", 1)
TOKENS = Metric("tokens", "tokens to target", "tokens", 0)
SPEED = Metric("tokens_per_s", "speed", "tokens/s", 0, lower_is_better=False)
TIMED = (TIME.key, SPEED.key)  # what the machine has a part in: compared within a machine
METRICS = {metric.key: metric for metric in (BPB, LOSS, TIME, TOKENS, SPEED)}

# Two runs with the same seed share initial weights and data only if these settings agree. With fewer pairs
# than this, pairing costs more in degrees of freedom than it gains by removing the variance between seeds.
PAIRED_BY = ("model.", "data.", "batch.", "size")
FEWEST_PAIRS = 5

RunsByLabel = Mapping[str, Sequence[Run]]


@dataclass(frozen=True)
class Target:
    kind: Literal["loss", "bpb"]
    value: float

    @property
    def field(self) -> str:
        return f"val_{self.kind}"

    def __str__(self) -> str:
        return f"{'validation loss' if self.kind == 'loss' else 'bits/byte'} of {self.value:g}"


@dataclass(frozen=True)
class Row:
    label: str
    runs: int
    values: Mapping[str, Summary]  # by metric key
    waits: Mapping[str, Waits]  # `train_s` and `tokens`, if there is a target
    below_target_p: float | None  # of the one-sided test "mean ≤ target"; None if it does not apply
    verdict: Verdict | None  # None for the first label, or without a comparison
    equal_time: EqualTime | None  # what remains of it if both train equally long


@dataclass(frozen=True)
class Analysis:
    metric: Metric
    target: Target | None
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    @property
    def has_comparison(self) -> bool:
        return any(row.verdict for row in self.rows)


def label_runs(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Group the runs that differ only in the seed, each group under a unique label.

    Runs of the same settings but of different code are different groups, labeled with the code.
    """
    groups: list[list[Run]] = []
    for run in runs:
        for group in groups:
            if group[0].codes == run.codes and _same_settings(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    first_of_recipe: dict[str, Run] = {}
    labeled: dict[str, list[Run]] = {}
    for group in groups:
        config = group[0].config
        name = config.recipe or group[0].name
        parent = first_of_recipe.setdefault(name, group[0])
        changes = [c for c in diff(parent.config, config) if c.name != "seed"]
        label = (
            ":".join([name, ",".join(f"{c.name}={without_folders(shown(c.after))}" for c in changes[:2])])
            if changes
            else name
        )
        label += f" and {len(changes) - 2} more" if len(changes) > 2 else ""
        if any(other is not group and _same_settings(other[0], group[0]) for other in groups):
            label += f" (code {' → '.join(group[0].codes) or 'not recorded'})"
        while label in labeled:
            label += "′"
        labeled[label] = sorted(group, key=lambda run: run.config.seed)
    return labeled


def _same_settings(one: Run, other: Run) -> bool:
    return updated(one.config, {"seed": other.config.seed}) == other.config


def common_target(runs: Sequence[Run]) -> Target | None:
    """The target of all runs; None if they have none, or different ones."""
    wanted = {(run.config.evaluation.target_bpb, run.config.evaluation.target_loss) for run in runs}
    if len(wanted) != 1:
        return None
    ((bpb, loss),) = wanted
    if bpb is not None:
        return Target("bpb", bpb)
    return None if loss is None else Target("loss", loss)


def waits_of(runs: Sequence[Run], target: Target, field: str, longest: float) -> Waits:
    """Time or tokens until the first validation at the target.

    A run that may still reach it is censored at its current time. A run that has ended without reaching it
    never will, and is censored at the longest time of all runs: ending early must not count as an advantage.
    """
    until, reached = [], []
    for run in runs:
        hits = np.flatnonzero(run.validation[target.field] <= target.value)
        reached.append(bool(hits.size))
        if hits.size:
            until.append(float(run.validation[field][hits[0]]))
        elif run.is_final:
            until.append(longest)
        else:
            until.append(run.train_s if field == "train_s" else run.tokens)
    return Waits(np.array(until, dtype=np.float64), np.array(reached, dtype=np.bool_))


def pairing_holds(baseline: Sequence[Run], candidate: Sequence[Run]) -> bool:
    """Whether runs with the same seed share data and initial weights; depends on settings, not on results."""
    seeds = [run.config.seed for run in baseline]
    return (
        len(set(seeds)) == len(seeds) >= FEWEST_PAIRS
        and seeds == [run.config.seed for run in candidate]
        and not any(
            change.name.startswith(PAIRED_BY) for change in diff(baseline[0].config, candidate[0].config)
        )
    )


def analyze(runs_by_label: RunsByLabel, metric: str | None = None, notes: Sequence[str] = ()) -> Analysis:
    """Labels keep their order; the others are compared with the first. `notes` come before those on runs."""
    everything = [run for runs in runs_by_label.values() for run in runs]
    if not everything:
        raise ReportError(expected="at least one run", found="none", do="train one first")
    target = common_target(everything)
    final = {label: [run for run in runs if run.is_final] for label, runs in runs_by_label.items()}
    chosen = _metric(metric, target, [run for runs in final.values() for run in runs])
    longest = {
        "train_s": max(run.train_s for run in everything),
        "tokens": max(run.tokens for run in everything),
    }
    waits = {
        label: {field: waits_of(runs, target, field, longest[field]) for field in longest} if target else {}
        for label, runs in runs_by_label.items()
    }
    # Runs that have not ended count as censored waits, but have no final loss or speed.
    counted = dict(runs_by_label) if chosen.key in longest else final
    verdicts = _verdicts(chosen, counted, waits)
    rows = tuple(
        Row(
            label=label,
            runs=len(runs),
            values={
                key: stats.summarize(_values(final[label], key)) for key in ("bpb", "loss", "tokens_per_s")
            },
            waits=waits[label],
            below_target_p=_below_target_p(final[label], target),
            verdict=verdicts.get(label),
            equal_time=_at_equal_time(chosen, final, label, verdicts),
        )
        for label, runs in runs_by_label.items()
    )
    return Analysis(chosen, target, rows, (*notes, *_notes(runs_by_label)))


def _at_equal_time(
    metric: Metric, final: RunsByLabel, label: str, verdicts: Mapping[str, Verdict]
) -> EqualTime | None:
    if label not in verdicts:
        return None
    first = next(iter(final))
    return compare_at_equal_time(
        metric, (first, label), final[first], final[label], verdicts[label], comparisons=len(verdicts)
    )


def _below_target_p(final: Sequence[Run], target: Target | None) -> float | None:
    """The p-value of "mean ≤ target", or None if a run stopped at the target.

    Such a run is below the target because it stopped there: the test would pass for any recipe that ever
    reaches it.
    """
    if target is None or any(run.status == "target" for run in final):
        return None
    return stats.mean_below(_values(final, target.kind), target.value)


def _metric(asked: str | None, target: Target | None, final: Sequence[Run]) -> Metric:
    if asked is not None:
        known = [key for key in METRICS if target or key not in ("train_s", "tokens")]
        if asked not in known:
            raise ReportError(
                expected=f"a metric ({', '.join(known)})", found=f"`{asked}`", do="choose one of those"
            )
        return METRICS[asked]
    if target:
        return TIME
    return BPB if all(math.isfinite(run.last("val_bpb")) for run in final) else LOSS


def _value(run: Run, key: str) -> float:
    return run.tokens_per_s if key == "tokens_per_s" else run.last(f"val_{key}")


def _with_value(runs: Sequence[Run], key: str) -> list[Run]:
    return [run for run in runs if math.isfinite(_value(run, key))]


def _values(runs: Sequence[Run], key: str) -> list[float]:
    return [_value(run, key) for run in _with_value(runs, key)]


def _verdicts(
    metric: Metric, runs_by_label: RunsByLabel, waits: Mapping[str, Mapping[str, Waits]]
) -> dict[str, Verdict]:
    is_wait = metric.key in ("train_s", "tokens")
    counted = {
        label: runs if is_wait else _with_value(runs, metric.key) for label, runs in runs_by_label.items()
    }
    baseline, *candidates = counted
    if not candidates:
        return {}
    pairs = [pairing_holds(counted[baseline], counted[label]) for label in candidates]
    machines = None
    if metric.key in TIMED:
        named = [[machine_of(run) for run in runs] for runs in counted.values()]
        machines = named if len({name for names in named for name in names}) > 1 else None
    if is_wait:
        found = judge_waits(
            metric,
            waits[baseline][metric.key],
            [waits[label][metric.key] for label in candidates],
            pairs,
            machines,
        )
    else:
        values = {label: _values(runs, metric.key) for label, runs in counted.items()}
        found = judge(metric, values[baseline], [values[label] for label in candidates], pairs, machines)
    return dict(zip(candidates, found, strict=True))


def _notes(runs_by_label: RunsByLabel) -> list[str]:
    notes = [
        *_notes_on_code(runs_by_label),
        *kernel_notes(runs_by_label),
        *machine_notes(runs_by_label),
    ]
    for label, runs in runs_by_label.items():
        for status in ("running", "interrupted", "diverged"):
            names = [run.name for run in runs if run.status == status]
            counts = (
                "counts with its last finite validation" if status == "diverged" else "has no final loss yet"
            )
            if names:
                notes.append(f"{label}: {status}: {', '.join(names)} ({counts})")
        seeds = [run.config.seed for run in runs]
        if len(set(seeds)) < len(seeds):
            notes.append(f"{label}: some seeds ran more than once; such runs are not independent")
        notes.extend(f"{run.name}: {note}" for run in runs for note in run.notes)
    return notes


def _notes_on_code(runs_by_label: RunsByLabel) -> list[str]:
    """Notes on runs that changed code on the way, and on differences that may come from the code alone."""
    everything = [run for runs in runs_by_label.values() for run in runs]
    notes = [
        f"{run.name}: resumed by other code: {' → '.join(run.codes)}"
        for run in everything
        if len(run.codes) > 1
    ]
    codes = {label: list(dict.fromkeys(run.codes for run in runs)) for label, runs in runs_by_label.items()}
    for label, of_label in codes.items():
        if len(of_label) > 1:
            listed = ", ".join(" → ".join(code) or "not recorded" for code in of_label)
            notes.append(f"{label}: its runs are of different code: {listed}")
    trained_by = {label: runs[-1].trained_by for label, runs in runs_by_label.items()}
    if len(set(trained_by.values())) > 1:
        listed = "; ".join(f"{label}: {code or 'not recorded'}" for label, code in trained_by.items())
        notes.append(f"trained by different versions of the code, which may explain a difference: {listed}")
    return notes


def settings_that_differ(runs_by_label: RunsByLabel) -> list[tuple[str, list[Any]]]:
    """(setting, its value for each label) of the settings that differ between labels."""
    flat = [flatten(updated(runs[0].config, {"seed": 0})) for runs in runs_by_label.values()]
    return [
        (name, [values[name] for values in flat])
        for name in flat[0]
        if any(values[name] != flat[0][name] for values in flat)
    ]


def to_json(analysis: Analysis) -> dict[str, Any]:
    """Plain data for other tools and tables, with None for what is unknown."""
    rows = [
        {
            "label": row.label,
            "runs": row.runs,
            **{key: asdict(summary) for key, summary in row.values.items()},
            "to_target": {key: _waits_json(waits) for key, waits in row.waits.items()},
            "below_target_p": row.below_target_p,
            "verdict": asdict(row.verdict) if row.verdict else None,
            "equal_time": asdict(row.equal_time) if row.equal_time else None,
        }
        for row in analysis.rows
    ]
    target = asdict(analysis.target) if analysis.target else None
    plain: dict[str, Any] = finite(
        {"metric": analysis.metric.key, "target": target, "rows": rows, "notes": list(analysis.notes)}
    )
    return plain


def _waits_json(waits: Waits) -> dict[str, Any]:
    median, low, high = stats.median_wait(waits)
    return {
        "runs": waits.count,
        "reached": int(waits.reached.sum()),
        "mean": asdict(stats.summarize(waits.until)) if waits.all_reached else None,
        "median": {"median": median, "low": low, "high": high},
    }
