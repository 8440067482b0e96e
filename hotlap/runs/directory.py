"""Writes the files of one run: its configuration, environment, metrics, log, samples and summary.

A run directory is made once and never overwritten, and one process at a time writes in it, under a lock.
`metrics.jsonl` and `log.txt` grow by whole lines, so a killed process leaves at most an incomplete last line;
all other files are written atomically. What is written is read by `hotlap.runs.reader`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn, Self

from hotlap import settings
from hotlap.config import Config
from hotlap.errors import CheckpointError, ConfigError
from hotlap.files import file_sha256, lock, make_directory, sync, write_atomically, writing
from hotlap.json_files import finite, write_json, write_sealed
from hotlap.runs.reader import CONFIG_NAME, IDEAS_DIRECTORY, SEALED_FIELD, RunFiles, whole_lines

LOCK_NAME = "lock"
LOG_STEP = re.compile(rb"step:(\d{1,18})/")  # the start of a validation's line in log.txt


class RunDirectory(RunFiles):
    """`runs/<name>/`, made by `create` or `open`. A process that writes holds the lock until `close`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._appending: dict[Path, FileIO] = {}
        self._lock: FileIO | None = None

    @classmethod
    def create(cls, root: Path, name: str) -> Self:
        """Make the directory of a new run and lock it. An existing name is refused."""
        check_name(name)
        path = root / name
        with writing(path, CheckpointError):
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
        """Make `<stem>-<n>`, where n is 0 or one more than the highest number so far."""
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        taken = [int(m[1]) for m in (re.fullmatch(rf"{re.escape(stem)}-(\d+)", name) for name in names) if m]
        number = max(taken, default=-1) + 1
        while True:
            try:
                return cls.create(root, f"{stem}-{number}")
            except CheckpointError:
                if not (root / f"{stem}-{number}").exists():
                    raise
                number += 1  # another process has just made it

    @classmethod
    def open(cls, path: Path) -> Self:
        """An existing run, to read from; call `lock` before writing."""
        run = cls(path)
        if not run.config_path.is_file():
            raise CheckpointError(
                expected=f"a run directory at {path}",
                found=f"no {CONFIG_NAME} in it" if path.is_dir() else "no such directory",
                do="give the path of a run, such as runs/softcap-nano-0",
            )
        run.read_config()
        return run

    @classmethod
    def start_over(cls, path: Path) -> Self:
        """A run without a checkpoint; its last process may have ended before it wrote the configuration."""
        bare = (LOCK_NAME, IDEAS_DIRECTORY)
        is_bare = all(entry.name in bare or entry.name.startswith(".") for entry in path.iterdir())
        return cls(path) if is_bare else cls.open(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def lock(self) -> None:
        """Refuse if another process trains here. The lock is released when this process ends, or before."""
        assert self._lock is None, "this process holds the lock already"

        def refuse(owner: str) -> NoReturn:
            raise CheckpointError(
                expected=f"no other process that trains in {self.path}",
                found=f"process {owner}" if owner else "one",
                do="wait for it or stop it, or start a run with another name",
            )

        path = self.path / LOCK_NAME
        with writing(path, CheckpointError):
            self._lock = lock(path, refuse)

    def close(self) -> None:
        """Close the open files and release the lock."""
        for file in self._appending.values():
            file.close()
        self._appending.clear()
        if self._lock:
            self._lock.close()
            self._lock = None

    def write_config(self, config: Config) -> None:
        write_json(self.config_path, settings.to_json(config), CheckpointError)

    def write_ideas(self, files: Mapping[str, str]) -> None:
        """Copies of the idea files, before the configuration that names them."""
        if not files:
            return
        with writing(self.ideas, CheckpointError):
            make_directory(self.ideas)
            for name, content in files.items():
                write_atomically(self.ideas / name, content.encode())

    def write_environment(self, facts: Mapping[str, Any]) -> None:
        """Of this process; what earlier processes of the run wrote moves to `earlier`."""
        earlier = []
        if self.environment_path.exists():
            before = self.read_environment()
            earlier = [*(before.pop("earlier", None) or []), before]
        write_json(
            self.environment_path, {**facts, "earlier": earlier} if earlier else facts, CheckpointError
        )

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """The last file of a run. It seals the others: `load_run` notes what was changed afterwards."""
        sha256 = {
            path.name: file_sha256(path, CheckpointError) for path in self.sealed_paths if path.exists()
        }
        write_sealed(self.summary_path, {**summary, SEALED_FIELD: sha256}, CheckpointError)

    def append_metrics(self, line: Mapping[str, Any]) -> None:
        """Add one object, which readers see at once; numbers that are not finite are written as null."""
        self._append(self.metrics_path, json.dumps(finite(line), allow_nan=False))

    def append_log(self, line: str) -> None:
        self._append(self.log_path, line)

    def append_sample(self, step: int, text: str) -> None:
        """Add a text that the model has generated, for people to read."""
        self._append(self.samples_path, _sample(step, text))

    def sync(self) -> None:
        """Wait until all appended lines are on disk: a checkpoint must not be ahead of its metrics."""
        for path in self._appending:
            with writing(path, CheckpointError):
                sync(path)

    def rewind(self, step: int, validated_step: int) -> None:
        """Go back to a checkpoint at `step`, whose last validation was at `validated_step`.

        Removes the summary, incomplete lines, and the lines of later steps and later validations.
        """
        assert self._lock, "lock the run before rewinding it"
        assert not self._appending, "rewind before anything is appended"
        contents = self.rewound(step, validated_step)
        with writing(self.summary_path, CheckpointError):
            self.summary_path.unlink(missing_ok=True)
        for path, content in contents.items():
            self._replace(path, content)

    def rewound(self, step: int, validated_step: int) -> dict[Path, bytes]:
        """What `rewind` will write. Raises if a file is damaged, before anything is removed."""
        for name in self.changed_since_the_end():
            raise CheckpointError(
                expected=f"{self.path / name} as it was when the run ended",
                found="another content",
                do=f"restore it from a backup, or remove {self.summary_path} to go on with it as it is",
            )
        if self.environment_path.exists():
            self.read_environment()  # the next process will add to it
        last = {"validation": validated_step, "sample": validated_step, "warning": validated_step}
        lines = self.read_metrics().lines
        kept = [line["step"] <= last.get(line["kind"], step) for line in lines]
        self._check_complete([line for line, keep in zip(lines, kept, strict=True) if keep], step)
        matches = [LOG_STEP.match(line) for line in whole_lines(self.log_path)[0]]
        samples = [
            _sample(line["step"], str(line.get("text", "")))
            for line, keep in zip(lines, kept, strict=True)
            if keep and line["kind"] == "sample"
        ]
        return {
            **_kept_lines(self.metrics_path, kept),
            **_kept_lines(self.log_path, [m is None or int(m[1]) <= validated_step for m in matches]),
            self.samples_path: "".join(samples).encode(errors="backslashreplace"),
        }

    def _check_complete(self, lines: Sequence[Mapping[str, Any]], step: int) -> None:
        """Refuse metrics that lack steps: they are on disk before a checkpoint of these steps is."""
        if not self.metrics_path.exists():
            return
        steps = [line["step"] for line in lines if line["kind"] == "train"]
        expected = [*range(step + 1 - len(steps), step + 1)] if steps or not step else [step]
        if steps != expected:
            at = next(
                (n for n, (a, b) in enumerate(zip(steps, expected, strict=False)) if a != b), len(steps)
            )
            raise CheckpointError(
                expected=f"a line for each step up to {step}, that of the checkpoint, in {self.metrics_path}",
                found=f"step {steps[at]} out of order" if at < len(steps) else "none",
                do="restore it from a backup, resume from an earlier checkpoint, or remove it to do without",
            )

    def _replace(self, path: Path, content: bytes) -> None:
        with writing(path, CheckpointError):
            write_atomically(path, content)

    def _append(self, path: Path, line: str) -> None:
        assert self._lock, f"lock the run before writing {path.name}"
        with writing(path, CheckpointError):
            if path not in self._appending:
                assert not whole_lines(path)[1], f"rewind before going on with {path}"
                self._appending[path] = path.open("ab", buffering=0)
            _append_whole(self._appending[path], f"{line}\n".encode(errors="backslashreplace"))


def _kept_lines(path: Path, wanted: list[bool]) -> dict[Path, bytes]:
    if not path.exists():
        return {}
    return {path: b"".join(line for line, keep in zip(whole_lines(path)[0], wanted, strict=True) if keep)}


def check_name(name: str) -> None:
    if not re.fullmatch(r"\w[\w.+=-]*", name):
        raise ConfigError(
            expected="a run name of letters, digits and . _ + = - that starts with a letter or digit",
            found=repr(name),
            do="choose another name",
        )


def _sample(step: int, text: str) -> str:
    return f"sample at step {step}:\n{text}\n"


def _append_whole(file: FileIO, content: bytes) -> None:
    """Append all of `content`, or nothing if the disk is full."""
    start = file.seek(0, os.SEEK_END)
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(start)
        raise
