"""The results of a race: its runs by label, statistics as a table and as JSON, verdicts, the report.

Only rounds in which every entry has ended count, so that all entries have the same number of seeds. The table
on the terminal and the tables in the docs are made from the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hotlap.errors import RaceError
from hotlap.json_files import finite, write_json
from hotlap.race.ablation import effects
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import Plan
from hotlap.race.plan import to_json as plan_to_json
from hotlap.report.analysis import METRICS, analyze, to_json
from hotlap.report.machines import count_machines, machine_of
from hotlap.report.page import write_report
from hotlap.report.stats import CONFIDENCE, TARGET_ALPHA
from hotlap.runs.reader import CONFIG_NAME, Run, load_run

# What a reader of the results needs to know about the machine; no paths.
MACHINE = (
    *("hotlap", "python", "torch", "system", "device", "device_name", "cores", "memory_gib"),
    *("world_size", "threads", "precision", "attention_backend", "compile"),
)
UNKNOWN = "–"


def load_race(directory: RaceDirectory, plan: Plan, *, whole_rounds: bool) -> dict[str, list[Run]]:
    """The runs by label, in the order of the plan; with `whole_rounds`, only of rounds that have ended."""
    runs: dict[str, list[Run]] = {}
    for round_ in plan.rounds():
        if whole_rounds and not all(directory.is_over(start) for start in round_):
            continue
        for start in round_:
            run = directory.run(start)
            if run.config_path.exists():
                runs.setdefault(start.entry.label, []).append(load_run(run.path))
    return {entry.label: runs[entry.label] for entry in plan.entries if entry.label in runs}


def left_out(directory: RaceDirectory, plan: Plan, runs_by_label: Mapping[str, Sequence[Run]]) -> list[str]:
    """Notes on the runs of the plan that are not among `runs_by_label`, and on runs beside the plan."""
    counted = {run.name for runs in runs_by_label.values() for run in runs}
    planned = [start.name for round_ in plan.rounds() for start in round_]
    notes = []
    if missing := [name for name in planned if name not in counted]:
        notes.append(f"runs of the plan that are not counted: {', '.join(missing)}")
    found = sorted(path.parent.name for path in directory.path.glob(f"[!.]*/{CONFIG_NAME}"))
    if others := [name for name in found if name not in planned]:
        notes.append(f"runs that are not in the plan: {', '.join(others)}")
    return notes


def conclude(directory: RaceDirectory, plan: Plan, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Analyze the whole rounds, write `report.html` and `results.json`, and return the data of the latter."""
    runs_by_label = load_race(directory, plan, whole_rounds=True)
    notes = [*notes, *left_out(directory, plan, runs_by_label)]
    analysis = analyze(runs_by_label, notes=notes)
    first = next(iter(runs_by_label.values()))[0]
    data: dict[str, Any] = finite(
        {
            "name": directory.path.name,
            "command": plan.command,
            "date": first.started[:10],
            "machine": {key: first.environment.get(key) for key in MACHINE},
            "machines": count_machines(runs_by_label),
            "plan": plan_to_json(plan),
            "statistics": to_json(analysis),
            "changes": effects(plan, runs_by_label, analysis) if plan.ablation else [],
            "runs": [_run_result(label, run) for label, runs in runs_by_label.items() for run in runs],
        }
    )
    write_json(directory.results_path, data, RaceError)
    write_report(runs_by_label, directory.report_path, directory.path.name, notes=notes)
    return data


def _run_result(label: str, run: Run) -> dict[str, Any]:
    return {
        "name": run.name,
        "label": label,
        "seed": run.config.seed,
        "status": run.status,
        "machine": machine_of(run),
        "val_loss": run.last("val_loss"),
        "val_bpb": run.last("val_bpb"),
        "train_s": run.train_s,
        "tokens": run.tokens,
        "tokens_per_s": run.tokens_per_s,
    }


