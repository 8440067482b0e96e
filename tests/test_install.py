"""What `kernels.install` swaps, what it leaves plain and why; names and state dicts stay the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hotlap.kernels import Installed, Part, choose_backend, install
from hotlap.kernels.install import _install_math
from hotlap.model import build_model
from hotlap.model.head import cross_entropy
from hotlap.optim.muon_math import PlainMath
from hotlap.optim.routing import build_optimizers
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.compile import max_micro_batch_tokens
from hotlap.train.lap import route_parameters
from tests.kernels_here import needs_kernels, without_kernels
from tests.tiny import made_up_tokens, make_masking, make_model


def installed_at_nano(
    recipe: str = "softcap",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    compiled: bool = False,
    **changes,
) -> Installed:
    """With settings given as `section__name`."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    config = updated(resolve(recipe, "nano"), {"model.num_layers": 2, **named})
    model = build_model(config.model, config.batch.sequence_tokens, dtype)
    optimizers = build_optimizers(route_parameters(model, config, world_size=1))
    return install(
        model,
        optimizers,
        backend=choose_backend(backend, "cpu"),
        tokens=max_micro_batch_tokens(config, world_size=1),
        compiled=compiled,
    )


TOO_LARGE = "plain: too few or too large matrices"
FUSED = {"attention": "C", "QKV of layer 0": "C", "MLP of layers 0-1": "C", "loss": "C", "Newton-Schulz": "C"}


@needs_kernels
@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, {}),
        (
            {"compiled": True},
            {"blocks": "plain: compiled", "QKV of layer 0": None, "MLP of layers 0-1": None},
        ),
        (
            {"dtype": torch.bfloat16},
            {
                "blocks": "plain: bfloat16 activations",
                "loss": "chunked PyTorch and C",
                "QKV of layer 0": None,
                "MLP of layers 0-1": None,
            },
        ),
        ({"backend": "blocked"}, {"attention": "plain: blocked backend"}),
        (
            {"model__width": 768, "model__num_heads": 6, "model__vocab_size": 8192},
            {"loss": "chunked PyTorch and C", "Newton-Schulz": TOO_LARGE},
        ),
        (
            {"model__width": 1024, "model__num_heads": 8},
            {"MLP of layers 0-1": "plain: too wide for a cache", "Newton-Schulz": TOO_LARGE},
        ),
        ({"model__softcap": 50.0}, {"loss": "chunked PyTorch"}),
    ],
    ids=str,
)
def test_every_part_says_what_runs_it(asked, expected) -> None:
    found = installed_at_nano(**asked).as_json()
    for part, how in {**FUSED, **expected}.items():
        assert found.get(part) == how


@needs_kernels
def test_gpt2_has_a_kernel_for_its_loss_only() -> None:
    found = installed_at_nano("adamw").as_json()
    assert found["blocks"] == "plain: GPT-2's have no kernels"
    assert found["loss"] == "chunked PyTorch"


@needs_kernels
def test_too_few_tokens_for_the_threads_leave_blocks_plain() -> None:
    torch.set_num_threads(16)
    assert installed_at_nano().as_json()["blocks"] == "plain: 2048 tokens at once, kernels pay from 4096"


def test_without_kernels_the_reason_is_given_and_the_loss_is_still_chunked(monkeypatch) -> None:
    without_kernels(monkeypatch)
    found = installed_at_nano().as_json()
    assert found["blocks"] == found["Newton-Schulz"] == "plain: left out by a test"
    assert found["loss"] == "chunked PyTorch"


@needs_kernels
def test_the_summary_is_one_line_with_every_reason() -> None:
    line = str(installed_at_nano(backend="blocked"))
    assert line.startswith(
        "attention plain (blocked backend); QKV of layer 0, MLP of layers 0-1, loss, Newton-Schulz in C"
    )
    assert "\n" not in line


def test_without_the_call_nothing_is_swapped() -> None:
    model = make_model(resolve("softcap", "pico"))
    assert model.loss is cross_entropy
    assert {type(block).__name__ for block in model.blocks} == {"Block"}


