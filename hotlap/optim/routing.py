"""Parameter routing: which optimizer trains which parameter, by the role that the model declares.

Every parameter is routed exactly once, or construction fails with an error that names it. The
result is a table, which a run prints before its first step. The optimizers are built from it alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from hotlap.config import AdamConfig, OptimConfig
from hotlap.errors import OptimizerError
from hotlap.optim.chunks import MatrixSpec, plan_owners
from hotlap.optim.exchange import OnEvent
from hotlap.optim.gradients import check_gradients
from hotlap.optim.muon import Muon
from hotlap.optim.parameters import check_matrices, check_unique
from hotlap.optim.row_rms import RowRms

ROLES = ("matrix", "embedding", "pairs", "head", "scalar")


class RoutedParameter(NamedTuple):
    """A parameter as the model declares it.

    `parts` is the number of matrices concatenated along its rows, such as 3 for a fused QKV weight.
    """

    name: str
    tensor: Tensor
    role: str
    parts: int = 1


@dataclass(frozen=True)
class Route:
    """One row of the table.

    `owner` is the rank that computes the update; None means all ranks do.
    """

    name: str
    tensor: Tensor
    role: str
    optimizer: str
    lr: float
    weight_decay: float
    owner: int | None
    parts: int = 1
    lr_factor: float = 1.0


@dataclass(frozen=True)
class Routing:
    routes: tuple[Route, ...]
    config: OptimConfig
    own: tuple[torch.optim.Optimizer, ...] = ()  # made by an idea

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain values, for JSON."""
        return [
            {
                "parameter": route.name,
                "shape": list(route.tensor.shape),
                "role": route.role,
                "optimizer": route.optimizer,
                "lr": route.lr * route.lr_factor,
                "owner": route.owner,
            }
            for route in self.routes
        ]

    def table(self) -> Table:
        table = Table("parameter", "shape", "role", "optimizer", "lr", "owner", title="optimizers")
        for row in self.rows():
            shape = "×".join(map(str, row["shape"])) or "1"
            owner = "all ranks" if row["owner"] is None else f"rank {row['owner']}"
            table.add_row(row["parameter"], shape, row["role"], row["optimizer"], f"{row['lr']:g}", owner)
        return table

    def summary(self) -> str:
        """How many parameters and weights each optimizer has, on one line."""
        parts = []
        for optimizer in dict.fromkeys(route.optimizer for route in self.routes):
            tensors = [route.tensor for route in self.routes if route.optimizer == optimizer]
            weights = sum(tensor.numel() for tensor in tensors)
            parts.append(f"{optimizer} {len(tensors)} tensors, {weights:,} weights")
        return "; ".join(parts)

    def notes(self) -> list[str]:
        """Remarks to print below the table."""
        if self.config.clip_norm and any(route.optimizer == "muon" for route in self.routes):
            return [
                f"gradients are clipped to a norm of {self.config.clip_norm:g} before momentum; for Muon "
                "this only changes how much a step contributes to the momentum, not the size of the update"
            ]
        return []


