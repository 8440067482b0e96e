"""From the tokens of a batch to one attention plan per layer.

The window is one tensor on the device, updated in place when the schedule changes it, so that a new
window does not trigger recompilation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hotlap.attention import Backend, plan_batch
from hotlap.attention.visibility import Visibility
from hotlap.config import Config
from hotlap.model.attention import AttentionPlan


class Masking:
    def __init__(self, config: Config, backend: Backend, end_of_text: int, device: torch.device) -> None:
        self.config = config
        self.backend = backend
        self.visibility = Visibility.at_step(config, 0, end_of_text)
        self._window = torch.tensor(self.visibility.window, dtype=torch.int32, device=device)

    def set_step(self, step: int) -> None:
        """Set the window to its size after `step` updates."""
        before = self.visibility
        self.visibility = Visibility.at_step(self.config, step, before.end_of_text)
        if self.visibility != before:
            self._window.fill_(self.visibility.window)

    @property
    def window_tokens(self) -> int:
        return self.visibility.window_tokens

    def plans(self, tokens_T: Tensor, chunk_tokens: int | None) -> list[AttentionPlan] | None:
        """One plan per layer, or None if queries see all of their context.

        With `chunk_tokens`, every multiple of it starts a document.
        """
        if self.visibility.unit == "unlimited":
            return None
        mask = self.visibility.mask(tokens_T, chunk_tokens, self._window)
        return [plan_batch(self.backend, mask)] * self.config.model.num_layers
