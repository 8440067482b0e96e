"""`hotlap train --device cuda` on the emulated device: the losses of a CPU, and no wait inside a step."""

from pathlib import Path

import pytest

from hotlap.errors import INTERRUPTED, USER_MISTAKE
from tests.command import hotlap
from tests.cuda.emulated import Outcome, hotlap_on_cuda, needs_emulation
from tests.training import assert_one_curve, losses

pytestmark = needs_emulation

STEPS = 10


def arguments(recipe: str, data: Path, name: str, *more: str) -> list[str]:
    """A short run in float32 whose operators are the same on both devices."""
    return [
        *("train", recipe, "--size", "pico", "--name", name, "--data.source", str(data)),
        *("--steps", str(STEPS), "--evaluation.tokens", "1024", "--evaluation.every-steps", "5"),
        *("--precision", "float32", "--compile", "off", "--attention.backend", "dense"),
        *more,
    ]


def assert_no_wait(outcome: Outcome, steps: int) -> None:
    assert [step["step"] for step in outcome.steps] == list(range(1, steps + 1))
    assert [step["reasons"] for step in outcome.steps] == [[]] * steps


@pytest.fixture(scope="module")
def on_cuda(tiny_data, tmp_path_factory) -> tuple[Path, Outcome]:
    """The folder and the outcome of a whole run of `softcap`."""
    folder = tmp_path_factory.mktemp("on-cuda")
    outcome = hotlap_on_cuda(*arguments("softcap", tiny_data, "run", "--device", "cuda"), cwd=folder)
    assert outcome.code == 0, outcome.err
    return folder, outcome


def cpu_losses(recipe: str, data: Path, folder: Path, *more: str) -> list[float]:
    """Of the same operators: without the kernels in C, which add up in another order."""
    command = arguments(recipe, data, "cpu", "--device", "cpu", *more)
    done = hotlap(*command, cwd=folder, env={"HOTLAP_NATIVE": "off"})
    assert done.returncode == 0, done.stderr
    return losses(folder / "runs" / "cpu")


def test_the_losses_are_those_of_a_cpu(on_cuda, tiny_data, tmp_path):
    found = losses(on_cuda[0] / "runs" / "run")
    assert found == pytest.approx(cpu_losses("softcap", tiny_data, tmp_path), abs=1e-5)


def test_nothing_inside_a_step_waits_for_the_device(on_cuda):
    assert_no_wait(on_cuda[1], STEPS)


def test_a_step_waits_only_for_the_figures_of_the_step_before(on_cuda):
    # Nothing is unread in the first step, nor after a validation or a checkpoint, which read all.
    waited = [step["event_waits"] > 0 for step in on_cuda[1].steps]
    assert waited == [step not in (1, 6) for step in range(1, STEPS + 1)]


def test_tokens_are_pinned_and_copied_asynchronously(on_cuda):
    for step in on_cuda[1].steps:
        # Inputs and targets to the device, the step's figures back.
        assert step["asynchronous_copies"] == 3
    # Inputs and targets of the batch that is read ahead, in another thread, and the figures.
    assert sum(step["pinned_allocations"] for step in on_cuda[1].steps) >= 3 * STEPS - 2


