"""Trackers that follow a run beside `metrics.jsonl`: TensorBoard, W&B and trackio, each in its own extra.

`metrics.jsonl` is what a tracker is held to. A run that is resumed goes on in the same run of the tracker,
which first gets the lines that it lacks and is not given again what it has, so that it ends with each step
once. A tracker that fails is left out from then on; training goes on.
"""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from hotlap.errors import CheckpointError, ConfigError
from hotlap.extras import installer
from hotlap.json_files import read_object, write_json
from hotlap.runs.wandb_files import logged_values

PROJECT = "hotlap"
NAMES_FILE = "trackers.json"  # what the run is called in each tracker that cannot tell by itself
FOLLOWED = ("train", "validation")  # kinds of lines

Line = dict[str, Any]  # of metrics.jsonl
Recorded = set[tuple[str, int]]  # kind and step


class Tracker(Protocol):
    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `RUN/tensorboard`. A process of the run writes a new one, which replaces the others."""

    def __init__(self, run: Path, config: dict[str, Any], earlier: Sequence[Line]) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        # Events are on disk only after a while, so which of them a killed process has left is unknown. With
        # `purge_step` 0 TensorBoard forgets all of them, and all lines are written again.
        folder = run / "tensorboard"
        self._writer = writer(str(folder), purge_step=0 if folder.exists() else None)
        self._writer.add_text("settings", f"```\n{json.dumps(config, indent=1)}\n```")
        trained_s = max((line["train_s"] for line in earlier), default=0.0)
        for line in earlier:
            self._write(line, time.time() - (trained_s - line["train_s"]))

    def write(self, line: Line) -> None:
        self._write(line, None)

    def _write(self, line: Line, at: float | None) -> None:
        """`at`: seconds since 1970, as if the run had never stopped; None: now."""
        for name, value in values(line).items():
            self._writer.add_scalar(name, value, line["step"], walltime=at)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """A run of Weights & Biases, online or offline as it is configured there (`WANDB_MODE`)."""

    def __init__(self, run: Path, config: dict[str, Any], earlier: Sequence[Line]) -> None:
        wandb = _require("wandb")
        known = read_names(run).get("wandb")
        online = wandb.setup().settings.mode in ("online", "shared")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            dir=str(run),
            config=config,
            id=known,
            resume="allow" if online and known else None,
        )
        write_name(run, "wandb", self._run.id)
        recorded = logged_values(run / "wandb", known) if known and not online else set()
        # Online it knows its next step, and refuses earlier ones.
        self._first_step = self._run.step if online else 0
        self._recorded = recorded
        for line in earlier:
            self.write(line)

    def write(self, line: Line) -> None:
        if line["step"] >= self._first_step and (line["kind"], line["step"]) not in self._recorded:
            self._run.log(values(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


class Trackio:
    """A run in trackio's database, which needs no account (`trackio show --project hotlap`)."""

    def __init__(self, run: Path, config: dict[str, Any], earlier: Sequence[Line]) -> None:
        trackio = _require("trackio")
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        known = read_names(run).get("trackio")
        # It goes on with the newest run of a name, so that the name has to be of this run alone.
        name = known or new_name(run.name, storage.get_runs(project))
        self._run = trackio.init(
            project=project, name=name, config=config, resume="allow" if known else "never", embed=False
        )
        write_name(run, "trackio", name)
        self._name, self._project, self._storage, self._finish = name, project, storage, trackio.finish
        self._recorded = self._read_back() if known else set()
        for line in earlier:
            self.write(line)

    def _read_back(self) -> Recorded:
        logs = self._storage.get_logs(self._project, self._name)
        return {(key.partition("/")[0], int(log["step"])) for log in logs for key in log if "/" in key}

    def write(self, line: Line) -> None:
        if (line["kind"], line["step"]) not in self._recorded:
            self._run.log(values(line), step=line["step"])
            self._recorded.add((line["kind"], line["step"]))

    def close(self) -> None:
        self._finish()
        # It raises nothing where it cannot write.
        if missing := len(self._recorded - self._read_back()):
            raise OSError(f"{missing} of {len(self._recorded)} lines are not in its database")


TRACKERS: dict[str, Callable[[Path, dict[str, Any], Sequence[Line]], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
}


class Trackers:
    """All trackers of a run. What fails is told in a line per tracker, which is then left out."""

    def __init__(self) -> None:
        self._open: dict[str, Tracker] = {}

    def open(self, name: str, run: Path, config: dict[str, Any], lines: Sequence[Line]) -> list[str]:
        """`lines`: all of `metrics.jsonl` so far."""
        earlier = [line for line in lines if line["kind"] in FOLLOWED]
        try:
            self._open[name] = TRACKERS[name](run, config, earlier)
        except Exception as problem:
            return [complaint(name, problem)]
        return []

    def write(self, line: Line) -> list[str]:
        return self._with_each(lambda tracker: tracker.write(line))

    def close(self) -> list[str]:
        return self._with_each(lambda tracker: tracker.close())

    def _with_each(self, action: Callable[[Tracker], None]) -> list[str]:
        complaints = []
        for name, tracker in list(self._open.items()):
            try:
                action(tracker)
            except Exception as problem:
                del self._open[name]
                complaints.append(complaint(name, problem))
        return complaints


def complaint(name: str, problem: Exception) -> str:
    said = " ".join(str(problem).split()) or type(problem).__name__
    return f"the tracker {name} failed and is left out, training goes on: {said}"


def check_trackers(names: Sequence[str]) -> None:
    """Refuse unknown names and packages that are not installed."""
    check_names(names)
    for name in names:
        _require(name)


def check_names(names: Sequence[str]) -> None:
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(expected=f"--log {', '.join(TRACKERS)}", found=name, do="choose one of those")


def values(line: Line) -> dict[str, float]:
    """The numbers of a line, named as all trackers name them: `train/loss`."""
    return {
        f"{line['kind']}/{name}": value
        for name, value in line.items()
        if isinstance(value, (int, float)) and name != "step"
    }


def read_names(run: Path) -> dict[str, str]:
    path = run / NAMES_FILE
    content = read_object(path, CheckpointError) if path.exists() else {}
    return {name: value for name, value in content.items() if isinstance(value, str)}


def write_name(run: Path, tracker: str, name: str) -> None:
    write_json(run / NAMES_FILE, {**read_names(run), tracker: name}, CheckpointError)


def new_name(wanted: str, taken: Sequence[str]) -> str:
    number, name = 1, wanted
    while name in taken:
        number += 1
        name = f"{wanted}-{number}"
    return name


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            expected=f"the package {package} for --log {package}",
            found="it is not installed",
            do=f"{installer()} {package}",
        ) from None
