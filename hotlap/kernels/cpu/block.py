"""A block whose attention inputs and MLP are fused kernels, on the parameters of the plain block.

`FusedBlock` computes what `Block` does. In C, one kernel goes from the residual stream to queries, keys and
values; a second one from attention's output to the end of the block. Whatever part of a block the kernels do
not know runs as the plain module that it is. Shapes: T tokens, C width, H query heads, G key/value heads,
D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotlap.kernels.cpu import mlp as mlp_kernel
from hotlap.kernels.cpu import qkv as qkv_kernel
from hotlap.kernels.derivatives import first_derivative_only
from hotlap.model.attention import Attention, AttentionPlan
from hotlap.model.block import Block, SkipConnection
from hotlap.model.layers import norm
from hotlap.model.rotary import Rotation


class FusedBlock(Block):
    """Not constructed: `kernels.install` makes a `Block` into one by giving it this class.

    So parameters, their names and the state dict are those of the plain block.
    """

    fuses_attention: bool
    fuses_mlp: bool

    @classmethod
    def adopt(cls, block: Block, *, fuses_attention: bool, fuses_mlp: bool) -> None:
        block.__class__ = cls
        assert isinstance(block, FusedBlock), "a block is now of this class"
        block.fuses_attention, block.fuses_mlp = fuses_attention, fuses_mlp

    def forward(
        self,
        x: Tensor,
        x0: Tensor,
        skip: SkipConnection | None,
        value_embedding: Tensor | None,
        rotation: Rotation,
        plan: AttentionPlan,
    ) -> Tensor:
        attended: Tensor | None = None
        if self.fuses_attention:
            x, q, k, v = self.attention_inputs(x, x0, skip, value_embedding, rotation)
            attended = plan.attend(q, k, v, q.shape[-1] ** -0.5).flatten(-2)
        else:
            x = self.mix(x, x0, skip)
            if self.attention is not None:
                x = x + self.attention(norm(x), value_embedding, rotation, plan)
        if self.fuses_mlp:
            return self.add_mlp(x, attended)
        if attended is not None:
            assert self.attention is not None, "it has attended"
            x = x + self.attention.out(attended)
        return x + self.mlp(norm(x))

    def attention_inputs(
        self,
        x: Tensor,
        x0: Tensor,
        skip: SkipConnection | None,
        value_embedding: Tensor | None,
        rotation: Rotation,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The mixed stream (T, C), queries (T, H, D), keys and values (T, G, D)."""
        attention = self.attention
        assert attention is not None, "installed only where there is attention"
        empty: Tensor = x.new_empty(0)
        residual_mix: Tensor = self.residual_mix
        if skip is not None:
            # mix · (x + weight · skip, x0) as one sum of three.
            residual_mix = torch.cat((residual_mix, residual_mix[:1] * skip.weight))
        operands: tuple[Tensor, Tensor, Tensor, Tensor] = _AttentionInputs.apply(  # type: ignore[no-untyped-call]
            x,
            x0,
            empty if skip is None else skip.x,
            residual_mix,
            *(attention.q.weight, attention.k.weight, attention.v.weight),
            *rotation,
            value_mix_pair(attention, x, alone=value_embedding is None),
            empty if value_embedding is None else value_embedding,
        )
        return operands

    def add_mlp(self, x: Tensor, attended: Tensor | None) -> Tensor:
        """x plus attention's output, projected, plus the MLP of their sum."""
        empty = x.new_empty(0)
        given = (empty, empty)
        if attended is not None:
            assert self.attention is not None, "it has attended"
            given = (attended, self.attention.out.weight)
        y: Tensor = _AddMLP.apply(  # type: ignore[no-untyped-call]
            x, *given, self.mlp.expand.weight, self.mlp.out.weight
        )
        return y


def value_mix_pair(attention: Attention, like: Tensor, *, alone: bool) -> Tensor:
    """What values and value embeddings are multiplied by, (2,), whichever way the layer mixes them."""
    mix = attention.value_mix
    if mix is None:
        return like.new_tensor([1.0, 0.0])
    if mix.ndim == 1:
        return mix
    # One λ: values are mixed with themselves where there is no value embedding.
    return torch.stack(((1 - mix) + mix, 0 * mix) if alone else (1 - mix, mix))


class _AttentionInputs(torch.autograd.Function):
    """The QKV kernel. Takes `qkv.Given`; returns the mixed stream, q, k and v."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        made = qkv_kernel.forward(qkv_kernel.Given(*given))
        empty = made.mixed.new_empty(0)
        ctx.save_for_backward(*given, *made._replace(mixed=empty, v=empty))
        q, k, v = (x_HTD.transpose(0, 1) for x_HTD in (made.q, made.k, made.v))
        return made.mixed, q, k, v

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        num_given = len(qkv_kernel.Given._fields)
        given = qkv_kernel.Given(*ctx.saved_tensors[:num_given])
        made = qkv_kernel.Made(*ctx.saved_tensors[num_given:])
        gradients = qkv_kernel.backward(given, made, qkv_kernel.Received(*grads))
        return tuple(
            grad if needed else None for grad, needed in zip(gradients, ctx.needs_input_grad, strict=True)
        )


class _AddMLP(torch.autograd.Function):
    """The MLP kernel. Takes `mlp.Given`; returns the residual stream after the block."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        made = mlp_kernel.forward(mlp_kernel.Given(*given))
        x, attended, *weights = given
        ctx.save_for_backward(
            made.sum if attended.numel() else x, attended, *weights, made.inverse_rms, made.hidden
        )
        return made.y

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        *given, inverse_rms, hidden = ctx.saved_tensors
        return mlp_kernel.backward(grad_y, mlp_kernel.Given(*given), inverse_rms, hidden)
