"""One compiled training step of a configuration on a named GPU: its launches and its memory.

The compiler is the real one. It takes about a minute at `small`, in a child process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hotlap.config import Config
from hotlap.emulation.child import call
from hotlap.gpus import find_gpu
from hotlap.settings import to_json


@dataclass(frozen=True)
class Launches:
    """Of one phase of a step: kernels that Inductor wrote, and torch's own operators, such as matmuls."""

    kernels: int
    operators: int
    matmuls: int  # of the operators
    bytes_outside_matmuls: int  # read and written

    @property
    def total(self) -> int:
        return self.kernels + self.operators


@dataclass(frozen=True)
class CompiledStep:
    gpu: str
    tokens: int  # of the micro-batch
    mode: str  # what is compiled: the model as one graph, or its parts
    loss: str  # what computes it, as in a run's header
    graphs: int  # of the model; a whole one has one forward and one backward
    optimizer_graphs: int
    kernels: int  # distinct ones, of model and optimizers
    graph_breaks: int
    recompilations: int  # over the windows that were tried
    windows: tuple[int, ...]  # in tokens
    forward: Launches
    backward: Launches
    optimizer: Launches
    # Bytes that torch.cuda.max_memory_allocated and memory_allocated would report, in MiB: the highest of a
    # whole step, and what stays between steps (parameters, optimizer state, tables).
    peak_mib: float
    resident_mib: float
    operators: dict[str, int]  # {operator: launches} of the whole step
    seconds: float  # that this took
    sources: dict[str, str] | None = None  # {kernel: Triton source}

    @property
    def phases(self) -> tuple[Launches, Launches, Launches]:
        return self.forward, self.backward, self.optimizer

    @property
    def launches(self) -> int:
        return sum(phase.total for phase in self.phases)

    @property
    def launches_outside_matmuls(self) -> int:
        return self.launches - sum(phase.matmuls for phase in self.phases)

    @property
    def bytes_outside_matmuls(self) -> int:
        return sum(phase.bytes_outside_matmuls for phase in self.phases)


def compiled_step(
    config: Config,
    *,
    gpu: str,
    tokens: int | None = None,
    world_size: int = 1,
    window_steps: tuple[int, ...] = (),
    with_sources: bool = False,
) -> CompiledStep:
    """Compile and run a step of `config` on fake tensors, as `gpu` would.

    `tokens` of one micro-batch: by default the largest that a rank of `world_size` has. One rank compiles
    the whole model as one graph, several compile its parts. After the step, the windows of `window_steps` of
    the schedule are tried for recompilations. Of several ranks' optimizers, this one updates all matrices.
    """
    answer = call(
        "hotlap.emulation.step:measure",
        config=to_json(config),
        gpu=find_gpu(gpu).name,
        tokens=tokens,
        world_size=world_size,
        window_steps=list(window_steps),
        with_sources=with_sources,
    )
    return from_answer(answer)


def from_answer(answer: dict[str, Any]) -> CompiledStep:
    phases = {name: Launches(**answer[name]) for name in ("forward", "backward", "optimizer")}
    return CompiledStep(**{**answer, **phases, "windows": tuple(answer["windows"])})
