"""What a query sees at a step of a run: the one rule behind training, validation and sampling.

The same rule in two forms: the mask of a whole sequence, and the first visible position of one query, which
tells a cache what it may forget. The window grows with the step, on the schedule of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotlap.attention.mask import NO_TOKEN, Mask, document_ids
from hotlap.config import Config, ScheduleConfig


def window_tokens(step: int, schedule: ScheduleConfig) -> int:
    """The attention window after `step` updates: linear from start to end, rounded down to its multiple.

    All integers, so that no rounding of a fraction can shift the step at which the window grows.
    """
    steps = schedule.steps
    start, end = schedule.window_start_tokens, schedule.window_end_tokens
    exact_times_steps = start * (steps - step) + end * step + schedule.window_offset_tokens * steps
    return exact_times_steps // (steps * schedule.window_multiple_tokens) * schedule.window_multiple_tokens


@dataclass(frozen=True)
class Visibility:
    unit: Literal["tokens", "blocks", "unlimited"]
    window_tokens: int  # the most keys that a query sees; whole blocks if the window counts blocks
    block_size: int
    end_of_text: int
    starts_document: int  # the token that hides all before it: end_of_text, or NO_TOKEN without such a mask

    @classmethod
    def at_step(cls, config: Config, step: int, end_of_text: int) -> Visibility:
        """After `step` updates of a run. Without a window a query sees its whole context: one sequence."""
        unit = config.attention.window_unit
        if unit == "unlimited":
            window = config.batch.sequence_tokens
        else:
            window = window_tokens(min(step, config.schedule.steps), config.schedule)
        masks_documents = unit != "unlimited" and config.attention.document_mask
        return cls(
            unit=unit,
            window_tokens=window,
            block_size=config.attention.block_size,
            end_of_text=end_of_text,
            starts_document=end_of_text if masks_documents else NO_TOKEN,
        )

    @property
    def window(self) -> int:
        """The window in the unit of the mask: in blocks if it counts blocks, else in tokens."""
        return self.window_tokens // self.block_size if self.unit == "blocks" else self.window_tokens

    def first_visible(self, position: int) -> int:
        """The first position inside the window of a query, whatever the documents; may be negative."""
        if self.unit == "unlimited":
            return 0
        if self.unit == "tokens":
            return position - self.window_tokens + 1
        return (position // self.block_size - self.window + 1) * self.block_size

    def mask(self, tokens_T: Tensor, chunk_tokens: int | None = None, window: Tensor | None = None) -> Mask:
        """The mask of a sequence. With `chunk_tokens`, every run of so many tokens is a document of its own.

        `window`: a tensor that holds the window, for callers that keep one on their device.
        """
        documents = document_ids(tokens_T, self.starts_document, chunk_tokens)
        if window is None:
            # Without a window every key of the sequence is within it, however long the sequence is.
            size = len(tokens_T) if self.unit == "unlimited" else self.window
            window = torch.tensor(size, dtype=torch.int32, device=tokens_T.device)
        return Mask(documents, window, "blocks" if self.unit == "blocks" else "tokens", self.block_size)
