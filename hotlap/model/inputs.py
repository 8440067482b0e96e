"""From the residual stream to attention's operands: everything of a block that comes before its attention.

The stream is mixed with the embedding and a skip connection, normed, and multiplied by three matrices;
queries and keys are normed again and turned, and values mixed with what is mixed in. One by one, that is a
dozen passes over activations. Kernels in C, where there are any, take some tokens at a time through it all.
Shapes: T tokens, C width, H query heads, G key/value heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotlap.kernels.cpu import inputs as kernel
from hotlap.model.derivatives import first_derivative_only
from hotlap.model.layers import mix, plain_mix, plain_rms_norm, rms_norm
from hotlap.model.products import linears, plain_linear
from hotlap.model.rotary import Rotation, norm_and_rotate, plain_norm_and_rotate

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def plain_inputs(
    streams: tuple[Tensor, ...],
    stream_mix: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    rotation: Rotation,
    value_mix_2: Tensor,
    mixed_in_TGD: Tensor | None,
) -> Operands:
    """The reference: the mixed stream (T, C), queries (T, H, D), keys and values (T, G, D), and x0 itself.

    `streams`: x, x0 and, where there is a skip connection, what comes by it; each (T, C), with one weight.
    """
    mixed = plain_mix(stream_mix, *streams)
    features = (plain_linear(plain_rms_norm(mixed), weight) for weight in weights)
    q, k, v = (y_TC.unflatten(-1, (-1, 2 * rotation.cos.shape[-1])) for y_TC in features)
    v = value_mix_2[0] * v if mixed_in_TGD is None else plain_mix(value_mix_2, v, mixed_in_TGD)
    return mixed, plain_norm_and_rotate(q, rotation), plain_norm_and_rotate(k, rotation), v, streams[1]


class _Inputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Operands:
        made = kernel.forward(kernel.Given(*given))
        none = made.mixed.new_empty(0)
        ctx.save_for_backward(*given, *made._replace(mixed=none, v=none))
        # The last layer's x0 goes nowhere; no gradient is then none, and not zeros.
        ctx.set_materialize_grads(False)
        q, k, v = (x_HTD.transpose(0, 1) for x_HTD in (made.q, made.k, made.v))
        return made.mixed, q, k, v, given[1]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *received: Tensor | None) -> tuple[Tensor | None, ...]:
        num_given = len(kernel.Given._fields)
        given = kernel.Given(*ctx.saved_tensors[:num_given])
        made = kernel.Made(*ctx.saved_tensors[num_given:])
        *of_operands, later_x0 = received
        q, k = (x_HTD.transpose(0, 1) for x_HTD in (made.q, made.k))
        mixed, q, k, v = (
            torch.zeros_like(operand) if grad is None else grad
            for grad, operand in zip(of_operands, (given.x, q, k, k), strict=True)
        )
        later_x0 = given.x0.new_empty(0) if later_x0 is None else later_x0
        gradients = kernel.backward(given, made, kernel.Received(mixed, q, k, v, later_x0))
        needed = ctx.needs_input_grad
        return tuple(grad if needs else None for grad, needs in zip(gradients, needed, strict=True))


def inputs(
    streams: tuple[Tensor, ...],
    stream_mix: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    rotation: Rotation,
    value_mix_2: Tensor,
    mixed_in_TGD: Tensor | None,
) -> Operands:
    """As the plain version. Where kernels made them, a head's queries, keys and values lie together.

    Whoever goes on with the x0 that comes back, and not with that which was given, lets the gradients that it
    gets from many layers be added up on the way, without a pass for each.
    """
    none = streams[0].new_empty(0)
    x_TC, x0_TC, skip, *_ = (*streams, none)
    mixed_in = none if mixed_in_TGD is None else mixed_in_TGD
    given = kernel.Given(x_TC, x0_TC, skip, stream_mix, *weights, *rotation, value_mix_2, mixed_in)
    if not torch.compiler.is_compiling() and kernel.suits(given):
        operands: Operands = _Inputs.apply(*given)  # type: ignore[no-untyped-call]
        return operands
    mixed = mix(stream_mix, *streams)
    features = linears(rms_norm(mixed), *weights)
    q, k, v = (y_TC.unflatten(-1, (-1, 2 * rotation.cos.shape[-1])) for y_TC in features)
    v = value_mix_2[0] * v if mixed_in_TGD is None else mix(value_mix_2, v, mixed_in_TGD)
    return mixed, norm_and_rotate(q, rotation), norm_and_rotate(k, rotation), v, x0_TC
