"""The models: embedding, U-Net of transformer blocks, softcapped head; and plain GPT-2 as the baseline.

Distribution, devices and logging stay outside. `build_model` gives the one that a configuration names; both
have the same interface.
"""

from __future__ import annotations

import torch

from hotlap.config import ModelConfig
from hotlap.model.gpt import GPT
from hotlap.model.gpt2 import GPT2

__all__ = ["GPT", "GPT2", "build_model"]


def build_model(config: ModelConfig, max_tokens: int, dtype: torch.dtype = torch.float32) -> GPT | GPT2:
    """A model for packed sequences of up to `max_tokens`, computing in `dtype`, freshly initialised."""
    kind = GPT if config.architecture == "speedrun" else GPT2
    return kind(config, max_tokens, dtype)
