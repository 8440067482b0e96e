"""What an idea changes, side by side with what it replaces: for the header, the report and `recipes`.

The texts are recorded with a run, since a report reads nothing but the run's files.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from hotlap.model.head import cross_entropy
from hotlap.model.parts import STANDARD
from hotlap.optim import schedules
from hotlap.recipes import IdeaFile, resolve
from hotlap.settings import flatten, shown


class Difference(NamedTuple):
    what: str  # a part, or "settings"
    before: str  # of the parent; empty if it has nothing like it
    after: str


def differences(file: IdeaFile, size: str) -> list[Difference]:
    """What the idea changes of its parent, at a size."""
    idea = file.idea
    parent = flatten(resolve(idea.parent, size))
    found = []
    if idea.settings:
        found.append(
            Difference(
                "settings",
                "\n".join(f"{name} = {shown(parent[name])}" for name in idea.settings),
                "\n".join(f"{name} = {shown(value)}" for name, value in idea.settings.items()),
            )
        )
    before: dict[str, Callable[..., Any]] = {
        item.name: getattr(STANDARD, item.name) for item in fields(STANDARD)
    }
    before |= {"loss": cross_entropy, "schedule": getattr(schedules, parent["schedule.kind"])}
    for name, part in idea.replaced.items():
        found.append(Difference(name, _source(before[name]) if name in before else "", _text(file, part)))
    for name, role in idea.roles.items():
        found.append(Difference("role", "", f"{name}: {role}"))
    for name, make in idea.optimizers.items():
        found.append(Difference(f"optimizer of {name}", "by its role", _text(file, make)))
    return found


def described(file: IdeaFile, size: str) -> dict[str, Any]:
    """An idea as one of `ideas` in the environment of a run."""
    return {
        "idea": file.identity,
        "sentence": file.sentence,
        "parent": file.idea.parent,
        "source": file.source,
        "differences": [difference._asdict() for difference in differences(file, size)],
    }


def idea_lines(file: IdeaFile) -> list[str]:
    """The lines of a header."""
    names = {
        name: getattr(part, "__name__", repr(part))
        for name, part in {**file.idea.replaced, **file.idea.optimizers}.items()
    }
    changed = [f"{name} is {by}" for name, by in names.items()]
    changed += [f"{name} = {shown(value)}" for name, value in file.idea.settings.items()]
    changed += [f"role of {name}: {role}" for name, role in file.idea.roles.items()]
    return [
        f"idea       {file.identity}, on {file.idea.parent}, from {file.place}: {file.sentence}",
        f"           {'; '.join(changed) or 'changes nothing'}",
    ]


def difference_table(file: IdeaFile, size: str) -> Table:
    """Parent and idea side by side."""
    table = Table("", file.idea.parent, file.name, title=f"what {file.name} changes", show_lines=True)
    for what, before, after in differences(file, size):
        table.add_row(Text(what), Text(before or "–"), Text(after))
    return table


def _text(file: IdeaFile, part: Callable[..., Any]) -> str:
    name = getattr(part, "__name__", "")
    return file.class_source(name) or name or repr(part)


def _source(part: Callable[..., Any]) -> str:
    return inspect.getsource(part).rstrip()
