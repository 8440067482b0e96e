"""Optimizer state as named tensors, as a checkpoint stores it, independent of the number of ranks.

A tensor is named `parameter/entry`, such as `blocks.0.mlp.up/momentum`. Muon's state is gathered
from the ranks that own it; the state of the other optimizers is equal on all ranks. Restoring is
bit-exact. A state that does not fit raises before anything has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hotlap.errors import CheckpointError
from hotlap.optim.muon import Muon
from hotlap.optim.row_rms import RowRms


def gather_state(optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Tensor]:
    """All state, on the CPU. A collective: every rank must call it and gets the same result."""
    tensors = {}
    for optimizer in optimizers:
        if isinstance(optimizer, Muon):
            by_name = optimizer.full_state_dict()["state"]
        else:
            by_name = {name: optimizer.state.get(tensor, {}) for name, tensor in _named(optimizer).items()}
        for name, entries in by_name.items():
            for entry, value in entries.items():
                tensors[f"{name}/{entry}"] = torch.as_tensor(value).to("cpu", copy=True)
    return tensors


def restore_state(optimizers: Iterable[torch.optim.Optimizer], tensors: Mapping[str, Tensor]) -> None:
    """Load the result of `gather_state`, on any number of ranks."""
    optimizers = list(optimizers)
    by_name: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, _, entry = key.rpartition("/")
        by_name.setdefault(name, {})[entry] = value
    expected_entries = {name: _entries(optimizer) for optimizer in optimizers for name in _named(optimizer)}
    shapes = {name: tensor.shape for optimizer in optimizers for name, tensor in _named(optimizer).items()}
    _check_fit(by_name, expected_entries, shapes)
    for optimizer in optimizers:
        state_dict = optimizer.state_dict()
        if isinstance(optimizer, Muon):
            state_dict["state"] = {name: by_name[name] for name in _named(optimizer)}
        else:
            # Clone, because an optimizer may keep and overwrite the tensors that it loads.
            state_dict["state"] = {
                index: {entry: value.clone() for entry, value in by_name[name].items()}
                for index, name in enumerate(_named(optimizer))
                if name in by_name
            }
        optimizer.load_state_dict(state_dict)


def _entries(optimizer: torch.optim.Optimizer) -> set[str] | None:
    """What a parameter's state has after a step; None if only the optimizer knows, as one of an idea."""
    if isinstance(optimizer, Muon):
        return {"momentum"}
    if isinstance(optimizer, RowRms):
        return {"step", "exp_avg_sq"}
    return {"step", "exp_avg", "exp_avg_sq"} if type(optimizer) is torch.optim.AdamW else None


def _named(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    return {
        name: tensor
        for group in optimizer.param_groups
        for name, tensor in zip(group["param_names"], group["params"], strict=True)
    }


def _check_fit(
    saved: Mapping[str, Mapping[str, Tensor]],
    expected_entries: Mapping[str, set[str] | None],
    shapes: Mapping[str, torch.Size],
) -> None:
    has_stepped = any("step" in entries for entries in saved.values())
    for name, entries in expected_entries.items():
        if entries is None:
            continue
        # Adam and RowRms create their state in the first step.
        wanted = entries if has_stepped or entries == {"momentum"} else set()
        found = saved.get(name, {})
        misfit = next((e for e, t in found.items() if e != "step" and t.shape != shapes[name]), None)
        if set(found) != wanted or misfit:
            wrong_shape = f"{misfit} of shape {tuple(found[misfit].shape)}" if misfit else ""
            raise CheckpointError(
                expected=f"optimizer state of `{name}`, {sorted(wanted)} of shape {tuple(shapes[name])}",
                found=wrong_shape or str(sorted(found)),
                do="resume with the recipe and size that the checkpoint was saved with",
            )
    unknown = sorted(set(saved) - set(expected_entries))
    if unknown:
        raise CheckpointError(
            expected="optimizer state of this model's parameters",
            found=f"`{unknown[0]}`, which the model does not have",
            do="resume with the recipe and size that the checkpoint was saved with",
        )
