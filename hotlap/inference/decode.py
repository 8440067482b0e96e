"""Incremental decoding with a KV cache that holds one attention window per layer.

The cache is a ring buffer: position p is stored in slot p modulo the window, so memory does not grow with the
text. A `LayerCache` is passed to the model as the layer's attention plan; the model is unchanged.

Shapes: S samples (the batch), T prompt tokens, W slots, H query heads, G key/value heads, D head dim,
C model width, V vocabulary without padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hotlap.attention import plan_batch
from hotlap.attention.blocked import BlockedBackend
from hotlap.attention.mask import NO_TOKEN
from hotlap.attention.visibility import Visibility
from hotlap.model import GPT, GPT2
from hotlap.model.attention import AttentionPlan


class LayerCache:
    """The ring buffer of one layer's keys and values, each (S, G, W, D)."""

    def __init__(self, model: GPT | GPT2, num_samples: int, num_slots: int) -> None:
        shape = (num_samples, model.config.kv_heads, num_slots, model.config.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=model.dtype, device=model.device)
        self.num_slots = num_slots
        # Set by the decoder before each step, to the same values for all layers.
        self.position = 0
        self.visible = torch.ones(num_samples, 1, 1, 0, dtype=torch.bool)  # (S, 1, 1, filled slots)
        self.previous_S = torch.full((num_samples,), NO_TOKEN)

    def fill(self, rows: slice, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Store the newest W keys and values of positions [0, T) for the samples in `rows`."""
        count = len(k_TGD)
        newest = torch.arange(max(0, count - self.num_slots), count, device=k_TGD.device)
        slots = newest % self.num_slots
        self.keys[rows][:, :, slots] = k_TGD[newest].transpose(0, 1)
        self.values[rows][:, :, slots] = v_TGD[newest].transpose(0, 1)

    def attend(self, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float) -> Tensor:
        """Append one key and value per sample at the current position, then attend with one query each."""
        slot = self.position % self.num_slots
        self.keys[:, :, slot] = k_SGD
        self.values[:, :, slot] = v_SGD
        filled = self.visible.size(-1)
        out_SH1D = F.scaled_dot_product_attention(
            q_SHD[:, :, None],
            self.keys[:, :, :filled],
            self.values[:, :, :filled],
            attn_mask=self.visible,
            scale=scale,
            enable_gqa=q_SHD.size(1) != k_SGD.size(1),
        )
        return out_SH1D[:, :, 0]

    def previous(self, _tokens_S: Tensor) -> Tensor:
        return self.previous_S


class FillingPlan:
    """Attends over a whole prompt with another plan and stores the keys and values in a layer's cache."""

    def __init__(self, plan: AttentionPlan, cache: LayerCache, rows: slice) -> None:
        self.plan = plan
        self.cache = cache
        self.rows = rows

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        self.cache.fill(self.rows, k_TGD, v_TGD)
        return self.plan.attend(q_THD, k_TGD, v_TGD, scale)

    def previous(self, tokens_T: Tensor) -> Tensor:
        return self.plan.previous(tokens_T)


def prompt_plan(visibility: Visibility, tokens_T: Tensor) -> AttentionPlan:
    """Works on every device and in every dtype: a prompt is read once, so speed matters little."""
    return plan_batch(BlockedBackend(saved_bytes=0), visibility.mask(tokens_T))


@torch.no_grad()
def uncached_logits(model: GPT | GPT2, visibility: Visibility, tokens_T: Tensor) -> Tensor:
    """(T, V) float32, what follows each token, in one pass: the reference that cached reading must equal."""
    positions = torch.arange(len(tokens_T), device=tokens_T.device)
    plans = [prompt_plan(visibility, tokens_T)] * model.config.num_layers
    return model.logits(model.hidden(tokens_T, plans, positions))


class Decoder:
    """Decodes several samples in parallel from one prompt, one token per sample and step.

    With rotary positions the text may grow without limit. With learned positions (GPT-2) it is limited to the
    context: when the context is full, its last half is prefilled again from position 0. A prompt longer than
    the context is likewise cut to its last half context.
    """

    def __init__(self, model: GPT | GPT2, visibility: Visibility, num_samples: int = 1) -> None:
        self.model = model
        self.visibility = visibility
        self.num_samples = num_samples
        self.context = model.max_tokens if isinstance(model, GPT2) else None
        self.device = model.device
        self.position = 0  # of the next token
        window = visibility.window_tokens
        self._caches = [LayerCache(model, num_samples, window) for _ in model.blocks]
        self._slots = torch.arange(window, device=self.device)
        self._document_starts = torch.zeros(num_samples, dtype=torch.long, device=self.device)
        self._last_S = torch.zeros(num_samples, dtype=torch.long, device=self.device)  # the latest token
        # (S, tokens so far), kept only if the context is limited
        self._read = torch.zeros(num_samples, 0, dtype=torch.long, device=self.device)

    @property
    def cache_bytes(self) -> int:
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in self._caches)

    @torch.no_grad()
    def start(self, prompt_T: Tensor) -> Tensor:
        """Prefill the prompt, which all samples share. Returns the next-token logits (S, V) float32."""
        assert self.position == 0, "start() was called twice"
        assert len(prompt_T) > 0, "the prompt is empty; it needs at least the end-of-text token"
        if self.context is not None:
            if len(prompt_T) > self.context:
                prompt_T = prompt_T[-(self.context // 2) :]
            self._read = prompt_T.expand(self.num_samples, -1)
        self._last_S = prompt_T[-1].expand(self.num_samples)
        logits_V = self._fill(slice(None), prompt_T)
        return logits_V.expand(self.num_samples, -1)

    @torch.no_grad()
    def step(self, tokens_S: Tensor) -> Tensor:
        """Append one token to each sample. Returns the next-token logits (S, V) float32."""
        assert self.position > 0, "call start() before step()"
        assert tokens_S.shape == (self.num_samples,), (
            f"expected ({self.num_samples},) tokens, found {tuple(tokens_S.shape)}"
        )
        if self.context is not None:
            self._refill_if_full(self.context)
            self._read = torch.cat([self._read, tokens_S[:, None]], dim=1)
        previous_S, self._last_S = self._last_S, tokens_S
        starts_document = tokens_S == self.visibility.starts_document
        self._document_starts = self._document_starts.masked_fill(starts_document, self.position)
        previous_S = previous_S.masked_fill(starts_document, NO_TOKEN)
        visible = self._visible()
        for cache in self._caches:
            cache.position, cache.visible, cache.previous_S = self.position, visible, previous_S
        positions_S = torch.full_like(tokens_S, self.position)
        x_SC = self.model.hidden(tokens_S, self._caches, positions_S)
        self.position += 1
        return self.model.logits(x_SC)

    def _fill(self, rows: slice, tokens_T: Tensor) -> Tensor:
        """Prefill `rows` of the caches with tokens from position 0. Returns the last token's logits (V,)."""
        plan = prompt_plan(self.visibility, tokens_T)
        plans = [FillingPlan(plan, cache, rows) for cache in self._caches]
        positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
        x_TC = self.model.hidden(tokens_T, plans, positions_T)
        self.position = len(tokens_T)
        self._document_starts[rows] = self._document_start(tokens_T)
        return self.model.logits(x_TC[-1:])[0]

    def _refill_if_full(self, context: int) -> None:
        if self.position < context:
            return
        self._read = self._read[:, -(context // 2) :]
        for row, tokens_T in enumerate(self._read):
            self._fill(slice(row, row + 1), tokens_T)

    def _document_start(self, tokens_T: Tensor) -> int:
        starts = (tokens_T == self.visibility.starts_document).nonzero()
        return int(starts[-1]) if len(starts) else 0

    def _visible(self) -> Tensor:
        """(S, 1, 1, filled slots) bool: the slots that the query at the current position attends to."""
        slots = self._slots[: self.position + 1]
        # The position stored in each slot: the newest one up to the current position.
        held = self.position - (self.position - slots) % self.visibility.window_tokens
        first = self._document_starts.clamp(min=self.visibility.first_visible(self.position))
        return (held >= first[:, None])[:, None, None]
