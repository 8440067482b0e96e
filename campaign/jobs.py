"""Work that is disturbed: for each command that writes, how it is called, gone on with and checked.

A disturbed job has to leave on disk what is whole or nothing, and, called again, has to come to the result of
one that was left alone: bit for bit where training is concerned.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaign import results
from campaign.commands import Ended, Limits, Running
from campaign.outcomes import is_refusal
from campaign.results import Observe, Result
from campaign.stage import PICO, PREPARE, train_words
from hotlap.corpus.inspect import inspect_directory
from hotlap.errors import HotlapError
from hotlap.inference.load import read_exported
from hotlap.runs import checkpoint as store
from hotlap.runs.reader import RunFiles

NO_LIMIT = Limits(cpu_seconds=600, wait_seconds=900, extra_mib=None)
MOST_CALLS = 3  # until a disturbed job has to be done
STEPS = 12
FIXED_SUMS = "train with fixed sums"  # the same bits on any number of threads


class LostError(Exception):
    """What was there is gone or damaged, or cannot be gone on with."""


@dataclass
class Job:
    stage: Path
    root: Path
    name: str
    words: Sequence[str]
    needs: Sequence[str]  # of the stage
    out: str  # what the command writes
    observe: Observe
    # Raises LostError unless what is on disk is whole or absent; returns how far it is, which never shrinks.
    check: Callable[[Path], int]
    once: bool = False  # the command refuses to write twice: a finished job is not called again
    starts_processes: bool = False
    threads_option: str = ""  # how the command is told its number of threads or workers

    @functools.cached_property
    def place(self) -> Path:
        return self.root / self.name.replace(" ", "-")

    @functools.cached_property
    def reference(self) -> tuple[Result, float]:
        """The result of the job when it is left alone, and how many seconds it took."""
        self.prepare()
        ended = self.start().wait()
        if ended.code:
            raise RuntimeError(f"{self.name} ends with {ended.code}\n{ended.out}\n{ended.err}")
        self.check(self.place)
        return self.observe(self.place, ended), ended.seconds

    def prepare(self) -> None:
        """Fill the job's directory, which may be the root of a file system."""
        self.place.mkdir(parents=True, exist_ok=True)
        for path in self.place.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        for name in self.needs:
            # Not copied: inputs are only read, and `data prepare` tells files by their times.
            target = self.place / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(self.stage / name)

    def start(
        self,
        limits: Limits = NO_LIMIT,
        before: Callable[[], object] | None = None,
        scratch: str = "",
        threads: int = 1,
    ) -> Running:
        place = self.root / f"output-of-{self.name.replace(' ', '-')}{scratch}"
        place.mkdir(parents=True, exist_ok=True)
        words = list(self.words)
        if self.threads_option:
            words[words.index(self.threads_option) + 1] = str(threads)
        return Running(words, self.place, place, limits, before)

    def is_done(self) -> bool:
        return self.once and (self.place / self.out).exists()

    def finish(self) -> Ended:
        """Call the command until it is done; raises LostError if it never is."""
        for _ in range(MOST_CALLS):
            if self.is_done():
                return Ended(0, False, "", "", 0.0)
            ended = self.start().wait()
            if ended.code == 0:
                return ended
            if not is_refusal(ended):
                break
        raise LostError(f"cannot be finished: {ended.code}: {ended.err[-300:]}")

    def compare(self, ended: Ended) -> str:
        """Where the result differs from that of a job left alone."""
        return results.difference(self.reference[0], self.observe(self.place, ended))


@contextlib.contextmanager
def lost() -> object:
    try:
        yield
    except (HotlapError, OSError) as error:
        raise LostError(str(error)) from error


def only_visible(place: Path, expected: set[str]) -> None:
    extra = {path.name for path in place.iterdir() if not path.name.startswith(".")} - expected
    if extra:
        raise LostError(f"left behind: {sorted(extra)}")


def check_prepared(place: Path) -> int:
    only_visible(place, {"texts", "data"})
    if not (place / "data").exists():
        return 0
    with lost():
        inspect_directory(place / "data")
    return 1


def check_run(run: Path) -> int:
    """The newest step that is saved."""
    files = RunFiles(run)
    if not run.exists():
        return 0
    with lost():
        saved = store.stored(files.checkpoints)
        for path in saved.values():
            store.load(path)
        files.read_metrics()
        files.read_summary()
        if files.config_path.exists():
            files.read_config()
        if files.environment_path.exists():
            files.read_environment()
    return max(saved, default=0)


def check_race(race: Path) -> int:
    """How many runs have ended."""
    runs = [path.parent for path in race.glob("*/config.json")]
    for run in runs:
        check_run(run)
    return sum((run / "summary.json").exists() for run in runs)


def check_export(place: Path) -> int:
    only_visible(place, {"runs", "out"})
    if not (place / "out").exists():
        return 0
    with lost():
        read_exported(place / "out")
    return 1


def check_report(place: Path) -> int:
    only_visible(place, {"runs", "page.html"})
    page = place / "page.html"
    if not page.exists():
        return 0
    if not page.read_text(encoding="utf-8").rstrip().endswith("</html>"):
        raise LostError("half a page")
    return 1


def make_jobs(stage: Path, root: Path) -> list[Job]:
    make = functools.partial(Job, stage, root)
    auto = ["--resume", "auto"]

    def train(name: str, *more: str, processes: bool = False, threads_option: str = "") -> Job:
        words = train_words("lap", STEPS, *auto, *more)
        return make(
            name, words, ["data"], "runs", results.training("runs/lap"),
            lambda place: check_run(place / "runs/lap"),
            starts_processes=processes, threads_option=threads_option,
        )  # fmt: skip

    race_words = ["race", "softcap", "softcap:optim.muon.lr=0.03", "--seeds", "2", "--name", "race", *PICO]
    return [
        make(
            "prepare", PREPARE, ["texts"], "data", results.written("data"), check_prepared,
            threads_option="--workers",
        ),
        train("train"),
        train("train on 2 ranks", "--procs", "2", processes=True),
        train(FIXED_SUMS, "--reduction", "fixed", "--allow-change", threads_option="--threads"),
        make(
            "race", [*race_words, "--steps", "4", "--checkpoint.every-steps", "2", "--data.source", "data"],
            ["data"], "runs", results.race("runs/race"), lambda place: check_race(place / "runs/race"),
            starts_processes=True,
        ),
        make(
            "export", ["export", "runs/lap", "out"], ["runs/lap"], "out", results.written("out"),
            check_export, once=True,
        ),
        make(
            "report", ["report", "runs/lap", "--out", "page.html"], ["runs/lap"], "page.html",
            lambda place, _: {"page": results.sha256(place / "page.html")}, check_report,
        ),
    ]  # fmt: skip
