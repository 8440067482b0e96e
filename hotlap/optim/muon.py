"""Muon: momentum, orthogonalised by Newton-Schulz, for the weight matrices of a network.

Relies on nothing but PyTorch and works in any training loop. In a process group each rank orthogonalises its
share and all ranks end with the same weights, provided that they start with the same weights and gradients.
A rank keeps the momentum of the matrices it owns and of no others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.errors import OptimizerError
from hotlap.optim.chunks import GATHER_ENTRIES, Chunk, MatrixKind, plan_chunks
from hotlap.optim.exchange import OnEvent, gather_all, run_alone, run_flat, run_overlapped
from hotlap.optim.gradients import check_gradients
from hotlap.optim.muon_maths import MomentumForm, PlainMaths
from hotlap.optim.newton_schulz import CoefficientKind, step_coefficients, working_dtype
from hotlap.optim.parameters import Parameters, check_matrices, check_unique, named_groups

UpdateScale = Literal["aspect", "match-rms"]
Communication = Literal["overlapped", "flat"]


@dataclass(frozen=True)
class _Share:
    """One chunk's tensors, and this rank's momentum for the positions that it owns: (owned, rows, cols)."""

    chunk: Chunk
    group: dict[str, Any]
    names: list[str]
    weights: list[Tensor]
    owned: range
    momentum: Tensor


class Muon(torch.optim.Optimizer):
    """Muon for matrices, given as tensors, (name, tensor) pairs or parameter groups of either.

    `lr`, `momentum` and `weight_decay` may differ by group and change between steps. Names key what is
    saved; tensors without one are named by their position. The other options hold for all groups:

    nesterov        look ahead along the momentum before orthogonalising
    momentum_form   "lerp": the buffer goes to the gradient by 1-momentum; "sum": momentum·buffer + gradient
    ns_steps, coefficients   of the Newton-Schulz iteration
    ns_dtype        that it computes in; by default bfloat16 on CUDA and float32 elsewhere
    update_scale    "aspect": max(1, rows/cols)^½; "match-rms": 0.2·max(rows, cols)^½, the size of AdamW's
    cautious        decay only those weights that the update moves towards zero as well
    lr_factors      name → factor on the learning rate; {"blocks.0.mlp.up": 2.0}
    parts           name → number of matrices stacked in its rows; {"blocks.0.attention.qkv": 3}
    communication   "overlapped", or "flat": one all-reduce of all updates, to measure what the overlap gains
    gather_entries  numbers that a rank puts into one exchange: small matrices go several at a time
    check_finite    look for NaN and infinity in the gradients, before anything changes. By default on the CPU
                    only, since a GPU would have to be waited for in every step
    on_event        told each stage of each chunk as it begins, see `exchange.OnEvent`
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = True,
        momentum_form: MomentumForm = "lerp",
        ns_steps: int = 5,
        coefficients: CoefficientKind = "quintic",
        ns_dtype: torch.dtype | None = None,
        update_scale: UpdateScale = "aspect",
        cautious: bool = False,
        lr_factors: Mapping[str, float] | None = None,
        parts: Mapping[str, int] | None = None,
        communication: Communication = "overlapped",
        gather_entries: int = GATHER_ENTRIES,
        check_finite: bool | None = None,
        process_group: dist.ProcessGroup | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self.maths = PlainMaths()
        self._is_planned = False
        self._lr_factors = dict(lr_factors or {})
        self._parts = dict(parts or {})
        groups = named_groups(params)
        named = [pair for group in groups for pair in group["params"]]
        check_unique(named)
        check_matrices(named, self._parts, self._lr_factors)
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            _check_settings(group)
        _check_choices(coefficients, momentum_form, update_scale, communication)
        self._nesterov = nesterov
        self._momentum_form = momentum_form
        self._coefficients = step_coefficients(coefficients, ns_steps)
        self._ns_dtype = ns_dtype
        self._update_scale = update_scale
        self._cautious = cautious
        self._gather_entries = gather_entries
        self._check_finite = check_finite
        self._process_group = process_group
        in_group = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank(process_group) if in_group else 0
        self.world_size = dist.get_world_size(process_group) if in_group else 1
        self._on_event = on_event or (lambda _event, _chunk: None)
        self._run = run_alone
        if self.world_size > 1:
            run = run_overlapped if communication == "overlapped" else run_flat
            self._run = partial(run, process_group=process_group)
        self._shares = [share for group in self.param_groups for share in self._plan(group)]
        self._is_planned = True

    def _plan(self, group: dict[str, Any]) -> list[_Share]:
        named = list(zip(group["param_names"], group["params"], strict=True))
        kinds = [MatrixKind.of(weight, self._parts.get(name, 1)) for name, weight in named]
        shares = []
        for chunk in plan_chunks(kinds, self.world_size, self._gather_entries):
            owned = chunk.owned_by(self.rank)
            # Half precision would lose what lerp adds; such weights still get float32 momentum.
            wide = torch.promote_types(chunk.kind.dtype, torch.float32)
            momentum = torch.zeros((len(owned), *chunk.shape[1:]), dtype=wide, device=chunk.kind.device)
            weights = [named[member][1] for member in chunk.members]
            for position, buffer in zip(owned, momentum, strict=True):
                self.state[weights[position]]["momentum"] = buffer
            names = [named[member][0] for member in chunk.members]
            shares.append(_Share(chunk, group, names, weights, owned, momentum))
        return shares

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_planned:
            raise OptimizerError(
                expected="all matrices when Muon is built",
                found="a parameter group added later",
                do="build a new Muon: which rank owns which matrix is planned once, for all of them together",
            )
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        check_gradients(self.named_parameters(), self._check_finite)
        chunks = [share.chunk for share in self._shares]
        self._run(chunks, self._compute, self._apply, self._on_event)
        return loss

    def _compute(self, index: int) -> Tensor:
        """This rank's orthogonalised updates of one chunk, (owned, rows, cols)."""
        share = self._shares[index]
        buffer = share.momentum
        dtype = self._ns_dtype or working_dtype(buffer)
        if not len(share.owned):
            return buffer.to(dtype)
        gradients = [cast(Tensor, share.weights[position].grad) for position in share.owned]
        updates = self.maths.momenta(
            gradients, buffer, self._momentum_form, share.group["momentum"], self._nesterov
        )
        kind = share.chunk.kind
        pieces = updates.view(-1, kind.rows // kind.parts, kind.cols)
        return self.maths.orthogonalize(pieces, self._coefficients, dtype).reshape(updates.shape)

    def _apply(self, index: int, updates: Tensor) -> None:
        share = self._shares[index]
        kind = share.chunk.kind
        rows = kind.rows // kind.parts
        spectral = max(1.0, rows / kind.cols) ** 0.5
        scale = spectral if self._update_scale == "aspect" else 0.2 * max(rows, kind.cols) ** 0.5
        lrs = [share.group["lr"] * self._lr_factors.get(name, 1.0) for name in share.names]
        rates, decays = [lr * scale for lr in lrs], [lr * share.group["weight_decay"] for lr in lrs]
        # The slots at the end of an uneven chunk hold no matrix.
        self.maths.step(share.weights, updates[: len(share.weights)], rates, decays, self._cautious)

    def named_parameters(self) -> dict[str, Tensor]:
        """All matrices by name, owned by this rank or not."""
        return {
            name: weight
            for group in self.param_groups
            for name, weight in zip(group["param_names"], group["params"], strict=True)
        }

    def owners(self) -> dict[str, int]:
        """The rank that computes each matrix and keeps its momentum."""
        return {
            name: share.chunk.owner(position)
            for share in self._shares
            for position, name in enumerate(share.names)
        }

    def state_dict(self) -> dict[str, Any]:
        """What this rank owns, by name. Those of all ranks merge into one that any number of ranks load."""
        state = {
            name: dict(self.state[weight])
            for name, weight in self.named_parameters().items()
            if weight in self.state
        }
        return {"state": state, "param_groups": self._group_settings()}

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The state of all ranks, on the CPU. All ranks must call it; all get the same."""
        state = {}
        for share in self._shares:
            buffers = share.momentum
            if self.world_size > 1:
                buffers = gather_all(buffers, share.chunk, self._process_group)
            for name, buffer in zip(share.names, buffers, strict=True):
                state[name] = {"momentum": buffer.to("cpu", copy=True)}
        return {"state": state, "param_groups": self._group_settings()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take from a full or merged state what this rank owns. Nothing changes if something does not fit."""
        saved_names = [group["param_names"] for group in state_dict["param_groups"]]
        own_names = [group["param_names"] for group in self.param_groups]
        if saved_names != own_names:
            different = sorted({n for g in saved_names for n in g} ^ {n for g in own_names for n in g})
            found = f"`{different[0]}` in one and not in the other" if different else "another order"
            raise OptimizerError(
                expected="the state of the same matrices in the same groups",
                found=found,
                do="load it into an optimizer built from the same model",
            )
        loaded = []
        for name, weight in self.named_parameters().items():
            if weight not in self.state:
                continue
            saved = state_dict["state"].get(name, {}).get("momentum")
            if saved is None or saved.shape != weight.shape:
                raise OptimizerError(
                    expected=f"momentum of shape {tuple(weight.shape)} for `{name}`",
                    found="none" if saved is None else f"shape {tuple(saved.shape)}",
                    do="gather the state with `full_state_dict` before it is saved",
                )
            loaded.append((self.state[weight]["momentum"], saved))
        for buffer, saved in loaded:
            buffer.copy_(saved)
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in saved_group.items() if key != "param_names"})

    def _group_settings(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key != "params"} for group in self.param_groups
        ]


def _check_settings(group: Mapping[str, Any]) -> None:
    lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
    if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
        raise OptimizerError(
            expected="lr and weight_decay of 0 or more, momentum from 0 to below 1",
            found=f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}",
            do="correct what is out of range",
        )


def _check_choices(coefficients: str, momentum_form: str, update_scale: str, communication: str) -> None:
    for name, value, choices in (
        ("coefficients", coefficients, get_args(CoefficientKind)),
        ("momentum_form", momentum_form, get_args(MomentumForm)),
        ("update_scale", update_scale, get_args(UpdateScale)),
        ("communication", communication, get_args(Communication)),
    ):
        if value not in choices:
            raise OptimizerError(
                expected=f"{name} out of {', '.join(choices)}",
                found=f"{name}={value!r}",
                do="choose one of those",
            )
