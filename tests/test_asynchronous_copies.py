"""Batches reach a GPU by asynchronous copies from pinned memory, seen at torch's dispatcher without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from hotlap.data.loader import Batch, Loader, to_device
from hotlap.data.validation import validation_batches
from tests.token_data import stream_of


class CopiesToCuda(TorchDispatchMode):
    """Runs operators on the CPU as usual, and notes each copy from there to a CUDA device.

    Memory that should be pinned is ordinary memory here, and what arrives on the device has no values: the
    innermost mode is torch's own for fake tensors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()  # addresses of storages
        self.copies: list[tuple[torch.Tensor, bool, bool]] = []  # (source, from pinned memory, non-blocking)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            if func is torch.ops.aten._to_copy.default:
                address = args[0].untyped_storage().data_ptr()
                self.copies.append((args[0], address in self.pinned, kwargs.get("non_blocking", False)))
            return func(*args, **kwargs)
        pin = kwargs.pop("pin_memory", False)
        with _disable_current_modes():
            result = func(*args, **kwargs)
        if pin:
            self.pinned.add(result.untyped_storage().data_ptr())
        return result


def check(seen: CopiesToCuda, expected: list[Batch]) -> None:
    sources = [source for batch in expected for source in (batch.inputs, batch.targets)]
    for source, (tensor, from_pinned, non_blocking) in zip(sources, seen.copies, strict=True):
        assert torch.equal(tensor, source)
        assert from_pinned, "a copy from pageable memory waits for the device"
        assert non_blocking


@pytest.mark.parametrize("order", ["stream", "shuffled"])
def test_training_batches(order):
    settings = {"batch_tokens": 16, "sequence_tokens": 8, "order": order, "chunk_tokens": 4}
    on_cpu = Loader(stream_of(100), **settings)
    with FakeTensorMode(allow_non_fake_inputs=True), CopiesToCuda() as seen:
        # Without the thread, to which a dispatch mode would not apply.
        loader = Loader(stream_of(100), **settings, device="cuda", prefetch=False)
        batches = [loader.next() for _ in range(3)]
    assert {x.device.type for batch in batches for x in (batch.inputs, batch.targets)} == {"cuda"}
    check(seen, [on_cpu.next() for _ in range(3)])


def test_validation_batches():
    stream = stream_of(1000)
    with FakeTensorMode(allow_non_fake_inputs=True), CopiesToCuda() as seen:
        batches = list(validation_batches(stream, 512, 256, device="cuda:0"))
    assert {batch.inputs.device.type for batch in batches} == {"cuda"}
    check(seen, list(validation_batches(stream, 512, 256)))


def test_a_batch_for_the_cpu_is_not_copied():
    tokens = torch.from_numpy(np.arange(8)).view(2, 4)
    batch = Batch(tokens, tokens, None)
    assert to_device(batch, torch.device("cpu")) is batch
