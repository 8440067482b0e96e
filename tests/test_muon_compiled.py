"""Muon's math compiled for CUDA: the values of the plain one, one compilation per shape, no waiting.

Run here on the CPU. Values are compared as the compiler traces the math and, slowly, as generated code.
"""

import copy
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hotlap.kernels.cuda import muon_math
from hotlap.kernels.cuda.muon_math import CompiledMath
from hotlap.kernels.install import Part, _install_math
from hotlap.optim import Muon
from hotlap.optim.muon_math import PlainMath
from hotlap.train.compile import warm_up_muon

SHAPES = [(16, 16)] * 3 + [(8, 32), (32, 8), (48, 16)]
OPTIONS = {
    "lerp": {"weight_decay": 0.1, "cautious": True},
    "sum": {"weight_decay": 0.1, "momentum_form": "sum", "nesterov": False, "coefficients": "polar-express"},
}


def make_weights() -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        str(index): torch.nn.Parameter(torch.randn(shape, generator=generator))
        for index, shape in enumerate(SHAPES)
    }


def make_muon(weights: dict[str, torch.nn.Parameter], **options: Any) -> Muon:
    return Muon(weights.items(), lr=0.02, parts={"5": 3}, lr_factors={"1": 2.0}, **options)


def take_step(weights: dict[str, torch.nn.Parameter], muon: Muon, step: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for weight in weights.values():
        weight.grad = torch.randn(weight.shape, generator=generator)
    (group,) = muon.param_groups
    group["lr"] = 0.02 * (1 - step / (steps - 1))  # down to 0, where decay and rates vanish
    group["momentum"] = 0.85 + 0.1 * step / steps
    muon.step()


def compare_with_plain(options: dict[str, Any], steps: int) -> None:
    """Train with both; after the first step a compilation is an error."""
    weights = make_weights()
    expected = copy.deepcopy(weights)
    muon, plain = make_muon(weights, **options), make_muon(expected, **options)
    muon.math = CompiledMath()
    take_step(weights, muon, 0, steps)
    take_step(expected, plain, 0, steps)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(1, steps):
            take_step(weights, muon, step, steps)
            take_step(expected, plain, step, steps)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name], atol=2e-5, rtol=0)
        momentum = [optimizer.state_dict()["state"][name]["momentum"] for optimizer in (muon, plain)]
        torch.testing.assert_close(*momentum, atol=1e-6, rtol=1e-5)


def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile without generating code, which takes seconds."""
    monkeypatch.setattr(
        muon_math,
        "_compiled",
        lambda function: torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=False),
    )


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_schedule_needs_one_compilation_and_gives_the_plain_values(options, monkeypatch):
    traced_only(monkeypatch)
    compare_with_plain(options, steps=20)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated:FutureWarning")  # torch's
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_generated_code_gives_the_plain_values(options):
    compare_with_plain(options, steps=20)


def test_bfloat16_weights_are_updated_in_float32_and_rounded_once(monkeypatch):
    traced_only(monkeypatch)
    weights = [torch.nn.Parameter(weight.detach().bfloat16()) for weight in make_weights().values()]
    updates = [torch.randn(weight.shape).bfloat16() for weight in weights]
    rate, decay = torch.tensor(0.01), torch.tensor(0.001)
    expected = [
        (weight.float() - decay * weight.float() - rate * update.float()).bfloat16()
        for weight, update in zip(weights, updates, strict=True)
    ]
    with torch.no_grad():
        CompiledMath().update_weights(weights, updates, [0.01] * 6, [0.001] * 6, cautious=False)
    assert all(torch.equal(weight, value) for weight, value in zip(weights, expected, strict=True))


class ForbidReading(TorchDispatchMode):
    """An error where Python reads a value from a tensor, which on CUDA waits for the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "a value is read"
        return func(*args, **(kwargs or {}))


def test_nothing_reads_a_value(monkeypatch):
    monkeypatch.setattr(muon_math, "_compiled", lambda function: function)
    weights = make_weights()
    muon = make_muon(weights, check_finite=False, weight_decay=0.1)
    for math in (PlainMath(), CompiledMath()):
        muon.math = math
        with ForbidReading():
            take_step(weights, muon, 0, 2)
    with pytest.raises(AssertionError, match="a value is read"), ForbidReading():
        torch.ones(()).item()


def test_it_is_installed_where_optimizers_are_compiled():
    muon = make_muon(make_weights())
    assert _install_math(muon, "no kernels on cuda") == Part("Newton-Schulz", "", "no kernels on cuda")
    assert type(muon.math) is PlainMath
    assert _install_math(muon, "no kernels on cuda", compiles=True) == Part("Muon", "compiled PyTorch")
    assert type(muon.math) is CompiledMath


def test_warming_up_compiles_all_of_a_step_and_changes_nothing(monkeypatch):
    traced_only(monkeypatch)
    weights = make_weights()
    before = copy.deepcopy(weights)
    muon = make_muon(weights, weight_decay=0.1)
    muon.math = CompiledMath()
    warm_up_muon([muon, torch.optim.AdamW([torch.zeros(2, requires_grad=True)])])
    assert all(torch.equal(weights[name], before[name]) and weights[name].grad is None for name in weights)
    assert all(not entry["momentum"].any() for entry in muon.state_dict()["state"].values())
    assert muon.param_groups[0]["lr"] == 0.02
    with torch.compiler.set_stance("fail_on_recompile"):
        take_step(weights, muon, 0, 2)
    assert not any(torch.equal(weights[name], before[name]) for name in weights)
