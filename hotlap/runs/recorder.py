"""Records a run while it trains: metrics and log lines in its directory, a live line on the terminal.

Only the recorder of the main rank does anything.
"""

from __future__ import annotations

import time
from typing import Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hotlap.runs.directory import RunDirectory

# Seconds between lines if the output is not a terminal.
PLAIN_LINE_SECONDS = 10.0


class Sink(Protocol):
    """Another destination of the metrics: TensorBoard, W&B."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class Recorder:
    """Records nothing; for all ranks but the main one."""

    def trained(self, record: dict[str, Any]) -> None:
        pass

    def validated(self, record: dict[str, Any]) -> None:
        pass

    def sampled(self, step: int, text: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class MainRecorder(Recorder):
    def __init__(
        self, run: RunDirectory, console: Console, steps: int, first_step: int, sinks: list[Sink]
    ) -> None:
        self.run = run
        self.console = console
        self.steps = steps
        self.first_step = first_step
        self.sinks = sinks
        self._val = ""
        self._line_at = time.monotonic()
        self._bar = Progress(
            TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=first_step)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def trained(self, record: dict[str, Any]) -> None:
        self._write(record)
        line = (
            f"loss {record['loss']:.4f}{self._val}  lr ×{record['lr']:.2f}  window {record['window']}"
            f"  {record['tokens_per_s']:,.0f} tok/s"
        )
        self._bar.update(self._task, completed=record["step"], description=line)
        if not self.console.is_terminal and time.monotonic() - self._line_at > PLAIN_LINE_SECONDS:
            self._line_at = time.monotonic()
            self.console.print(f"step {record['step']}/{self.steps}  {line}", markup=False)

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
        self._val = f"  val {record['val_loss']:.4f}{bpb.replace(' val_bpb:', '  bpb ')}"
        self.console.print(line + bpb, markup=False)

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        for sink in self.sinks:
            sink.close()

    def sampled(self, step: int, text: str) -> None:
        self.run.append_metrics({"kind": "sample", "step": step, "text": text})
        self.run.append_sample(step, text)

    def _write(self, record: dict[str, Any]) -> None:
        self.run.append_metrics(record)
        for sink in self.sinks:
            sink.write(record)
