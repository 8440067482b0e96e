"""The files of one run: its configuration, environment, metrics, log and summary, and the lock on them.

A run directory is made once and never overwritten. Files written at once are whole or absent; `metrics.jsonl`
and `log.txt` grow by whole lines, so that a killed process leaves at most half a line at their end. Needs no
torch: reading a run is cheap.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from hotlap import settings
from hotlap.config import Config
from hotlap.errors import CheckpointError, ConfigError
from hotlap.files import sync
from hotlap.runs.durable import make_directory, write_whole, writing
from hotlap.strict_json import finite

CONFIG_NAME = "config.json"
LOCK_NAME = "lock"
LOG_STEP = re.compile(rb"step:(\d+)/")  # of a validation


class Metrics(NamedTuple):
    lines: list[dict[str, Any]]
    half_line: bool  # the last one was cut off by a kill, and is not among the lines


class RunDirectory:
    """`runs/<name>/`, made by `create` or `open`. A process that writes holds the lock until `close`."""

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
        self._appending: dict[Path, FileIO] = {}
        self._lock: FileIO | None = None

    @classmethod
    def create(cls, root: Path, name: str) -> Self:
        """The directory of a new run, locked. A name that is taken is refused, even in a race for it."""
        check_name(name)
        path = root / name
        with writing(path):
            make_directory(root)
            try:
                path.mkdir()
            except FileExistsError:
                raise CheckpointError(
                    expected=f"a new run name in {root}",
                    found=f"`{name}`, which exists",
                    do="choose another name, or resume that run",
                ) from None
            sync(root)
        run = cls(path)
        run.lock()
        return run

    @classmethod
    def create_numbered(cls, root: Path, stem: str) -> Self:
        """Make `<stem>-<n>` with n above every such number there is, from 0."""
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        taken = [int(m[1]) for m in (re.fullmatch(rf"{re.escape(stem)}-(\d+)", name) for name in names) if m]
        number = max(taken, default=-1) + 1
        while True:
            try:
                return cls.create(root, f"{stem}-{number}")
            except CheckpointError:
                if not (root / f"{stem}-{number}").exists():
                    raise
                number += 1  # another process was faster

    @classmethod
    def open(cls, path: Path) -> Self:
        """The directory of a run that exists, to read from; `lock` it to write."""
        run = cls(path)
        if not run.config_path.is_file():
            raise CheckpointError(
                expected=f"a run directory at {path}",
                found=f"no {CONFIG_NAME} in it" if path.is_dir() else "no such directory",
                do="give the path of a run, such as runs/softcap-nano-0",
            )
        run.read_config()
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def lock(self) -> None:
        """Refuse a second process that trains here. The lock ends with this process at the latest."""
        import fcntl  # not on Windows, where runs can still be read

        assert self._lock is None, "this process holds the lock already"
        path = self.path / LOCK_NAME
        with writing(path):
            handle = path.open("a+b", buffering=0)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                handle.seek(0)
                owner = handle.read().decode(errors="replace").strip()
                handle.close()
                raise CheckpointError(
                    expected=f"no other process that trains in {self.path}",
                    found=f"process {owner}" if owner else "one",
                    do="wait for it or stop it, or start a run of another name",
                ) from None
            except BaseException:
                handle.close()
                raise
            handle.truncate(0)
            handle.write(f"{os.getpid()}\n".encode())
        self._lock = handle

    def close(self) -> None:
        """Close the files that grow and give the lock back."""
        for file in self._appending.values():
            file.close()
        self._appending.clear()
        if self._lock:
            self._lock.close()
            self._lock = None

    def write_config(self, config: Config) -> None:
        _write_json(self.config_path, settings.to_json(config))

    def read_config(self) -> Config:
        return settings.from_json(Config, _read_json(self.config_path))

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Of the process that trains now; what earlier ones of the run wrote is kept in `earlier`."""
        earlier = []
        if self.environment_path.exists():
            before = self.read_environment()
            earlier = [*before.pop("earlier", []), before]
        _write_json(self.environment_path, {**facts, "earlier": earlier} if earlier else facts)

    def read_environment(self) -> dict[str, Any]:
        return _read_json(self.environment_path)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        _write_json(self.summary_path, summary)

    def read_summary(self) -> dict[str, Any] | None:
        """None while the run has not come to its end."""
        return _read_json(self.summary_path) if self.summary_path.exists() else None

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one object, at once visible to readers; a number that is not finite is written as null."""
        self._append(self.metrics_path, json.dumps(finite(line), allow_nan=False))

    def append_log(self, line: str) -> None:
        self._append(self.log_path, line)

    def append_sample(self, step: int, text: str) -> None:
        """Add what the model wrote at a step, for people to read."""
        self._append(self.samples_path, _sample(step, text))

    def newest_sample(self) -> str | None:
        texts = [line["text"] for line in self.metrics().lines if line.get("kind") == "sample"]
        return texts[-1] if texts else None

    def sync(self) -> None:
        """Wait until what was appended is on the disk, as a checkpoint that counts on it needs."""
        for path in self._appending:
            with writing(path):
                sync(path)

    def metrics(self) -> Metrics:
        """Every complete line of `metrics.jsonl`; a damaged one other than the last is an error."""
        whole, half_line = _whole_lines(self.metrics_path)
        return Metrics([_object(self.metrics_path, n, line) for n, line in enumerate(whole, 1)], half_line)

    def rewind(self, step: int, validated_step: int) -> None:
        """Go back to `step`, of which the last validation was at `validated_step`.

        Half lines go, lines of later steps or validations, and the summary of an earlier end.
        """
        assert self._lock, "lock the run before rewinding it"
        assert not self._appending, "rewind before anything is appended"
        with writing(self.summary_path):
            self.summary_path.unlink(missing_ok=True)
        last = {"validation": validated_step, "sample": validated_step}
        wanted = [entry["step"] <= last.get(entry.get("kind", ""), step) for entry in self.metrics().lines]
        _keep_lines(self.metrics_path, wanted)
        matches = [LOG_STEP.match(line) for line in _whole_lines(self.log_path)[0]]
        _keep_lines(self.log_path, [match is None or int(match[1]) <= validated_step for match in matches])
        samples = [line for line in self.metrics().lines if line.get("kind") == "sample"]
        write_whole(self.samples_path, "".join(_sample(**line) for line in samples).encode())

    def _append(self, path: Path, line: str) -> None:
        assert self._lock, f"lock the run before writing {path.name}"
        with writing(path):
            if path not in self._appending:
                assert not _whole_lines(path)[1], f"rewind before going on with {path}"
                self._appending[path] = path.open("ab", buffering=0)
            _append_whole(self._appending[path], f"{line}\n".encode())


def check_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.+=-]*", name):
        raise ConfigError(
            expected="a run name of letters, digits and . _ + = - that starts with a letter or digit",
            found=repr(name),
            do="choose another name",
        )


def _sample(step: int, text: str, kind: str = "sample") -> str:
    return f"{kind} at step {step}:\n{text}\n"


def _append_whole(file: FileIO, content: bytes) -> None:
    """Append all of it or, when the system refuses, nothing."""
    start = file.seek(0, os.SEEK_END)
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, (json.dumps(finite(content), indent=1, allow_nan=False) + "\n").encode())


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(
            expected=f"a readable file {path}",
            found=error.strerror or str(error),
            do="check the run directory",
        ) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(content, dict):
        raise _damaged(path, type(content).__name__)
    return content


def _whole_lines(path: Path) -> tuple[list[bytes], bool]:
    """The lines that end, each with its newline, and whether half a line follows; no file has none."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        raise _damaged(path, error.strerror or str(error)) from error
    return [line + b"\n" for line in lines], bool(rest)


def _keep_lines(path: Path, wanted: list[bool]) -> None:
    """Rewrite a file that grows with only the wanted of its whole lines."""
    if path.exists():
        lines, _ = _whole_lines(path)
        write_whole(path, b"".join(line for line, keep in zip(lines, wanted, strict=True) if keep))


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"{error} in line {number}") from error
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        raise _damaged(path, f"no `step` in line {number}")
    return entry


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        expected=f"{path} as it was written", found=what, do="restore the file or start a new run"
    )
