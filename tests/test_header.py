"""What a run's header says of its precision. Of its kernels: test_install.py and test_train.py."""

from types import SimpleNamespace

import pytest
import torch

from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train import header
from hotlap.train.header import described_precision


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
    lap = SimpleNamespace(
        config=updated(resolve("softcap", "pico"), {"runtime.precision": asked}),
        distributed=SimpleNamespace(device=torch.device("cpu")),
        dtype=torch.float32,
    )
    assert described_precision(lap) == described
