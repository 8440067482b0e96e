"""In the child process: one uncompiled training step on fake CUDA tensors, looked at by a census."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hotlap.emulation.step import build_parts
from hotlap.emulation.torch_internals import pretend_for_fake_tensors, run_flex_uncompiled
from hotlap.gpus import find_gpu
from hotlap.recipes import resolve
from hotlap.train.compile import max_micro_batch_tokens
from tests.cuda.census import Census

WORLD_SIZE = 8  # of the records


def take_step(recipe: str, gpu: str = "H100") -> dict[str, Any]:
    """What the census found in the step of one micro-batch at `small`."""
    pretend_for_fake_tensors(find_gpu(gpu))
    run_flex_uncompiled()
    config = resolve(recipe, "small")
    count = max_micro_batch_tokens(config, WORLD_SIZE)
    with FakeTensorMode(), torch.compiler.set_stance("force_eager"):
        parts = build_parts(config, count)
        with Census(count) as census:
            parts.masking.set_step(config.schedule.steps)
            parts.loss(*parts.tokens(count)).backward()
            mistaken = [
                name
                for name, parameter in parts.model.named_parameters()
                if parameter.grad is None
                or (parameter.grad.dtype, parameter.grad.device) != (parameter.dtype, parameter.device)
            ]
            parts.update()
    findings = [*census.findings, *(f"no gradient of {name} in its dtype" for name in mistaken)]
    return {
        "loss": parts.installed.as_json()["loss"],
        "findings": findings,
        "matmuls": dict(census.matmuls),
        "wide": dict(census.wide),
        "operators": census.operators,
    }
