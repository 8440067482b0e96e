"""The ledger, `lab.jsonl` in the directory of runs: what was tried, and what came of it. One line per event.

Lines are only added, under a lock, and each has a checksum of its own. A process that was killed while it
wrote leaves at most a torn last line; the next to write removes it and says so. The numbers of tries and the
levels of the series follow from what is here.

Kinds of lines: `try` (a gate begins: its number and level), `verdict` (it has ended, or stopped undecided;
the last one of a try counts), `race` and `ladder` (a comparison outside of the series).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from hotlap.errors import RaceError
from hotlap.files import lock, make_directory, sync, writing
from hotlap.json_files import CHECKSUM_FIELD, canonical, damaged, finite, parse_object
from hotlap.lab.decision import Outcome
from hotlap.lab.discoveries import level_of_try
from hotlap.progress import Say
from hotlap.runs.reader import whole_lines

LEDGER_NAME = "lab.jsonl"
KINDS = ("try", "verdict", "race", "ladder")
CHECKSUM_DIGITS = 16

Entry = Mapping[str, Any]


class Try(NamedTuple):
    """A gate in the series, and the last verdict on it."""

    began: Entry
    verdict: Entry | None

    @property
    def outcome(self) -> str:
        """`running` if it has no verdict yet: it trains, or was killed."""
        return "running" if self.verdict is None else str(self.verdict["outcome"])


class Ledger:
    def __init__(self, runs: Path) -> None:
        """`runs`: the directory that holds races, gates and this file."""
        self.path = runs / LEDGER_NAME

    def entries(self) -> list[dict[str, Any]]:
        """All whole lines, in order. A torn last line is left out; see `torn_bytes`."""
        lines, _ = whole_lines(self.path)
        found = [_read(line, f"{self.path}:{number}") for number, line in enumerate(lines, 1)]
        numbers = [entry.get("number") for entry in found if entry["kind"] == "try"]
        if numbers != list(range(1, len(numbers) + 1)):
            raise damaged(str(self.path), "tries 1, 2, 3, … in order", f"{numbers[:20]}", RaceError)
        return found

    def torn_bytes(self) -> int:
        """The length of an incomplete last line; 0 if there is none."""
        if not self.path.exists():
            return 0
        return self.path.stat().st_size - sum(map(len, whole_lines(self.path)[0]))

    def tries(self) -> list[Try]:
        return _tries(self.entries())

    def begin(self, gate: str, facts: Entry, alpha: float, say: Say) -> tuple[dict[str, Any], Entry | None]:
        """The line of this gate's try, which is added if it is new, and its last verdict.

        Under one lock, so that two processes get two numbers, and levels that know of each other.
        """
        with self._locked(say):
            tries = self.tries()
            for known in tries:
                if known.began["gate"] == gate:
                    _check_same(known.began, {"alpha": alpha, **facts}, gate)
                    return dict(known.began), known.verdict
                _check_fresh(known.began, facts)
            number = len(tries) + 1
            found = _discoveries(tries)
            entry = {
                "kind": "try",
                "number": number,
                "gate": gate,
                "level": level_of_try(number, found, alpha),
                "discoveries_before": len(found),
                "tries_since_discovery": number - 1 - max(found) if found else None,
                "alpha": alpha,
                **facts,
            }
            return self._append(entry), None

    def end(self, number: int, gate: str, facts: Entry, say: Say) -> dict[str, Any]:
        """Add a verdict on a try. `tries_begun`: how many had begun when it became known."""
        with self._locked(say):
            begun = len(self.tries())
            return self._append(
                {"kind": "verdict", "number": number, "gate": gate, "tries_begun": begun, **facts}
            )

    def add(self, kind: str, facts: Entry, say: Say) -> dict[str, Any]:
        """Add the result of a race or a ladder."""
        with self._locked(say):
            return self._append({"kind": kind, **facts})

    @contextmanager
    def _locked(self, say: Say) -> Iterator[None]:
        def wait(owner: str) -> None:
            del owner  # a line takes milliseconds

        lock_path = self.path.with_name(f".{self.path.name}.lock")
        with writing(self.path, RaceError):
            make_directory(self.path.parent)
            file = lock(lock_path, wait)
        with file:
            self._repair(say)
            yield

    def _repair(self, say: Say) -> None:
        torn = self.torn_bytes()
        if not torn:
            return
        with writing(self.path, RaceError):
            with self.path.open("r+b") as file:
                file.truncate(self.path.stat().st_size - torn)
            sync(self.path)
        say(
            f"lab: removed a torn last line ({torn} bytes) from {self.path}: a process was killed while it"
            " wrote it; repeat that process's command to have its result added"
        )

    def _append(self, entry: Entry) -> dict[str, Any]:
        dated = finite({**entry, "time": datetime.now(UTC).isoformat(timespec="seconds")})
        line = json.dumps({**dated, CHECKSUM_FIELD: _checksum(dated)}, ensure_ascii=True) + "\n"
        with writing(self.path, RaceError):
            is_new = not self.path.exists()
            with self.path.open("ab") as file:
                file.write(line.encode())
            sync(self.path)
            if is_new:
                sync(self.path.parent)
        return dict(dated)


def _tries(entries: list[dict[str, Any]]) -> list[Try]:
    verdicts = {entry["number"]: entry for entry in entries if entry["kind"] == "verdict"}
    return [Try(entry, verdicts.get(entry["number"])) for entry in entries if entry["kind"] == "try"]


def _discoveries(tries: list[Try]) -> list[int]:
    """For each "helps", how many tries had begun when it became known."""
    return [
        int(one.verdict["tries_begun"])
        for one in tries
        if one.verdict is not None and one.outcome == Outcome.HELPS
    ]


def _check_same(began: Entry, facts: Entry, gate: str) -> None:
    asked = ("comparison", "alpha", "least_effect", "most_seeds", "first_seed")
    changed = [name for name in asked if began.get(name) != facts[name]]
    if changed:
        raise RaceError(
            expected=f"the question that {gate} began with",
            found=f"another {', '.join(changed)}",
            do="choose another --name",
        )


def _check_fresh(began: Entry, facts: Entry) -> None:
    """Refuse to test a comparison again on seeds that a try has seen: it would be the same luck again."""
    if began["comparison"] != facts["comparison"]:
        return
    next_seed = int(began["first_seed"]) + int(began["most_seeds"])
    if int(facts["first_seed"]) < next_seed and int(began["first_seed"]) < int(facts["first_seed"]) + int(
        facts["most_seeds"]
    ):
        raise RaceError(
            expected=f"seeds that no try of this comparison has used (try {began['number']}, {began['gate']},"
            f" has {began['first_seed']} to {next_seed - 1})",
            found=f"first seed {facts['first_seed']}",
            do=f"give --first-seed {next_seed}, which counts as another try",
        )


def _checksum(content: Entry) -> str:
    return hashlib.sha256(canonical(content).encode()).hexdigest()[:CHECKSUM_DIGITS]


def _read(line: bytes, place: str) -> dict[str, Any]:
    content = parse_object(line, place, RaceError)
    checksum = content.pop(CHECKSUM_FIELD, None)
    if checksum != _checksum(content):
        raise damaged(place, "a line that matches its checksum", "a changed line", RaceError)
    if content.get("kind") not in KINDS:
        raise damaged(place, f"a kind of line ({', '.join(KINDS)})", repr(content.get("kind")), RaceError)
    return content
