"""The emulated device counts, delays and refuses as a GPU would."""

import json

import pytest
import torch

from tests.cuda.emulated import needs_emulation, run_on_cuda
from tests.cuda.torch_interfaces import bfloat16_bits

pytestmark = needs_emulation

PROGRAM = """
import json, math, torch
from tests.cuda.process import device

def reasons(act):
    before = device().counts()
    act()
    after = device().counts()
    waits = device().wait_reasons(before.waits, after.waits)
    return waits, after.asynchronous_copies - before.asynchronous_copies

def message(act):
    try:
        act()
    except RuntimeError as error:
        return str(error)

x = torch.arange(6.0, device="cuda")
indices = torch.arange(2, device="cuda")
pinned = torch.empty(6, pin_memory=True)
found = {
    "sum": (x @ x).item(),
    "unwritten": bool(torch.empty(1000, device="cuda").isnan().all().cpu()),
    "compute": reasons(lambda: torch.nn.functional.softmax(x, 0).mul_(2).sum()),
    "item": reasons(lambda: x.sum().item()),
    "print": reasons(lambda: x.tolist()),
    "blocking": reasons(lambda: pinned.copy_(x)),
    "pageable": reasons(lambda: torch.empty(6).copy_(x, non_blocking=True)),
    "new": reasons(lambda: torch.tensor([1.0], device="cuda")),
    "boolean index": reasons(lambda: x[x > 2]),
    "integer index": reasons(lambda: x[indices][0]),
    "nonzero": reasons(lambda: x.nonzero()),
    "fill": reasons(lambda: x.fill_(3.0)),
    "asynchronous": reasons(lambda: pinned.copy_(x, non_blocking=True)),
    "before it arrives": math.isnan(pinned[0]),
}
event = torch.Event(torch.device("cuda"))
event.record()
event.synchronize()
found["after it has arrived"] = pinned.tolist()
found["mixed"] = message(lambda: x[None] @ torch.ones(6, 6))
torch.cuda.set_sync_debug_mode("error")
found["forbidden"] = message(lambda: x.sum().item())
torch.cuda.set_sync_debug_mode("default")
found["pinned"] = [pinned.is_pinned(), pinned[2:].is_pinned(), torch.empty(6).is_pinned()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    done = run_on_cuda("-c", PROGRAM, cwd=tmp_path_factory.mktemp("device"))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_computes(found):
    assert found["sum"] == 55


def test_memory_is_nan_until_it_is_written(found):
    assert found["unwritten"]


@pytest.mark.parametrize("call", ["compute", "integer index", "fill"])
def test_work_is_queued_without_waiting(found, call):
    assert found[call] == [[], 0]


@pytest.mark.parametrize(
    "call, reason",
    [
        ("item", "item()"),
        ("print", "blocking copy to pageable memory, shape [6]"),
        ("blocking", "blocking copy to pinned memory, shape [6]"),
        ("pageable", "copy to pageable memory, shape [6]"),
        ("new", "blocking copy from pageable memory, shape [1]"),
        ("nonzero", "aten::nonzero"),
    ],
)
def test_a_wait_is_counted_with_its_reason(found, call, reason):
    assert found[call] == [[reason], 0]


def test_an_index_by_a_mask_waits_for_the_size_of_the_result(found):
    assert "aten::nonzero" in found["boolean index"][0]


def test_a_copy_to_pinned_memory_arrives_when_its_event_was_waited_for(found):
    assert found["asynchronous"] == [[], 1]
    assert found["before it arrives"]
    assert found["after it has arrived"] == [3.0] * 6


def test_pinned_memory_is_known(found):
    assert found["pinned"] == [True, True, False]


def test_what_a_gpu_refuses_is_an_error(found):
    assert "expected all tensors to be on cuda:0" in found["mixed"]
    assert "called a synchronizing CUDA operation: item()" in found["forbidden"]


def test_float32_is_rounded_to_bfloat16_as_a_gpu_does():
    values = torch.randn(1000).mul(torch.logspace(-30, 30, 1000))
    values = torch.cat([values, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1.00390625, 1.01171875])])
    expected = values.bfloat16().view(torch.uint16)
    assert torch.equal(torch.from_numpy(bfloat16_bits(values.numpy()).astype("uint16")), expected)
