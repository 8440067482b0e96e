"""The one reader of run directories: `config.json`, `environment.json`, `metrics.jsonl`, `summary.json`.

`RunFiles` reads one file at a time; `load_run` reads all of them into arrays, for reports. Checkpoints are
not read here, and torch is not needed. A process that was killed leaves at most an incomplete last line in
`metrics.jsonl`, which is skipped and noted; any other damage is an error that names the file and the line.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hotlap.config import Config
from hotlap.errors import CheckpointError, HotlapError, ReportError
from hotlap.files import file_sha256, reading
from hotlap.json_files import damaged, parse_object, read_object, read_sealed
from hotlap.runs.recorded import check_environment
from hotlap.settings import from_json

Floats = npt.NDArray[np.float64]

CONFIG_NAME = "config.json"
IDEAS_DIRECTORY = "ideas"  # also of an exported model and of a race
SEALED_FIELD = "sha256"  # in summary.json: {file name: checksum} of what is final when the run ends
COMMON_FIELDS = ("step", "tokens", "train_s")
RATE_FIELDS = ("tokens_per_s", "memory_mib", "grad_norm")
TRAIN_FIELDS = ("loss", "lr", "momentum", "window", *RATE_FIELDS, *COMMON_FIELDS)
VALIDATION_FIELDS = ("val_loss", "val_bpb", "comparable_loss", *COMMON_FIELDS)
# Fields that a run may not have (bits per byte without a manifest): null or absent in the file, NaN here.
OPTIONAL_FIELDS = {"val_bpb", "comparable_loss", "momentum", "window", *RATE_FIELDS}
MAY_DIVERGE = {"loss", "val_loss"}  # null if not finite, but never absent


class RunStatus(StrEnum):
    """Whether a run has ended, and how."""

    RUNNING = "running"  # or killed: it has no summary
    INTERRUPTED = "interrupted"  # stopped by the user; it can be resumed
    FINISHED = "finished"  # all steps done
    TARGET = "target"  # stopped at its target loss
    PATIENCE = "patience"  # stopped because validation no longer improved
    DIVERGED = "diverged"  # its loss is no longer finite

    @property
    def is_final(self) -> bool:
        """Whether the last validation is the run's result, rather than where it stands now."""
        return self in (RunStatus.FINISHED, RunStatus.TARGET, RunStatus.PATIENCE, RunStatus.DIVERGED)


class Metrics(NamedTuple):
    lines: list[dict[str, Any]]  # line n of the file is lines[n - 1]; all have `kind` and `step`
    half_line: bool  # whether an incomplete last line was skipped


