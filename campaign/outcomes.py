"""What a trial can come to, and how the end of a command is judged."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum

from campaign.commands import Ended
from hotlap.errors import USER_MISTAKE


class Outcome(StrEnum):
    REFUSED = "refused"  # one line, exit code 2
    HARMLESS = "harmless"  # the same result as without the fault
    NOTED = "noted"  # another result, and a note with it that says why
    AS_WRITTEN = "as written"  # the file is valid: its result is that of an independent reading
    WRONG = "wrong"  # another result, without a word
    LOST = "lost"  # what was on disk before is gone or damaged, or the work cannot be finished
    TRACEBACK = "traceback"
    HANG = "hang"
    CRASH = "crash"  # ended by a signal, or without a word
    MEMORY = "memory"  # took more memory than the limit


GOOD = (Outcome.REFUSED, Outcome.HARMLESS, Outcome.NOTED, Outcome.AS_WRITTEN)
LONGEST_DETAIL = 400
TRACEBACK = "Traceback (most recent call last)"


@dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    fault: str  # what was done
    detail: str = ""  # what was seen: the refusal, the end of a traceback, the difference


def mistake(ended: Ended, *, may_be_killed: bool = False) -> tuple[Outcome, str] | None:
    """What was wrong with how a command ended; None for success, a refusal, or a kill that was ours."""
    if ended.hung:
        return Outcome.HANG, f"no end after {ended.seconds:.0f} s"
    if TRACEBACK in ended.err:
        said = last_line(ended.err)
        is_memory = "MemoryError" in said or "can't allocate memory" in said
        return (Outcome.MEMORY if is_memory else Outcome.TRACEBACK), said
    if ended.code < 0:
        if may_be_killed and ended.code == -signal.SIGKILL:
            return None
        return Outcome.CRASH, f"{signal.Signals(-ended.code).name} {last_line(ended.err)}"
    if ended.code == 0 or is_refusal(ended):
        return None
    return Outcome.CRASH, f"exit code {ended.code}: {last_line(ended.err)}"


def is_refusal(ended: Ended) -> bool:
    """Exit code 2, and exactly one line of the form that HotlapError gives it."""
    lines = [line for line in ended.err.split("\n") if line.strip()]
    said = [line for line in lines if line.startswith("hotlap: expected ")]
    return ended.code == USER_MISTAKE and len(said) == 1 and lines[-1] == said[0]


def refusal(ended: Ended) -> str:
    return last_line(ended.err)


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1][:LONGEST_DETAIL] if lines else ""
