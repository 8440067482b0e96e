"""Operations on configuration dataclasses: list settings, parse text or JSON, update by name, diff.

A setting is a dataclass field made with `setting(default, doc)`. Sections are nested dataclasses, and the
full name of a setting is its dotted path (`optim.muon.lr`). The command line, `config.json`, recipes, race
variants and diffs all use the functions of this file, so an invalid name or value raises the same error
everywhere.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

from hotlap.errors import ConfigError

C = TypeVar("C")

REQUIRED = ("recipe", "size", "seed")  # without them a file is no configuration of a run
LARGEST = 2**63  # whole numbers are below it: torch and NumPy count in 64 bits


def setting(default: Any, doc: str) -> Any:
    """A dataclass field with its one-line doc."""
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata={"doc": doc})
    return dataclasses.field(default=default, metadata={"doc": doc})


def section(kind: type[Any], doc: str) -> Any:
    """A nested group of settings."""
    return dataclasses.field(default_factory=kind, metadata={"doc": doc})


class Setting(NamedTuple):
    name: str  # dotted path
    type: Any
    doc: str


class Change(NamedTuple):
    name: str
    before: Any
    after: Any


def settings_of(kind: type[Any]) -> tuple[Setting, ...]:
    """All settings of a configuration class, depth first, in declaration order."""
    return _settings_of(cast(Hashable, kind))


@functools.cache  # a race resolves its recipes hundreds of times
def _settings_of(kind: Any) -> tuple[Setting, ...]:
    found: list[Setting] = []
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        annotation = hints[field.name]
        if dataclasses.is_dataclass(annotation):
            assert isinstance(annotation, type)
            found += (inner._replace(name=f"{field.name}.{inner.name}") for inner in settings_of(annotation))
        else:
            found.append(Setting(field.name, annotation, field.metadata["doc"]))
    return tuple(found)


def flatten(config: Any) -> dict[str, Any]:
    """All settings as {dotted name: value}."""
    values = {}
    for item in settings_of(type(config)):
        value = config
        for part in item.name.split("."):
            value = getattr(value, part)
        values[item.name] = value
    return values


def diff(before: Any, after: Any) -> list[Change]:
    """The settings whose values differ between two configurations."""
    old, new = flatten(before), flatten(after)
    return [Change(name, old[name], new[name]) for name in new if old[name] != new[name]]


def nearest(word: str, known: Sequence[str]) -> str:
    """Advice for an unknown word: the closest known word, if any is close."""
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean `{matches[0]}`?" if matches else "choose one that exists"


def full_name(kind: type[Any], name: str) -> str:
    """Expand the name of a setting to its dotted path. The last part alone suffices if it is unique."""
    name = name.replace("-", "_")
    known = [item.name for item in settings_of(kind)]
    if name in known:
        return name
    ending = [candidate for candidate in known if candidate.rsplit(".", 1)[-1] == name]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigError(
            expected="an unambiguous setting name",
            found=f"`{name}`, which matches several settings",
            do=f"use one of {', '.join(ending)}",
        )
    leaves = {candidate.rsplit(".", 1)[-1]: candidate for candidate in known}
    matches = difflib.get_close_matches(name, [*known, *leaves], n=1, cutoff=0.5)
    guess = leaves.get(matches[0], matches[0]) if matches else None
    raise ConfigError(
        expected="the name of a setting",
        found=f"`{name}`",
        do=f"did you mean `{guess}`?" if guess else "`hotlap recipes show softcap` lists all of them",
    )


def parse(kind: type[Any], overrides: Mapping[str, str]) -> dict[str, Any]:
    """Parse overrides given as text, such as `{"optim.muon.lr": "0.03"}`, to {dotted name: typed value}."""
    types_by_name = {item.name: item.type for item in settings_of(kind)}
    changes = {}
    for name, text in overrides.items():
        full = full_name(kind, name)
        if full in changes:
            raise ConfigError(expected="each setting once", found=f"`{full}` twice", do="remove one")
        changes[full] = _from_text(text, types_by_name[full], full)
    return changes


def updated(config: C, changes: Mapping[str, Any]) -> C:
    """A copy of `config` with `changes` applied by dotted name. Only the final result is validated."""
    return _replace(config, checked(type(config), changes))


def checked(kind: type[Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` by full name, each value of its setting's type."""
    types_by_name = {item.name: item.type for item in settings_of(kind)}
    values = {}
    for name, value in changes.items():
        full = full_name(kind, name)
        values[full] = _checked(value, types_by_name[full], full)
    return values


def to_json(config: Any) -> dict[str, Any]:
    """The configuration as nested dicts, the content of `config.json`."""
    return dataclasses.asdict(config)


