"""Which earlier tokens each token attends to at inference: the same ones as in validation at a given step.

The rule has two forms: the mask of a whole sequence, and the first visible position of one query, which tells
the KV cache what it may overwrite. `uncached_logits` is the reference that cached decoding must match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotlap.attention import make_plan
from hotlap.attention.blocked import BlockedBackend
from hotlap.attention.mask import NO_TOKEN, Mask, document_ids
from hotlap.config import Config
from hotlap.model import GPT, GPT2
from hotlap.model.block import AttentionPlan
from hotlap.optim.schedules import window_tokens


@dataclass(frozen=True)
class Visibility:
    unit: Literal["tokens", "blocks", "unlimited"]
    window_tokens: int  # maximum number of keys per query; a multiple of block_size if the unit is blocks
    block_size: int
    end_of_text: int
    starts_document: int  # id of the token that starts a document; NO_TOKEN if documents are not masked

    @classmethod
    def at_step(cls, config: Config, step: int, end_of_text: int) -> Visibility:
        """The rule after `step` updates of a run. An unlimited window is limited to one sequence."""
        unit, block_size = config.attention.window_unit, config.attention.block_size
        if unit == "unlimited":
            window = config.batch.sequence_tokens
        else:
            window = window_tokens(min(step, config.schedule.steps), config.schedule)
        masks_documents = unit != "unlimited" and config.attention.document_mask
        return cls(unit, window, block_size, end_of_text, end_of_text if masks_documents else NO_TOKEN)

    def first_visible(self, position: int) -> int:
        """The first position in the window of a query at `position`, ignoring documents. Can be negative."""
        if self.unit == "unlimited":
            return 0
        if self.unit == "tokens":
            return position - self.window_tokens + 1
        window_blocks = self.window_tokens // self.block_size
        return (position // self.block_size - window_blocks + 1) * self.block_size

    def mask(self, tokens_T: Tensor) -> Mask:
        if self.unit == "unlimited":
            window = len(tokens_T)
        else:
            window = self.window_tokens // (self.block_size if self.unit == "blocks" else 1)
        documents = document_ids(tokens_T, self.starts_document)
        window_tensor = torch.tensor(window, dtype=torch.int32, device=tokens_T.device)
        return Mask(
            documents, window_tensor, "blocks" if self.unit == "blocks" else "tokens", self.block_size
        )

    def plan(self, tokens_T: Tensor) -> AttentionPlan:
        # The blocked backend supports every device and dtype. Speed matters little: a prompt is read once.
        return make_plan(BlockedBackend(saved_bytes=0), self.mask(tokens_T))


@torch.no_grad()
def uncached_logits(model: GPT | GPT2, visibility: Visibility, tokens_T: Tensor) -> Tensor:
    """Next-token logits (T, V) float32 for each token, in one forward pass without a cache."""
    positions = torch.arange(len(tokens_T), device=tokens_T.device)
    plans = [visibility.plan(tokens_T)] * model.config.num_layers
    return model.logits(model.hidden(tokens_T, plans, positions))
