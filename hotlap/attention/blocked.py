"""Masked attention in plain PyTorch, forward and backward, at a cost linear in the visible tiles.

For devices where flex_attention has no backward: CPU and MPS. It iterates over the batches of
`tiles.py`; each is a matmul, a softmax and a matmul into reused buffers. Two custom operators make
it one opaque node inside a compiled block. The mask enters as a tensor of fixed shape, so new
windows or documents do not trigger recompilation.

Shapes: T tokens, H query heads, G key/value heads, R = H / G, D head dim, L keys per tile, B
matmuls per batch.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotlap.attention.mask import Mask, first_visible_keys
from hotlap.attention.tiles import TILE, TileBatch, batches, plan_runs

DEFAULT_SAVED_BYTES = 128 * 2**20


@dataclass(frozen=True)
class BlockedPlan:
    """The mask of one batch, shared by all layers."""

    # (T,) int32: query q sees keys first_key[q] … q. Always on the CPU, where tiles are planned.
    first_key: Tensor


@dataclass(frozen=True)
class BlockedBackend:
    """Attention in plain PyTorch.

    `saved_bytes` limits the probabilities that one call (one layer) saves for its backward pass,
    which recomputes the rest. Without gradients nothing is saved.
    """

    saved_bytes: int = DEFAULT_SAVED_BYTES
    name: str = "blocked"
    plans_on_device: bool = False

    def plan(self, mask: Mask) -> BlockedPlan:
        return BlockedPlan(first_visible_keys(mask).cpu())

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: BlockedPlan, scale: float) -> Tensor:
        check_shapes(q_THD, k_TGD, v_TGD, plan.first_key)
        needs_grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q_THD, k_TGD, v_TGD))
        saved_bytes = self.saved_bytes if needs_grad else 0
        out: Tensor = _forward(q_THD, k_TGD, v_TGD, plan.first_key, scale, saved_bytes)[0]
        return out


def check_shapes(q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, first_key: Tensor) -> None:
    T, H, D = q_THD.shape
    assert k_TGD.shape == v_TGD.shape, f"keys {k_TGD.shape}, values {v_TGD.shape}: shapes must be equal"
    assert (k_TGD.shape[0], k_TGD.shape[2]) == (T, D), f"queries {q_THD.shape}, keys {k_TGD.shape}"
    assert H % k_TGD.shape[1] == 0, f"{H} query heads, not a multiple of {k_TGD.shape[1]} key/value heads"
    assert first_key.shape == (T,), f"a plan for {first_key.shape[0]} tokens, but {T} queries"


class _Layout:
    """The operands of one call, in at least float32, padded to whole tiles, with views per batch.

    Padded queries come last and have zero gradient, so they do not affect the result.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, first_key: Tensor) -> None:
        self.num_tokens = -(-len(q) // TILE) * TILE
        self.q, self.k, self.v = self.prepare(q), self.prepare(k), self.prepare(v)
        self.num_kv_heads, self.head_dim = k.shape[1], k.shape[2]
        self.heads_per_kv = q.shape[1] // self.num_kv_heads
        self.rows = self.heads_per_kv * TILE  # R·TILE: rows of scores per tile and key/value head
        runs = plan_runs(first_key, self.q.dtype, q.device)
        self.batches = batches(runs, self.num_kv_heads, self.heads_per_kv)

    def prepare(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if len(x) < self.num_tokens:
            x = F.pad(x, (0, 0, 0, 0, 0, self.num_tokens - len(x)))
        return x if x.stride(-1) == 1 else x.contiguous()

    def query_view(self, x_THD: Tensor, batch: TileBatch) -> Tensor:
        """(B, R, TILE, D)"""
        token, head, _ = x_THD.stride()
        between = batch.run.stride * token if batch.num_tiles > 1 else self.heads_per_kv * head
        start = batch.first_query * token + batch.first_kv_head * self.heads_per_kv * head
        shape = (batch.size, self.heads_per_kv, TILE, self.head_dim)
        return x_THD.as_strided(shape, (between, head, token, 1), x_THD.storage_offset() + start)

    def query_rows(self, x_THD: Tensor, batch: TileBatch) -> Tensor:
        """(B, R·TILE, D): a view if R is 1, else a copy."""
        return self.query_view(x_THD, batch).reshape(batch.size, self.rows, self.head_dim)

    def key_view(self, x_TGD: Tensor, batch: TileBatch) -> Tensor:
        """(B, L, D)"""
        token, head, _ = x_TGD.stride()
        between = batch.run.stride * token if batch.num_tiles > 1 else head
        start = batch.first_key * token + batch.first_kv_head * head
        shape = (batch.size, batch.run.num_keys, self.head_dim)
        return x_TGD.as_strided(shape, (between, token, 1), x_TGD.storage_offset() + start)

    def scores_shape(self, batch: TileBatch) -> tuple[int, int, int]:
        return batch.size, self.rows, batch.run.num_keys

    def saved_elements(self, saved_bytes: int) -> int:
        """Number of probabilities in the leading batches that fit into `saved_bytes`."""
        fitting = 0
        for batch in self.batches:
            elements = math.prod(self.scores_shape(batch))
            if (fitting + elements) * self.q.itemsize > saved_bytes:
                break
            fitting += elements
        return fitting

    def scores_buffer(self) -> Tensor:
        return self.q.new_empty(max(math.prod(self.scores_shape(batch)) for batch in self.batches))

    def rows_buffer(self) -> Tensor:
        return self.q.new_empty(max(batch.size for batch in self.batches) * self.rows * self.head_dim)

    def fill_probabilities(self, batch: TileBatch, scale: float, out: Tensor) -> None:
        """Write softmax(scale · Q·Kᵀ + bias) to `out` (B, R·TILE, L)."""
        keys = self.key_view(self.k, batch).transpose(1, 2)
        torch.baddbmm(out, self.query_rows(self.q, batch), keys, beta=0, alpha=scale, out=out)
        bias = batch.run.bias
        out.view(-1, TILE, batch.run.num_keys)[:, :, -bias.shape[1] :].add_(bias)
        torch.softmax(out, -1, out=out)


def _front(buffer: Tensor, shape: tuple[int, ...], start: int = 0) -> Tensor:
    # Contiguous, because a batched matmul into a strided output runs as one call per matrix.
    return buffer[start : start + math.prod(shape)].view(shape)


@torch.library.custom_op("hotlap::blocked_attention", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float, saved_bytes: int
) -> tuple[Tensor, Tensor]:
    """The output (T, H, D), and the saved probabilities of the leading batches that fit, flat."""
    layout = _Layout(q, k, v, first_key)
    out = layout.q.new_empty(layout.q.shape)
    saved = layout.q.new_empty(layout.saved_elements(saved_bytes))
    scores, rows, used = layout.scores_buffer(), layout.rows_buffer(), 0
    for batch in layout.batches:
        shape = layout.scores_shape(batch)
        if used < len(saved):
            probabilities = _front(saved, shape, used)
            used += probabilities.numel()
        else:
            probabilities = _front(scores, shape)
        layout.fill_probabilities(batch, scale, probabilities)
        out_rows = _front(rows, (batch.size, layout.rows, layout.head_dim))
        torch.bmm(probabilities, layout.key_view(layout.v, batch), out=out_rows)
        out_tile = layout.query_view(out, batch)
        out_tile.copy_(out_rows.view(out_tile.shape))
    return out[: len(q)].to(q.dtype), saved


@torch.library.custom_op("hotlap::blocked_attention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, saved: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the loss with respect to q (T, H, D), k (T, G, D) and v (T, G, D).

    `grad` is the gradient with respect to the output, (T, H, D).
    """
    layout = _Layout(q, k, v, first_key)
    grad_out = layout.prepare(grad)
    grad_q = layout.q.new_empty(layout.q.shape)
    # Transposed to (G, D, T), so that the keys, the long dimension, are contiguous in the matmul.
    grad_k_GDT = layout.k.new_zeros(layout.num_kv_heads, layout.head_dim, layout.num_tokens)
    grad_v_GDT = torch.zeros_like(grad_k_GDT)
    scores, grad_scores, rows, used = (*(layout.scores_buffer() for _ in range(2)), layout.rows_buffer(), 0)
    most_keys = max(batch.size * batch.run.num_keys for batch in layout.batches)
    keys_buffer = layout.q.new_empty(most_keys * layout.head_dim)
    for batch in layout.batches:
        shape = layout.scores_shape(batch)
        if used < len(saved):
            probabilities = _front(saved, shape, used)
            used += probabilities.numel()
        else:
            probabilities = _front(scores, shape)
            layout.fill_probabilities(batch, scale, probabilities)
        q_rows, grad_rows = layout.query_rows(layout.q, batch), layout.query_rows(grad_out, batch)
        keys, values = layout.key_view(layout.k, batch), layout.key_view(layout.v, batch)

        grad_keys = _front(keys_buffer, (batch.size, layout.head_dim, batch.run.num_keys))
        torch.bmm(grad_rows.transpose(1, 2), probabilities, out=grad_keys)
        _grad_key_view(grad_v_GDT, batch).add_(grad_keys)

        grad_tile = _front(grad_scores, shape)
        torch.bmm(grad_rows, values.transpose(1, 2), out=grad_tile)
        torch._softmax_backward_data(grad_tile, probabilities, -1, grad_tile.dtype, grad_input=grad_tile)

        grad_q_rows = _front(rows, (batch.size, layout.rows, layout.head_dim))
        torch.baddbmm(grad_q_rows, grad_tile, keys, beta=0, alpha=scale, out=grad_q_rows)
        grad_q_tile = layout.query_view(grad_q, batch)
        grad_q_tile.copy_(grad_q_rows.view(grad_q_tile.shape))

        torch.baddbmm(grad_keys, q_rows.transpose(1, 2), grad_tile, beta=0, alpha=scale, out=grad_keys)
        _grad_key_view(grad_k_GDT, batch).add_(grad_keys)
    return (
        grad_q[: len(q)].to(q.dtype),
        k.new_empty(k.shape).copy_(grad_k_GDT.permute(2, 0, 1)[: len(k)]),
        v.new_empty(v.shape).copy_(grad_v_GDT.permute(2, 0, 1)[: len(v)]),
    )


def _grad_key_view(x_GDT: Tensor, batch: TileBatch) -> Tensor:
    """(B, D, L). The keys of a batch do not overlap, so adding to the view in place is safe."""
    head, dim, token = x_GDT.stride()
    between = batch.run.stride * token if batch.num_tiles > 1 else head
    shape = (batch.size, x_GDT.shape[1], batch.run.num_keys)
    start = batch.first_key * token + batch.first_kv_head * head
    return x_GDT.as_strided(shape, (between, dim, token), start)


@_forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, scale: float, saved_bytes: int
) -> tuple[Tensor, Tensor]:
    del k, v, first_key, scale
    # The size depends on the values of the mask, so the compiler must treat it as dynamic.
    elements = torch.library.get_ctx().new_dynamic_size(min=0) if saved_bytes > 0 else 0
    saved = q.new_empty(elements, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(q.shape), saved


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first_key: Tensor, saved: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, first_key, saved, scale
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, first_key, scale, _ = inputs
    _, saved = output
    ctx.scale = scale
    ctx.save_for_backward(q, k, v, first_key, saved)
    # Otherwise autograd would allocate a zero gradient as large as the saved probabilities.
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 6
    return (*_backward(grad, *ctx.saved_tensors, ctx.scale), None, None, None)


_forward.register_autograd(_autograd, setup_context=_setup_context)
