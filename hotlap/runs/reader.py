"""Reads run directories into plain dataclasses: the configuration, the curves, the samples, the summary.

Only the files that the trainer writes are read, never a checkpoint. A run that is still going has no summary
and may end in half a line, which is left out and noted; any other line that cannot be read is an error that
names file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hotlap.config import Config
from hotlap.errors import HotlapError, ReportError
from hotlap.settings import from_json

Floats = npt.NDArray[np.float64]

TRAIN_FIELDS = (
    "step",
    "loss",
    "lr",
    "momentum",
    "window",
    "tokens",
    "train_s",
    "tokens_per_s",
    "memory_mib",
)
VALIDATION_FIELDS = ("step", "val_loss", "val_bpb", "tokens", "train_s")
# A number that a run may not have (bits per byte without a manifest) is null in the file and nan here.
MAY_BE_NULL = {"val_bpb", "momentum", "window", "tokens_per_s", "memory_mib"}
MAY_DIVERGE = {"loss", "val_loss"}  # null where they were not finite, but never left out
FINAL_STATUSES = {"finished", "target", "diverged"}


@dataclass(frozen=True)
class Sample:
    step: int
    text: str


@dataclass(frozen=True)
class Run:
    directory: Path
    config: Config
    train: Mapping[str, Floats]  # one array a field of TRAIN_FIELDS, by step
    validation: Mapping[str, Floats]  # one array a field of VALIDATION_FIELDS, by step
    samples: tuple[Sample, ...]
    resumed_at: tuple[int, ...]  # steps after which a checkpoint was gone on from
    environment: Mapping[str, Any]
    summary: Mapping[str, Any] | None  # None: the run is still going, or was killed
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """Of each process that has trained this run, in their order."""
        return [*self.environment.get("earlier", []), self.environment]

    @property
    def started(self) -> str:
        """When its first process did; nothing where that has not been recorded."""
        return str(self.environments[0].get("started", ""))

    @property
    def status(self) -> str:
        """As the summary says, but a run that skipped steps without a finite loss may also end diverged."""
        if self.summary is None:
            return "running"
        status = str(self.summary["status"])
        ends_finite = bool(np.isfinite(self.validation["val_loss"][-1:]).all())
        return "diverged" if status == "finished" and not ends_finite else status

    @property
    def is_final(self) -> bool:
        """Whether the last validation is the run's result, not just where it stands or was stopped."""
        return self.status in FINAL_STATUSES

    def last(self, field: str) -> float:
        """The last finite value of a validation field; nan where there is none."""
        finite = self.validation[field][np.isfinite(self.validation[field])]
        return float(finite[-1]) if finite.size else float("nan")

    @property
    def train_s(self) -> float:
        """Training seconds so far."""
        times = np.concatenate([self.train["train_s"], self.validation["train_s"]])
        return float(times.max()) if times.size else 0.0

    @property
    def tokens(self) -> float:
        seen = np.concatenate([self.train["tokens"], self.validation["tokens"]])
        return float(seen.max()) if seen.size else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Over the whole run; nan before the first update."""
        return self.tokens / self.train_s if self.train_s > 0 else float("nan")


def find_runs(paths: Sequence[Path]) -> list[list[Path]]:
    """For each path the run directories meant: itself, or those one or two levels below it."""
    found = []
    for path in paths:
        if (path / "config.json").is_file():
            found.append([path])
            continue
        configs = [*path.glob("*/config.json"), *path.glob("*/*/config.json")]
        if not configs:
            raise ReportError(
                expected="a run directory, or a directory of them",
                found=f"{path} without config.json" if path.is_dir() else f"no directory {path}",
                do="give one that `hotlap train` has written",
            )
        found.append([config.parent for config in configs])
    return found


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in or below each path, each once: in the order given, and below one path as they started."""
    loaded: dict[Path, Run] = {}
    for directories in find_runs(paths):
        runs = [load_run(directory) for directory in directories]
        for run in sorted(runs, key=lambda run: (run.started, run.name)):
            loaded.setdefault(run.directory.resolve(), run)
    return list(loaded.values())


def load_run(directory: Path) -> Run:
    config_file = directory / "config.json"
    try:
        config = from_json(Config, _read_object(config_file))
    except ReportError:
        raise
    except HotlapError as mistake:
        raise ReportError(
            expected=f"{mistake.expected} in {config_file}", found=mistake.found, do=mistake.do
        ) from None
    lines, notes = _read_metrics(directory / "metrics.jsonl")
    of_kind: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for place, line in lines:
        of_kind.setdefault(line["kind"], []).append((place, line))
    optional = {
        name: _read_object(directory / name)
        for name in ("environment.json", "summary.json")
        if (directory / name).is_file()
    }
    summary = optional.get("summary.json")
    if summary is not None and "status" not in summary:
        raise _damaged(str(directory / "summary.json"), "`status`", "none")
    return Run(
        directory=directory,
        config=config,
        train=_columns(of_kind.get("train", []), TRAIN_FIELDS),
        validation=_columns(of_kind.get("validation", []), VALIDATION_FIELDS),
        samples=tuple(
            Sample(int(_number(place, line, "step")), str(line.get("text", "")))
            for place, line in of_kind.get("sample", [])
        ),
        resumed_at=tuple(int(_number(place, line, "step")) for place, line in of_kind.get("resume", [])),
        environment=optional.get("environment.json", {}),
        summary=summary,
        notes=tuple(notes),
    )


def _damaged(place: str, expected: str, found: str) -> ReportError:
    return ReportError(
        expected=f"{expected} at {place}", found=found, do="restore the file or leave this run out"
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _damaged(str(path), "UTF-8 text", f"another byte at offset {error.start}") from None
    except OSError as error:
        raise ReportError(
            expected=f"a readable {path}", found=str(error.strerror), do="check the run directory"
        ) from None


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise _damaged(f"{path}:{error.lineno}", "JSON", error.msg) from None
    if not isinstance(value, dict):
        raise _damaged(str(path), "a JSON object", type(value).__name__)
    return value


def _read_metrics(path: Path) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """(place, object) of every whole line, and notes. A run that has not begun has no file yet.

    A line without its newline is not whole, even if it reads well: a run that is resumed drops it too.
    """
    if not path.is_file():
        return [], []
    # Bytes first: a line cut in the middle of a character must count as cut, not as damaged text.
    *whole, rest = path.read_bytes().split(b"\n")
    notes = [f"{path.name}: line {len(whole) + 1}, the last, is incomplete and left out"] if rest else []
    return list(_parsed(path, whole)), notes


def _parsed(path: Path, lines: list[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, raw in enumerate(lines, 1):
        place = f"{path}:{number}"
        try:
            value = json.loads(raw)
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "bytes that are not UTF-8"
            raise _damaged(place, "a JSON object", reason) from None
        if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
            raise _damaged(place, "an object with `kind`", raw[:40].decode(errors="replace"))
        yield place, value


def _columns(lines: list[tuple[str, dict[str, Any]]], fields: tuple[str, ...]) -> dict[str, Floats]:
    return {
        field: np.array([_number(place, line, field) for place, line in lines], dtype=np.float64)
        for field in fields
    }


def _number(place: str, line: dict[str, Any], field: str) -> float:
    value = line.get(field)
    if value is None and (field in MAY_BE_NULL or (field in MAY_DIVERGE and field in line)):
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _damaged(place, f"a number as `{field}`", json.dumps(value))
    return float(value)
