"""The models: a U-Net of transformer blocks with a softcapped head, and GPT-2 as the baseline.

No distribution, devices or logging here. `build_model` returns the model that a configuration
names. Both have the same interface.
"""

from __future__ import annotations

import torch

from hotlap.config import ModelConfig
from hotlap.model.gpt import GPT
from hotlap.model.gpt2 import GPT2

__all__ = ["GPT", "GPT2", "build_model"]


def build_model(config: ModelConfig, max_tokens: int, dtype: torch.dtype = torch.float32) -> GPT | GPT2:
    """A newly initialized model for packed sequences of up to `max_tokens` tokens, in `dtype`."""
    kind = GPT if config.architecture == "speedrun" else GPT2
    return kind(config, max_tokens, dtype)
