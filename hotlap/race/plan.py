"""The plan of a race: entries (recipes and variants), the number of seeds, and settings for every run.

A plan is checked completely before the first run starts. It is saved as JSON, so that a killed race can be
resumed and a different plan under the same name is detected. Entries with equal settings (an A/A comparison)
get different seeds; with the same seeds they would be identical runs.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hotlap.config import Config
from hotlap.errors import ConfigError, RaceError
from hotlap.files import without_home
from hotlap.recipes import check_used, find_recipe, resolve
from hotlap.recipes.idea_files import SUFFIX
from hotlap.settings import as_text, full_name, parse
from hotlap.versions import commit_of, split_version

BY_RECIPE = ("recipe", "ideas")  # settings that follow from the recipe word of a command
MIN_SEEDS = 2
MAX_LABEL = 200  # characters; it becomes a part of a file name
# Offset of the first seed of an entry that equals an earlier one. Leaves room to add seeds to both later.
SEED_OFFSET = 1000


@dataclass(frozen=True)
class Entry:
    label: str
    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # by full name; override the plan's settings
    first_seed: int = 0
    removes: str | None = None  # in an ablation: the change that this entry undoes
    spec: str = ""  # with ideas or a version, as the user wrote it; `recipe` is the ideas' parent
    commit: str = ""  # of the package that trains it; empty: this one

    @property
    def ideas(self) -> tuple[str, ...]:
        """As in the setting of this name."""
        return tuple(self.changes.get("ideas", ()))


class Start(NamedTuple):
    """One run of a race."""

    entry: Entry
    seed: int

    @property
    def name(self) -> str:
        """The name of the run directory: label and seed, with unsafe characters replaced."""
        label = re.sub(r"[^\w.+=-]+", "-", self.entry.label)
        return f"{label}-seed{self.seed}"

    def __str__(self) -> str:
        return f"{self.entry.label}, seed {self.seed}"


@dataclass(frozen=True)
class Plan:
    size: str
    seeds: int
    entries: tuple[Entry, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)  # for every run, by full name
    procs: int | None = None  # processes per run; None: no launcher
    ablation: str | None = None  # the ancestor that changes are reverted to; None: a plain race

    def __post_init__(self) -> None:
        if isinstance(source := self.settings.get("data.source"), str):
            # As in the configurations of the runs: race.json is shared with them.
            object.__setattr__(self, "settings", {**self.settings, "data.source": without_home(source)})
        if not self.entries:
            raise ConfigError(expected="at least one RECIPE", found="none", do="`hotlap recipes` lists them")
        if not MIN_SEEDS <= self.seeds <= SEED_OFFSET:
            raise ConfigError(
                expected=f"--seeds of {MIN_SEEDS} to {SEED_OFFSET}",
                found=str(self.seeds),
                do="use more seeds; the test compares a difference with the spread between seeds"
                if self.seeds < MIN_SEEDS
                else "use fewer seeds",
            )
        if self.procs is not None and self.procs < 1:
            raise ConfigError(expected="--procs of at least 1", found=str(self.procs), do="omit it")
        names = [start.name for start in self.rounds()[0]]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:
            raise ConfigError(
                expected="variants that differ in more than punctuation",
                found=f"two that would both run in `{twice}`",
                do="name one, as in softcap:NAME,optim.muon.lr=0.03",
            )

    def config(self, start: Start) -> Config:
        changes = {**self.settings, **start.entry.changes, "seed": start.seed}
        return _config(start.entry.recipe, self.size, changes)

    def words(self, start: Start, copies: Path) -> list[str]:
        """The recipe and the settings of a run, as arguments of `hotlap train`; `copies` of its ideas."""
        entry = start.entry
        recipe = "+".join(str(copies / f"{identity}{SUFFIX}") for identity in entry.ideas) or entry.recipe
        recipe += f"@{entry.commit}" if entry.commit else ""
        settings = {**self.settings, **entry.changes, "seed": start.seed}
        named = [f"--{name}={as_text(value)}" for name, value in settings.items() if name not in BY_RECIPE]
        return [recipe, "--size", self.size, *named]

    def rounds(self) -> list[list[Start]]:
        """Runs in rounds, one seed of each entry per round (A1 B1 C1, A2 B2 C2, …).

        Interleaving spreads the effect of a temporarily slow machine over all entries.
        """
        return [
            [Start(entry, entry.first_seed + number) for entry in self.entries]
            for number in range(self.seeds)
        ]

    @property
    def command(self) -> str:
        """The command line that produces this plan."""
        if self.ablation:
            first = self.entries[0]
            words = ["ablate", first.spec or first.recipe, "--against", self.ablation]
        else:
            words = ["race", *(_spec(entry) for entry in self.entries)]
        words += ["--size", self.size, "--seeds", str(self.seeds)]
        words += ["--procs", str(self.procs)] if self.procs else []
        words += [word for name, value in self.settings.items() for word in (f"--{name}", as_text(value))]
        return shlex.join(["hotlap", *words])

    @property
    def default_name(self) -> str:
        """The default name of the race.

        It depends neither on the number of seeds nor on the content of ideas, so that the race of a changed
        file is refused instead of begun anew.
        """
        plain = {**to_json(self), "seeds": None}
        for entry in plain["entries"]:
            del entry["spec"], entry["commit"]
            if "ideas" in entry["changes"]:
                entry["changes"]["ideas"] = [name.partition("@")[0] for name in entry["changes"]["ideas"]]
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()[:6]
        kind = "ablate" if self.ablation else "race"
        first = self.entries[0]
        return f"{kind}-{first.changes.get('recipe', first.recipe)}-{self.size}-{digest}"


def make_plan(
    specs: Sequence[str],
    size: str,
    seeds: int,
    settings: Mapping[str, Any],
    procs: int | None = None,
    *,
    first_seed: int = 0,
) -> Plan:
    """The plan of `hotlap race`. Builds every configuration once, so that mistakes are reported now."""
    check_settings(settings)
    entries: list[Entry] = []
    known: list[tuple[Config, str]] = []
    for spec in specs:
        label, recipe, changes = parse_spec(spec)
        version = split_version(spec_recipe(spec))[1]
        commit = commit_of(version) if version else ""
        recipe, changes = with_ideas(recipe, changes)
        config = _config(recipe, size, {**settings, **changes})
        copies = known.count((config, commit))
        name = changes.get("recipe", recipe)
        label = _unused(label, name, [entry.label for entry in entries], is_copy=copies > 0)
        kept = spec if "ideas" in changes or commit else ""
        entries.append(
            Entry(
                label, recipe, changes, first_seed=first_seed + copies * SEED_OFFSET, spec=kept, commit=commit
            )
        )
        known.append((config, commit))
    return Plan(size, seeds, tuple(entries), dict(settings), procs)


def with_ideas(recipe: str, changes: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """(recipe, changes) by which no idea file has to be read again: of ideas, their parent and settings."""
    found = find_recipe(recipe)
    if not found.ideas:
        return recipe, dict(changes)
    assert found.parent is not None, "ideas have a parent"
    own = {"recipe": found.name, "ideas": found.config.ideas}
    return found.parent, {**own, **found.changes, **changes}


def _config(recipe: str, size: str, changes: Mapping[str, Any]) -> Config:
    """The configuration as `hotlap train` builds it. A setting without effect is an error."""
    config = resolve(recipe, size, changes)
    check_used(config, changes)
    if config.schedule.minutes:
        raise RaceError(
            expected="runs that end by their number of steps, so that they can be compared",
            found=f"schedule.minutes = {config.schedule.minutes:g}",
            do="give --steps",
        )
    return config


def parse_spec(spec: str) -> tuple[str, str, dict[str, Any]]:
    """Parse `RECIPE[:part,part…]` to (label, recipe, changes). A part is `setting=value` or a name."""
    recipe, colon, rest = spec.partition(":")
    name_with_version = recipe
    recipe, version = split_version(recipe)
    recipe_name = name_with_version if version else find_recipe(recipe).name
    find_recipe(recipe)
    parts = rest.split(",") if colon else []
    names = [part for part in parts if "=" not in part]
    for name in names:
        _check_name(name, spec)
    if len(names) > 1:
        raise ConfigError(expected=f"one name in `{spec}`", found=", ".join(names), do="keep one of them")
    given: dict[str, str] = {}
    for part in parts:
        setting, equals, value = part.partition("=")
        if equals:
            given[setting] = value
    changes = parse(Config, given)
    check_settings(changes)
    label = ":".join([recipe_name, names[0] if names else rest]) if colon else recipe_name
    return label, recipe, changes


def spec_recipe(spec: str) -> str:
    """The recipe, or the idea files, of a spec."""
    return spec.partition(":")[0]


def check_settings(settings: Mapping[str, Any]) -> None:
    instead = {"seed": "use --seeds", "recipe": "use RECIPE", "ideas": "use RECIPE", "size": "use --size"}
    for name, do in instead.items():
        if name in settings:
            raise ConfigError(expected="settings that a race does not set", found=f"`{name}`", do=do)


def _check_name(name: str, spec: str) -> None:
    try:
        setting = full_name(Config, name) if name else None
    except ConfigError:
        setting = None
    if setting:
        raise ConfigError(
            expected=f"a value for `{setting}` in `{spec}`", found="none", do=f"write {name}=VALUE"
        )
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ConfigError(
            expected=f"setting=value or a variant name in `{spec}`",
            found=f"`{name}`",
            do="write RECIPE:setting=value,setting=value",
        )


def _unused(label: str, recipe: str, taken: Sequence[str], *, is_copy: bool) -> str:
    if label not in taken:
        return label
    if not is_copy:
        raise ConfigError(expected="each name once", found=f"`{label}` twice", do="choose another name")
    again = f"{recipe}:again"
    count = 2
    while again in taken:
        again, count = f"{recipe}:again{count}", count + 1
    return again


def _spec(entry: Entry) -> str:
    if entry.spec:
        return entry.spec
    recipe, _, name = entry.label.partition(":")
    parts = [name] if name and "=" not in name else []
    parts += [f"{setting}={as_text(value)}" for setting, value in entry.changes.items()]
    return ":".join([recipe, ",".join(parts)]) if parts else recipe


def to_json(plan: Plan) -> dict[str, Any]:
    return asdict(plan)


def _entry(data: Mapping[str, Any]) -> Entry:
    """An entry from JSON, which has lists for tuples."""
    changes = {name: tuple(v) if isinstance(v, list) else v for name, v in data["changes"].items()}
    return Entry(**{**data, "changes": changes})


def from_json(data: Any, place: str) -> Plan:
    """The plan that `to_json` wrote. Unknown recipes or settings and damaged files raise an error."""
    try:
        entries = tuple(_entry(entry) for entry in data["entries"])
        plan = Plan(**{**data, "entries": entries})
        for start in plan.rounds()[0]:
            plan.config(start)
        for entry in entries:
            if not entry.label.isprintable() or len(entry.label) > MAX_LABEL:
                raise ValueError(f"the label {entry.label[:80]!r}")
            if not (isinstance(entry.spec, str) and re.fullmatch("[0-9a-f]*", entry.commit)):
                raise ValueError("a spec that is no text, or a commit that is no hash")
    except (TypeError, KeyError, AttributeError, ValueError, ArithmeticError) as error:
        raise RaceError(
            expected=f"the plan of a race in {place}",
            found=f"{type(error).__name__}: {error}",
            do="restore the file, or race under another name",
        ) from error
    return plan