@needs_kernels
@pytest.mark.parametrize("recipe", ["softcap", "flex-attention", "sprint", "adamw"])
def test_state_dict_and_routing_are_the_same_with_and_without(recipe) -> None:
    config = resolve(recipe, "pico")
    plain, fused = make_model(config), make_model(config)
    install(fused, backend=choose_backend("native", "cpu"), tokens=512)
    assert list(plain.state_dict()) == list(fused.state_dict())
    rows = [route_parameters(model, config, world_size=1).rows() for model in (plain, fused)]
    assert rows[0] == rows[1]
    fused.load_state_dict(plain.state_dict())


class FusedNowhere(nn.Module):
    """A block of somebody's own."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = block

    def forward(self, *args: object) -> torch.Tensor:
        return self.inner(*args)


@needs_kernels
def test_a_foreign_block_is_left_alone() -> None:
    config = resolve("softcap", "pico")
    model = make_model(config)
    model.blocks[1] = FusedNowhere(model.blocks[1])
    found = install(model, backend=choose_backend("native", "cpu"), tokens=512).as_json()
    assert found["block of layer 1"] == "plain: FusedNowhere has no kernel"
    tokens, targets = made_up_tokens(512, 512)
    assert model(tokens, targets, make_masking(config).plans(tokens, None)).isfinite()


@needs_kernels
def test_a_foreign_matrix_inside_attention_leaves_that_attention_plain() -> None:
    model = make_model(resolve("softcap", "pico"))
    model.blocks[0].attention.q = nn.Linear(64, 64, bias=False)
    found = install(model, backend=choose_backend("native", "cpu"), tokens=512).as_json()
    assert found["QKV of layer 0"] == "plain: Linear has no kernel"
    assert found["MLP of layers 0-3"] == "C"


@needs_kernels
def test_a_loss_of_its_own_stays() -> None:
    model = make_model(resolve("softcap", "pico"))
    own = model.loss = lambda *_, **__: torch.zeros(())
    assert (
        install(model, backend=choose_backend("native", "cpu"), tokens=512).as_json()["loss"]
        == "plain: a loss of its own"
    )
    assert model.loss is own


@needs_kernels
def test_a_module_with_hooks_is_left_plain() -> None:
    model = make_model(resolve("softcap", "pico"))
    model.blocks[0].attention.q.register_forward_pre_hook(lambda *_: None)
    model.blocks[1].mlp.register_forward_hook(lambda *_: None)
    found = install(model, backend=choose_backend("native", "cpu"), tokens=512).as_json()
    assert found["QKV of layer 0"] == "plain: Matrix has hooks"
    assert found["MLP of layer 1"] == "plain: MLP has hooks"


@needs_kernels
def test_a_parametrized_weight_is_left_plain() -> None:
    model = make_model(resolve("softcap", "pico"))
    nn.utils.parametrizations.weight_norm(model.blocks[0].mlp.expand)
    found = install(model, backend=choose_backend("native", "cpu"), tokens=512).as_json()
    assert found["MLP of layer 0"].startswith("plain: ")


@needs_kernels
def test_newton_schulz_in_bfloat16_is_not_said_to_run_in_c() -> None:
    config = resolve("softcap", "pico")
    model = make_model(config)
    routing = route_parameters(model, config, world_size=1)
    for dtype, expected in ((torch.bfloat16, "plain: in bfloat16"), (torch.float32, "C")):
        (muon, *_) = build_optimizers(routing, ns_dtype=dtype)
        assert _install_math(muon, None) == Part("Newton-Schulz", *parted(expected))


def parted(how: str) -> tuple[str, str]:
    return ("", how.removeprefix("plain: ")) if how.startswith("plain: ") else (how, "")


@needs_kernels
def test_math_of_its_own_stays() -> None:
    config = resolve("softcap", "pico")
    (muon, *_) = build_optimizers(route_parameters(make_model(config), config, world_size=1))
    own = muon.math = type("Own", (PlainMath,), {})()
    assert _install_math(muon, None).reason == "math of its own"
    assert muon.math is own


@needs_kernels
def test_a_second_call_is_refused() -> None:
    model = make_model(resolve("softcap", "pico"))
    install(model, backend=choose_backend("native", "cpu"), tokens=512)
    with pytest.raises(AssertionError, match="already"):
        install(model, backend=choose_backend("native", "cpu"), tokens=512)