def verdict_lines(data: Mapping[str, Any]) -> list[str]:
    """The verdicts of `results.json`, one per line, and the notes on them."""
    statistics = data["statistics"]
    first, *others = statistics["rows"]
    lines = []
    if data["changes"]:
        lines.append(f"{METRICS[statistics['metric']].name}, what each change of {first['label']} does:")
        lines += [f"  {change['change']}: {change['words']}" for change in data["changes"]]
    elif others:
        lines.append(f"{METRICS[statistics['metric']].name}, each against {first['label']}:")
        for row in others:
            lines.append(f"  {row['label']}: {row['verdict']['words']}")
            if row.get("equal_time"):  # results of earlier versions have none
                lines.append(f"  {row['label']}, at equal time: {row['equal_time']['words']}")
    if statistics["target"]:
        value = statistics["target"]["value"]
        for row in statistics["rows"]:
            p = row["below_target_p"]
            if p is not None:
                passed = "shown" if p < TARGET_ALPHA else "not shown"
                lines.append(f"  {row['label']}: mean ≤ {value:g} {passed} (p = {p:.2g})")
    return [*lines, *(f"note: {note}" for note in statistics["notes"])]


def table(statistics: Mapping[str, Any], *, full: bool) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of text: all figures, or if not `full` the main ones with the verdicts in words."""
    rows = statistics["rows"]
    has = {key: any(row[key]["mean"] is not None for row in rows) for key in ("bpb", "loss")}
    described = [key for key in ("bpb", "loss") if has[key] and (full or key == "bpb" or not has["bpb"])]
    is_compared = any(row["verdict"] for row in rows)
    headers = ["recipe", "runs", *(METRICS[key].name for key in described)]
    headers += ["time to target (s)"] if statistics["target"] else []
    headers.append("tokens/s")
    if is_compared and full:
        headers += ["difference", "p (Holm)", "effect size g"]
    elif is_compared:
        headers.append(f"against {rows[0]['label']}")
    lines = []
    for row in rows:
        cells = [row["label"], str(row["runs"])]
        cells += [_mean(row[key], METRICS[key].decimals, full) for key in described]
        cells += [_wait(row["to_target"]["train_s"])] if statistics["target"] else []
        cells.append(_mean(row["tokens_per_s"], 0, False))
        if is_compared and full:
            cells += _comparison(row["verdict"], METRICS[statistics["metric"]].decimals)
        elif is_compared:
            cells.append(row["verdict"]["words"] if row["verdict"] else UNKNOWN)
        lines.append(cells)
    return headers, lines


def _mean(summary: Mapping[str, Any], decimals: int, with_interval: bool) -> str:
    if summary["mean"] is None:
        return UNKNOWN
    text = f"{summary['mean']:,.{decimals}f}"
    if summary["sd"] is not None:
        text += f" ± {summary['sd']:,.{decimals}f}"
        if with_interval:
            text += f" ({summary['low']:,.{decimals}f} to {summary['high']:,.{decimals}f})"
    return text


def _wait(wait: Mapping[str, Any]) -> str:
    if wait["mean"]:
        return _mean(wait["mean"], 1, False)
    median = wait["median"]["median"]
    reached = f"reached by {wait['reached']} of {wait['runs']}"
    return reached if median is None else f"median {median:,.1f}, {reached}"


def _comparison(verdict: Mapping[str, Any] | None, decimals: int) -> list[str]:
    if verdict is None:
        return [UNKNOWN] * 3
    difference, g, p = verdict["difference"]["mean"], verdict["effect"][0], verdict["p_adjusted"]
    return [
        UNKNOWN if difference is None else f"{difference:+,.{decimals}f}".replace("-", "−"),
        UNKNOWN if p is None else f"{p:.2g}",
        UNKNOWN if g is None else f"{g:+.2f}".replace("-", "−"),
    ]


def table_note() -> str:
    return (
        f"Mean ± standard deviation; in brackets the {100 * CONFIDENCE:g} % confidence interval of the mean."
    )
