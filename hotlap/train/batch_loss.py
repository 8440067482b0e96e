"""The loss of a batch from its tokens alone: attention plans first, then the model.

Both are one module, so that a compiler can fuse them into one graph.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from hotlap.model import GPT, GPT2
from hotlap.train.masking import Masking


class BatchLoss(nn.Module):
    def __init__(self, model: GPT | GPT2, masking: Masking) -> None:
        super().__init__()
        self.model = model
        self.masking = masking

    def forward(
        self,
        tokens_T: Tensor,
        targets_T: Tensor,
        chunk_tokens: int | None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> Tensor:
        """Cross entropy in nats. With `chunk_tokens`, every multiple of it starts a document."""
        plans = self.masking.plans(tokens_T, chunk_tokens)
        loss: Tensor = self.model(tokens_T, targets_T, plans, reduction=reduction)
        return loss
