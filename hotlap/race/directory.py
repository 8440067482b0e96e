"""A race on the disk: `race.json` (the plan), a directory a run, `logs/`, `results.json` and the report.

One process at a time races in it. A run that a killed race left behind keeps the lock until it ends, and the
next race waits for it instead of training beside it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from hotlap.errors import RaceError
from hotlap.progress import Say
from hotlap.race.plan import Plan, Start, from_json, to_json
from hotlap.runs.directory import LOCK_NAME, RunDirectory
from hotlap.runs.durable import make_directory, write_whole, writing
from hotlap.settings import diff, shown

PLAN_NAME = "race.json"
OVER = ("finished", "target", "diverged")  # how a run ends that is not repeated
SECONDS_BETWEEN_LOOKS = 0.2


class RaceDirectory:
    """`runs/<race>/`; runs lie right below it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_path = path / PLAN_NAME
        self.results_path = path / "results.json"
        self.report_path = path / "report.html"

    def run(self, start: Start) -> RunDirectory:
        return RunDirectory(self.path / start.name)

    def log(self, start: Start) -> Path:
        """What the run's process printed. Not in the run's directory, which that process makes itself."""
        return self.path / "logs" / f"{start.name}.txt"

    def is_over(self, start: Start) -> bool:
        summary = self.run(start).read_summary()
        return summary is not None and summary.get("status") in OVER

    def read_plan(self) -> Plan:
        try:
            data = json.loads(self.plan_path.read_bytes())
        except FileNotFoundError:
            raise RaceError(
                expected=f"a race at {self.path}",
                found=f"no {PLAN_NAME} in it" if self.path.is_dir() else "no such directory",
                do="give the directory of a race",
            ) from None
        except ValueError as error:
            raise RaceError(
                expected=f"JSON in {self.plan_path}", found=str(error), do="restore the file"
            ) from error
        return from_json(data, str(self.plan_path))

    def check(self, plan: Plan) -> None:
        """Refuse another plan than the one here, field by field. Only the number of seeds may grow."""
        if self._is_new():
            return
        if not self.plan_path.exists():
            raise RaceError(
                expected=f"a new name, or a race at {self.path}",
                found=f"a directory without {PLAN_NAME}",
                do="choose another --name",
            )
        earlier = self.read_plan()
        before, after = _flat(to_json(earlier)), _flat(to_json(plan))
        changed = [
            f"{name} {before.get(name, 'absent')} → {after.get(name, 'absent')}"
            for name in sorted({*before, *after})
            if before.get(name) != after.get(name) and not (name == "seeds" and plan.seeds > earlier.seeds)
        ]
        if changed:
            raise RaceError(
                expected=f"the plan of {self.plan_path}",
                found=f"changed {'; '.join(changed)}",
                do="choose another --name, or go on with `hotlap race --resume`",
            )
        self._check_runs(plan)

    def _is_new(self) -> bool:
        if self.path.is_dir():
            return {path.name for path in self.path.iterdir()} <= {LOCK_NAME}
        return not self.path.exists()

    def write_plan(self, plan: Plan) -> None:
        with writing(self.plan_path):
            make_directory(self.path / "logs")
        write_whole(self.plan_path, (json.dumps(to_json(plan), indent=1) + "\n").encode())

    def _check_runs(self, plan: Plan) -> None:
        """A recipe may have changed since the race began: its runs must not be mixed."""
        for start in (start for round_ in plan.rounds() for start in round_):
            run = self.run(start)
            changes = diff(plan.config(start), run.read_config()) if run.config_path.exists() else []
            if changes:
                listed = ", ".join(f"{c.name} {shown(c.after)}, now {shown(c.before)}" for c in changes)
                raise RaceError(
                    expected=f"{run.path} with the settings that its recipe has now",
                    found=listed,
                    do="race under another --name",
                )

    @contextmanager
    def lock(self, say: Say) -> Iterator[FileIO]:
        """Keep other races out. Processes of runs inherit the handle, and with it the lock."""
        with writing(self.path / LOCK_NAME):
            make_directory(self.path)
            handle = (self.path / LOCK_NAME).open("a+b", buffering=0)
        with handle:
            self._wait_for_lock(handle, say)
            handle.truncate(0)
            handle.write(f"{os.getpid()}\n".encode())
            yield handle

    def _wait_for_lock(self, handle: FileIO, say: Say) -> None:
        import fcntl  # not on Windows, where results can still be read

        import psutil

        has_said = False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().decode(errors="replace").strip()
            if owner.isdecimal() and psutil.pid_exists(int(owner)):
                raise RaceError(
                    expected=f"no other race in {self.path}",
                    found=f"process {owner}",
                    do="wait for it or stop it",
                )
            if not has_said:
                say(f"race: waiting for the run that a killed race left behind in {self.path}")
                has_said = True
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _flat(data: Any, prefix: str = "") -> dict[str, str]:
    """{dotted path: JSON text} of every leaf."""
    if isinstance(data, (dict, list, tuple)):
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        leaves: dict[str, str] = {}
        for key, value in pairs:
            leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
        return leaves
    return {prefix: json.dumps(data)}
