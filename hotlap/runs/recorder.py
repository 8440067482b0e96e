"""Records a run while it trains: metrics and log lines in its directory, a live line on the terminal.

Only the recorder of the main rank does anything.
"""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console

from hotlap.live_line import LiveLine, TimeLeft, duration, fitted
from hotlap.runs.directory import RunDirectory
from hotlap.runs.trackers import Trackers

# Seconds between lines if the output is not a terminal.
PLAIN_LINE_SECONDS = 10.0


class Recorder:
    """Records nothing; for all ranks but the main one."""

    def trained(self, record: dict[str, Any]) -> None:
        pass

    def validated(self, record: dict[str, Any]) -> None:
        pass

    def warned(self, step: int, text: str) -> None:
        pass

    def sampled(self, step: int, text: str) -> None:
        pass

    def replanned(self, step: int, steps: int, text: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class MainRecorder(Recorder):
    def __init__(
        self, run: RunDirectory, console: Console, steps: int, first_step: int, trackers: Trackers
    ) -> None:
        self.run = run
        self.console = console
        self.steps = steps
        self.first_step = first_step
        self.trackers = trackers
        self._validation: dict[str, Any] | None = None  # the last one
        self._line_at = time.monotonic()
        self._time_left = TimeLeft(steps, first_step)
        is_live = console.is_terminal and not console.is_dumb_terminal
        self._live = LiveLine(console.file) if is_live else None

    def trained(self, record: dict[str, Any]) -> None:
        self._write(record)
        left = self._time_left.after(record["step"])
        if self._live is not None:
            self._live.show(self._live_text(record, left))
        elif time.monotonic() - self._line_at > PLAIN_LINE_SECONDS:
            self._line_at = time.monotonic()
            parts = [f"step {record['step']}/{self.steps}", *self._losses(record), *self._details(record)]
            self.console.print("  ".join(parts), markup=False)

    def _live_text(self, record: dict[str, Any], left: float | None) -> str:
        step = record["step"]
        first, *others = self._losses(record)
        # Bits per byte if they are known, and then the loss of the validation only where there is room.
        needed = [f"{duration(left)} left", first, *others[-1:]]
        wanted = [f"step {step}/{self.steps}", *others[:-1], *self._details(record)]
        ascii_only = self.console.options.ascii_only
        return fitted(self.console.width, step / self.steps, needed, wanted, ascii_only=ascii_only)

    def _losses(self, record: dict[str, Any]) -> list[str]:
        losses = [f"loss {record['loss']:.4f}"]
        if self._validation is not None:
            losses.append(f"val {self._validation['val_loss']:.4f}")
            if self._validation["val_bpb"] is not None:
                losses.append(f"bpb {self._validation['val_bpb']:.4f}")
        return losses

    def _details(self, record: dict[str, Any]) -> list[str]:
        return [
            f"{record['tokens_per_s']:,.0f} tok/s",
            f"lr ×{record['lr']:.2f}",
            f"window {record['window']}",
        ]

    def validated(self, record: dict[str, Any]) -> None:
        self._write(record)
        train_ms = record["train_s"] * 1000
        average_ms = train_ms / max(1, record["step"])
        line = (
            f"step:{record['step']}/{self.steps} val_loss:{record['val_loss']:.4f}"
            f" train_time:{train_ms:.0f}ms step_avg:{average_ms:.2f}ms"
        )
        self.run.append_log(line)
        bpb = "" if record["val_bpb"] is None else f" val_bpb:{record['val_bpb']:.4f}"
        self._validation = record
        self._print(line + bpb)

    def warned(self, step: int, text: str) -> None:
        self.run.append_metrics({"kind": "warning", "step": step, "text": text})
        self.run.append_log(f"step:{step}/{self.steps} {text}")
        self._print(text)

    def complained(self, lines: list[str]) -> None:
        """Of trackers that failed."""
        for line in lines:
            self.run.append_log(line)
            self._print(line)

    def replanned(self, step: int, steps: int, text: str) -> None:
        """From `step` on the run has another number of steps."""
        self.steps = steps
        self._time_left = TimeLeft(steps, step)
        self.run.append_metrics({"kind": "plan", "step": step, "steps": steps})
        self.run.append_log(f"step:{step}/{steps} {text}")
        self._print(text)

    def _print(self, line: str) -> None:
        if self._live is not None:
            self._live.hide()
        self.console.print(line, markup=False, soft_wrap=True)

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.hide()
        self.complained(self.trackers.close())

    def sampled(self, step: int, text: str) -> None:
        self.run.append_metrics({"kind": "sample", "step": step, "text": text})
        self.run.append_sample(step, text)

    def _write(self, record: dict[str, Any]) -> None:
        self.run.append_metrics(record)
        self.complained(self.trackers.write(record))
