"""AdamW by a kernel, against torch's own, whose state it shares."""

import copy
from typing import Any

import pytest
import torch
from hotlap.optim.adam import KernelAdam
from torch import Tensor

from hotlap.config import OptimConfig
from hotlap.optim.routing import RoutedParameter, build_optimizers, route
from tests.kernels_here import needs_kernels, without_kernels

BETAS, EPS = (0.8, 0.95), 1e-10
# The last one is more than a thread takes at once, and not a whole number of times.
SHAPES = [(), (2,), (7, 9), (150, 301)]


def groups(weights: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": weights[:2], "lr": 0.3, "weight_decay": 0.0},
        {"params": weights[2:], "lr": 0.01, "weight_decay": 0.1},
    ]


def walk(optimizer: torch.optim.Optimizer, weights: list[Tensor], first: int, past: int) -> None:
    """Steps `first` to `past`, each with gradients of its own."""
    for step in range(first, past):
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            gradient = torch.randn(weight.shape[::-1], generator=generator, dtype=torch.float64)
            # They need not be contiguous, and are zero in places.
            weight.grad = (
                (gradient * (gradient > -1)).permute(tuple(reversed(range(weight.ndim)))).to(weight.dtype)
            )
        optimizer.param_groups[1]["lr"] = 0.01 / (1 + step)
        optimizer.step()


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_it_agrees_with_torch(threads) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in SHAPES]
    oracles = [weight.double() for weight in weights]
    ours = KernelAdam(groups(weights), betas=BETAS, eps=EPS)
    torchs = torch.optim.AdamW(groups(oracles), betas=BETAS, eps=EPS)
    walk(ours, weights, 0, 5)
    walk(torchs, oracles, 0, 5)
    for weight, oracle in zip(weights, oracles, strict=True):
        torch.testing.assert_close(weight, oracle, atol=2e-6, rtol=2e-6, check_dtype=False)
        for entry, value in torchs.state[oracle].items():
            found = ours.state[weight][entry]
            torch.testing.assert_close(found, value, atol=2e-6, rtol=2e-6, check_dtype=False)


@needs_kernels
@pytest.mark.parametrize("from_torch", [True, False])
def test_either_goes_on_from_the_state_of_the_other(from_torch) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(shape) for shape in SHAPES]
    alone = copy.deepcopy(weights)
    optimizers = [
        lambda given: KernelAdam(groups(given), betas=BETAS, eps=EPS),
        lambda given: torch.optim.AdamW(groups(given), betas=BETAS, eps=EPS),
    ]
    first, second = reversed(optimizers) if from_torch else optimizers
    before, after = first(weights), second(weights)
    walk(before, weights, 0, 3)
    after.load_state_dict(copy.deepcopy(before.state_dict()))
    walk(after, weights, 3, 6)
    walk(first(alone), alone, 0, 6)
    for weight, expected in zip(weights, alone, strict=True):
        torch.testing.assert_close(weight, expected, atol=2e-6, rtol=2e-6)


@needs_kernels
def test_what_is_not_a_number_does_not_go_unseen() -> None:
    weight = torch.ones(4, 4)
    weight.grad = torch.ones(4, 4)
    weight.grad[1, 2] = float("nan")
    KernelAdam([{"params": [weight], "lr": 0.1, "weight_decay": 0.0}], betas=BETAS, eps=EPS).step()
    assert weight.isnan().nonzero().tolist() == [[1, 2]]


@needs_kernels
@pytest.mark.parametrize(
    ("tensor", "has_kernels", "expected"),
    [
        (torch.ones(4, 6), True, KernelAdam),
        (torch.ones(4, 6), False, torch.optim.AdamW),
        (torch.ones(4, 6, dtype=torch.float64), True, torch.optim.AdamW),
        (torch.ones(6, 4).T, True, torch.optim.AdamW),
    ],
)
def test_the_kernel_is_taken_where_it_can_be(tensor, has_kernels, expected, monkeypatch) -> None:
    if not has_kernels:
        without_kernels(monkeypatch)
    routing = route([RoutedParameter("head", tensor, "head")], OptimConfig(), world_size=1)
    (optimizer,) = build_optimizers(routing)
    assert type(optimizer) is expected
