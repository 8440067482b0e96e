"""RowRms: RMSprop for an embedding table, updating only the rows that have a gradient.

Adam reads and writes the whole table in every step, because its moments decay even where the
gradient is zero. Here a row whose gradient is zero keeps its value and its second moment. There is
no first moment: it would either keep moving rows that no token uses or go stale with them. Without
it, a rare row moves about as far per gradient as Adam moves it in the steps after that gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# (table, grad, squares, lr, beta2, correction, eps); updates table and squares in place
StepRows = Callable[[Tensor, Tensor, Tensor, float, float, float, float], None]


class RowRms(torch.optim.Optimizer):
    """Takes (name, table) pairs. `lr` may change between steps."""

    def __init__(self, params: Sequence[tuple[str, Tensor]], lr: float, *, beta2: float, eps: float) -> None:
        super().__init__(params, {"lr": lr})
        self._beta2, self._eps = beta2, eps
        self.step_rows: StepRows = step_rows

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "RowRms takes no closure: compute the gradients before step()"
        for group in self.param_groups:
            for table in group["params"]:
                state = self.state[table]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg_sq"] = torch.zeros_like(table)
                state["step"] += 1
                # Adam's bias correction: the second moment starts at zero.
                correction = 1 - self._beta2 ** state["step"].item()
                self.step_rows(
                    table,
                    table.grad,
                    state["exp_avg_sq"],
                    group["lr"],
                    self._beta2,
                    correction,
                    self._eps,
                )
        return None


def step_rows(
    table: Tensor, grad: Tensor, squares: Tensor, lr: float, beta2: float, correction: float, eps: float
) -> None:
    """Update the rows of `table` and `squares` where `grad` is not all zero. All are (rows, width).

    squares ← beta2 · squares + (1 − beta2) · grad²
    table ← table − lr · grad / (√(squares / correction) + eps)
    """
    touched = grad.ne(0).any(dim=1, keepdim=True)
    squares.lerp_(grad.square(), torch.where(touched, 1 - beta2, 0.0).to(squares.dtype))
    table.addcdiv_(grad, (squares / correction).sqrt_().add_(eps), value=-lr)
