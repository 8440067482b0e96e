"""A model at `pico` and made-up tokens, for tests that need a few real training steps without a corpus."""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.config import Config
from hotlap.kernels import choose_backend, install
from hotlap.model import GPT, GPT2, build_model
from hotlap.optim.routing import apply_schedule, build_optimizers
from hotlap.optim.schedules import lr_multiplier, momentum
from hotlap.train.lap import route_parameters
from hotlap.train.masking import Masking

END_OF_TEXT = 7


def made_up_tokens(count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets with some structure to learn and a document every hundred tokens or so."""
    i = torch.arange(count + 1)
    tokens = (31 * (i % 50) ** 2 + 17 * i + 101 * (i // 37)) % vocab_size
    tokens[tokens == END_OF_TEXT] = END_OF_TEXT + 1
    tokens[::97] = END_OF_TEXT
    return tokens[:-1].to(torch.int32), tokens[1:]


def make_model(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> GPT | GPT2:
    torch.manual_seed(seed)
    return build_model(config.model, config.batch.sequence_tokens, dtype).to(dtype)


def make_masking(config: Config, step: int = 0, backend: str = "blocked") -> Masking:
    cpu = torch.device("cpu")
    masking = Masking(config, choose_backend(backend, cpu), END_OF_TEXT, cpu)
    masking.set_step(step)
    return masking


def train(
    config: Config, model: GPT | GPT2, steps: int, backend: str = "blocked", *, fused: bool = False
) -> list[float]:
    """Losses of the first steps of the recipe's own schedule, always on the same tokens."""
    optimizers = build_optimizers(route_parameters(model, config, world_size=1))
    tokens, targets = made_up_tokens(config.batch.sequence_tokens, config.model.vocab_size)
    masking = make_masking(config, backend=backend)
    if fused:
        install(model, optimizers, backend=masking.backend, tokens=len(tokens))
    losses = []
    for step in range(steps):
        masking.set_step(step)
        loss = model(tokens, targets, masking.plans(tokens, None))
        loss.backward()
        apply_schedule(optimizers, lr_multiplier(step, config.schedule), momentum(step, config.optim.muon))
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return losses
