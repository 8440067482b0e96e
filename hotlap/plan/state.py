"""Parameters by role, and the bytes of weights, gradients and optimizer state on one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hotlap.config import Config
from hotlap.model import GPT, GPT2, build_model
from hotlap.optim.chunks import MatrixSpec
from hotlap.optim.routing import ROLES, Route, Routing
from hotlap.train.lap import packed_tokens, route_parameters

ADAM_MOMENTS = 2  # of the parameter's own dtype


@dataclass(frozen=True)
class ModelState:
    """Bytes on the rank that keeps the most. They exist from the first step to the last."""

    weights: int
    buffers: int  # cos and sin of the rotary embedding
    adam: int
    muon: int  # momentum of the matrices that the rank owns
    row_rms: int

    @property
    def optimizer(self) -> int:
        return self.adam + self.muon + self.row_rms

    @property
    def total(self) -> int:
        return self.weights + self.buffers + self.optimizer


def meta_model(config: Config, dtype: torch.dtype) -> GPT | GPT2:
    """The model of a run without memory for its tensors."""
    with torch.device("meta"):
        return build_model(config.model, packed_tokens(config), dtype)


def count_by_role(routing: Routing) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for route in routing.routes:
        counts[route.role] += route.tensor.numel()
    return {role: counts[role] for role in ROLES if counts[role]}


def model_state(model: GPT | GPT2, config: Config, world_size: int) -> ModelState:
    routing = route_parameters(model, config, world_size)
    of_optimizer: dict[str, list[Route]] = {}
    for route in routing.routes:
        of_optimizer.setdefault(route.optimizer, []).append(route)
    in_adam = [*of_optimizer.get("adam", ()), *of_optimizer.get("adamw", ())]
    return ModelState(
        weights=total_bytes(model.parameters()),
        buffers=total_bytes(model.buffers()),
        adam=ADAM_MOMENTS * total_bytes(route.tensor for route in in_adam),
        muon=_largest_momentum(of_optimizer.get("muon", ())),
        row_rms=total_bytes(route.tensor for route in of_optimizer.get("row-rms", ())),
    )


def matrix_specs(model: GPT | GPT2, config: Config) -> list[MatrixSpec]:
    """Of the matrices that Muon updates, in its order."""
    routing = route_parameters(model, config, 1)
    return [MatrixSpec.of(route.tensor, route.parts) for route in routing.routes if route.optimizer == "muon"]


def total_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _largest_momentum(routes: Iterable[Route]) -> int:
    """Bytes of Muon's momentum, at least float32, on the rank that owns the most."""
    per_owner: Counter[int | None] = Counter()
    for route in routes:
        element_bytes = max(4, route.tensor.element_size())
        per_owner[route.owner] += route.tensor.numel() * element_bytes
    return max(per_owner.values(), default=0)