@pytest.mark.parametrize(
    "recipe, more",
    [
        ("window-warmup", ()),  # clips gradients
        ("softcap", ("--batch.micro-sequences", "2")),
        ("adamw", ()),
    ],
)
@pytest.mark.slow
def test_other_steps_do_not_wait_either(tiny_data, tmp_path, recipe, more):
    outcome = hotlap_on_cuda(*arguments(recipe, tiny_data, "run", "--device", "cuda", *more), cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert_no_wait(outcome, STEPS)
    assert_one_curve(losses(tmp_path / "runs" / "run"), cpu_losses(recipe, tiny_data, tmp_path, *more))


@pytest.mark.parametrize(
    "gpu, words, found, do",
    [
        ("T4", (), "Tesla T4, whose tensor cores have float16 only", "use another GPU"),
        (
            "4090",
            ("--precision", "float32", "--model.width", "256", "--model.num-heads", "2"),
            "128, whose kernels need more shared memory than it has",
            "use --precision bfloat16 or --attention.backend blocked",
        ),
    ],
    ids=["float16-only", "float32-that-does-not-fit"],
)
def test_what_a_gpu_cannot_do_is_refused_beforehand(tiny_data, tmp_path, gpu, words, found, do):
    command = ("train", "softcap", "--size", "pico", "--data.source", str(tiny_data), "--name", "run")
    more = ("--evaluation.tokens", "1024", "--device", "cuda", *words)
    refused = hotlap_on_cuda(*command, *more, cwd=tmp_path, gpu=gpu)
    assert refused.code == USER_MISTAKE, refused.err
    (line,) = refused.err.strip().splitlines()
    assert found in line
    assert do in line
    assert refused.steps == []
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def resume(folder: Path) -> Outcome:
    return hotlap_on_cuda("train", "--resume", "runs/cut", cwd=folder)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_happened(on_cuda, tiny_data, tmp_path):
    command = arguments("softcap", tiny_data, "cut", "--device", "cuda", "--checkpoint.every-steps", "2")
    killed = hotlap_on_cuda(*command, cwd=tmp_path, accidents={6: "SIGKILL"})
    assert killed.code == -9
    resumed = resume(tmp_path)
    assert resumed.code == 0, resumed.err
    # The validation at step 5 was the best so far, and so was saved.
    assert [step["step"] for step in resumed.steps] == list(range(6, STEPS + 1))
    assert losses(tmp_path / "runs" / "cut") == losses(on_cuda[0] / "runs" / "run")


@pytest.mark.slow
def test_a_stop_request_is_heard_one_step_later_and_the_run_resumes(on_cuda, tiny_data, tmp_path):
    command = arguments("softcap", tiny_data, "cut", "--device", "cuda")
    stopped = hotlap_on_cuda(*command, cwd=tmp_path, accidents={3: "SIGINT"})
    assert stopped.code == INTERRUPTED, stopped.err
    # The request is a figure of step 3, which is read when step 4 has been queued.
    assert [step["step"] for step in stopped.steps] == [1, 2, 3, 4]
    resumed = resume(tmp_path)
    assert resumed.code == 0, resumed.err
    assert losses(tmp_path / "runs" / "cut") == losses(on_cuda[0] / "runs" / "run")


@pytest.mark.slow
def test_a_lost_run_ends_one_step_later_and_names_the_step(tiny_data, tmp_path):
    command = arguments("softcap", tiny_data, "cut", "--device", "cuda", "--on-nan", "stop")
    lost = hotlap_on_cuda(*command, "--checkpoint.every-steps", "3", cwd=tmp_path, accidents={4: "nan"})
    assert lost.code == USER_MISTAKE
    assert [step["step"] for step in lost.steps] == [1, 2, 3, 4, 5]
    assert "expected a finite loss; found nan at step 4" in lost.err
    assert "step-000003" in lost.err
    assert len(losses(tmp_path / "runs" / "cut")) == 3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_default_path_has_the_losses_of_a_cpu(tiny_data, tmp_path):
    """FlexAttention, masks and model compiled as one graph, bfloat16; the Triton kernels are interpreted.

    Two layers instead of four: every kernel is there, and the interpreter takes half as long.
    """
    shared = [
        *("train", "softcap", "--size", "pico", "--data.source", str(tiny_data), "--steps", "2"),
        *("--model.num-layers", "2"),
        *("--batch.tokens-per-step", "512", "--evaluation.tokens", "512", "--evaluation.every-steps", "0"),
    ]
    default = hotlap_on_cuda(*shared, "--device", "cuda", "--name", "run", cwd=tmp_path, interpreted=True)
    assert default.code == 0, default.err
    assert_no_wait(default, 2)
    header = (tmp_path / "runs" / "run" / "log.txt").read_text()
    for chosen in ("flex", "bfloat16", "compile model"):
        assert chosen in header
    plain = hotlap(*shared, "--device", "cpu", "--precision", "float32", "--name", "cpu", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    found, expected = (losses(tmp_path / "runs" / name) for name in ("run", "cpu"))
    assert found == pytest.approx(expected, abs=2e-3)
