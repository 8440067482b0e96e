"""Muon: momentum orthogonalized by Newton-Schulz, for the weight matrices of a network.

Muon is by Keller Jordan et al. (https://kellerjordan.github.io/posts/muon/). The distributed scheme
follows modded-nanogpt (https://github.com/KellerJordan/modded-nanogpt): each rank orthogonalizes
the matrices that it owns, keeps only their momentum, and sends the updates to the other ranks. All
ranks end a step with the same weights if they start it with the same weights and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.errors import OptimizerError
from hotlap.optim.chunks import GATHER_ENTRIES, Chunk, MatrixSpec, plan_chunks
from hotlap.optim.exchange import OnEvent, gather_chunk, run_flat, run_overlapped, run_single_rank
from hotlap.optim.gradients import check_gradients
from hotlap.optim.muon_math import MomentumForm, PlainMath, UpdateRule
from hotlap.optim.newton_schulz import CoefficientKind, step_coefficients, working_dtype
from hotlap.optim.parameters import (
    Parameters,
    check_choice,
    check_matrices,
    check_settings,
    check_shapes,
    check_unique,
    named_groups,
)

UpdateScale = Literal["aspect", "match-rms"]
Communication = Literal["overlapped", "flat"]


@dataclass(frozen=True)
class _Stack:
    """Matrices of one spec that this rank owns in a chunk, and their momentum (count, rows, cols)."""

    spec: MatrixSpec
    weights: list[Tensor]
    momentum: Tensor


@dataclass(frozen=True)
class _LocalChunk:
    """A chunk on this rank: all of its weights, and what the rank owns, at least one empty stack."""

    chunk: Chunk
    names: list[str]
    weights: list[Tensor]
    stacks: list[_Stack]


class Muon(torch.optim.Optimizer):
    """Muon for matrices, given as tensors, (name, tensor) pairs or parameter groups of either.

    `lr`, `momentum` and `weight_decay` may differ per group and change between steps. The state is
    keyed by name; an unnamed tensor is named after its position. Options of all groups:

    nesterov        use Nesterov momentum
    momentum_form   "lerp": buffer = momentum·buffer + (1 − momentum)·gradient;
                    "sum": buffer = momentum·buffer + gradient
    ns_steps        number of Newton-Schulz steps
    coefficients    of the Newton-Schulz polynomials: "quintic" or "polar-express"
    ns_dtype        dtype of Newton-Schulz; by default bfloat16 on CUDA and float32 elsewhere
    update_scale    "aspect": √max(1, rows/cols); "match-rms": 0.2·√max(rows, cols), which matches
                    the RMS of AdamW's updates
    cautious        decay only the entries that the update moves toward zero
    lr_factors      {name: factor on the learning rate}, such as {"blocks.0.mlp.up": 2.0}
    parts           {name: number of matrices concatenated along the rows}, each orthogonalized on
                    its own, such as {"blocks.0.attention.qkv": 3}
    communication   "overlapped": exchange a chunk while the next one is computed; "flat": one
                    all-reduce of all updates, the baseline for measuring the overlap
    gather_entries  target number of entries that a rank contributes to one all-gather; small
                    matrices are gathered several at a time
    check_finite    raise on NaN or infinity in the gradients before anything changes; by default
                    only on the CPU, because on a GPU it synchronizes in every step
    on_event        called before each stage of each chunk, see `exchange.OnEvent`
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
        self.math = PlainMath()
        self._is_planned = False
        self._lr_factors = dict(lr_factors or {})
        self._parts = dict(parts or {})
        groups = named_groups(params)
        named = [pair for group in groups for pair in group["params"]]
        check_unique(named)
        check_matrices(named, self._parts, self._lr_factors)
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for group in self.param_groups:
            check_settings(group)
        check_choice("coefficients", coefficients, get_args(CoefficientKind))
        check_choice("momentum_form", momentum_form, get_args(MomentumForm))
        check_choice("update_scale", update_scale, get_args(UpdateScale))
        check_choice("communication", communication, get_args(Communication))
        self._rule = UpdateRule(momentum_form, nesterov, step_coefficients(coefficients, ns_steps))
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
        self._run = run_single_rank
        if self.world_size > 1:
            run = run_overlapped if communication == "overlapped" else run_flat
            self._run = partial(run, process_group=process_group)
        self._local_chunks = self._plan()
        self._is_planned = True

    def _plan(self) -> list[_LocalChunk]:
        named = [
            (name, weight, MatrixSpec.of(weight, self._parts.get(name, 1), index))
            for index, group in enumerate(self.param_groups)
            for name, weight in zip(group["param_names"], group["params"], strict=True)
        ]
        names, weights, specs = zip(*named, strict=True)
        local_chunks = []
        for chunk in plan_chunks(specs, self.world_size, self._gather_entries):
            in_chunk = [weights[member] for member in chunk.members]
            owned = chunk.stacks_of(self.rank) or [range(0)]
            stacks = [_new_stack(chunk.specs[run.start], in_chunk[run.start : run.stop]) for run in owned]
            for stack in stacks:
                for weight, buffer in zip(stack.weights, stack.momentum, strict=True):
                    self.state[weight]["momentum"] = buffer
            in_order = [names[member] for member in chunk.members]
            local_chunks.append(_LocalChunk(chunk, in_order, in_chunk, stacks))
        return local_chunks

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if self._is_planned:
            raise OptimizerError(
                expected="all matrices when Muon is built",
                found="a parameter group added later",
                do="build a new Muon: ownership of the matrices is planned once, for all groups together",
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        # torch's own leaves out the plan, without which a copy of the optimizer cannot step.
        return dict(vars(self))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for local in self._local_chunks:
            check_shapes(local.names, local.weights, local.chunk.specs)
        check_gradients(self.named_parameters(), self._check_finite)
        chunks = [local.chunk for local in self._local_chunks]
        self._run(chunks, self._compute, self._apply, self._on_event)
        return loss

    def _compute(self, index: int) -> list[Tensor]:
        """The orthogonalized updates that this rank owns in one chunk, stacks (count, rows, cols)."""
        return [self._compute_stack(stack) for stack in self._local_chunks[index].stacks]

    def _compute_stack(self, stack: _Stack) -> Tensor:
        dtype = self._update_dtype(stack.spec)
        if not stack.weights:
            return stack.momentum.to(dtype)
        gradients = [cast(Tensor, weight.grad) for weight in stack.weights]
        momentum = self.param_groups[stack.spec.group]["momentum"]
        return self.math.compute_updates(
            gradients, stack.momentum, momentum, self._rule, stack.spec.parts, dtype
        )

    def _apply(self, index: int, updates: Sequence[Tensor]) -> None:
        """Update all weights of one chunk; `updates` are (rows, cols) each."""
        local = self._local_chunks[index]
        rates, decays = [], []
        for name, spec in zip(local.names, local.chunk.specs, strict=True):
            group = self.param_groups[spec.group]
            lr = group["lr"] * self._lr_factors.get(name, 1.0)
            rates.append(lr * self._scale(spec))
            decays.append(lr * group["weight_decay"])
        self.math.update_weights(local.weights, updates, rates, decays, self._cautious)

    def _scale(self, spec: MatrixSpec) -> float:
        rows = spec.rows // spec.parts
        aspect: float = max(1.0, rows / spec.cols) ** 0.5
        return aspect if self._update_scale == "aspect" else 0.2 * max(rows, spec.cols) ** 0.5

    def _update_dtype(self, spec: MatrixSpec) -> torch.dtype:
        return self._ns_dtype or working_dtype(spec.dtype, spec.device)

    def named_parameters(self) -> dict[str, Tensor]:
        """All matrices by name, including those that other ranks own."""
        return {
            name: weight
            for group in self.param_groups
            for name, weight in zip(group["param_names"], group["params"], strict=True)
        }

    def owners(self) -> dict[str, int]:
        """{name: rank that computes the update and keeps the momentum}."""
        return {
            name: owner
            for local in self._local_chunks
            for name, owner in zip(local.names, local.chunk.owners, strict=True)
        }

    def newton_schulz_stacks(self) -> list[tuple[tuple[int, int, int], torch.dtype]]:
        """(count, rows, cols) and dtype of each stack that all ranks together orthogonalize in a step."""
        stacks = []
        for local in self._local_chunks:
            for rank in sorted(set(local.chunk.owners)):
                for run in local.chunk.stacks_of(rank):
                    spec = local.chunk.specs[run.start]
                    shape = (len(run) * spec.parts, spec.rows // spec.parts, spec.cols)
                    stacks.append((shape, self._update_dtype(spec)))
        return stacks

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank owns, by name.

        The states of all ranks merge into one that loads on any number of ranks.
        """
        state = {
            name: dict(self.state[weight])
            for name, weight in self.named_parameters().items()
            if weight in self.state
        }
        return {"state": state, "param_groups": self._group_settings()}

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """The state of all matrices, on the CPU. A collective: every rank must call it."""
        state = {}
        for local in self._local_chunks:
            own = [stack.momentum for stack in local.stacks]
            buffers = [buffer for stack in own for buffer in stack]
            if self.world_size > 1:
                buffers = gather_chunk(own, local.chunk, self._process_group)
            for name, buffer in zip(local.names, buffers, strict=True):
                state[name] = {"momentum": buffer.to("cpu", copy=True)}
        return {"state": state, "param_groups": self._group_settings()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this rank owns from a full or merged state. On an error nothing has changed."""
        saved_names = [group["param_names"] for group in state_dict["param_groups"]]
        own_names = [group["param_names"] for group in self.param_groups]
        if saved_names != own_names:
            different = sorted({n for g in saved_names for n in g} ^ {n for g in own_names for n in g})
            found = f"`{different[0]}` in only one of the two" if different else "another order"
            raise OptimizerError(
                expected="a state with the same matrices in the same groups",
                found=found,
                do="load it into a Muon built from the same model",
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
                    do="save the state that `full_state_dict` returns",
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


def _new_stack(spec: MatrixSpec, weights: list[Tensor]) -> _Stack:
    # At least float32: half precision would round away small increments.
    dtype = torch.promote_types(spec.dtype, torch.float32)
    momentum = torch.zeros((len(weights), spec.rows, spec.cols), dtype=dtype, device=spec.device)
    return _Stack(spec, weights, momentum)
