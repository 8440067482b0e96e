"""Faults that befall a job while it runs: kills, full disks, vanished directories, second processes and more.

Every trial ends alike. What is on disk is checked, the command is called again without the fault, and its
result is compared with that of a job that was left alone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import psutil

from campaign.commands import Ended, Limits, send
from campaign.jobs import FIXED_SUMS, NO_LIMIT, Job, LostError
from campaign.outcomes import TRACEBACK, Outcome, Verdict, is_refusal, mistake, refusal
from hotlap.errors import USER_MISTAKE

SECONDS_TO_FOLLOW = 60  # in which the processes of a killed launcher have to end
Fault = Callable[[Job, Random], Verdict]
DAY = 86_400.0
# The largest file, as powers of two: from the first words of an error to more than any file of these jobs.
MIN_FILE_BITS, MAX_FILE_BITS = 6.0, 22.0


@dataclass
class Faulted:
    """A job and a fault that befalls it."""

    job: Job
    fault: Fault
    trials: int
    part: str = field(default="faults", init=False)

    @property
    def name(self) -> str:
        return f"{self.job.name}: {self.fault.__name__.replace('_', ' ')}"

    def run(self, _number: int, chance: Random) -> Verdict:
        assert self.job.reference, "made before the first fault"
        try:
            return self.fault(self.job, chance)
        except LostError as error:
            return Verdict(Outcome.LOST, self.name, str(error))


def conclude(job: Job, what: str, ended: Ended, *, may_be_killed: bool = False) -> Verdict:
    """Judge how the disturbed command ended, then finish the job and judge its result."""
    if (found := mistake(ended, may_be_killed=may_be_killed)) is not None:
        return Verdict(found[0], what, found[1])
    job.check(job.place)
    different = job.compare(job.finish())
    if different:
        return Verdict(Outcome.WRONG, what, different)
    if is_refusal(ended):
        return Verdict(Outcome.REFUSED, what, refusal(ended))
    return Verdict(Outcome.HARMLESS, what)


def moment(job: Job, chance: Random) -> float:
    """Seconds after the start, anywhere in the time that the job takes."""
    return chance.uniform(0.0, 1.02 * job.reference[1])


def kill(job: Job, chance: Random) -> Verdict:
    """SIGKILL to all processes, or only to the one that was called; once more while it goes on, often."""
    job.prepare()
    progress, said = 0, []
    for _ in range(chance.choice((1, 1, 2, 3))):
        if job.is_done():
            break
        running, after = job.start(), moment(job, chance)
        only_first = job.starts_processes and chance.random() < 0.4
        said.append(f"{'the first process' if only_first else 'all'} after {after:.2f} s")
        if not running.has_ended(after):
            family = running.descendants()
            send(family[:1] if only_first else family, signal.SIGKILL)
            left_over = family[1:] if only_first else []
        else:
            left_over = []
        ended = running.wait()
        # A run of a race keeps its lock and trains on; a rank may not.
        if left_over and job.name != "race" and psutil.wait_procs(left_over, SECONDS_TO_FOLLOW)[1]:
            send(left_over, signal.SIGKILL)
            return Verdict(Outcome.HANG, said[-1], "processes outlive the one that started them")
        if (found := mistake(ended, may_be_killed=True)) is not None:
            return Verdict(found[0], said[-1], found[1])
        now = job.check(job.place)
        if now < progress:
            raise LostError(f"{now} instead of {progress} is saved, after {', '.join(said)}")
        progress = now
    return conclude(job, "killed: " + ", ".join(said), Ended(0, False, "", "", 0.0))


def one_rank_killed(job: Job, chance: Random) -> Verdict:
    """SIGKILL to one of two ranks: the other and the launcher have to end with one line."""
    job.prepare()
    running, after = job.start(), moment(job, chance)
    ranks: list[psutil.Process] = []
    if not running.has_ended(after):
        ranks = running.descendants()[1:]
        send([chance.choice(ranks)] if ranks else [], signal.SIGKILL)
    return conclude(job, f"one of {len(ranks)} processes after {after:.2f} s", running.wait())


@contextlib.contextmanager
def small_disk(place: Path, size_bytes: int) -> Iterator[None]:
    """A file system of its own at `place`, of that size; needs root."""
    place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", place], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def remount(place: Path, options: str) -> bool:
    done = subprocess.run(["mount", "-o", f"remount,{options}", place], capture_output=True)
    return done.returncode == 0


def full_disk(job: Job, chance: Random) -> Verdict:
    """A disk with room for a part of what the job writes."""
    needed = sum(path.stat().st_size for path in (job.place / job.out).rglob("*") if path.is_file())
    needed = max(needed, (job.place / job.out).stat().st_size if (job.place / job.out).is_file() else 0)
    size = 4096 * max(4, int(chance.uniform(0, 1.5 * max(needed, 65_536)) / 4096))
    with small_disk(job.place, size):
        job.prepare()
        running = job.start()
        ended = running.wait()
        wrong = mistake(ended)
        job.check(job.place)
        if not remount(job.place, "size=1g"):
            raise RuntimeError(f"cannot enlarge {job.place}")
        if wrong is not None:
            return Verdict(wrong[0], f"{size} bytes", wrong[1])
        verdict = conclude(job, f"{size} bytes", ended)
    job.prepare()
    return verdict


def file_size_limit(job: Job, chance: Random) -> Verdict:
    """No file may grow beyond a size, as under `ulimit -f`."""
    job.prepare()
    size = round(2 ** chance.uniform(MIN_FILE_BITS, MAX_FILE_BITS))
    limits = Limits(NO_LIMIT.cpu_seconds, NO_LIMIT.wait_seconds, None, file_bytes=size)
    ended = job.start(limits).wait()
    is_cut_off = size in (len(ended.out.encode()), len(ended.err.encode()))
    if ended.code > 0 and is_cut_off and TRACEBACK not in ended.err:
        # Its one line did not fit the file that it was written to.
        line = "hotlap: expected (cut off by the limit)"
        ended = Ended(USER_MISTAKE, ended.hung, ended.out, line, ended.seconds)
    return conclude(job, f"{size} bytes", ended)


def read_only(job: Job, chance: Random) -> Verdict:
    """A file system that becomes read-only before the job, or after it was killed half-way."""
    with small_disk(job.place, 2**30):
        job.prepare()
        if chance.random() < 0.7:
            running = job.start()
            running.has_ended(moment(job, chance))
            running.signal_all(signal.SIGKILL)
            running.wait()
        deadline = time.monotonic() + SECONDS_TO_FOLLOW
        while not remount(job.place, "ro"):  # a run of a race may still be writing
            if time.monotonic() > deadline:
                raise RuntimeError(f"cannot make {job.place} read-only")
            time.sleep(0.2)
        ended = Ended(0, False, "", "", 0.0) if job.is_done() else job.start().wait()
        remount(job.place, "rw")
        verdict = conclude(job, "read-only", ended)
    job.prepare()
    return verdict


def vanished(job: Job, chance: Random) -> Verdict:
    """What the job writes is removed, or moved away, while it runs; then it starts over."""
    job.prepare()
    running, after = job.start(), moment(job, chance)
    running.has_ended(after)
    way = chance.choice(("removed", "moved"))
    for path in [
        path for path in job.place.iterdir() if not path.is_symlink() and path.name not in job.needs
    ]:
        target = job.root / f"moved-{path.name}"
        if way == "moved":
            shutil.rmtree(target, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.rename(target)
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    ended = running.wait()
    what = f"{way} after {after:.2f} s"
    if (found := mistake(ended)) is not None:
        return Verdict(found[0], what, found[1])
    job.prepare()
    return conclude(job, what, ended)


def two_at_once(job: Job, chance: Random) -> Verdict:
    """The same command twice, the second a little later: each ends well or is refused, one ends well."""
    job.prepare()
    first, after = job.start(), chance.uniform(0.0, 0.7 * job.reference[1])
    first.has_ended(after)
    second = job.start(scratch="-second")
    both = [first.wait(), second.wait()]
    what = f"twice, the second after {after:.2f} s"
    for ended in both:
        if (found := mistake(ended)) is not None:
            return Verdict(found[0], what, found[1])
    if all(ended.code for ended in both):
        return Verdict(Outcome.LOST, what, f"both are refused: {refusal(both[0])} | {refusal(both[1])}")
    refused = next((ended for ended in both if ended.code), both[0])
    return conclude(job, what, refused)


def stopped(job: Job, chance: Random) -> Verdict:
    """SIGSTOP to all processes, or to one of them, and SIGCONT a moment later."""
    job.prepare()
    running, after = job.start(), moment(job, chance)
    what = f"stopped after {after:.2f} s"
    if not running.has_ended(after):
        family = running.descendants()
        chosen = family if chance.random() < 0.5 else family[-1:]
        send(chosen, signal.SIGSTOP)
        time.sleep(chance.uniform(0.05, 1.0))
        send(chosen, signal.SIGCONT)
        what += f", {len(chosen)} of {len(family)}"
    ended = running.wait()
    if is_refusal(ended):
        return Verdict(Outcome.LOST, what, refusal(ended))
    return conclude(job, what, ended)


def clock_jumps(job: Job, chance: Random) -> Verdict:
    """The clock of the day jumps while the job runs, and what was there before is dated in the future."""
    job.prepare()
    offset = chance.choice((-3650, -1, 1, 3650)) * DAY
    real, began, after = time.time, time.monotonic(), moment(job, chance)

    def jump() -> None:
        time.time = lambda: real() + (offset if time.monotonic() - began > after else 0.0)

    running = job.start(before=jump)
    running.has_ended(after)
    running.signal_all(signal.SIGKILL)
    running.wait()
    for path in job.place.rglob("*"):
        if path.is_file() and not path.is_symlink():
            os.utime(path, (real() + offset, real() + offset))
    return conclude(job, f"{offset / DAY:+.0f} days after {after:.2f} s", Ended(0, False, "", "", 0.0))


def little_memory(job: Job, chance: Random) -> Verdict:
    """An address space that is little larger than that of the program."""
    job.prepare()
    extra_mib = round(2 ** chance.uniform(2, 9))
    limits = Limits(NO_LIMIT.cpu_seconds, NO_LIMIT.wait_seconds, extra_mib)
    return conclude(job, f"{extra_mib} MiB", job.start(limits).wait())


def other_threads(job: Job, chance: Random) -> Verdict:
    """1, 2 or 7 threads, half of the times killed on the way and gone on with by one."""
    job.prepare()
    count, is_killed = chance.choice((1, 2, 7)), chance.random() < 0.5
    what = f"{count} threads"
    running = job.start(threads=count)
    if is_killed:
        after = moment(job, chance)
        what += f", killed after {after:.2f} s"
        if not running.has_ended(after):
            running.signal_all(signal.SIGKILL)
    ended = running.wait()
    if (found := mistake(ended, may_be_killed=is_killed)) is not None:
        return Verdict(found[0], what, found[1])
    if is_refusal(ended):
        return Verdict(Outcome.LOST, what, refusal(ended))
    return conclude(job, what, Ended(0, False, "", "", 0.0))


def interrupted(job: Job, chance: Random) -> Verdict:
    """Ctrl-C, SIGTERM or SIGHUP at any moment: a line, and nothing lost."""
    job.prepare()
    number = chance.choice((signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    running, after = job.start(), moment(job, chance)
    if not running.has_ended(after):
        os.killpg(running.pid, number)
    ended = running.wait()
    what = f"{number.name} after {after:.2f} s"
    # SIGTERM and SIGHUP end a process that has nothing to save yet, as they end any other.
    if ended.code in (128 + signal.SIGINT, 128 + signal.SIGTERM, -number):
        ended = Ended(0, ended.hung, ended.out, ended.err, ended.seconds)
    return conclude(job, what, ended)


def can_mount() -> bool:
    return os.geteuid() == 0 and shutil.which("mount") is not None


def make_faults(jobs: list[Job]) -> list[Faulted]:
    """Which fault befalls which job, and how often: slow jobs less often."""
    kills = {"prepare": 40, "train": 60, "train on 2 ranks": 40, "race": 20, "export": 20, "report": 20}
    fast = ("prepare", "train", "export", "report")
    subjects = [Faulted(job, other_threads, 12) for job in jobs if job.threads_option]
    jobs = [job for job in jobs if job.name != FIXED_SUMS]  # disturbed otherwise, it is `train`
    subjects += [Faulted(job, kill, kills[job.name]) for job in jobs]
    for job in jobs:
        is_fast = job.name in fast
        of_all = [(two_at_once, 10), (stopped, 10), (vanished, 10), (clock_jumps, 10), (interrupted, 12)]
        if can_mount():
            of_all += [(full_disk, 20), (read_only, 8)]
        subjects += [Faulted(job, fault, count if is_fast else max(2, count // 4)) for fault, count in of_all]
        if is_fast:
            subjects += [Faulted(job, file_size_limit, 20), Faulted(job, little_memory, 12)]
        if job.name == "train on 2 ranks":
            subjects.append(Faulted(job, one_rank_killed, 6))
    return subjects
