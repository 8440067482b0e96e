"""The optimizer of tables of which a step touches some rows: against a loop, and what it leaves alone."""

import pytest
import torch
from torch import Tensor, nn

from hotlap.config import OptimConfig
from hotlap.kernels.cpu import row_rms
from hotlap.optim.routing import RoutedParameter, build_optimizers, route
from hotlap.optim.row_rms import RowRms, step_rows
from hotlap.optim.state import gather_state, restore_state
from tests.kernels_here import needs_kernels

BETA2, EPS = 0.9, 1e-8


def gradients(steps: int, rows: int = 40, width: int = 7) -> list[Tensor]:
    """A third of the rows in each step, some entries of them zero."""
    made = torch.Generator().manual_seed(0)
    values = torch.randn(steps, rows, width, generator=made)
    some_rows = torch.rand(steps, rows, 1, generator=made) < 0.33
    return list(values * some_rows * (torch.rand(steps, rows, width, generator=made) < 0.9))


def by_hand(table: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    table, squares = table.double().clone(), torch.zeros_like(table, dtype=torch.float64)
    for step, grad in enumerate(grads, 1):
        for row in range(len(table)):
            if (grad[row] == 0).all():
                continue
            squares[row] = BETA2 * squares[row] + (1 - BETA2) * grad[row].double() ** 2
            table[row] -= lr * grad[row] / ((squares[row] / (1 - BETA2**step)).sqrt() + EPS)
    return table


def trained(table: Tensor, grads: list[Tensor], lr: float) -> Tensor:
    parameter = nn.Parameter(table.clone())
    optimizer = RowRms([("pairs", parameter)], lr=lr, beta2=BETA2, eps=EPS)
    for grad in grads:
        parameter.grad = grad.clone()
        optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_it_does_what_a_loop_over_rows_does(dtype) -> None:
    table, grads = torch.randn(40, 7), gradients(20)
    found = trained(table.to(dtype), [grad.to(dtype) for grad in grads], 0.3)
    torch.testing.assert_close(found.double(), by_hand(table, grads, 0.3), rtol=1e-5, atol=1e-5)


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_kernel_agrees_with_plain(threads) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    grad = gradients(1)[0]
    ours, plain = ([torch.ones(40, 7), torch.full((40, 7), 0.5)] for _ in range(2))
    row_rms.step_rows(ours[0], grad, ours[1], 0.3, BETA2, 0.5, EPS)
    step_rows(plain[0], grad, plain[1], 0.3, BETA2, 0.5, EPS)
    torch.set_num_threads(before)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_without_a_gradient_stays_bit_for_bit(dtype) -> None:
    table, (first, second) = torch.randn(40, 7).to(dtype), (grad.to(dtype) for grad in gradients(2))
    after_one, after_two = trained(table, [first], 0.3), trained(table, [first, second], 0.3)
    untouched = (second == 0).all(dim=1)
    assert 0 < untouched.sum() < 40
    assert torch.equal(after_one[untouched], after_two[untouched])
    assert (after_one != after_two)[~untouched].any(dim=1).all()


def test_nan_is_not_taken_for_no_gradient() -> None:
    grad = torch.zeros(40, 7)
    grad[3, 2] = float("nan")
    found = trained(torch.zeros(40, 7), [grad], 0.3)
    assert found[3, 2].isnan()
    assert found[4:].eq(0).all()


def optimizers_of(table: nn.Parameter) -> list[torch.optim.Optimizer]:
    config = OptimConfig(pairs="row-rms")
    return build_optimizers(route([RoutedParameter("pairs", table, "pairs")], config, world_size=1))


def test_it_goes_on_from_its_state_as_if_never_stopped() -> None:
    start, grads = torch.randn(40, 7), gradients(6)
    straight, halted = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    (whole,), (half,) = optimizers_of(straight), optimizers_of(halted)
    for grad in grads:
        straight.grad = grad
        whole.step()
    for grad in grads[:3]:
        halted.grad = grad
        half.step()
    resumed = nn.Parameter(halted.detach().clone())
    rest = optimizers_of(resumed)
    restore_state(rest, gather_state([half]))
    for grad in grads[3:]:
        resumed.grad = grad
        rest[0].step()
    assert torch.equal(resumed, straight)
    assert not torch.equal(halted, straight)


def test_adam_takes_the_table_unless_it_is_asked_for() -> None:
    declared = [RoutedParameter("pairs", nn.Parameter(torch.zeros(40, 7)), "pairs")]
    assert [r.optimizer for r in route(declared, OptimConfig(), world_size=1).routes] == ["adam"]
    chosen = route(declared, OptimConfig(pairs="row-rms"), world_size=1)
    assert [r["optimizer"] for r in chosen.rows()] == ["row-rms"]
    assert isinstance(build_optimizers(chosen)[0], RowRms)
