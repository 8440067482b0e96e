"""Inside the child process: the loss with full logits, compiled for a GPU, and what it moves.

call("hotlap.emulation.head:full_logits_traffic", tokens=65_536, …, gpu="H100")
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hotlap.emulation.recorder import CompilerRecorder, StepRecorder
from hotlap.emulation.torch_internals import pretend_for_fake_tensors
from hotlap.gpus import find_gpu
from hotlap.kernels.cuda.head_traffic import Traffic
from hotlap.model.head import cross_entropy


def full_logits_traffic(
    *, tokens: int, width: int, vocabulary: int, softcap: float | None, gpu: str
) -> dict[str, Any]:
    """`Traffic` as JSON, of loss and gradients with bfloat16 activations and a float32 weight."""
    pretend_for_fake_tensors(find_gpu(gpu))
    compiler = CompilerRecorder()
    compiler.install()
    with FakeTensorMode(), StepRecorder() as recorder, torch.device("cuda:0"):
        x = torch.empty(tokens, width, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(vocabulary, width, requires_grad=True)
        targets = torch.empty(tokens, dtype=torch.int64)
        loss = torch.compile(cross_entropy, dynamic=False, fullgraph=True)
        for _ in range(2):  # the first compiles
            compiler.restart()
            recorder.launches.clear()
            loss(x, weight, targets, softcap).backward()
            x.grad = weight.grad = None
    matmuls = [launch.bytes for launch in recorder.launches if launch.is_matmul]
    others = [launch.bytes for launch in recorder.launches if not launch.is_matmul]
    return Traffic(
        launches=compiler.launched.total() + len(recorder.launches),
        matmuls=len(matmuls),
        bytes_outside_matmuls=compiler.moved.total() + sum(others),
        bytes_of_matmuls=sum(matmuls),
    )._asdict()
