"""Bytes that a Triton kernel of Inductor reads and writes, from its source and the tensors it is given."""

from __future__ import annotations

import math
import re
from typing import Any

from torch import Tensor

_SIGNATURE = re.compile(r"^def (triton_\w+)\((.*)\):", re.MULTILINE)  # not of functions that it calls
TEMPLATE_PREFIX = "triton_tem"
_ACCESS = re.compile(r"tl\.(load|store|atomic_add)\((\w+) \+ (.*)")
_INDEX = re.compile(r"\b(x|y|z|r\d_)\d+\b")  # x0, x1, r0_2: coordinates along a dimension of the grid


def moved_bytes(source: str, arguments: tuple[Any, ...]) -> int:
    """Of one launch.

    Each load and store that is written in the source counts, as many elements as its index can have, but a
    tensor at most whole: what is read again by neighbors is in a cache, what is read in a second loop over
    a row is not. A template, such as flex_attention's, moves its tensors at least once.
    """
    found = _SIGNATURE.search(source)
    assert found is not None, "no function in the source of a kernel"
    kernel, parameters = found.groups()
    if kernel.startswith(TEMPLATE_PREFIX):
        return sum(x.nbytes for x in arguments if isinstance(x, Tensor))
    names = [parameter.partition(":")[0].strip() for parameter in parameters.split(",")]
    given = dict(zip(names, arguments, strict=False))
    moved = 0
    for kind, name, index in _ACCESS.findall(source):
        tensor = given[name]
        # A kernel for a list of tensors has no extents of its own: each of them is touched whole.
        extents = [given.get(f"{dimension}numel", tensor.numel()) for dimension in set(_INDEX.findall(index))]
        touched = min(tensor.numel(), math.prod(extents)) * tensor.element_size()
        moved += 2 * touched if kind == "atomic_add" else touched
    return moved