class RunFiles:
    """The paths of a run's files, and what they contain."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_path = path / CONFIG_NAME
        self.environment_path = path / "environment.json"
        self.metrics_path = path / "metrics.jsonl"
        self.log_path = path / "log.txt"
        self.summary_path = path / "summary.json"
        self.samples_path = path / "samples.txt"
        self.report_path = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.ideas = path / IDEAS_DIRECTORY  # copies of the idea files, NAME@hash.py
        # Final when the run ends; the summary has their checksums.
        self.sealed_paths = (self.config_path, self.environment_path, self.metrics_path, self.samples_path)

    def read_config(self) -> Config:
        content = read_object(self.config_path, CheckpointError)
        try:
            return from_json(Config, content)
        except HotlapError as mistake:
            raise CheckpointError(
                expected=f"{mistake.expected} in {self.config_path}", found=mistake.found, do=mistake.do
            ) from None

    def read_environment(self) -> dict[str, Any]:
        """Of the process that trained last; `earlier` has those of the processes before it."""
        content = read_object(self.environment_path, CheckpointError)
        check_environment(content, str(self.environment_path))
        return content

    def read_summary(self) -> dict[str, Any] | None:
        """None if the run is still training or was killed."""
        if not self.summary_path.exists():
            return None
        summary = read_sealed(self.summary_path, CheckpointError)
        if summary.get("status") not in list(RunStatus):
            found = json.dumps(summary.get("status"))
            raise damaged(str(self.summary_path), "a `status`", found, CheckpointError)
        return summary

    def changed_since_the_end(self) -> list[str]:
        """Names of files that differ from when the run ended; none for a run that was never sealed."""
        sha256 = (self.read_summary() or {}).get(SEALED_FIELD)
        if not isinstance(sha256, dict):
            return []
        return [
            path.name
            for path in self.sealed_paths
            if path.name in sha256
            and not (path.exists() and file_sha256(path, CheckpointError) == sha256[path.name])
        ]

    def read_status(self) -> RunStatus:
        return status_of(self.read_summary())

    def read_metrics(self) -> Metrics:
        """Every complete line. A line without its newline is incomplete, even if it is valid JSON."""
        lines, half_line = whole_lines(self.metrics_path)
        return Metrics([self._metrics_line(n, line) for n, line in enumerate(lines, 1)], half_line)

    def _metrics_line(self, number: int, line: bytes) -> dict[str, Any]:
        place = f"{self.metrics_path}:{number}"
        content = parse_object(line, place, CheckpointError)
        if not isinstance(content.get("kind"), str) or type(content.get("step")) is not int:
            found = line[:40].decode(errors="replace").strip()
            raise damaged(place, "an object with `kind` and `step`", found, CheckpointError)
        return content


def status_of(summary: Mapping[str, Any] | None) -> RunStatus:
    if summary is None:
        return RunStatus.RUNNING
    status = RunStatus(summary["status"])
    # A run that skips steps without a finite loss does all its steps, but may still have diverged.
    # A run without validation has no loss to tell by.
    is_finite = summary.get("val_loss", 0.0) is not None or summary.get("val_tokens") == 0
    return RunStatus.DIVERGED if status is RunStatus.FINISHED and not is_finite else status


def whole_lines(path: Path) -> tuple[list[bytes], bool]:
    """The lines of a growing file, each with its newline, and whether an incomplete one follows them."""
    # As bytes: a line that was cut within a character is incomplete, not damaged text.
    if not path.exists():
        return [], False
    with reading(path, CheckpointError):
        *lines, rest = path.read_bytes().split(b"\n")
    return [line + b"\n" for line in lines], bool(rest)


@dataclass(frozen=True)
class Sample:
    step: int
    text: str


@dataclass(frozen=True)
class Run:
    """A run as reports need it."""

    directory: Path
    config: Config
    train: Mapping[str, Floats]  # one array per field of TRAIN_FIELDS, by step
    validation: Mapping[str, Floats]  # one array per field of VALIDATION_FIELDS, by step
    samples: tuple[Sample, ...]
    resumed_at: tuple[int, ...]  # steps of the checkpoints that it was resumed from
    environment: Mapping[str, Any]
    status: RunStatus
    notes: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def environments(self) -> list[Mapping[str, Any]]:
        """Of each process that has trained this run, in order."""
        return [*(self.environment.get("earlier") or []), self.environment]

    @property
    def started(self) -> str:
        """When its first process started; empty if that was not recorded."""
        return str(self.environments[0].get("started", ""))

    @property
    def codes(self) -> tuple[str, ...]:
        """The fingerprints of the code that trained it, in order; empty if that was not recorded."""
        found = [(facts.get("code") or {}).get("fingerprint") for facts in self.environments]
        return tuple(dict.fromkeys(str(code) for code in found if code))

    @property
    def trained_by(self) -> str:
        """The package, kernels and torch that trained it last, without its ideas; empty if not recorded."""
        code = self.environment.get("code") or {}
        return ", ".join(f"{part} {code[part]}" for part in ("package", "kernels", "torch") if part in code)

    @property
    def is_final(self) -> bool:
        return self.status.is_final

    def last(self, field: str) -> float:
        """The last finite value of a validation field, or NaN."""
        finite = self.validation[field][np.isfinite(self.validation[field])]
        return float(finite[-1]) if finite.size else float("nan")

    @property
    def best(self) -> int | None:
        """Which validation has the lowest loss, the first of equals; None before the first finite one.

        Validations are compared by `comparable_loss`, older ones, which have none, by their loss.
        """
        table = self.validation
        losses = np.where(np.isnan(table["comparable_loss"]), table["val_loss"], table["comparable_loss"])
        return int(np.nanargmin(losses)) if np.isfinite(losses).any() else None

    @property
    def train_s(self) -> float:
        """Training seconds so far."""
        return self._largest("train_s")

    @property
    def tokens(self) -> float:
        return self._largest("tokens")

    def _largest(self, field: str) -> float:
        return float(np.concatenate([self.train[field], self.validation[field]]).max(initial=0.0))

    @property
    def tokens_per_s(self) -> float:
        """Over the whole run; NaN before the first step."""
        return self.tokens / self.train_s if self.train_s > 0 else float("nan")


def find_runs(paths: Sequence[Path]) -> list[list[Path]]:
    """For each path its run directories: the path itself, or those one or two levels below it."""
    found = []
    for path in paths:
        if (path / CONFIG_NAME).is_file():
            found.append([path])
            continue
        configs = [
            config
            for pattern in (f"*/{CONFIG_NAME}", f"*/*/{CONFIG_NAME}")
            for config in path.glob(pattern)
            # An export has a configuration too, and an unfinished one is hidden.
            if (config.parent / "environment.json").is_file() and not _is_hidden(config.parent, path)
        ]
        if not configs:
            raise ReportError(
                expected="a run directory, or a directory of them",
                found=f"{path} without {CONFIG_NAME}" if path.is_dir() else f"no directory {path}",
                do="give one that `hotlap train` has written",
            )
        found.append([config.parent for config in configs])
    return found


def _is_hidden(directory: Path, below: Path) -> bool:
    return any(part.startswith(".") for part in directory.relative_to(below).parts)


def load_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in or below each path, each once, in the order of the paths and then of their start."""
    loaded: dict[Path, Run] = {}
    for directories in find_runs(paths):
        runs = [load_run(directory) for directory in directories]
        for run in sorted(runs, key=lambda run: (run.started, run.name)):
            loaded.setdefault(run.directory.resolve(), run)
    return list(loaded.values())


