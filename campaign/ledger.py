"""The results of a campaign, one JSON object per line, so that it can be stopped and go on.

A trial is named by its subject and number. A later line of the same trial replaces the earlier one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaign.outcomes import Outcome, Verdict


@dataclass(frozen=True)
class Trial:
    part: str
    subject: str
    number: int
    verdict: Verdict
    seconds: float

    @property
    def key(self) -> tuple[str, str, int]:
        return self.part, self.subject, self.number


class Ledger:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.trials: dict[tuple[str, str, int], Trial] = {}
        self.sessions: list[dict[str, Any]] = []
        if path.exists():
            # A killed campaign may leave half a line.
            *lines, rest = path.read_text(encoding="utf-8").split("\n")
            if rest:
                path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
            for line in lines:
                self._add(json.loads(line))

    def _add(self, line: dict[str, Any]) -> None:
        if "session" in line:
            self.sessions.append(line["session"])
            return
        verdict = Verdict(Outcome(line["outcome"]), line["fault"], line["detail"])
        trial = Trial(line["part"], line["subject"], line["number"], verdict, line["seconds"])
        self.trials[trial.key] = trial

    def begin(self, facts: dict[str, Any]) -> None:
        self._write({"session": facts})

    def record(self, trial: Trial) -> None:
        self._write(
            {
                "part": trial.part,
                "subject": trial.subject,
                "number": trial.number,
                "outcome": trial.verdict.outcome,
                "fault": trial.verdict.fault,
                "detail": trial.verdict.detail,
                "seconds": round(trial.seconds, 3),
            }
        )

    def _write(self, line: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        self._add(line)
