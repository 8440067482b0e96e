"""Ablation: race a recipe against itself with one of its changes undone at a time.

Settings that only make sense together are undone as one change; `SETTING_GROUPS` declares them and gives the
reason. A change whose removal leaves an invalid configuration is reported and not raced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hotlap.errors import ConfigError
from hotlap.race.plan import Entry, Plan, check_settings, with_ideas
from hotlap.recipes import RECIPES, check_used, find_recipe, resolve
from hotlap.report.analysis import Analysis, RunsByLabel
from hotlap.settings import Change, diff, shown, updated


class SettingGroup(NamedTuple):
    name: str
    settings: tuple[str, ...]
    why: str


SETTING_GROUPS = (
    SettingGroup(
        "cooldown",
        ("schedule.cooldown_steps", "schedule.cooldown_fraction"),
        "the cooldown is given in steps or as a fraction; setting both is an error",
    ),
    SettingGroup(
        "window",
        (
            "attention.window_unit",
            "schedule.window_start_tokens",
            "schedule.window_end_tokens",
            "schedule.window_offset_tokens",
            "schedule.window_multiple_tokens",
        ),
        "they are the parameters of one formula, whose rounding must match its unit",
    ),
    SettingGroup(
        "values",
        ("model.values", "model.value_mix", "model.value_tables"),
        "how tables are stored and mixed has no effect without the tables",
    ),
    SettingGroup(
        "rotary",
        ("model.rotary", "model.rotary_base"),
        "the base sets the frequencies of the dimensions that are rotated",
    ),
    SettingGroup(
        "length",
        ("schedule.steps", "schedule.warmup_steps", "optim.muon.momentum_warmup_steps"),
        "a size scales each phase in proportion to the number of steps",
    ),
)


# Changes that do not affect what a model learns: the name, and how the machine is used.
NOT_LEARNED = ("recipe", "ideas", "runtime.", "checkpoint.")


class ChangeGroup(NamedTuple):
    """One change of a recipe: settings that are undone together."""

    name: str
    changes: tuple[Change, ...]

    def __str__(self) -> str:
        return ", ".join(f"{c.name} {shown(c.before)} → {shown(c.after)}" for c in self.changes)


def group_changes(changes: Sequence[Change]) -> list[ChangeGroup]:
    """Group changes by SETTING_GROUPS, keeping their order. A single setting keeps its own name."""
    group_of = {setting: group.name for group in SETTING_GROUPS for setting in group.settings}
    grouped: dict[str, list[Change]] = {}
    for change in changes:
        grouped.setdefault(group_of.get(change.name, change.name), []).append(change)
    return [
        ChangeGroup(name if len(members) > 1 else members[0].name, tuple(members))
        for name, members in grouped.items()
    ]


def ancestors(recipe: str) -> list[str]:
    """The recipe's ancestors, from the parent to the root."""
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
    """The plan, and one message for each change that cannot be undone on its own."""
    check_settings(settings)
    found = find_recipe(recipe)
    line = ancestors(recipe)
    if against is not None:
        find_recipe(against)
    if not line or (against is not None and against not in line):
        raise ConfigError(
            expected=f"an ancestor of {recipe} ({', '.join(line)})" if line else "a recipe with a parent",
            found=f"`{against}`" if line else f"{recipe}, which has none",
            do="see `hotlap recipes`; `hotlap race` compares any two recipes",
        )
    ancestor = against or line[0]
    base, own = with_ideas(recipe, {})
    full = resolve(recipe, size, settings)
    check_used(full, settings)
    length = {name: value for name, value in settings.items() if name == "schedule.steps"}
    # A setting given on the command line applies to every run, so undoing the recipe's change has no effect.
    changes = [
        change
        for change in diff(resolve(ancestor, size, length), resolve(recipe, size, length))
        if not change.name.startswith(NOT_LEARNED) and change.name not in settings
    ]
    spec = recipe if found.ideas else ""
    entries, skipped = [Entry(found.name, base, own, spec=spec)], []
    for file in found.ideas:
        rest = [other for other in found.ideas if other is not file]
        undo = {
            "recipe": "+".join(other.name for other in rest) or base,
            "ideas": tuple(other.identity for other in rest),
        }
        changed = f"the code of {file.name} ({file.sentence})"
        entries.append(Entry(f"without {file.name}", base, {**own, **undo}, removes=changed, spec=spec))
    for group in group_changes(changes):
        undo = {change.name: change.before for change in group.changes}
        try:
            check_used(updated(full, undo), {**settings, **undo})
        except ConfigError as mistake:
            skipped.append(f"{group}: not raced, cannot be undone on its own: {mistake}")
        else:
            label, changed = f"without {group.name}", str(group)
            entries.append(Entry(label, base, {**own, **undo}, removes=changed, spec=spec))
    if len(entries) == 1:
        raise ConfigError(
            expected=f"changes of {recipe} since {ancestor} that can be undone",
            found="; ".join(skipped) or f"none at {size} with these settings",
            do="choose another --size or --against",
        )
    return Plan(size, seeds, tuple(entries), dict(settings), procs, ablation=ancestor), skipped


def effects(plan: Plan, runs_by_label: RunsByLabel, analysis: Analysis) -> list[dict[str, str]]:
    """The effect of each change: the opposite of the verdict on the recipe without it."""
    opposite = {"helps": "hurts", "hurts": "helps", "no evidence": "no evidence"}
    rows = {row.label: row for row in analysis.rows}
    found = []
    for entry in plan.entries[1:]:
        verdict = rows[entry.label].verdict if entry.label in rows else None
        assert entry.removes is not None, f"{entry.label} undoes no change"
        if verdict is None:
            continue
        outcome = opposite[verdict.outcome]
        if outcome != "no evidence":
            words = f"{outcome}; undoing it {verdict.words}"
        elif _same_losses(runs_by_label[plan.entries[0].label], runs_by_label[entry.label]):
            words = "has no effect; without it every run ends at exactly the same loss"
        else:
            words = verdict.words
        found.append({"label": entry.label, "change": entry.removes, "outcome": outcome, "words": words})
    return found


def _same_losses(baseline: Sequence[Any], candidate: Sequence[Any]) -> bool:
    return [run.last("val_loss") for run in baseline] == [run.last("val_loss") for run in candidate]
