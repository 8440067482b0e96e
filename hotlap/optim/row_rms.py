"""RowRms: RMSprop, row by row, for a table of which each step touches only some rows.

Adam walks the whole of such a table in every step, to let moments decay where there is no gradient. Here a
row without a gradient stays as it is, its second moment too, and there is no first moment: that would go on
moving a row which nobody asks for, or stand still with it. Divided by the root of the second moment alone, a
row that comes up rarely moves about as far as Adam would carry it after its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# (table, grad, squares, lr, beta2, correction, eps), in place
StepRows = Callable[[Tensor, Tensor, Tensor, float, float, float, float], None]


class RowRms(torch.optim.Optimizer):
    """For (name, table) pairs. `lr` may change between steps."""

    def __init__(self, params: Sequence[tuple[str, Tensor]], lr: float, *, beta2: float, eps: float) -> None:
        super().__init__(params, {"lr": lr})
        self._beta2, self._eps = beta2, eps
        self.step_rows: StepRows = step_rows

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        assert closure is None, "gradients are computed before the step"
        for group in self.param_groups:
            for table in group["params"]:
                state = self.state[table]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg_sq"] = torch.zeros_like(table)
                state["step"] += 1
                # Early on, the second moment is still too small by this.
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
    """Where a row of grad is not zero: squares moves to grad² by 1 − beta2, and table against grad."""
    touched = grad.ne(0).any(dim=1, keepdim=True)
    squares.lerp_(grad.square(), torch.where(touched, 1 - beta2, 0.0).to(squares.dtype))
    table.addcdiv_(grad, (squares / correction).sqrt_().add_(eps), value=-lr)
