"""Runs of a baseline that were trained before: found among the races and gates beside this one, and copied.

A run is taken only if it would be the same run again: its settings and seed, the data, the code and the
machine. What the data, code and machine of this gate are is what its own first run has recorded.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hotlap.config import Config
from hotlap.errors import HotlapError, RaceError
from hotlap.files import atomic_directory, writing
from hotlap.runs.directory import LOCK_NAME
from hotlap.runs.reader import RunFiles

# What of an environment has to agree. Names that are not recorded count as None on both sides.
MACHINE = (
    *("hotlap", "python", "torch", "system", "device", "device_name", "cores", "memory_gib"),
    *("world_size", "threads", "variables"),
)
CODE = ("package", "kernels", "torch")
NOT_COPIED = ("checkpoints", LOCK_NAME)
COPIED_FROM = "copied-from.txt"


def identity(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The data, code and machine of a run."""
    code = environment.get("code")
    data = environment.get("data") or {}
    return {
        "machine": {name: environment.get(name) for name in MACHINE},
        "code": {part: code.get(part) for part in CODE}
        if isinstance(code, dict)
        else environment.get("git_commit"),
        "data": [data.get(split) for split in ("fingerprint", "val_fingerprint")],
    }


def find_run(config: Config, name: str, beside: Path, wanted: Mapping[str, Any]) -> RunFiles | None:
    """A finished run of this configuration, in a directory like `beside`, whose `identity` is as wanted.

    `name`: its directory's. A damaged run is no such run.
    """
    for config_path in sorted(beside.parent.glob(f"*/{name}/config.json")):
        run = RunFiles(config_path.parent)
        if run.path.parent == beside:
            continue
        try:
            is_same = (
                run.read_status().is_final
                and run.read_config() == config
                and not run.changed_since_the_end()
                and identity(run.read_environment()) == wanted
            )
        except HotlapError:
            continue
        if is_same:
            return run
    return None


def copy_run(run: RunFiles, path: Path) -> None:
    """Copy a run without its checkpoints; whole or not at all."""
    with writing(path, RaceError), atomic_directory(path) as work:
        for source in run.path.iterdir():
            if source.name in NOT_COPIED or not source.is_file():
                continue
            shutil.copyfile(source, work / source.name)
        origin = source_of(run.path) or run.path.parent.name
        (work / COPIED_FROM).write_text(f"{origin}\n")


def source_of(run: Path) -> str | None:
    """The name of the race or gate that trained a copied run; None if it was trained here."""
    path = run / COPIED_FROM
    return path.read_text().strip() if path.exists() else None


def sources_of(runs: Iterable[Path]) -> dict[str, int]:
    """{race or gate: number of runs that were copied from it}."""
    found: dict[str, int] = {}
    for run in runs:
        if (source := source_of(run)) is not None:
            found[source] = found.get(source, 0) + 1
    return found
