"""The kernels of Muon's momentum and step, against their plain versions."""

from typing import get_args

import pytest
import torch
from hotlap.optim.matrix_steps import MomentumForm, momentum_weights, plain_momenta, plain_step_matrix

from hotlap.kernels.cpu import steps
from tests.kernels_here import needs_kernels

# Several matrices; of the larger ones threads take parts, the last of which is not a whole block.
SHAPES = [(1, 3, 5), (4, 7, 9), (3, 150, 300)]
TOLERANCE = {"atol": 1e-6, "rtol": 1e-6, "check_dtype": False}

pytestmark = [needs_kernels, pytest.mark.parametrize("threads", [1, 2, 5])]


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("form", get_args(MomentumForm))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_momentum_agrees_with_plain(shape, form, nesterov, threads) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    momenta = torch.randn(shape)
    gradients = [*torch.randn(shape[0], shape[2], shape[1]).mT]  # they need not be contiguous
    plain = momenta.double()
    expected = plain_momenta([gradient.double() for gradient in gradients], plain, form, 0.9, nesterov)
    updates = steps.step_momenta(gradients, momenta, *momentum_weights(form, 0.9, nesterov))
    torch.testing.assert_close(momenta, plain, **TOLERANCE)
    torch.testing.assert_close(updates, expected, **TOLERANCE)


@pytest.mark.parametrize(("decay", "cautious"), [(0.0, True), (0.0, False), (0.1, True), (0.1, False)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_step_agrees_with_plain(shape, decay, cautious, threads) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    weights, updates = [*torch.randn(shape)], torch.randn(shape)
    updates[:, 0, 0] = 0  # neither towards zero nor away
    rates, decays = [0.3 + i for i in range(len(weights))], [decay / (1 + i) for i in range(len(weights))]
    plain = [weight.double() for weight in weights]
    for weight, update, rate, each_decay in zip(plain, updates.double(), rates, decays, strict=True):
        plain_step_matrix(weight, update, rate, each_decay, cautious)
    steps.step_matrices(weights, updates, rates, decays, cautious)
    for weight, expected in zip(weights, plain, strict=True):
        torch.testing.assert_close(weight, expected, **TOLERANCE)


def test_what_is_not_a_number_does_not_go_unseen(threads) -> None:
    torch.set_num_threads(threads)
    weights, updates = [torch.ones(4, 4)], torch.ones(1, 4, 4)
    updates[0, 1, 2] = float("nan")
    steps.step_matrices(weights, updates, [0.3], [0.1], cautious=True)
    assert weights[0].isnan().nonzero().tolist() == [[1, 2]]
