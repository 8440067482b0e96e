"""A race on disk: `race.json` (the plan), one directory per run, `logs/`, `results.json` and the report.

One process at a time races in it, under a lock. A run that outlives its race, because the race was killed,
keeps the lock until it ends: the next race waits for it instead of training at the same time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any

from hotlap.code_identity import PACKAGE, code_identity
from hotlap.errors import RaceError
from hotlap.files import lock, make_directory, writing
from hotlap.json_files import read_sealed, write_sealed
from hotlap.progress import Say
from hotlap.race.idea_copies import keep_ideas
from hotlap.race.plan import Plan, Start, from_json, to_json
from hotlap.runs.directory import LOCK_NAME, RunDirectory
from hotlap.runs.reader import IDEAS_DIRECTORY
from hotlap.settings import diff, shown
from hotlap.versions import worktree_of

PLAN_NAME = "race.json"


class RaceDirectory:
    """`runs/<race>/`, with the directories of its runs right below it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_path = path / PLAN_NAME
        self.results_path = path / "results.json"
        self.report_path = path / "report.html"
        self.ideas = path / IDEAS_DIRECTORY  # copies of the idea files

    def run(self, start: Start) -> RunDirectory:
        return RunDirectory(self.path / start.name)

    def log(self, start: Start) -> Path:
        """The output of the run's process. Not in the run's directory, which that process makes itself."""
        return self.path / "logs" / f"{start.name}.txt"

    def is_over(self, start: Start) -> bool:
        return self.run(start).read_status().is_final

    def read_plan(self) -> Plan:
        if not self.plan_path.exists():
            raise RaceError(
                expected=f"a race at {self.path}",
                found=f"no {PLAN_NAME} in it" if self.path.is_dir() else "no such directory",
                do="give the directory of a race",
            )
        return from_json(read_sealed(self.plan_path, RaceError), str(self.plan_path))

    def check(self, plan: Plan) -> None:
        """Refuse any other plan than the one in this directory, except for a higher number of seeds."""
        if self._is_new():
            return
        if not self.plan_path.exists():
            raise RaceError(
                expected=f"a new name, or a race at {self.path}",
                found=f"a directory without {PLAN_NAME}",
                do="choose another --name",
            )
        earlier = self.read_plan()
        self._check_ideas(earlier, plan)
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
        self.check_code(plan)

    def _check_ideas(self, earlier: Plan, plan: Plan) -> None:
        """Refuse by name an idea file that has changed since the race began."""
        for old, new in zip(earlier.entries, plan.entries, strict=False):
            if old.label == new.label and old.ideas != new.ideas:
                raise RaceError(
                    expected=f"{new.spec or new.label} as it was when the race began, {', '.join(old.ideas)}",
                    found=f"a changed file, {', '.join(new.ideas)}",
                    do=f"race under another --name, or go on with `hotlap race --resume {self.path}`,"
                    " which uses the race's copy",
                )

    def _is_new(self) -> bool:
        if self.path.is_dir():
            return {path.name for path in self.path.iterdir()} <= {LOCK_NAME}
        return not self.path.exists()

    def write_plan(self, plan: Plan) -> None:
        with writing(self.plan_path, RaceError):
            make_directory(self.path / "logs")
        write_sealed(self.plan_path, to_json(plan), RaceError)
        keep_ideas(plan, self.ideas)

    def _check_runs(self, plan: Plan) -> None:
        """Refuse if a recipe has changed since the race began: runs of both versions must not be mixed."""
        for start in (start for round_ in plan.rounds() for start in round_):
            run = self.run(start)
            if start.entry.commit:
                continue  # another version may have other settings
            changes = diff(plan.config(start), run.read_config()) if run.config_path.exists() else []
            if changes:
                listed = ", ".join(f"{c.name} {shown(c.after)}, now {shown(c.before)}" for c in changes)
                raise RaceError(
                    expected=f"{run.path} with the settings that its recipe has now",
                    found=listed,
                    do="race under another --name",
                )

    def check_code(self, plan: Plan) -> None:
        """Refuse to add runs to those of other code: nothing would tell them apart in the statistics."""
        starts = [start for round_ in plan.rounds() for start in round_]
        if all(self.is_over(start) for start in starts):
            return
        code_of_entry: dict[str, str] = {}
        for start in starts:
            run, commit = self.run(start), start.entry.commit
            if not run.environment_path.exists():
                continue
            if start.entry.label not in code_of_entry:
                package = worktree_of(commit) / PACKAGE.name if commit else PACKAGE
                code_of_entry[start.entry.label] = code_identity(start.entry.ideas, package)["fingerprint"]
            now = code_of_entry[start.entry.label]
            before = (run.read_environment().get("code") or {}).get("fingerprint", now)
            if before != now:
                raise RaceError(
                    expected=f"the code that trained {run.path}, {before}, for the rest of the race",
                    found=f"code {now}: the package, its kernels or torch have changed",
                    do="race under another --name, or go back to that code",
                )

    @contextmanager
    def lock(self, say: Say) -> Iterator[FileIO]:
        """Keep other races out. The processes of runs inherit the file, and with it the lock."""

        def refuse_or_wait(owner: str) -> None:
            import psutil

            if owner.isdecimal() and psutil.pid_exists(int(owner)):
                raise RaceError(
                    expected=f"no other race in {self.path}",
                    found=f"process {owner}",
                    do="wait for it or stop it",
                )
            say(f"race: waiting for the run that a killed race left behind in {self.path}")

        path = self.path / LOCK_NAME
        with writing(path, RaceError):
            make_directory(self.path)
            file = lock(path, refuse_or_wait)
        with file:
            yield file


def _flat(data: Any, prefix: str = "") -> dict[str, str]:
    """{dotted path: JSON text} of every value that is no list or object."""
    if isinstance(data, (dict, list, tuple)):
        pairs = data.items() if isinstance(data, dict) else enumerate(data)
        leaves: dict[str, str] = {}
        for key, value in pairs:
            leaves |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
        return leaves
    return {prefix: json.dumps(data)}
