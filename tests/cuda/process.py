"""What happens in a process on the emulated device: its setup, the counts of every step, and accidents."""

from __future__ import annotations

import functools
import json
import os
import signal
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotlap.train.loop import Trainer
    from tests.cuda.host_device import HostDevice

VARIABLE = "HOTLAP_TEST_EMULATION"
INTERPRETER_VARIABLE = "TRITON_INTERPRET"  # Triton's own


@dataclass(frozen=True)
class Emulation:
    """How a process is set up; passed to it and its children as JSON in an environment variable."""

    report: str | None = None  # a file to which every step adds a line
    # Step, counted from 1, to what happens before it: "nan" in the weights, a "wait" for the device, or a
    # signal by name.
    accidents: dict[str, str] = field(default_factory=dict)
    attention: str | None = None  # the backend that "auto" is to be; None: Hotlap's own choice
    gpu: str = "H100"  # what the device says it is

    def variables(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


@functools.cache
def device() -> HostDevice:
    """The device of this process. The first call must come before torch is imported."""
    from tests.cuda.host_device import HostDevice

    return HostDevice()


def set_up() -> None:
    emulation = Emulation(**json.loads(os.environ[VARIABLE]))
    device()
    from tests.cuda import torch_interfaces

    torch_interfaces.replace_device(device(), emulation.gpu)
    if os.environ.get(INTERPRETER_VARIABLE) == "1":
        torch_interfaces.interpret_kernels()
    else:
        leave_out_triton()
    if emulation.attention is not None:
        choose_attention(emulation.attention)
    if emulation.report is not None:
        watch_steps(emulation)


def leave_out_triton() -> None:
    """Without the interpreter no kernel of ours can run: the loss is computed by PyTorch."""
    from hotlap.kernels.cuda import head_choice

    head_choice.no_triton = lambda: "Triton's kernels are not interpreted"


def choose_attention(backend: str) -> None:
    from hotlap import kernels

    choose = kernels.choose_backend
    kernels.choose_backend = lambda name, *arguments, **options: choose(
        backend if name == "auto" else name, *arguments, **options
    )


def watch_steps(emulation: Emulation) -> None:
    """Count what happens inside `Trainer.update` and nowhere else."""
    from hotlap.train.loop import Trainer

    update = Trainer.update

    def watched(trainer: Trainer) -> None:
        step = trainer.progress.step + 1
        happen(emulation.accidents.get(str(step)), trainer)
        before = device().counts()
        try:
            update(trainer)
        finally:
            after = device().counts()
            reasons = device().wait_reasons(before.waits, after.waits)
            line = {"step": step, **after.since(before), "reasons": reasons}
            with Path(emulation.report).open("a", encoding="utf-8") as report:
                report.write(json.dumps(line) + "\n")

    Trainer.update = watched


def happen(accident: str | None, trainer: Trainer) -> None:
    weight = trainer.parameters[0]
    if accident == "nan":
        weight.data.fill_(float("nan"))
    elif accident == "wait":
        weight.sum().item()
    elif accident is not None:
        os.kill(os.getpid(), signal.Signals[accident])
