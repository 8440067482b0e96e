"""What an optimizer is given: names for every tensor, and a clear refusal of what it cannot take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hotlap.errors import OptimizerError

Parameters = Iterable[Tensor] | Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]]


def named_groups(parameters: Parameters) -> list[dict[str, Any]]:
    """Parameter groups of (name, tensor) pairs; a tensor without a name gets its position over all."""
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
    """Each name and each tensor once."""
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
    """Each a matrix, its rows divisible by its parts, and no part or factor for a name that is not there."""
    for name, tensor in named:
        if tensor.ndim != 2:
            raise OptimizerError(
                expected="matrices in Muon",
                found=f"`{name}` with shape {tuple(tensor.shape)}",
                do="give it to Adam",
            )
        count = parts.get(name, 1)
        if count < 1 or tensor.shape[0] % count:
            raise OptimizerError(
                expected=f"rows of `{name}` that divide into its parts",
                found=f"{tensor.shape[0]} rows, {count} parts",
                do="correct `parts`",
            )
    unknown = sorted({*parts, *lr_factors} - {name for name, _ in named})
    if unknown:
        raise OptimizerError(
            expected="`parts` and `lr_factors` for given parameters",
            found=f"`{unknown[0]}`, which is not among them",
            do="correct the name",
        )
