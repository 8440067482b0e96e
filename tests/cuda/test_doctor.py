"""`hotlap doctor --gpu` on the emulated device: the script itself, before somebody with a GPU runs it.

Without the compiler: interpreted kernels would take an hour. They have tests of their own.
"""

import json

import pytest

from tests.cuda.emulated import Outcome, hotlap_on_cuda, needs_emulation

pytestmark = [needs_emulation, pytest.mark.slow, pytest.mark.timeout(600)]


def doctor(cwd, **options) -> Outcome:
    return hotlap_on_cuda(
        *("doctor", "--gpu", "--size", "pico", "--json"), cwd=cwd, TORCHDYNAMO_DISABLE="1", **options
    )


def outcomes(found: Outcome) -> dict[str, str]:
    return {check["name"]: check["outcome"] for check in json.loads(found.out)["checks"]}


def test_every_check_passes_that_one_device_can_have(tmp_path):
    found = doctor(tmp_path)
    assert found.code == 0, found.out + found.err
    assert outcomes(found) == {
        **dict.fromkeys(("attention", "loss", "curve", "step", "resume"), "passed"),
        "ranks": "skipped",  # one GPU
    }
    assert json.loads(found.out)["machine"]["attention_backend"] == "flex"


def test_a_step_that_waits_for_the_device_fails(tmp_path):
    found = doctor(tmp_path, accidents={5: "wait"})
    assert found.code == 1
    (step,) = (check for check in json.loads(found.out)["checks"] if check["name"] == "step")
    assert step["outcome"] == "failed"
    assert "called a synchronizing CUDA operation" in step["figures"]["waits"]
