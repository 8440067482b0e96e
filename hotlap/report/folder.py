"""A folder of runs for `hotlap watch`: all of them in a list, and those that the reader has ticked as curves.

The page asks with `run=NAME` for each ticked run, NAME being its path below the folder. Names are looked up
in the list, so nothing outside of the folder is ever read. Until the reader has ticked anything, the runs
that are training are drawn, or else the newest. Files are read again only when they have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hotlap.errors import HotlapError
from hotlap.report.analysis import BPB, LOSS, RunsByLabel, label_runs
from hotlap.report.curves import MOST_STYLES
from hotlap.report.lead import parameters_of
from hotlap.report.live import Query, Watched, stamp_of
from hotlap.report.markup import Cell, number, sortable_table, swatch
from hotlap.runs.reader import Run, RunStatus, find_runs, load_run


@dataclass(frozen=True)
class Listed:
    """A run of the folder, or what is wrong with its files."""

    name: str
    run: Run | None
    mistake: str = ""


class WatchedFolder(Watched):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.title = folder.resolve().name
        self._read: dict[Path, tuple[str, Listed]] = {}  # by directory, with the stamp of its files
        self._lock = threading.Lock()  # each request has a thread

    def directories(self) -> list[Path]:
        (found,) = find_runs([self.folder])
        return found

    def read(self, query: Query) -> tuple[RunsByLabel, list[str]]:
        listed = self.listed()
        chosen = [one for one in chosen_of(listed, query) if one.run]
        notes = [f"{one.name}: {one.mistake}" for one in listed if one.mistake]
        if len(chosen) > MOST_STYLES:
            notes.append(f"{MOST_STYLES} of {len(chosen)} ticked runs are drawn: there are no more colors")
        runs = {one.name: one.run for one in chosen[:MOST_STYLES] if one.run}
        if is_by_recipe(query):
            return label_runs(list(runs.values())), notes
        return {name: [run] for name, run in runs.items()}, notes

    def picker(self, query: Query) -> str:
        listed = self.listed()
        runs_by_label, _ = self.read(query)
        color_of = {run.directory: i for i, runs in enumerate(runs_by_label.values()) for run in runs}
        ticked = {one.name for one in chosen_of(listed, query)}
        headers = ["run", "recipe", "size", "status", "step", "bits/byte", "loss", "training s", "parameters"]
        headers.append("started")
        rows = [_row(one, one.name in ticked, color_of) for one in listed]
        return sortable_table(f"Runs in {self.title}, newest first", headers, rows)

    def listed(self) -> list[Listed]:
        """Newest first; those that cannot be read at the end."""
        directories = self.directories()
        with self._lock:
            self._read = {path: self._listed(path) for path in directories}
            found = [one for _, one in self._read.values()]
        return sorted(found, key=lambda one: (one.run.started if one.run else "", one.name), reverse=True)

    def _listed(self, path: Path) -> tuple[str, Listed]:
        stamp = stamp_of(path)
        if path in self._read and self._read[path][0] == stamp:
            return self._read[path]
        name = path.relative_to(self.folder).as_posix()
        try:
            return stamp, Listed(name, load_run(path))
        except HotlapError as mistake:
            return stamp, Listed(name, None, str(mistake))


def chosen_of(listed: Sequence[Listed], query: Query) -> list[Listed]:
    """The ticked runs, in the order of the list; before any tick those that train, or the newest."""
    if "run" in query:
        return [one for one in listed if one.name in query["run"]]
    readable = [one for one in listed if one.run]
    training = [one for one in readable if one.run and one.run.status is RunStatus.RUNNING]
    return training[:MOST_STYLES] or readable[:1]


def is_by_recipe(query: Query) -> bool:
    return query.get("by") == ["recipe"]


def _row(one: Listed, is_ticked: bool, color_of: Mapping[Path, int]) -> list[Cell]:
    run = one.run
    mark = swatch(color_of[run.directory]) if run and run.directory in color_of else ""
    box = (
        f'<label><input type="checkbox" data-run="{escape(one.name)}"{" checked" if is_ticked else ""}'
        f"{'' if run else ' disabled'}> {mark}{escape(one.name)}</label>"
    )
    if run is None:
        return [(box, one.name), *[("–", None)] * 2, ("cannot be read", "~"), *[("–", None)] * 6]
    done = float(run.train["step"][-1]) if run.train["step"].size else 0.0
    bpb, loss, parameters = run.last("val_bpb"), run.last("val_loss"), float(parameters_of(run) or "nan")
    started = run.started.replace("T", " ")[:16]
    return [
        (box, one.name),
        (escape(str(run.config.recipe)), str(run.config.recipe)),
        (escape(str(run.config.size)), str(run.config.size)),
        (escape(run.status), run.status),
        (f"{done:,.0f} of {run.config.schedule.steps:,}", done),
        (number(bpb, BPB.decimals), bpb),
        (number(loss, LOSS.decimals), loss),
        (number(run.train_s, 1), run.train_s),
        (number(parameters, 0), parameters),
        (escape(started) or "–", started or None),
    ]
