"""Incremental decoding with a KV cache that holds one attention window per layer.

The cache is a ring buffer: position p is stored in slot p modulo the window, so memory does not grow with the
text. A `LayerCache` is passed to the model as the layer's attention plan; the model is unchanged.

Samples are rows of a batch. Each has its own position, so a row may start at any time, as in `hotlap serve`.
A row's logits do not depend on how many others are decoded with it where the matmul treats whole groups of
rows alike (`ROW_GROUP`); docs/serving.md says where that was tried.

Shapes: S samples (the rows of the batch), T prompt tokens, W slots, H query heads, G key/value heads, D head
dim, C model width, V vocabulary without padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hotlap.attention import plan_batch
from hotlap.attention.blocked import BlockedBackend
from hotlap.attention.mask import NO_TOKEN
from hotlap.attention.visibility import Visibility
from hotlap.model import GPT, GPT2
from hotlap.model.attention import AttentionPlan

# Rows are computed in multiples of this: MKL computes the rows that are left over from a group of four with
# another order of summation, so that a row's last bits would depend on the size of the batch.
ROW_GROUP = 4
# The number of cache slots that are attended to grows in steps of this, for the same reason.
SLOT_GROUP = 128


class LayerCache:
    """The ring buffer of one layer's keys and values, each (S, G, W, D)."""

    def __init__(self, model: GPT | GPT2, num_samples: int, num_slots: int) -> None:
        shape = (num_samples, model.config.kv_heads, num_slots, model.config.head_dim)
        self.keys, self.values = torch.zeros(2, *shape, dtype=model.dtype, device=model.device)
        self.num_slots = num_slots
        # Set by the decoder before each step, to the same values for all layers. L ≤ W slots are attended to.
        self.rows_S = torch.zeros(0, dtype=torch.long)
        self.slots_S = torch.zeros(0, dtype=torch.long)
        self.mask_S11L = torch.zeros(0, 1, 1, 0)  # 0 for visible slots, −∞ for others
        self.previous_S = torch.zeros(0, dtype=torch.long)

    def fill(self, rows_R: Tensor, k_TGD: Tensor, v_TGD: Tensor) -> None:
        """Store the newest W keys and values of positions [0, T) in the rows."""
        count = len(k_TGD)
        newest = torch.arange(max(0, count - self.num_slots), count, device=k_TGD.device)
        slots = newest % self.num_slots
        self.keys[rows_R[:, None], :, slots] = k_TGD[newest]
        self.values[rows_R[:, None], :, slots] = v_TGD[newest]

    def attend(self, q_SHD: Tensor, k_SGD: Tensor, v_SGD: Tensor, scale: float) -> Tensor:
        """Append one key and value per row at its position, then attend with one query each.

        Rows beyond the cache's fill up the last group of rows: they are returned as they are.
        """
        count, slots = len(self.mask_S11L), self.mask_S11L.size(-1)
        self.keys[self.rows_S, :, self.slots_S] = k_SGD[:count]
        self.values[self.rows_S, :, self.slots_S] = v_SGD[:count]
        # Repeated to a whole group, since a single query is multiplied otherwise on another thread.
        out_SHRD = F.scaled_dot_product_attention(
            q_SHD[:count, :, None].expand(-1, -1, ROW_GROUP, -1),
            self.keys[:count, :, :slots],
            self.values[:count, :, :slots],
            attn_mask=self.mask_S11L,
            scale=scale,
            enable_gqa=q_SHD.size(1) != k_SGD.size(1),
        )
        out_SHD = out_SHRD[:, :, 0]
        return out_SHD if count == len(q_SHD) else torch.cat([out_SHD, q_SHD[count:]])

    def previous(self, _tokens_S: Tensor) -> Tensor:
        return self.previous_S


