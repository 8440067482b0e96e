"""Recipes and sizes. `resolve` combines one of each into the configuration of a run.

A recipe is a configuration at the scale of the records (`small`); a size overrides its dimensions. Every
command calls `resolve("softcap", "nano")`. An unknown name is an error that suggests the closest known one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.recipes.idea_files import IdeaFile, is_idea, read_ideas, recipe_of
from hotlap.recipes.lineage import RECIPES, Recipe
from hotlap.recipes.sizes import SIZES, Size
from hotlap.settings import nearest, updated

__all__ = [
    "RECIPES",
    "SIZES",
    "IdeaFile",
    "Recipe",
    "Size",
    "check_used",
    "find_recipe",
    "find_size",
    "resolve",
    "with_what_follows",
]


def find_recipe(name: str) -> Recipe:
    """A recipe of the lineage, or what idea files (`a.py`, `a.py+b.py`) make of their parent."""
    if is_idea(name):
        return recipe_of(read_ideas(name))
    if name not in RECIPES:
        raise ConfigError(
            expected=f"a recipe ({', '.join(RECIPES)})", found=f"`{name}`", do=nearest(name, list(RECIPES))
        )
    return RECIPES[name]


def find_size(name: str) -> Size:
    if name not in SIZES:
        raise ConfigError(
            expected=f"a size ({', '.join(SIZES)})", found=f"`{name}`", do=nearest(name, list(SIZES))
        )
    return SIZES[name]


def check_used(config: Config, changes: Iterable[str]) -> None:
    """Raise an error if `changes` (full names) contains a setting that this configuration does not use."""
    unused = [name for name in changes if name.startswith("optim.muon.")]
    if unused and config.optim.matrices == "adamw":
        raise ConfigError(
            expected=f"settings that {config.recipe} uses",
            found=f"`{unused[0]}`, which has no effect because AdamW updates the matrices",
            do="change optim.adam.matrix_lr or another setting of optim.adam",
        )


def with_what_follows(changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes`, and those of settings that would otherwise contradict or undo them."""
    completed = dict(changes)
    if changes.get("data.order") == "shuffled":
        completed.setdefault("data.tail", "carry")
    if "checkpoint.every_minutes" in changes:
        completed.setdefault("checkpoint.end_only_from_ranks", 0)
    return completed


def resolve(recipe: str, size: str, changes: Mapping[str, Any] | None = None) -> Config:
    """The full configuration of a recipe at a size, with `changes` applied by dotted name.

    If `changes` sets the number of steps, the recipe's step counts (warmup, cooldown) scale in proportion.
    """
    scale, base = find_size(size), find_recipe(recipe)
    own = with_what_follows(base.changes)
    changes = {**base.at_size.get(size, {}), **own, **with_what_follows(changes or {})}
    if "schedule.steps" in changes:
        scale = replace(scale, steps=changes["schedule.steps"])
    return updated(scale.apply(base.config), {"recipe": base.name, "size": size, **changes})
