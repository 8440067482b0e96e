"""What `environment.json` of a run records: the types of what is read from it, and where the data was."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotlap.errors import CheckpointError
from hotlap.json_files import damaged

# Set where a cluster trains: the name that it gives the machine.
MACHINE_VARIABLE = "HOTLAP_MACHINE"

# Each may be absent or null.
TYPES = {
    "earlier": list,
    "code": dict,
    "data": dict,
    "model": dict,
    "variables": dict,
    "routing": list,
    "ideas": list,
}
DATA_TEXTS = ("source", "directory", "fingerprint", "tokenizer")
JSON_KINDS = {dict: "an object", list: "a list", str: "a text"}


def check_environment(content: Mapping[str, Any], place: str) -> None:
    """Raise if a value is of another type than Hotlap writes, in this environment or an earlier one."""
    _check_one(content, place)
    for facts in content.get("earlier") or []:
        if not isinstance(facts, dict):
            raise damaged(place, "objects in `earlier`", repr(facts)[:40], CheckpointError)
        _check_one(facts, place)


def _check_one(facts: Mapping[str, Any], place: str) -> None:
    values = [(name, facts.get(name), kind) for name, kind in TYPES.items()]
    if isinstance(data := facts.get("data"), dict):
        values += [(f"data.{name}", data.get(name), str) for name in DATA_TEXTS]
    if isinstance(routing := facts.get("routing"), list):
        values += [(f"routing.{i}", row, dict) for i, row in enumerate(routing)]
    for name, value, kind in values:
        if value is not None and not isinstance(value, kind):
            raise damaged(place, f"{JSON_KINDS[kind]} as `{name}`", repr(value)[:40], CheckpointError)


def recorded_directory(data: Mapping[str, Any]) -> Path | None:
    """The directory of the run's data, from `data` in its environment; None if it is not recorded."""
    directory = data.get("directory")
    return Path(os.path.expanduser(directory)) if directory else None
