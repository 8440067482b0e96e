"""Parameter roles, declared by the module that owns the parameter. Optimizer routing uses them.

A module with parameters has a class attribute `roles`: {parameter name: role}. It may also declare those of
the modules inside it, by dotted names (`{"gate.weight": "matrix"}` for a `torch.nn.Linear`). The innermost
declaration counts. A parameter without a role is a bug of its module and fails construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal, get_args

from torch import nn

Role = Literal["matrix", "embedding", "pairs", "head", "scalar"]


def parameter_roles(model: nn.Module, given: Mapping[str, Role] | None = None) -> dict[str, Role]:
    """{full parameter name: role}, each parameter once, in the order of the modules.

    `given`: {pattern of full names: role}, as in `blocks.*.gate`; it counts before what modules declare.
    """
    roles: dict[str, Role] = {}
    for name, role in find_roles(model, given or {}).items():
        assert role is not None, f"no module declares a role for the parameter {name}"
        assert role in get_args(Role), f"{name} has the unknown role {role}"
        roles[name] = role
    return roles


def find_roles(model: nn.Module, given: Mapping[str, Role]) -> dict[str, Role | None]:
    """As `parameter_roles`, with None for a parameter without a role."""
    modules = dict(model.named_modules())
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in modules.items()
        for name, _ in module.named_parameters(recurse=False)
    ]
    return {name: _given_role(name, given) or _declared_role(name, modules) for name in names}


def _given_role(name: str, given: Mapping[str, Role]) -> Role | None:
    return next((role for pattern, role in given.items() if fnmatchcase(name, pattern)), None)


def _declared_role(name: str, modules: Mapping[str, nn.Module]) -> Role | None:
    words = name.split(".")
    for depth in reversed(range(len(words))):
        declared = getattr(modules[".".join(words[:depth])], "roles", {})
        inner = ".".join(words[depth:])
        if inner in declared:
            role: Role = declared[inner]
            return role
    return None
