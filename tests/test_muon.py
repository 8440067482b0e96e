"""Muon on one device: against the plain reference, option by option, and what it refuses."""

import copy

import pytest
import torch

from hotlap.errors import OptimizerError
from hotlap.optim import Muon, reference
from hotlap.optim.newton_schulz import orthogonalize, step_coefficients


def matrix(rows: int = 12, cols: int = 20, seed: int = 0) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)))


def noise_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rows, cols", [(12, 12), (12, 40), (40, 12)])
@pytest.mark.parametrize("coefficients", ["quintic", "polar-express"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_fifty_steps_follow_the_reference(rows, cols, coefficients, dtype, tolerance):
    weight = torch.nn.Parameter(0.1 * matrix(rows, cols).detach().to(dtype))
    expected, buffer = weight.detach().clone(), torch.zeros(rows, cols, dtype=dtype)
    optimizer = Muon([weight], lr=0.02, momentum=0.95, coefficients=coefficients)
    for step in range(50):
        weight.grad = noise_like(weight, step).to(dtype)
        optimizer.step()
        expected, buffer = reference.muon_step(
            expected, weight.grad, buffer, 0.02, 0.95, step_coefficients(coefficients, 5)
        )
    torch.testing.assert_close(weight.detach(), expected, atol=tolerance, rtol=0)


def test_matrices_stepped_together_move_as_each_alone():
    shapes = [(8, 8), (16, 8), (8, 8), (8, 24), (16, 8), (8, 8)]
    together = [matrix(*shape, seed=i) for i, shape in enumerate(shapes)]
    apart = copy.deepcopy(together)
    optimizers = [Muon(together), *(Muon([weight]) for weight in apart)]
    for step in range(3):
        for index, (one, other) in enumerate(zip(together, apart, strict=True)):
            one.grad = noise_like(one, 10 * step + index)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_the_iteration_can_be_left_to_bfloat16_while_weights_stay_float32():
    moved, exact = (one_step(matrix(), ns_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    assert moved.dtype == torch.float32
    # Two to three significant digits, and not the float32 result.
    torch.testing.assert_close(moved, exact, atol=0.02, rtol=0)
    assert not torch.allclose(moved, exact, atol=1e-5)


def one_step(weight: torch.nn.Parameter, **options) -> torch.Tensor:
    """How a step moved the weight, per unit of learning rate."""
    before = weight.detach().clone()
    weight.grad = noise_like(weight, 5)
    Muon([("w", weight)], lr=0.1, **options).step()
    return (before - weight.detach()) / 0.1


def test_both_momentum_forms_and_the_look_ahead():
    coefficients = step_coefficients("quintic", 5)
    gradients = [noise_like(matrix(), seed) for seed in (1, 2)]
    first, second = gradients
    expected = {
        ("lerp", True): 0.1 * second + 0.9 * (0.9 * 0.1 * first + 0.1 * second),
        ("lerp", False): 0.9 * 0.1 * first + 0.1 * second,
        ("sum", True): second + 0.9 * (0.9 * first + second),
        ("sum", False): 0.9 * first + second,
    }
    for (form, nesterov), direction in expected.items():
        weight = matrix()
        optimizer = Muon([weight], lr=1.0, momentum=0.9, momentum_form=form, nesterov=nesterov)
        for gradient in gradients:
            before = weight.detach().clone()
            weight.grad = gradient.clone()
            optimizer.step()
        moved = before - weight.detach()
        torch.testing.assert_close(moved, orthogonalize(direction, coefficients), atol=1e-5, rtol=0)


def test_the_update_is_scaled_by_shape():
    coefficients = step_coefficients("quintic", 5)
    for rows, cols in ((40, 10), (10, 40)):
        direction = orthogonalize(noise_like(matrix(rows, cols), 5), coefficients)
        aspect = one_step(matrix(rows, cols))
        match_rms = one_step(matrix(rows, cols), update_scale="match-rms")
        torch.testing.assert_close(aspect, direction * max(1, rows / cols) ** 0.5, atol=1e-5, rtol=0)
        torch.testing.assert_close(match_rms, direction * 0.2 * 40**0.5, atol=1e-5, rtol=0)


def test_a_fused_matrix_moves_as_its_parts():
    fused = matrix(36, 12)
    pieces = [torch.nn.Parameter(piece.clone()) for piece in fused.detach().chunk(3)]
    gradient = noise_like(fused, 5)
    fused.grad = gradient
    for piece, piece_gradient in zip(pieces, gradient.chunk(3), strict=True):
        piece.grad = piece_gradient.clone()
    Muon([("qkv", fused)], parts={"qkv": 3}).step()
    Muon(pieces).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in pieces]), atol=1e-6, rtol=0)


def test_an_lr_factor_scales_one_parameter_only():
    weights = {"a": matrix(seed=1), "b": matrix(seed=2)}
    plain = copy.deepcopy(weights)
    for chosen, options in ((weights, {"lr_factors": {"b": 3.0}}), (plain, {})):
        for weight in chosen.values():
            weight.grad = noise_like(weight, 5)
        Muon(chosen.items(), lr=0.1, **options).step()
    start = {"a": matrix(seed=1), "b": matrix(seed=2)}
    assert torch.equal(weights["a"], plain["a"])
    torch.testing.assert_close(start["b"] - weights["b"], 3 * (start["b"] - plain["b"]), atol=1e-6, rtol=0)


def test_weight_decay_is_decoupled_and_can_be_cautious():
    start = matrix().detach()
    update = one_step(matrix())
    decayed = one_step(matrix(), weight_decay=0.5)
    torch.testing.assert_close(decayed, update + 0.5 * start, atol=1e-5, rtol=0)
    cautious = one_step(matrix(), weight_decay=0.5, cautious=True)
    agrees = update * start > 0
    assert agrees.any()
    assert not agrees.all()
    torch.testing.assert_close(cautious, update + 0.5 * start * agrees, atol=1e-5, rtol=0)


def test_groups_have_their_own_schedulable_settings():
    first, second = matrix(seed=1), matrix(seed=1)
    groups = [{"params": [("a", first)]}, {"params": [("b", second)], "lr": 0.0}]
    optimizer = Muon(groups, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    before = first.detach().clone()
    for weight in (first, second):
        weight.grad = noise_like(weight, 1)
    optimizer.step()
    scheduler.step()
    assert torch.equal(second, before)
    assert not torch.equal(first, before)
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.0]


def test_a_closure_gives_its_loss():
    weight = matrix()

    def closure() -> torch.Tensor:
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert Muon([weight]).step(closure) > 0


def test_a_bfloat16_weight_has_float32_momentum():
    weight = torch.nn.Parameter(matrix().detach().bfloat16())
    optimizer = Muon([weight])
    weight.grad = noise_like(weight, 1).bfloat16()
    before = weight.detach().clone()
    optimizer.step()
    assert weight.dtype == torch.bfloat16
    assert not torch.equal(weight, before)
    assert optimizer.state[weight]["momentum"].dtype == torch.float32


def stepped(weights, optimizer, steps):
    for step in steps:
        for index, weight in enumerate(weights):
            weight.grad = noise_like(weight, 10 * step + index)
        optimizer.step()


def test_state_continues_bit_for_bit():
    weights = [matrix(8, 8, 1), matrix(24, 8, 2), matrix(8, 8, 3)]
    optimizer = Muon(weights, lr=0.1)
    stepped(weights, optimizer, range(3))
    optimizer.param_groups[0]["momentum"] = 0.5
    resumed_weights = copy.deepcopy(weights)
    resumed = Muon(resumed_weights, lr=7.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    stepped(weights, optimizer, range(3, 6))
    stepped(resumed_weights, resumed, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(weights, resumed_weights, strict=True))


def test_state_that_does_not_fit_is_refused_and_changes_nothing():
    weights = {"a": matrix(seed=1), "b": matrix(seed=2)}
    optimizer = Muon(weights.items())
    stepped(weights.values(), optimizer, range(1))
    kept = copy.deepcopy(optimizer.state_dict())
    missing = copy.deepcopy(kept)
    del missing["state"]["b"]
    misshapen = copy.deepcopy(kept)
    misshapen["state"]["b"]["momentum"] = torch.zeros(3, 3)
    with pytest.raises(OptimizerError, match=r"`b`; found none"):
        optimizer.load_state_dict(missing)
    with pytest.raises(OptimizerError, match=r"`b`; found shape \(3, 3\)"):
        optimizer.load_state_dict(misshapen)
    with pytest.raises(OptimizerError, match="`b` in only one of the two"):
        Muon({"a": matrix(), "c": matrix()}.items()).load_state_dict(kept)
    for name in weights:
        assert torch.equal(optimizer.state_dict()["state"][name]["momentum"], kept["state"][name]["momentum"])


def test_what_it_cannot_take_is_refused_by_name():
    weight = matrix()
    with pytest.raises(OptimizerError, match=r"`first` twice \(also as `second`\)"):
        Muon([("first", weight), ("second", weight)])
    with pytest.raises(OptimizerError, match="`same` twice"):
        Muon([{"params": [("same", weight)]}, {"params": [("same", matrix())]}])
    with pytest.raises(OptimizerError, match=r"`bias` with shape \(4,\)"):
        Muon([("bias", torch.nn.Parameter(torch.zeros(4)))])
    for shape in ((0, 4), (4, 0)):
        with pytest.raises(OptimizerError, match=r"`empty` with shape \(\d, \d\); leave it out"):
            Muon([("empty", torch.nn.Parameter(torch.zeros(shape)))])
    with pytest.raises(OptimizerError, match="12 rows, 5 parts"):
        Muon([("qkv", weight)], parts={"qkv": 5})
    with pytest.raises(OptimizerError, match="`typo`, which is not among them"):
        Muon([("w", weight)], lr_factors={"typo": 2.0})
    with pytest.raises(OptimizerError, match="found none"):
        Muon([])
    with pytest.raises(OptimizerError, match="build a new Muon"):
        Muon([weight]).add_param_group({"params": [matrix()]})


@pytest.mark.parametrize(
    "options, found",
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"momentum": 1.0}, "momentum=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"ns_steps": 0}, "found 0"),
        ({"coefficients": "cubic"}, "coefficients='cubic'"),
        ({"momentum_form": "ema"}, "momentum_form='ema'"),
        ({"update_scale": "none"}, "update_scale='none'"),
        ({"communication": "carrier-pigeon"}, "communication='carrier-pigeon'"),
    ],
)
def test_options_out_of_range_are_refused(options, found):
    with pytest.raises(OptimizerError, match=found):
        Muon([matrix()], **options)


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_is_refused_by_name_before_anything_changes(poison):
    weights = {"good": matrix(seed=1), "bad": matrix(seed=2)}
    optimizer = Muon(weights.items())
    stepped(weights.values(), optimizer, range(1))
    before = copy.deepcopy((weights, optimizer.state_dict()["state"]))
    weights["bad"].grad[2, 3] = poison
    with pytest.raises(OptimizerError, match="NaN or infinity in the gradient of `bad`;"):
        optimizer.step()
    after = optimizer.state_dict()["state"]
    for name in weights:
        assert torch.equal(weights[name], before[0][name])
        assert torch.equal(after[name]["momentum"], before[1][name]["momentum"])


