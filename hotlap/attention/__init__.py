"""Attention over packed documents: one mask, and the backends that implement it.

`dense` is the reference, `flex` the fast path on CUDA, `blocked` trains on every device. The
`native` backend, in C for float32 on a CPU, is in `hotlap.kernels`, which also chooses the backend
of a run. All backends take the same `Mask` and must agree, forward and backward.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hotlap.attention.mask import Mask, previous_tokens


class Backend(Protocol):
    """Plans a mask once per batch. Every layer then attends with that plan."""

    @property
    def name(self) -> str: ...

    @property
    def plans_on_device(self) -> bool:
        """Whether `plan` is made of operators on tensors alone, so that a compiler can trace it."""
        ...

    def plan(self, mask: Mask) -> Any: ...

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, plan: Any, scale: float) -> Tensor:
        """(T, H, D) queries, (T, G, D) keys and values of one packed sequence → (T, H, D)."""
        ...


@dataclass(frozen=True)
class BatchPlan:
    """A backend and its plan for the mask of one batch. The model's `AttentionPlan`."""

    backend: Backend
    layout: Any  # the result of `backend.plan`
    mask: Mask

    def attend(self, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, scale: float) -> Tensor:
        return self.backend.attend(q_THD, k_TGD, v_TGD, self.layout, scale)

    def previous(self, tokens_T: Tensor) -> Tensor:
        """(T,): the token before each one in its document, NO_TOKEN at the start of a document."""
        return previous_tokens(tokens_T, self.mask.documents)


def plan_batch(backend: Backend, mask: Mask) -> BatchPlan:
    return BatchPlan(backend, backend.plan(mask), mask)