class FillingPlan:
    """Attends over a whole prompt with another plan and stores the keys and values in a layer's cache."""

    def __init__(self, plan: AttentionPlan, cache: LayerCache, rows_R: Tensor) -> None:
        self.plan = plan
        self.cache = cache
        self.rows_R = rows_R

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        self.cache.fill(self.rows_R, k_TGD, v_TGD)
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
    """Decodes several samples in parallel, one token per sample and step.

    `start` prefills a prompt into rows, `step` appends a token to each of the first rows. A token of NO_TOKEN
    leaves a row idle: its logits mean nothing, and it stays where it is until it is started.

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
        self.positions = [0] * num_samples  # of each row's next token
        window = visibility.window_tokens
        self._caches = [LayerCache(model, num_samples, window) for _ in model.blocks]
        self._slots = torch.arange(window, device=self.device)
        self._rows = torch.arange(num_samples, device=self.device)
        self._document_starts = torch.zeros(num_samples, dtype=torch.long, device=self.device)
        self._last = torch.zeros(num_samples, dtype=torch.long, device=self.device)  # each row's latest token
        # Each row's tokens by position, kept only if the context is limited.
        self._read = torch.zeros(num_samples, self.context or 0, dtype=torch.long, device=self.device)

    @property
    def cache_bytes(self) -> int:
        return sum(cache.keys.nbytes + cache.values.nbytes for cache in self._caches)

    @torch.no_grad()
    def start(self, prompt_T: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Prefill a prompt into rows, by default all. Returns the next-token logits (R, V) float32."""
        rows = range(self.num_samples) if rows is None else rows
        return self.model.logits(self.prefill(prompt_T, rows)[-1:]).expand(len(rows), -1)

    @torch.no_grad()
    def prefill(self, prompt_T: Tensor, rows: Sequence[int]) -> Tensor:
        """Start the rows with a prompt. Returns the input of the head for all its tokens, (T, C)."""
        assert len(prompt_T) > 0, "the prompt is empty; it needs at least the end-of-text token"
        if self.context is not None and len(prompt_T) > self.context:
            prompt_T = prompt_T[-(self.context // 2) :]
        rows_R = torch.tensor(list(rows), device=self.device)
        plan = prompt_plan(self.visibility, prompt_T)
        plans = [FillingPlan(plan, cache, rows_R) for cache in self._caches]
        x_TC = self.model.hidden(prompt_T, plans, torch.arange(len(prompt_T), device=self.device))
        for row in rows:
            self.positions[row] = len(prompt_T)
        self._document_starts[rows_R] = self._document_start(prompt_T)
        self._last[rows_R] = prompt_T[-1]
        if self.context is not None:
            self._read[rows_R, : len(prompt_T)] = prompt_T
        return x_TC

    @torch.no_grad()
    def step(self, tokens_S: Tensor) -> Tensor:
        """Append one token to each of the first S rows. Returns the next-token logits (S, V) float32."""
        count = len(tokens_S)
        assert 0 < count <= self.num_samples, f"{count} tokens for {self.num_samples} rows"
        if self.context is not None:
            self._refill_if_full(count, self.context)
        idle_S = tokens_S == NO_TOKEN
        tokens_S = tokens_S.clamp(min=0)
        positions_S = torch.tensor(self.positions[:count], device=self.device)
        self._prepare_caches(tokens_S, positions_S)
        fill = -count % ROW_GROUP
        x_SC = self.model.hidden(F.pad(tokens_S, (0, fill)), self._caches, F.pad(positions_S, (0, fill)))
        for row, idle in enumerate(idle_S.tolist()):
            self.positions[row] += not idle
        return self.model.logits(x_SC)[:count]

    def release(self, row: int) -> None:
        """Leave a row idle from position 0, so that it costs as little as possible."""
        self.positions[row] = 0
        self._document_starts[row] = 0

    def _prepare_caches(self, tokens_S: Tensor, positions_S: Tensor) -> None:
        """Tell the layers' caches which slots this step writes and sees."""
        count, rows_S = len(tokens_S), self._rows[: len(tokens_S)]
        starts_document = tokens_S == self.visibility.starts_document
        previous_S = self._last[:count].masked_fill(starts_document, NO_TOKEN)
        self._last[:count] = tokens_S
        starts_S = torch.where(starts_document, positions_S, self._document_starts[:count])
        self._document_starts[:count] = starts_S
        if self.context is not None:
            self._read[rows_S, positions_S] = tokens_S
        mask_S11L = self._mask(positions_S, starts_S)
        slots_S = positions_S % self.visibility.window_tokens
        previous_S = F.pad(previous_S, (0, -count % ROW_GROUP), value=NO_TOKEN)
        for cache in self._caches:
            cache.rows_S, cache.slots_S = rows_S, slots_S
            cache.mask_S11L, cache.previous_S = mask_S11L, previous_S

    def _refill_if_full(self, count: int, context: int) -> None:
        for row in range(count):
            if self.positions[row] == context:
                self.prefill(self._read[row, -(context // 2) :].clone(), [row])

    def _document_start(self, tokens_T: Tensor) -> int:
        starts = (tokens_T == self.visibility.starts_document).nonzero()
        return int(starts[-1]) if len(starts) else 0

    def _mask(self, positions_S: Tensor, document_starts_S: Tensor) -> Tensor:
        """(S, 1, 1, L): what is added to the scores of the slots, 0 where a row's query may look."""
        longest = max(self.positions[: len(positions_S)]) + 1
        slots_L = self._slots[: -(-longest // SLOT_GROUP) * SLOT_GROUP]
        positions_S1 = positions_S[:, None]
        # The position stored in each slot: the newest one up to the current position; negative if none.
        held_SL = positions_S1 - (positions_S1 - slots_L) % self.visibility.window_tokens
        first_S = torch.maximum(document_starts_S, self.visibility.first_visible(positions_S))
        hidden_SL = held_SL < first_S[:, None]
        mask_SL = torch.zeros(hidden_SL.shape, dtype=self.model.dtype, device=self.device)
        return mask_SL.masked_fill_(hidden_SL, -torch.inf)[:, None, None]
