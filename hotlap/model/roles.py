"""Parameter roles, declared by the module that owns the parameter. Optimizer routing uses them.

A module with parameters of its own has a class attribute `roles`: {parameter name: role}. A
parameter without a role is a bug of its module and fails construction.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import nn

Role = Literal["matrix", "embedding", "pairs", "head", "scalar"]


def parameter_roles(model: nn.Module) -> dict[str, Role]:
    """{full parameter name: role}, each parameter once, in the order of the modules."""
    roles: dict[str, Role] = {}
    for prefix, module in model.named_modules():
        declared = getattr(module, "roles", {})
        for name, _ in module.named_parameters(recurse=False):
            full = f"{prefix}.{name}" if prefix else name
            assert name in declared, f"{type(module).__name__} declares no role for its parameter {full}"
            assert declared[name] in get_args(Role), f"{full} has the unknown role {declared[name]}"
            roles[full] = declared[name]
    return roles
