"""Inside the child process: the parts of a lap on fake tensors, and one compiled step of them.

The parts are built as `hotlap.train.lap` does, without data, distribution or a clock.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hotlap import kernels
from hotlap.config import Config
from hotlap.distributed.process_group import Distributed
from hotlap.emulation.compiled_step import CompiledStep, Launches
from hotlap.emulation.recorder import CompilerRecorder, StepRecorder
from hotlap.emulation.torch_internals import pretend_for_fake_tensors
from hotlap.gpus import find_gpu
from hotlap.hardware import select_precision
from hotlap.model import GPT, GPT2, build_model
from hotlap.optim.gradients import clip_global_norm
from hotlap.optim.routing import build_optimizers
from hotlap.settings import from_json
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.compile import (
    apply_compile,
    choose_mode,
    compiles_loss,
    compiles_optimizers,
    max_micro_batch_tokens,
)
from hotlap.train.lap import GPT2_END_OF_TEXT, packed_tokens, route_parameters, saved_bytes_per_layer
from hotlap.train.masking import Masking
from hotlap.train.run import set_up_process

MIB = 2**20


@dataclass(frozen=True)
class Parts:
    """What one step needs. Everything is on the emulated device."""

    config: Config
    model: GPT | GPT2
    masking: Masking
    batch_loss: BatchLoss
    optimizers: list[torch.optim.Optimizer]
    installed: kernels.Installed

    def tokens(self, count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.zeros(count, dtype=torch.int32, device="cuda:0")
        return inputs, torch.zeros(count, dtype=torch.int64, device="cuda:0")

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """As in training, where every sequence starts a document."""
        loss: Tensor = self.batch_loss(inputs, targets, self.config.batch.sequence_tokens)
        return loss

    def update(self) -> None:
        """Clip and step as `Trainer.update` does."""
        if self.config.optim.clip_norm:
            clip_global_norm(self.model.parameters(), self.config.optim.clip_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad(set_to_none=True)


def build_parts(config: Config, tokens: int) -> Parts:
    """Must be called inside a FakeTensorMode."""
    device = torch.device("cuda:0")
    set_up_process(config, Distributed(0, 0, 1, 1, device, has_group=False))
    dtype = select_precision(config.runtime.precision, device)
    backend = kernels.choose_backend(
        config.attention.backend, device, saved_bytes=saved_bytes_per_layer(config)
    )
    with device:
        model = build_model(config.model, max(tokens, packed_tokens(config)), dtype)
    masking = Masking(config, backend, GPT2_END_OF_TEXT, device)
    optimizers = build_optimizers(
        route_parameters(model, config, world_size=1), ns_dtype=dtype, check_finite=False
    )
    installed = kernels.install(
        model,
        optimizers,
        backend=backend,
        tokens=tokens,
        compiled=config.runtime.compile in ("block", "parts", "model"),
        compiles_loss=compiles_loss(config, device),
        compiles_optimizers=compiles_optimizers(config, device),
    )
    return Parts(config, model, masking, BatchLoss(model, masking), optimizers, installed)


def measure(
    *,
    config: dict[str, Any],
    gpu: str,
    tokens: int | None,
    world_size: int,
    window_steps: list[int],
    with_sources: bool,
) -> dict[str, Any]:
    """A `CompiledStep` as JSON."""
    began = time.monotonic()
    pretend_for_fake_tensors(find_gpu(gpu))
    chosen = from_json(Config, config)
    count = tokens or max_micro_batch_tokens(chosen, world_size)
    compiler = CompilerRecorder()
    compiler.install()
    with FakeTensorMode(), StepRecorder() as recorder:
        parts = build_parts(chosen, count)
        device, dtype = torch.device("cuda:0"), parts.model.dtype
        mode = choose_mode(chosen, device, dtype, 1, parts.installed, world_size).mode
        # No tuning: it measures, and changes neither kernels nor launches.
        apply_compile(parts.batch_loss, mode, coordinate_descent=False)
        first = _step(parts, count, compiler, recorder)  # compiles, and makes the optimizers' state
        graphs = len(compiler.graphs)
        recorder.restart_peak()
        resident_bytes = recorder.live_bytes
        phases = _step(parts, count, compiler, recorder)
        peak_bytes = recorder.peak_bytes
        windows = []
        for step in window_steps:
            parts.masking.set_step(step)
            windows.append(parts.masking.window_tokens)
            parts.loss(*parts.tokens(count)).backward()
            parts.model.zero_grad(set_to_none=True)
    operators: Counter[str] = sum((phase.operators for phase in phases.values()), Counter())
    found = CompiledStep(
        gpu=gpu,
        tokens=count,
        mode=mode,
        loss=parts.installed.as_json()["loss"],
        graphs=first["forward"].new_graphs + first["backward"].new_graphs,
        optimizer_graphs=first["optimizer"].new_graphs,
        kernels=len(compiler.sources),
        graph_breaks=sum(torch._dynamo.utils.counters["graph_break"].values()),
        recompilations=len(compiler.graphs) - graphs,
        windows=tuple(windows),
        forward=phases["forward"].launches,
        backward=phases["backward"].launches,
        optimizer=phases["optimizer"].launches,
        peak_mib=peak_bytes / MIB,
        resident_mib=resident_bytes / MIB,
        operators=dict(operators),
        seconds=time.monotonic() - began,
        sources=compiler.sources if with_sources else None,
    )
    return asdict(found)


@dataclass(frozen=True)
class _Phase:
    new_graphs: int  # that were compiled in it
    operators: Counter[str]
    launches: Launches


def _step(parts: Parts, count: int, compiler: CompilerRecorder, recorder: StepRecorder) -> dict[str, _Phase]:
    phases: dict[str, _Phase] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        compiler.restart()
        recorder.launches.clear()
        graphs = len(compiler.graphs)
        yield
        outside = sum(launch.bytes for launch in recorder.launches if not launch.is_matmul)
        phases[name] = _Phase(
            new_graphs=len(compiler.graphs) - graphs,
            operators=Counter(launch.operator for launch in recorder.launches),
            launches=Launches(
                kernels=compiler.launched.total(),
                operators=len(recorder.launches),
                matmuls=sum(launch.is_matmul for launch in recorder.launches),
                bytes_outside_matmuls=compiler.moved.total() + outside,
            ),
        )

    with phase("forward"):
        loss = parts.loss(*parts.tokens(count))
    with phase("backward"):
        loss.backward()
    with phase("optimizer"):
        parts.update()
    return phases
