"""A long run: memory, open files and the time of a step must not grow."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np

from campaign.commands import Limits, run
from campaign.outcomes import Outcome, Verdict, mistake
from campaign.stage import PICO
from hotlap.runs.reader import RunFiles

MOST_GROWTH_MIB = 8.0  # from a tenth of the run to its end


@dataclass
class Soak:
    stage: Path
    root: Path
    steps: int
    trials: int = 1
    part: str = field(default="soak", init=False)

    @property
    def name(self) -> str:
        return f"train {self.steps:,} steps"

    def run(self, _number: int, _chance: Random) -> Verdict:
        place = self.root / f"{self.steps}-steps"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        (place / "data").symlink_to(self.stage / "data")
        rarely = str(self.steps // 20)
        words = ["train", "sprint", "--name", "soak", "--steps", str(self.steps), "--data.source", "data"]
        words += [*PICO, "--sequence-tokens", "512", "--tokens-per-step", "512"]
        words[words.index("--evaluation.every-steps") + 1] = rarely
        words += ["--checkpoint.every-steps", rarely]
        limits = Limits(cpu_seconds=36_000, wait_seconds=36_000, extra_mib=None)
        ended = run(words, place, self.root, limits)
        if (found := mistake(ended)) is not None:
            return Verdict(found[0], self.name, found[1])
        if ended.code:
            return Verdict(Outcome.LOST, self.name, ended.err[-300:])
        lines = RunFiles(place / "runs/soak").read_metrics().lines
        memory = np.array([line["memory_mib"] for line in lines if line["kind"] == "train"])
        early, late = memory[len(memory) // 10 : len(memory) // 5].max(), memory[-len(memory) // 10 :].max()
        seen = f"{early:.1f} MiB after a tenth of {len(memory):,} steps, {late:.1f} MiB at the end"
        grew = late - early > MOST_GROWTH_MIB or len(memory) != self.steps
        return Verdict(Outcome.MEMORY if grew else Outcome.HARMLESS, self.name, seen)
