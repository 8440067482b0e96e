"""Reads figures of a step from the device without making the device wait.

A GPU runs behind the process that queues its work. Reading a value at once would empty that queue in every
step, so the copy is queued as well, and its values are read when they have arrived.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """A copy of a small tensor, on its way to the host."""

    def __init__(self, figures: Tensor) -> None:
        self._arrived: torch.Event | None = None
        self._figures = figures
        if figures.device.type == "cuda":
            # Only into pinned memory is a copy asynchronous.
            self._figures = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            self._figures.copy_(figures, non_blocking=True)
            self._arrived = torch.Event(figures.device)
            self._arrived.record()

    def values(self) -> list[float]:
        """Waits until the copy has arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        values: list[float] = self._figures.tolist()
        return values
