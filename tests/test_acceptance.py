"""`hotlap doctor --gpu`, on this machine's CPU: every check can pass, and can fail."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from torch.autograd import DeviceType

from hotlap import kernels
from hotlap.acceptance import checks, overlap
from hotlap.acceptance.checks import (
    NotApplicableError,
    check_attention,
    check_curve,
    check_loss,
    check_step,
    find,
    subject,
)
from hotlap.acceptance.curve import STEPS, stored_curve
from hotlap.acceptance.measured_step import fitting, watched
from hotlap.attention.dense import DenseBackend
from hotlap.errors import TrainingError
from hotlap.model.head import cross_entropy
from hotlap.recipes import resolve
from tests.command import complaint, hotlap_here

CPU = torch.device("cpu")


@pytest.fixture
def made(tmp_path):
    with subject(CPU, "pico") as made:
        yield made


def test_the_backend_of_a_run_agrees_with_the_reference(made):
    finding = check_attention(made)
    assert finding.outcome == "passed"
    assert finding.figures["relative_errors"]


def test_attention_that_sees_too_much_fails(made):
    class Unmasked(DenseBackend):
        def plan(self, mask):
            return torch.ones_like(super().plan(mask)).tril()

    with patch.object(checks.kernels, "choose_backend", lambda *_: Unmasked()):
        assert check_attention(made).outcome == "failed"


def test_the_installed_loss_agrees_with_the_plain_one(made):
    assert check_loss(made).outcome == "passed"


def test_a_wrong_loss_fails(made):
    original = kernels.install

    def install(model, **options):
        installed = original(model, **options)
        model.loss = lambda *arguments: 1.1 * cross_entropy(*arguments)
        return installed

    with patch.object(checks.kernels, "install", install):
        assert check_loss(made).outcome == "failed"


@pytest.mark.parametrize("shift", [0.0, 0.2])
def test_a_curve_is_held_against_the_stored_one(made, shift):
    losses = [loss + shift for loss in stored_curve("pico")]
    with patch.object(checks.Subject, "train", lambda *_: losses):
        assert check_curve(made).outcome == ("failed" if shift else "passed")


def test_a_size_without_a_curve_is_skipped_by_name(made):
    finding = find("curve", lambda: check_curve(replace(made, size="medium")))
    assert (finding.outcome, finding.detail) == ("skipped", "no curve is stored for medium")


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (NotApplicableError("one GPU"), "skipped"),
        (TrainingError(expected="a", found="b", do="c"), "failed"),
        (RuntimeError("illegal memory access\nmore"), "failed"),
    ],
)
def test_whatever_a_check_raises_is_its_finding(error, outcome):
    def check():
        raise error

    finding = find("step", check)
    assert (finding.name, finding.outcome) == ("step", outcome)
    assert "more" not in finding.detail


def test_a_wait_and_a_recompilation_are_told_apart():
    class Waiting:
        def update(self):
            raise RuntimeError("called a synchronizing CUDA operation")

    class Recompiling:
        def update(self):
            raise RuntimeError("Detected recompile when torch.compile stance is 'fail_on_recompile'")

    assert watched(CPU, Waiting()) == ("called a synchronizing CUDA operation", "")
    assert watched(CPU, Recompiling())[0] == ""
    assert "recompile" in watched(CPU, Recompiling())[1]


@pytest.mark.parametrize(
    ("measured", "planned", "passes"),
    [(100.0, None, True), (300.0, 100.0, True), (2180.0, 2000.0, True), (2220.0, 2000.0, False)],
)
def test_memory_is_held_against_the_plan(made, measured, planned, passes):
    figures = {
        "step_ms": 1.0,
        "mfu": None,
        "peak_memory_mib": measured,
        "planned_memory_mib": planned,
        "head_share": 0.5,
        "waits": "",
        "recompiled": "",
    }
    with patch.object(checks, "measure_step", lambda *_: figures):
        finding = check_step(made)
    assert finding.outcome == ("passed" if passes else "failed")
    assert finding.figures["planned_memory_mib"] == planned
    assert ("planned" in finding.detail) == (planned == 2000)


@pytest.mark.parametrize(("hidden_share", "outcome"), [(0.6, "passed"), (0.02, "failed")])
def test_reductions_that_nothing_hides_fail(made, hidden_share, outcome):
    found = overlap.Reductions(4, hidden_share)
    with patch.object(checks, "measure_reductions", lambda *_: found):
        finding = checks.check_overlap(made)
    assert finding.outcome == outcome
    assert finding.figures == {"number": 4, "hidden_share": hidden_share}


def test_two_ranks_are_not_compared_on_one_gpu():
    with (
        patch("torch.cuda.device_count", lambda: 1),
        pytest.raises(NotApplicableError, match="1 GPU; two are needed"),
    ):
        checks.refuse_one_gpu(torch.device("cuda"))


def event(name, start, end, device=DeviceType.CUDA, **more):
    return SimpleNamespace(
        name=name, device_type=device, time_range=SimpleNamespace(start=start, end=end), **more
    )


def test_time_on_a_gpu_is_hidden_by_kernels_and_not_by_annotations():
    events = [
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 10, 20),
        event("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 30, 40),
        event("nccl:all_reduce", 10, 40, is_user_annotation=True),
        event("## Call CompiledFxGraph ##", 0, 100, is_user_annotation=True),
        event("c10d::allreduce_", 0, 100, device=DeviceType.CPU),
        event("triton_tem_fused_flex_attention_backward", 0, 15, is_user_annotation=False),
        event("nvjet_hsh_128x256_64x4", 12, 18),
        event("triton_poi_fused_0", 39, 50),
    ]
    reductions, computations = overlap.kernels(events)
    assert reductions == [(10, 20), (30, 40)]
    assert overlap.merged(computations) == [(0, 18), (39, 50)]
    assert overlap.overlap(reductions, computations) == 8 + 1


@pytest.mark.parametrize(("gib", "sequence_tokens"), [(80, 65_536), (24, 32_768)])
def test_a_step_is_measured_with_the_sequences_that_fit_the_gpu(gib, sequence_tokens):
    with (
        patch("hotlap.plan.machine.memory_bytes", lambda _: gib * 2**30),
        patch("hotlap.plan.machine.device_name", lambda _: "a GPU that no table has"),
    ):
        config, planned_mib = fitting(resolve("softcap", "small"), torch.device("cuda"))
    assert config.batch.sequence_tokens == sequence_tokens
    assert planned_mib < 0.92 * gib * 1024


def test_without_a_gpu_one_line_says_so():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert "found cuda" in complaint(hotlap_here("doctor", "--gpu"))


@pytest.mark.slow  # half a minute
def test_the_whole_acceptance_test_passes_here(tmp_path, capsys):
    page = tmp_path / "page.html"
    result = hotlap_here(
        "doctor", "--gpu", "--device", "cpu", "--size", "pico", "--json", "--page", str(page)
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    # The gradients of pico fit into two reductions.
    assert {check["name"]: check["outcome"] for check in found["checks"]} == {
        **dict.fromkeys(checks.CHECKS, "passed"),
        "overlap": "skipped",
    }
    (curve,) = (check for check in found["checks"] if check["name"] == "curve")
    assert len(curve["figures"]["losses"]) == STEPS
    assert "6 passed, 0 failed, 1 skipped" in page.read_text()
