"""The MLP's kernels, called with tensors.

Shapes: T tokens, C width, A features of attention's output, F hidden features.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotlap.kernels.cpu.library import needed_library
from hotlap.kernels.cpu.operands import EPSILON, dims, operand, optional, pointer, structure
from hotlap.kernels.cpu.shares import chunk_tokens

# Every chunk of a thread reads both weights and adds to their gradients. Up to this size they fit a
# cache, or the chunk is long enough to pay for reading them: at a width of 768 the kernel takes 0.96
# to 0.98 of PyTorch's time. Larger weights were not tried.
MOST_WEIGHTS = 3 * 2**20
# Of a thread's chunk, so that they stay in its core's cache from one pass to the next.
CHUNK_FEATURES = 2**17
# Matmuls of fewer tokens lose more than the cache gains: 2.5 % of the MLP at width 256.
LEAST_CHUNK_TOKENS = 256


class Given(NamedTuple):
    """Fields of `hotlap_mlp_t`. Without attention, `attended` and `project` are empty."""

    x: Tensor  # (T, C), the residual stream
    attended: Tensor  # (T, A), attention's output
    project: Tensor  # (C, A)
    expand: Tensor  # (F, C)
    out: Tensor  # (C, F)


class Made(NamedTuple):
    """The result, and what the backward needs."""

    y: Tensor  # (T, C)
    sum: Tensor  # (T, C): x + attended · projectᵀ; empty without attention, where it would be x
    inverse_rms: Tensor  # (T,): 1 / RMS of sum
    hidden: Tensor  # (T, F): relu(norm(sum) · expandᵀ)


def _checked(given: Given) -> tuple[Given, Any]:
    """The operands, contiguous, and the structure for C that points to them."""
    (num_tokens, width), num_features = dims("x", given.x, 2), dims("expand", given.expand, 2)[0]
    attended = dims("attended", given.attended, 2)[1] if given.attended.numel() else 0
    if not attended and given.project.numel():
        raise ValueError(f"project: expected none without attended, found {tuple(given.project.shape)}")
    given = Given(
        x=operand("x", given.x, (num_tokens, width)),
        attended=optional("attended", given.attended, (num_tokens, attended)),
        project=operand("project", given.project, (width, attended)) if attended else given.project,
        expand=operand("expand", given.expand, (num_features, width)),
        out=operand("out", given.out, (width, num_features)),
    )
    # Reading a wide weight pays off for a long chunk. Powers of 2: at a width of 768, chunks of 683
    # tokens take 1.04 times as long as those of 1,024.
    of_width = 2 ** (width - 1).bit_length()
    most = max(LEAST_CHUNK_TOKENS, of_width, CHUNK_FEATURES // num_features)
    sizes = {"T": num_tokens, "C": width, "A": attended, "F": num_features}
    sizes["chunk_tokens"] = chunk_tokens(num_tokens, most)
    return given, structure("hotlap_mlp_t *", given._asdict(), **sizes, epsilon=EPSILON)


def forward(given: Given) -> Made:
    """y = s + relu(norm(s) · expandᵀ)² · outᵀ with s = x + attended · projectᵀ."""
    kernels, threads = needed_library(), torch.get_num_threads()
    given, mlp = _checked(given)
    new_empty = given.x.new_empty
    made = Made(
        y=torch.empty_like(given.x),
        sum=torch.empty_like(given.x) if given.attended.numel() else new_empty(0),
        inverse_rms=new_empty(mlp.T),
        hidden=new_empty(mlp.T, mlp.F),
    )
    workspace = new_empty(kernels.hotlap_mlp_forward_floats(mlp, threads))
    results = (made.sum, made.y, made.inverse_rms, made.hidden, workspace)
    kernels.hotlap_mlp_forward(mlp, *map(pointer, results), threads)
    return made


def backward(grad_TC: Tensor, given: Given, inverse_rms_T: Tensor, hidden_TF: Tensor) -> Given:
    """The gradients with respect to the operands. With attention, given.x is the forward's `sum`."""
    kernels, threads = needed_library(), torch.get_num_threads()
    given, mlp = _checked(given)
    grad_y = operand("grad", grad_TC, (mlp.T, mlp.C))
    inverse_rms = operand("inverse_rms", inverse_rms_T, (mlp.T,))
    hidden = operand("hidden", hidden_TF, (mlp.T, mlp.F))
    grads = Given(*map(torch.empty_like, given))
    num_weights = given.expand.numel() + given.out.numel() + given.project.numel()
    shares = grad_y.new_empty(threads - 1, num_weights)
    gradients = structure("hotlap_mlp_gradients_t *", {"y": grad_y, **grads._asdict(), "shares": shares})
    workspace = grad_y.new_empty(kernels.hotlap_mlp_backward_floats(mlp, threads))
    kept = (inverse_rms, hidden, workspace)
    kernels.hotlap_mlp_backward(mlp, gradients, *map(pointer, kept), threads)
    return grads