def route(
    parameters: Iterable[RoutedParameter],
    config: OptimConfig,
    world_size: int,
    *,
    model_parameters: Iterable[tuple[str, Tensor]] | None = None,
    own: Sequence[torch.optim.Optimizer] = (),
) -> Routing:
    """Route each parameter by its role, or to the one of the `own` optimizers that has it.

    Raise if one of `model_parameters` is not among `parameters`.
    """
    declared = list(parameters)
    own_group = {
        name: (optimizer, group)
        for optimizer in own
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    check_unique((parameter.name, parameter.tensor) for parameter in declared)
    _check_roles(declared)
    _check_complete(declared, model_parameters)
    by_role = [p for p in declared if p.name not in own_group]
    matrices = [p for p in by_role if p.role == "matrix"] if config.matrices == "muon" else []
    lr_factors = _lr_factors(matrices, config)
    parts = {parameter.name: parameter.parts for parameter in matrices}
    check_matrices([(parameter.name, parameter.tensor) for parameter in matrices], parts, lr_factors)
    owners = plan_owners([MatrixSpec.of(p.tensor, p.parts) for p in matrices], world_size)
    owner_of = {p.name: owner for p, owner in zip(matrices, owners, strict=True)}
    routes = []
    for name, tensor, role, count in declared:
        if name in own_group:
            optimizer, group = own_group[name]
            kind, decay = type(optimizer).__name__, float(group.get("weight_decay", 0.0))
            routes.append(Route(name, tensor, role, kind, float(group["lr"]), decay, owner=None))
        elif name in owner_of:
            muon = config.muon
            factor = lr_factors.get(name, 1.0)
            routes.append(
                Route(name, tensor, role, "muon", muon.lr, muon.weight_decay, owner_of[name], count, factor)
            )
        elif role == "pairs" and config.pairs == "row-rms":
            routes.append(Route(name, tensor, role, "row-rms", config.adam.embed_lr, 0.0, owner=None))
        else:
            decay = config.adam.weight_decay if role != "scalar" and tensor.ndim >= 2 else 0.0
            kind = "adamw" if config.adam.weight_decay else "adam"
            routes.append(Route(name, tensor, role, kind, _adam_lr(role, config), decay, owner=None))
    return Routing(tuple(routes), config, tuple(own))


def build_optimizers(
    routing: Routing,
    *,
    ns_dtype: torch.dtype | None = None,
    check_finite: bool | None = None,
    process_group: dist.ProcessGroup | None = None,
    on_event: OnEvent | None = None,
) -> list[torch.optim.Optimizer]:
    """Muon, Adam and RowRms, each only if the table uses it, and those that an idea has made.

    Every parameter group has an `initial_lr`, which `apply_schedule` multiplies.
    """
    optimizers: list[torch.optim.Optimizer] = []
    in_muon = [route for route in routing.routes if route.optimizer == "muon"]
    in_row_rms = [route for route in routing.routes if route.optimizer == "row-rms"]
    in_adam = [route for route in routing.routes if route.optimizer in ("adam", "adamw")]
    if in_muon:
        muon = routing.config.muon
        optimizers.append(
            Muon(
                [(route.name, route.tensor) for route in in_muon],
                lr=muon.lr,
                momentum=muon.momentum_start,
                weight_decay=muon.weight_decay,
                nesterov=muon.nesterov,
                momentum_form=muon.momentum_form,
                ns_steps=muon.newton_schulz_steps,
                coefficients=muon.coefficients,
                ns_dtype=ns_dtype,
                update_scale=muon.update_scale,
                cautious=muon.cautious_weight_decay,
                lr_factors={route.name: route.lr_factor for route in in_muon},
                parts={route.name: route.parts for route in in_muon},
                communication=muon.communication,
                check_finite=check_finite,
                process_group=process_group,
                on_event=on_event,
            )
        )
    if in_adam:
        optimizers.append(_build_adam(in_adam, routing.config.adam, check_finite))
    if in_row_rms:
        optimizers.append(_build_row_rms(in_row_rms, routing.config.adam, check_finite))
    for optimizer in routing.own:
        names = {name for group in optimizer.param_groups for name in group["param_names"]}
        _check_gradients_before_step(
            optimizer, [route for route in routing.routes if route.name in names], check_finite
        )
        optimizers.append(optimizer)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
    return optimizers


def apply_schedule(
    optimizers: Iterable[torch.optim.Optimizer], lr_multiplier: float, muon_momentum: float
) -> None:
    """Set the learning rate and Muon's momentum for the next step."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * lr_multiplier
            if isinstance(optimizer, Muon):
                group["momentum"] = muon_momentum


def _build_adam(
    routes: Sequence[Route], adam: AdamConfig, check_finite: bool | None
) -> torch.optim.Optimizer:
    # With a weight decay of 0, AdamW is Adam.
    optimizer = torch.optim.AdamW(
        _adam_groups(routes), betas=(adam.beta1, adam.beta2), eps=adam.eps, fused=True
    )
    _check_gradients_before_step(optimizer, routes, check_finite)
    return optimizer


def _build_row_rms(
    routes: Sequence[Route], adam: AdamConfig, check_finite: bool | None
) -> torch.optim.Optimizer:
    named = [(route.name, route.tensor) for route in routes]
    optimizer = RowRms(named, lr=adam.embed_lr, beta2=adam.beta2, eps=adam.eps)
    _check_gradients_before_step(optimizer, routes, check_finite)
    return optimizer


def _check_gradients_before_step(
    optimizer: torch.optim.Optimizer, routes: Sequence[Route], check_finite: bool | None
) -> None:
    """Raise before a step if a gradient is missing or not finite, as Muon does."""
    parameters = {route.name: route.tensor for route in routes}

    def check(*_: Any) -> None:
        check_gradients(parameters, check_finite)

    optimizer.register_step_pre_hook(check)


def _adam_lr(role: str, config: OptimConfig) -> float:
    adam = config.adam
    of_role = {
        "matrix": adam.matrix_lr,
        "embedding": adam.embed_lr,
        "pairs": adam.embed_lr,
        "head": adam.head_lr,
        "scalar": adam.scalar_lr,
    }
    return of_role[role]


def _adam_groups(routes: Sequence[Route]) -> list[dict[str, Any]]:
    groups: dict[tuple[str, float, float], list[tuple[str, Tensor]]] = {}
    for route in routes:
        key = (route.role, route.lr, route.weight_decay)
        groups.setdefault(key, []).append((route.name, route.tensor))
    return [
        {"params": named, "lr": lr, "weight_decay": decay, "role": role}
        for (role, lr, decay), named in groups.items()
    ]


def _check_roles(parameters: Iterable[RoutedParameter]) -> None:
    for parameter in parameters:
        if parameter.role not in ROLES:
            raise OptimizerError(
                expected=f"a role ({', '.join(ROLES)}) for `{parameter.name}`",
                found=f"`{parameter.role}`",
                do="correct `roles` of the module that owns it",
            )


def _check_complete(
    declared: Iterable[RoutedParameter], model_parameters: Iterable[tuple[str, Tensor]] | None
) -> None:
    routed = {id(parameter.tensor) for parameter in declared}
    for name, tensor in model_parameters or ():
        if id(tensor) not in routed:
            raise OptimizerError(
                expected="a role for every parameter",
                found=f"none for `{name}`",
                do="declare it in `roles` of the module that owns it; no optimizer trains it otherwise",
            )


def _lr_factors(matrices: Iterable[RoutedParameter], config: OptimConfig) -> dict[str, float]:
    """{full parameter name: learning-rate factor}.

    A key of optim.muon.lr_factors applies to every name that contains it; several factors multiply.
    """
    factors: dict[str, float] = {}
    names = [parameter.name for parameter in matrices]
    for fragment, factor in config.muon.lr_factors.items():
        matching = [name for name in names if fragment in name]
        if not matching:
            raise OptimizerError(
                expected="a Muon parameter for each key of optim.muon.lr_factors",
                found=f"none whose name contains `{fragment}`",
                do="correct the key",
            )
        for name in matching:
            factors[name] = factors.get(name, 1.0) * factor
    return factors
