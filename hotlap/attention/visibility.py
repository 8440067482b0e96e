"""What a query sees at a given step of a run, for training, validation and sampling alike.

The rule has two forms: the mask of a whole sequence, and the first visible position of one query,
before which a KV cache can drop its entries. The window follows the schedule of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hotlap.attention.mask import NO_TOKEN, Mask, WindowUnit, document_ids
from hotlap.config import Config, ScheduleConfig


def window_tokens(step: int, schedule: ScheduleConfig) -> int:
    """The attention window after `step` updates: linear from start to end, rounded down.

    Uses integers only, so that float rounding cannot shift the step at which the window grows.
    """
    steps = schedule.steps
    start, end = schedule.window_start_tokens, schedule.window_end_tokens
    exact_times_steps = start * (steps - step) + end * step + schedule.window_offset_tokens * steps
    return exact_times_steps // (steps * schedule.window_multiple_tokens) * schedule.window_multiple_tokens


@dataclass(frozen=True)
class Visibility:
    unit: WindowUnit | Literal["unlimited"]
    window_tokens: int  # maximum number of visible keys; whole blocks if the unit is blocks
    block_size: int
    end_of_text: int
    starts_document: int  # end_of_text, or NO_TOKEN without a document mask

    @classmethod
    def at_step(cls, config: Config, step: int, end_of_text: int) -> Visibility:
        """After `step` updates. Without a window a query sees all of its sequence."""
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
        """The window in blocks if the unit is blocks, else in tokens."""
        return self.window_tokens // self.block_size if self.unit == "blocks" else self.window_tokens

    def first_visible(self, positions_S: Tensor) -> Tensor:
        """First position in the window of each query, ignoring documents. May be negative."""
        if self.unit == "unlimited":
            return torch.zeros_like(positions_S)
        first_in_tokens = positions_S - self.window_tokens + 1
        window_blocks = -(-self.window_tokens // self.block_size)
        first_in_blocks = (positions_S // self.block_size - window_blocks + 1) * self.block_size
        if self.unit == "tokens":
            return first_in_tokens
        return first_in_blocks if self.unit == "blocks" else torch.maximum(first_in_tokens, first_in_blocks)

    def mask(self, tokens_T: Tensor, chunk_tokens: int | None = None, window: Tensor | None = None) -> Mask:
        """The mask of a sequence. With `chunk_tokens`, every multiple of it starts a document.

        `window` is the window as a () int32 tensor, for callers that keep one on the device.
        """
        documents = document_ids(tokens_T, self.starts_document, chunk_tokens)
        if window is None:
            # Unlimited means the whole sequence, whatever its length.
            size = len(tokens_T) if self.unit == "unlimited" else self.window
            window = torch.tensor(size, dtype=torch.int32, device=tokens_T.device)
        unit = "tokens" if self.unit == "unlimited" else self.unit
        return Mask(documents, window, unit, self.block_size)