def from_json(kind: type[C], data: Any, prefix: str = "") -> C:
    """Rebuild the configuration that `to_json` wrote. Unknown or mistyped fields raise an error.

    A missing setting takes its default, so that files written before the setting existed
    still load. The default of a new setting must therefore keep the earlier behavior.
    """
    if not isinstance(data, dict):
        raise ConfigError(
            expected=f"a JSON object at `{prefix or 'the top'}`",
            found=type(data).__name__,
            do="restore the file, or recreate it with `hotlap train … --dry-run --json`",
        )
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in data:
        if key not in names:
            raise ConfigError(
                expected="known settings",
                found=f"`{prefix}{key}`",
                do=nearest(str(key), names) + " Otherwise remove it",
            )
    values: dict[str, Any] = {}
    for name in names:
        is_section = dataclasses.is_dataclass(hints[name])
        if name not in data:
            if is_section or name in REQUIRED:
                raise ConfigError(
                    expected=f"a value for `{prefix}{name}`", found="none", do="add it to the file"
                )
            continue
        if is_section:
            values[name] = from_json(hints[name], data[name], f"{prefix}{name}.")
        else:
            values[name] = _checked(data[name], hints[name], prefix + name)
    return kind(**values)


def describe_type(annotation: Any) -> str:
    """A setting's type, as text for the user."""
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return " or ".join(typing.get_args(annotation))
    if origin is types.UnionType:
        return " or ".join(
            "none" if a is types.NoneType else describe_type(a) for a in typing.get_args(annotation)
        )
    if origin is tuple:
        return f"{describe_type(typing.get_args(annotation)[0])}s, comma-separated"
    if origin is dict:
        return "name=number pairs, comma-separated"
    return {int: "whole number", float: "number", bool: "true or false", str: "text"}[annotation]


def shown(value: Any) -> str:
    """A setting's value, as the user would type it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ",".join(f"{key}={shown(number)}" for key, number in value.items()) or "none"
    if isinstance(value, tuple):
        return ",".join(map(shown, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def as_text(value: Any) -> str:
    """A setting's value as text that `parse` turns back into exactly the same value."""
    if isinstance(value, dict):
        return ",".join(f"{key}={number!r}" for key, number in value.items())
    if isinstance(value, tuple):
        return ",".join(map(as_text, value))
    return repr(value) if isinstance(value, float) else shown(value)


def _replace(config: C, changes: Mapping[str, Any]) -> C:
    here: dict[str, Any] = {}
    below: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        head, _, rest = name.partition(".")
        if rest:
            below.setdefault(head, {})[rest] = value
        else:
            here[head] = value
    for head, inner in below.items():
        here[head] = _replace(getattr(config, head), inner)
    return dataclasses.replace(config, **here)  # type: ignore[type-var]


def _wrong(value: Any, annotation: Any, name: str) -> ConfigError:
    return ConfigError(
        expected=f"`{name}` as {describe_type(annotation)}",
        found="no value" if value == "" else repr(value)[:80],
        do="give one" if value == "" else "change the value",
    )


def _from_text(text: str, annotation: Any, name: str) -> Any:
    origin = typing.get_origin(annotation)
    if origin is types.UnionType:
        if text.lower() == "none":
            return None
        (inner,) = (a for a in typing.get_args(annotation) if a is not types.NoneType)
        return _from_text(text, inner, name)
    try:
        if annotation is bool:
            return {"": True, "true": True, "false": False}[text.lower()]
        if annotation is int:
            return _checked(int(text.replace("_", "")), int, name)
        if annotation is float:
            return float(text)
        if origin is tuple:
            inner = typing.get_args(annotation)[0]
            return tuple(_from_text(part, inner, name) for part in text.split(",") if part)
        if origin is dict:
            return {
                key: float(number) for key, number in (pair.split("=") for pair in text.split(",") if pair)
            }
    except (KeyError, ValueError):
        raise _wrong(text, annotation, name) from None
    if not text:
        raise _wrong(text, annotation, name)
    return _checked(text, annotation, name)


def _checked(value: Any, annotation: Any, name: str) -> Any:
    """`value` checked against its annotation. Lists become tuples and integers become floats where needed."""
    origin = typing.get_origin(annotation)
    if origin is types.UnionType:
        if value is None and types.NoneType in typing.get_args(annotation):
            return None
        (inner,) = (a for a in typing.get_args(annotation) if a is not types.NoneType)
        return _checked(value, inner, name)
    if origin is Literal and value in typing.get_args(annotation):
        return value
    if origin is tuple and isinstance(value, (tuple, list)):
        inner = typing.get_args(annotation)[0]
        return tuple(_checked(item, inner, name) for item in value)
    if origin is dict and isinstance(value, dict):
        return {_checked(k, str, name): _checked(v, float, name) for k, v in value.items()}
    if annotation is float and (type(value) is float or _is_whole(value)):
        return float(value)
    if annotation is int and _is_whole(value):
        return value
    if annotation in (str, bool) and type(value) is annotation:
        return value
    raise _wrong(value, annotation, name)


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < LARGEST
