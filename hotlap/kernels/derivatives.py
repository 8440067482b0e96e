"""For gradients written by hand: refuse to be differentiated again, which would be silently wrong.

Not torch's `once_differentiable`, which lets create_graph pass where the incoming gradient is a constant, and
then a second derivative lacks what comes from there without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Operands = ParamSpec("Operands")
Gradients = TypeVar("Gradients")


def first_derivative_only(backward: Callable[Operands, Gradients]) -> Callable[Operands, Gradients]:
    """Wrap a backward to refuse create_graph, the only case in which autograd runs it in grad mode."""

    @functools.wraps(backward)
    def refusing(*args: Operands.args, **kwargs: Operands.kwargs) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: this gradient is written by hand and has no derivative of its own;"
                " the plain version beside it has"
            )
        return backward(*args, **kwargs)

    return refusing
