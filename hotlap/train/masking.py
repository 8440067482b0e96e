"""From a batch's tokens to the attention plans of the model's layers.

Holds the window as one device tensor that changes only when the schedule moves it, so that nothing compiled
has to be compiled again.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.attention import Backend, plan_batch
from hotlap.attention.mask import NO_TOKEN, Mask, document_ids
from hotlap.config import Config
from hotlap.model.attention import AttentionPlan
from hotlap.optim.schedules import window_tokens


class Masking:
    def __init__(self, config: Config, backend: Backend, end_of_text: int, device: torch.device) -> None:
        self.config = config
        self.backend = backend
        self.end_of_text = end_of_text
        self.window_tokens = 0
        self._window = torch.zeros((), dtype=torch.int32, device=device)
        self.set_step(0)

    def set_step(self, step: int) -> None:
        """Give the window the width that the schedule has at a step."""
        tokens = window_tokens(step, self.config.schedule)
        if tokens != self.window_tokens:
            self.window_tokens = tokens
            in_blocks = self.config.attention.window_unit == "blocks"
            self._window.fill_(tokens // self.config.attention.block_size if in_blocks else tokens)

    def plans(self, tokens_T: Tensor, chunk_tokens: int | None) -> list[AttentionPlan] | None:
        """One plan for every layer, or None for a model that sees all of its context.

        `chunk_tokens`: every run of so many tokens is a document of its own, whatever its tokens are.
        """
        unit = self.config.attention.window_unit
        if unit == "unlimited":
            return None
        # Without a document mask nothing starts a document but the chunks.
        starts_document = self.end_of_text if self.config.attention.document_mask else NO_TOKEN
        documents = document_ids(tokens_T, starts_document, chunk_tokens)
        mask = Mask(documents, self._window, unit, self.config.attention.block_size)
        return [plan_batch(self.backend, mask)] * self.config.model.num_layers
