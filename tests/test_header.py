"""What a run's header says of its precision, and of the kernels in C: those of its own model."""

from types import SimpleNamespace

import pytest
import torch

from hotlap.kernels import choose_backend
from hotlap.model import build_model
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train import header
from hotlap.train.header import described_kernels, described_precision
from tests.kernels_here import needs_kernels, without_kernels


def lap_of(
    recipe: str = "softcap",
    dtype: torch.dtype = torch.float32,
    backend: str = "auto",
    compiled: str = "off",
    **changes,
):
    """What the description looks at, at `nano`; settings with `__` for the dots of their names."""
    named = {name.replace("__", "."): value for name, value in changes.items()}
    config = updated(resolve(recipe, "nano"), {"model.num_layers": 2, **named})
    return SimpleNamespace(
        config=config,
        distributed=SimpleNamespace(device=torch.device("cpu"), world_size=1),
        backend=choose_backend(backend, "cpu"),
        model=build_model(config.model, config.batch.sequence_tokens, dtype),
        dtype=dtype,
        compiled=SimpleNamespace(mode=compiled),
    )


@needs_kernels
@pytest.mark.parametrize(
    ("lap", "described"),
    [
        ({}, "in C: attention's inputs, attention, MLP, head"),
        ({"compiled": "model"}, "in C: attention, MLP, head"),
        ({"dtype": torch.bfloat16}, "in C: attention"),
        ({"backend": "blocked"}, "in C: attention's inputs, MLP, head"),
        ({"backend": "blocked", "dtype": torch.bfloat16}, "in C: none of attention, MLP, head"),
        (
            {"model__width": 768, "model__num_heads": 6, "model__vocab_size": 8192},
            "in C: attention's inputs, attention, MLP",
        ),
        (
            {"model__width": 1024, "model__num_heads": 8},
            "in C: attention's inputs, attention, head",
        ),
        ({"model__softcap": 50.0}, "in C: attention's inputs, attention, MLP"),
        ({"recipe": "adamw"}, "in C: none of attention, MLP, head"),
    ],
    ids=str,
)
def test_the_parts_that_run_in_c_are_named(lap, described) -> None:
    assert described_kernels(lap_of(**lap)) == described


@pytest.mark.parametrize(
    ("asked", "faults", "described"),
    [
        ("auto", True, "float32 activations (the processor lists AMX but faults on it)"),
        ("auto", False, "float32 activations"),
        ("float32", True, "float32 activations"),
    ],
)
def test_a_precision_that_a_faulty_processor_decided_says_so(monkeypatch, asked, faults, described) -> None:
    monkeypatch.setattr(header, "amx_faults", lambda _: faults)
    assert described_precision(lap_of(runtime__precision=asked)) == described


def test_without_kernels_the_reason_is_named(monkeypatch) -> None:
    without_kernels(monkeypatch)
    assert described_kernels(lap_of()) == "no kernels in C (left out by a test)"
