"""A whole training graph, compiled for CUDA with its kernels interpreted, against plain operators in float64.

    python -m tests.cuda.model_graph RECIPE DTYPE

is a program for the emulated device. It prints the relative errors of the loss and of the gradients with
respect to every parameter, as JSON.
"""

from __future__ import annotations

import json
import sys

import torch
from torch import Tensor

from hotlap import kernels
from hotlap.config import Config
from hotlap.model import build_model
from hotlap.recipes import resolve
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.compile import apply_compile
from hotlap.train.masking import Masking
from tests.tiny import END_OF_TEXT, made_up_tokens

TOKENS = 512
STEP = 60  # at which the window is wider than a block and narrower than the sequence


def batch_loss(config: Config, dtype: torch.dtype, device: str, backend: str) -> BatchLoss:
    place = torch.device(device)
    with place:
        model = build_model(config.model, TOKENS, dtype)
    masking = Masking(config, kernels.choose_backend(backend, place), END_OF_TEXT, place)
    masking.set_step(STEP)
    return BatchLoss(model, masking)


def loss_and_gradients(of: BatchLoss, tokens: Tensor, targets: Tensor) -> dict[str, Tensor]:
    loss = of(tokens, targets, None)
    loss.backward()
    gradients = {name: p.grad for name, p in of.model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **gradients}


def main(recipe: str, dtype: str) -> None:
    config = resolve(recipe, "pico")
    torch.manual_seed(0)
    compiled = batch_loss(config, getattr(torch, dtype), "cuda", "auto")
    with torch.no_grad():  # no parameter starts at zero, so that every gradient tells
        for parameter in compiled.model.parameters():
            scale = 0.5 if parameter.ndim < 2 else parameter.shape[-1] ** -0.5
            parameter.copy_(scale * torch.randn_like(parameter))
    reference = batch_loss(config, torch.float64, "cpu", "dense").double()
    reference.model.load_state_dict({n: x.cpu().double() for n, x in compiled.model.state_dict().items()})
    options = {"tokens": TOKENS, "compiled": True, "compiles_loss": True}
    kernels.install(compiled.model, backend=compiled.masking.backend, **options)
    apply_compile(compiled, "model", coordinate_descent=False)
    tokens, targets = made_up_tokens(TOKENS, config.model.vocab_size)
    expected = loss_and_gradients(reference, tokens, targets)
    found = loss_and_gradients(compiled, tokens.cuda(), targets.cuda())
    assert found.keys() == expected.keys()
    print(json.dumps({name: relative_error(found[name].cpu(), expected[name]) for name in expected}))


def relative_error(found: Tensor, expected: Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


if __name__ == "__main__":
    main(*sys.argv[1:])
