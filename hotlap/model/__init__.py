"""The models: a U-Net of transformer blocks with a softcapped head, and GPT-2 as the baseline.

No distribution, devices or logging here. `build_model` returns the model that a configuration
names. Both have the same interface.
"""

from __future__ import annotations

import torch

from hotlap.config import ModelConfig
from hotlap.model.gpt import GPT
from hotlap.model.gpt2 import GPT2
from hotlap.model.parts import STANDARD, Parts

__all__ = ["GPT", "GPT2", "Parts", "build_model"]


def build_model(
    config: ModelConfig, max_tokens: int, dtype: torch.dtype = torch.float32, parts: Parts = STANDARD
) -> GPT | GPT2:
    """A newly initialized model for packed sequences of up to `max_tokens` tokens, in `dtype`.

    `parts` are the classes that a GPT is built of; GPT-2 has its own.
    """
    if config.architecture == "speedrun":
        return GPT(config, max_tokens, dtype, parts)
    assert parts == STANDARD, "GPT-2 is not built of parts"
    return GPT2(config, max_tokens, dtype)
