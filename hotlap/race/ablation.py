"""Which of a recipe's changes bought what: the recipe against itself with one change at a time taken back.

Settings that make sense only together form one change; which they are, and why, is declared here. A change
that cannot be taken back alone, because what remains is no valid configuration, is reported and not raced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hotlap.errors import ConfigError
from hotlap.race.plan import Entry, Plan, check_settings
from hotlap.recipes import RECIPES, check_used, find_recipe, resolve
from hotlap.report.analysis import Analysis, RunsByLabel
from hotlap.settings import Change, diff, shown, updated


class Together(NamedTuple):
    name: str
    settings: tuple[str, ...]
    why: str


TOGETHER = (
    Together(
        "cooldown",
        ("schedule.cooldown_steps", "schedule.cooldown_fraction"),
        "it is given in steps or as a fraction, and both at once are refused",
    ),
    Together(
        "window",
        (
            "attention.window_unit",
            "schedule.window_start_tokens",
            "schedule.window_end_tokens",
            "schedule.window_offset_tokens",
            "schedule.window_multiple_tokens",
        ),
        "they are one formula, and its rounding has to fit its unit",
    ),
    Together(
        "values",
        ("model.values", "model.value_mix", "model.value_tables"),
        "how tables are kept and mixed in means nothing without the tables",
    ),
    Together(
        "rotary",
        ("model.rotary", "model.rotary_base"),
        "the base sets the wavelengths of just those dimensions that are rotated",
    ),
    Together(
        "length",
        ("schedule.steps", "schedule.warmup_steps", "optim.muon.momentum_warmup_steps"),
        "a size scales each phase with the recipe's number of steps",
    ),
)


class Part(NamedTuple):
    """One change of a recipe: settings that are taken back together."""

    name: str
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return ", ".join(f"{c.name} {shown(c.before)} → {shown(c.after)}" for c in self.changes)


def take_apart(changes: Sequence[Change]) -> list[Part]:
    """Changes grouped by what belongs together, in their order. One alone is named by its setting."""
    group_of = {setting: group.name for group in TOGETHER for setting in group.settings}
    grouped: dict[str, list[Change]] = {}
    for change in changes:
        grouped.setdefault(group_of.get(change.name, change.name), []).append(change)
    return [
        Part(name if len(members) > 1 else members[0].name, tuple(members))
        for name, members in grouped.items()
    ]


def ancestors(recipe: str) -> list[str]:
    """From the parent to the root."""
    found = []
    parent = find_recipe(recipe).parent
    while parent:
        found.append(parent)
        parent = RECIPES[parent].parent
    return found


def make_ablation(
    recipe: str,
    against: str | None,
    size: str,
    seeds: int,
    settings: Mapping[str, Any],
    procs: int | None = None,
) -> tuple[Plan, list[str]]:
    """The plan, and a line for each change that cannot be taken back alone."""
    check_settings(settings)
    line = ancestors(recipe)
    if against is not None:
        find_recipe(against)
    if not line or (against is not None and against not in line):
        raise ConfigError(
            expected=f"an ancestor of {recipe} ({', '.join(line)})" if line else "a recipe with a parent",
            found=f"`{against}`" if line else f"{recipe}, which has none",
            do="see `hotlap recipes`; `hotlap race` compares any two",
        )
    ancestor = against or line[0]
    full = resolve(recipe, size, settings)
    check_used(full, settings)
    length = {name: value for name, value in settings.items() if name == "schedule.steps"}
    # A setting that was given for every run is the same with and without the recipe's change of it.
    changes = [
        change
        for change in diff(resolve(ancestor, size, length), resolve(recipe, size, length))
        if change.name != "recipe" and change.name not in settings
    ]
    entries, left_out = [Entry(recipe, recipe)], []
    for part in take_apart(changes):
        back = {change.name: change.before for change in part.changes}
        try:
            check_used(updated(full, back), {**settings, **back})
        except ConfigError as mistake:
            left_out.append(f"{part}: not raced, cannot be taken back alone: {mistake}")
        else:
            entries.append(Entry(f"without {part.name}", recipe, back, removes=str(part)))
    if len(entries) == 1:
        raise ConfigError(
            expected=f"changes of {recipe} since {ancestor} that can be taken back",
            found="; ".join(left_out) or f"none at {size} with these settings",
            do="choose another --size or --against",
        )
    return Plan(size, seeds, tuple(entries), dict(settings), procs, ablation=ancestor), left_out


def effects(plan: Plan, runs_by_label: RunsByLabel, analysis: Analysis) -> list[dict[str, str]]:
    """What each change did, in words: the other way round from the verdict on the recipe without it."""
    opposite = {"helps": "hurts", "hurts": "helps", "no evidence": "no evidence"}
    rows = {row.label: row for row in analysis.rows}
    found = []
    for entry in plan.entries[1:]:
        verdict = rows[entry.label].verdict if entry.label in rows else None
        assert entry.removes is not None, "every entry but the first is without something"
        if verdict is None:
            continue
        outcome = opposite[verdict.outcome]
        if outcome != "no evidence":
            words = f"{outcome}; taking it back {verdict.words}"
        elif _is_same(runs_by_label[plan.entries[0].label], runs_by_label[entry.label]):
            words = "does nothing here; without it every run ends at the very same loss"
        else:
            words = verdict.words
        found.append({"label": entry.label, "change": entry.removes, "outcome": outcome, "words": words})
    return found


def _is_same(baseline: Sequence[Any], candidate: Sequence[Any]) -> bool:
    return [run.last("val_loss") for run in baseline] == [run.last("val_loss") for run in candidate]