def test_a_huge_but_finite_gradient_is_taken():
    weight = matrix()
    weight.grad = torch.full_like(weight, 3e38)
    weight.grad[0] *= -1
    Muon([weight]).step()
    assert bool(weight.isfinite().all())


def test_a_missing_gradient_is_refused_by_name():
    weights = {"used": matrix(seed=1), "unused": matrix(seed=2)}
    optimizer = Muon(weights.items())
    weights["used"].grad = noise_like(weights["used"], 1)
    with pytest.raises(OptimizerError, match="none for `unused`;"):
        optimizer.step()


def test_a_deep_copy_steps_on_by_itself():
    weights = [matrix(8, 8, 1), matrix(24, 8, 2), matrix(8, 8, 3)]
    optimizer = Muon(weights, lr=0.1)
    stepped(weights, optimizer, range(2))
    copied_weights, copied = copy.deepcopy((weights, optimizer))
    stepped(weights, optimizer, range(2, 4))
    assert not torch.equal(weights[0], copied_weights[0])
    stepped(copied_weights, copied, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(weights, copied_weights, strict=True))
    for name, entry in optimizer.state_dict()["state"].items():
        assert torch.equal(entry["momentum"], copied.state_dict()["state"][name]["momentum"])


def test_a_matrix_whose_shape_was_changed_is_refused_by_name():
    weights = {"a": matrix(seed=1), "b": matrix(seed=2)}
    optimizer = Muon(weights.items())
    stepped(weights.values(), optimizer, range(1))
    before = weights["a"].detach().clone()
    weights["b"].data = torch.zeros(1, 20)
    weights["b"].grad = torch.zeros(1, 20)
    with pytest.raises(OptimizerError, match=r"`b` to keep its shape \(12, 20\); found \(1, 20\)"):
        optimizer.step()
    assert torch.equal(weights["a"], before)
