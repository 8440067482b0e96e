"""A race while it is on, for `hotlap watch`: its runs, also those that train on other machines."""

from __future__ import annotations

from pathlib import Path

from hotlap.errors import ReportError
from hotlap.race.directory import RaceDirectory
from hotlap.race.engine import LIVE_NAME
from hotlap.report.analysis import RunsByLabel
from hotlap.report.live import Query, Watched
from hotlap.report.machines import machine_of
from hotlap.runs.reader import Run, RunFiles, load_run


class WatchedRace(Watched):
    def __init__(self, path: Path) -> None:
        self._directory = RaceDirectory(path)
        self._plan = self._directory.read_plan()
        self._starts = [start for round_ in self._plan.rounds() for start in round_]
        self.title = path.resolve().name

    def directories(self) -> list[Path]:
        names = [start.name for start in self._starts]
        roots = (self._directory.path, self._directory.path / LIVE_NAME)
        return [root / name for root in roots for name in names]

    def read(self, query: Query) -> tuple[RunsByLabel, list[str]]:  # noqa: ARG002
        runs: dict[str, list[Run]] = {entry.label: [] for entry in self._plan.entries}
        for start in self._starts:
            here = RunFiles(self._directory.run(start).path)
            far = RunFiles(self._directory.path / LIVE_NAME / start.name)
            # A run that goes on elsewhere may have left a directory here, which is older.
            for files in (far, here):
                if files.config_path.is_file():
                    runs[start.entry.label].append(load_run(files.path))
                    break
        begun = [run for group in runs.values() for run in group]
        if not begun:
            raise ReportError(
                expected=f"a race with a run that has begun in {self._directory.path}",
                found="none",
                do="wait for the first, and load the page again",
            )
        done = sum(run.is_final for run in begun)
        notes = [f"{done} of {len(self._starts)} runs have ended"]
        notes += [f"training: {_progress(run)}" for run in begun if run.status == "running"]
        return {label: group for label, group in runs.items() if group}, notes


def _progress(run: Run) -> str:
    step = int(run.train["step"][-1]) if run.train["step"].size else 0
    return f"{run.name} on {machine_of(run)}, step {step:,} of {run.config.schedule.steps:,}"
