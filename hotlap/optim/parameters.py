"""Optimizer arguments: a name for every tensor, and clear errors for what does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from hotlap.errors import OptimizerError
from hotlap.optim.chunks import MatrixSpec

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def named_groups(parameters: Parameters) -> list[dict[str, Any]]:
    """Parameter groups of (name, tensor) pairs.

    An unnamed tensor is named after its overall position.
    """
    entries: list[Any] = list(parameters)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    position = 0
    result = []
    for group in groups:
        members = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
        named = []
        for member in members:
            named.append(member if isinstance(member, tuple) else (str(position), member))
            position += 1
        result.append({**group, "params": named})
    if position == 0:
        raise OptimizerError(
            expected="at least one parameter", found="none", do="pass the model's `named_parameters()`"
        )
    return result


def check_unique(named: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if a name or a tensor occurs twice."""
    name_of_tensor: dict[int, str] = {}
    names: set[str] = set()
    for name, tensor in named:
        if id(tensor) in name_of_tensor or name in names:
            twice = name_of_tensor.get(id(tensor), name)
            also = f" (also as `{name}`)" if twice != name else ""
            raise OptimizerError(
                expected="every parameter once",
                found=f"`{twice}` twice{also}",
                do="pass it in one group only",
            )
        name_of_tensor[id(tensor)] = name
        names.add(name)


def check_matrices(
    named: list[tuple[str, Tensor]], parts: Mapping[str, int], lr_factors: Mapping[str, float]
) -> None:
    """Raise on tensors that are not matrices, rows not divisible by `parts`, and unknown names."""
    for name, tensor in named:
        if tensor.ndim != 2 or tensor.numel() == 0:
            raise OptimizerError(
                expected="matrices with at least one entry in Muon",
                found=f"`{name}` with shape {tuple(tensor.shape)}",
                do="use Adam for it" if tensor.numel() else "leave it out",
            )
        count = parts.get(name, 1)
        if count < 1 or tensor.shape[0] % count:
            raise OptimizerError(
                expected=f"a number of rows of `{name}` that is divisible by its parts",
                found=f"{tensor.shape[0]} rows, {count} parts",
                do="correct `parts`",
            )
    unknown = sorted({*parts, *lr_factors} - {name for name, _ in named})
    if unknown:
        raise OptimizerError(
            expected="`parts` and `lr_factors` of the given parameters only",
            found=f"`{unknown[0]}`, which is not among them",
            do="correct the name",
        )


def check_settings(group: Mapping[str, Any]) -> None:
    """Raise if a setting of one of Muon's parameter groups is out of range."""
    lr, momentum, weight_decay = group["lr"], group["momentum"], group["weight_decay"]
    if not (lr >= 0 and 0 <= momentum < 1 and weight_decay >= 0):
        raise OptimizerError(
            expected="lr ≥ 0, 0 ≤ momentum < 1 and weight_decay ≥ 0",
            found=f"lr={lr}, momentum={momentum}, weight_decay={weight_decay}",
            do="correct the value that is out of range",
        )


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise OptimizerError(
            expected=f"{name} to be one of {', '.join(choices)}",
            found=f"{name}={value!r}",
            do="choose one of these",
        )


def check_shapes(names: Sequence[str], weights: Sequence[Tensor], specs: Sequence[MatrixSpec]) -> None:
    """Raise if a matrix has changed its shape since the optimizer was built."""
    for name, weight, spec in zip(names, weights, specs, strict=True):
        if weight.shape != (spec.rows, spec.cols):
            raise OptimizerError(
                expected=f"`{name}` to keep its shape ({spec.rows}, {spec.cols})",
                found=f"{tuple(weight.shape)}",
                do="build a new Muon after replacing the data of a parameter by another shape",
            )