def load_run(directory: Path) -> Run:
    files = RunFiles(directory)
    config = files.read_config()
    lines, half_line = files.read_metrics()
    of_kind: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for number, line in enumerate(lines, 1):
        of_kind.setdefault(line["kind"], []).append((f"{files.metrics_path}:{number}", line))
    notes = [f"{name} was changed after the run ended" for name in files.changed_since_the_end()]
    notes += _disorder(files.metrics_path.name, lines)
    if half_line:
        notes.append(
            f"{files.metrics_path.name}: line {len(lines) + 1}, the last, is incomplete and was skipped"
        )
    notes += [str(line.get("text", "")) for _, line in of_kind.get("warning", [])]
    return Run(
        directory=directory,
        config=config,
        train=_columns(of_kind.get("train", []), TRAIN_FIELDS),
        validation=_columns(of_kind.get("validation", []), VALIDATION_FIELDS),
        samples=tuple(
            Sample(line["step"], str(line.get("text", ""))) for _, line in of_kind.get("sample", [])
        ),
        resumed_at=tuple(line["step"] for _, line in of_kind.get("resume", [])),
        environment=files.read_environment() if files.environment_path.exists() else {},
        status=files.read_status(),
        notes=tuple(notes),
    )


def _disorder(name: str, lines: list[dict[str, Any]]) -> list[str]:
    """A note on the first line of each kind that does not follow the one before: lines were lost or moved."""
    notes = []
    for kind, is_consecutive in (("train", True), ("validation", False)):
        steps = [(number, line["step"]) for number, line in enumerate(lines, 1) if line["kind"] == kind]
        for (_, before), (number, step) in itertools.pairwise(steps):
            if step < before or (is_consecutive and step != before + 1):
                notes.append(
                    f"{name}: line {number}, {kind} step {step}, follows step {before}:"
                    " lines are missing or out of order"
                )
                break
    return notes


def _columns(lines: list[tuple[str, dict[str, Any]]], fields: tuple[str, ...]) -> dict[str, Floats]:
    return {
        field: np.array([_number(place, line, field) for place, line in lines], dtype=np.float64)
        for field in fields
    }


def _number(place: str, line: dict[str, Any], field: str) -> float:
    value = line.get(field)
    if value is None and (field in OPTIONAL_FIELDS or (field in MAY_DIVERGE and field in line)):
        return float("nan")
    try:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError
        number = float(value)
        if field in COMMON_FIELDS and not math.isfinite(number):
            raise OverflowError
    except (TypeError, OverflowError):
        found = json.dumps(value)[:40]
        raise damaged(place, f"a number as `{field}`", found, CheckpointError) from None
    return number
