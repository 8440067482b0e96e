"""`hotlap doctor --gpu` on the emulated device: the script itself, before somebody with a GPU runs it.

Interpreted kernels would take an hour, and have tests of their own. So nothing is compiled, and attention is
dense: FlexAttention without a compiler copies scalars to the device in every layer.
"""

import json
import subprocess

import pytest

from tests.cuda.emulated import needs_emulation, run_on_cuda
from tests.cuda.process import Emulation

pytestmark = [needs_emulation, pytest.mark.slow, pytest.mark.timeout(900)]

STEP_CHECK = """
import torch
from hotlap.acceptance.checks import check_step, subject
with subject(torch.device("cuda"), "pico") as made:
    finding = check_step(made)
print(finding.outcome, finding.figures["waits"])
"""


def run_uncompiled(*words, cwd, accidents=None) -> subprocess.CompletedProcess[str]:
    emulation = Emulation(str(cwd / "steps.jsonl"), accidents or {}, attention="dense")
    return run_on_cuda(*words, cwd=cwd, emulation=emulation, TORCHDYNAMO_DISABLE="1")


def test_every_check_passes_that_one_device_can_have(tmp_path):
    done = run_uncompiled("-m", "hotlap", "doctor", "--gpu", "--size", "pico", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    outcomes = {check["name"]: check["outcome"] for check in found["checks"]}
    assert outcomes == {
        **dict.fromkeys(("attention", "loss", "curve", "step", "resume"), "passed"),
        **dict.fromkeys(("ranks", "overlap"), "skipped"),  # one GPU
    }, found
    assert done.returncode == 0


def test_a_step_that_waits_for_the_device_fails(tmp_path):
    # After three steps that warm up.
    done = run_uncompiled("-c", STEP_CHECK, cwd=tmp_path, accidents={"5": "wait"})
    assert done.stdout.startswith("failed called a synchronizing CUDA operation: item()"), done.stderr
