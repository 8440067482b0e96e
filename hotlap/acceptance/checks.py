"""The checks of a device, one function each, and how their findings are collected."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from hotlap import kernels
from hotlap.acceptance.curve import (
    RECIPE,
    SEQUENCE_TOKENS,
    SEQUENCES,
    STEPS,
    command,
    environment,
    read_losses,
    settings,
    stored_curve,
    train,
    write_tokens,
)
from hotlap.acceptance.measured_step import measure_step
from hotlap.acceptance.overlap import measure_reductions
from hotlap.attention import Backend, plan_batch
from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import Mask, document_ids
from hotlap.errors import HotlapError
from hotlap.hardware import has_native_bf16, select_precision
from hotlap.model import build_model
from hotlap.model.head import Loss, cross_entropy
from hotlap.progress import Say
from hotlap.recipes import resolve

# Largest ‖found − expected‖ / ‖expected‖. bfloat16 rounds to 8 bits, and a GPU multiplies float32 in TF32,
# with 10 bits.
TOLERANCES = {torch.bfloat16: 2e-2, torch.float32: 3e-3}
# Loss at any of the steps against the stored curve: bfloat16 moves it by a few thousandths.
CURVE_TOLERANCE = 0.05
RESUME_TOLERANCE = 1e-3
# Of the peak memory that `hotlap plan` gives: the compiler's choices differ between GPUs and releases.
MEMORY_TOLERANCE = 0.1
# Of the time of the reductions, that the backward hides. With all of it at the end, none is hidden.
LEAST_HIDDEN_SHARE = 0.1
LEAST_REDUCTIONS = 4  # the last one has nothing left to hide behind
# Below, the workspaces of CUDA's libraries count as much as the model.
LEAST_COMPARED_MIB = 1024


@dataclass(frozen=True)
class Finding:
    name: str
    outcome: Literal["passed", "failed", "skipped"]
    detail: str
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class NotApplicableError(Exception):
    """A check that this machine has no use for; the message says why."""


@dataclass(frozen=True)
class Subject:
    """What is checked: a device and a size, with made-up tokens and a place for runs."""

    device: torch.device
    size: str
    scratch: Path

    @property
    def data(self) -> Path:
        return self.scratch / "data"

    def train(self, name: str, *more: str, **changes: Any) -> list[float]:
        return train(self.command(name, *more, **changes), self.runs / name)

    def command(self, name: str, *more: str, **changes: Any) -> list[str]:
        chosen = settings(self.size, self.data) | {key.replace("__", "."): v for key, v in changes.items()}
        return command(name, self.size, self.runs, chosen, "--device", self.device.type, *more)

    @property
    def runs(self) -> Path:
        return self.scratch / "runs"


@contextmanager
def subject(device: torch.device, size: str) -> Iterator[Subject]:
    with tempfile.TemporaryDirectory() as scratch:
        made = Subject(device, size, Path(scratch))
        made.data.mkdir()
        config = resolve(RECIPE, size)
        tokens = max(2 * config.batch.tokens_per_step, (STEPS + 1) * SEQUENCES * SEQUENCE_TOKENS) + 1
        write_tokens(made.data, config.model.vocab_size, tokens)
        yield made


def run_checks(device: torch.device, size: str, say: Say) -> list[Finding]:
    findings = []
    with subject(device, size) as made:
        for name, check in CHECKS.items():
            say(f"{name} …")
            findings.append(find(name, partial(check, made)))
    return findings


def find(name: str, check: Callable[[], Finding]) -> Finding:
    """The finding of a check; whatever it raises is its failure."""
    began = time.monotonic()
    try:
        finding = check()
    except NotApplicableError as reason:
        finding = Finding(name, "skipped", str(reason))
    except HotlapError as error:
        finding = Finding(name, "failed", str(error))
    except Exception as error:  # a bug of a kernel or of the driver, which is what is looked for
        finding = Finding(name, "failed", f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    return Finding(name, finding.outcome, finding.detail, finding.figures, time.monotonic() - began)


def judged(passed: bool, detail: str, **figures: Any) -> Finding:
    return Finding("", "passed" if passed else "failed", detail, figures)


def check_attention(made: Subject) -> Finding:
    """The run's attention backend against the dense reference, forward and backward."""
    backend = kernels.choose_backend("auto", made.device)
    errors = {}
    for dtype, head_dim in ((torch.bfloat16, 128), (torch.float32, 64)):
        if dtype == torch.bfloat16 and not has_native_bf16(made.device):
            continue
        for window, unit in ((3, "blocks"), (200, "tokens"), (200, "tokens-and-blocks")):
            error = attention_error(backend, made.device, dtype, head_dim, window, unit)
            errors[f"{dtype} × {head_dim}, window of {window} {unit}".removeprefix("torch.")] = (
                error,
                TOLERANCES[dtype],
            )
    worst = max(errors, key=lambda case: errors[case][0] / errors[case][1])
    return judged(
        all(error <= tolerance for error, tolerance in errors.values()),
        f"{backend.name} against dense: {errors[worst][0]:.1e} of {errors[worst][1]:.0e} allowed ({worst})",
        relative_errors={case: error for case, (error, _) in errors.items()},
    )


def attention_error(
    backend: Backend, device: torch.device, dtype: torch.dtype, head_dim: int, window: int, unit: Any
) -> float:
    """Largest relative error of output and gradients. One document is longer than the window."""
    generator = torch.Generator().manual_seed(0)
    shape = (1024, 2, head_dim)
    q, k, v, upstream = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4))
    tokens = torch.ones(1024, dtype=torch.int32)
    tokens[[0, 700, 730]] = 0
    documents = document_ids(tokens.to(device), 0)
    mask = Mask(documents, torch.tensor(window, dtype=torch.int32, device=device), unit)

    def results(chosen: Backend) -> list[Tensor]:
        operands = [x.detach().requires_grad_() for x in (q, k, v)]
        out = plan_batch(chosen, mask).attend(operands[0], operands[1], operands[2], head_dim**-0.5)
        return [out, *torch.autograd.grad(out, operands, upstream)]

    return max(map(relative_error, results(backend), results(DenseBackend())))


def relative_error(found: Tensor, expected: Tensor) -> float:
    found, expected = (x.detach().double().cpu() for x in (found, expected))
    return ((found - expected).norm() / expected.norm()).item()


def check_loss(made: Subject) -> Finding:
    """The loss that a run installs against the plain one, with both gradients."""
    config = resolve(RECIPE, made.size)
    dtype = select_precision("auto", made.device)
    tokens = 1000  # not a multiple of anything
    with made.device:
        model = build_model(config.model, tokens, dtype)
    backend = kernels.choose_backend("auto", made.device)
    installed = kernels.install(model, backend=backend, tokens=tokens)
    generator = torch.Generator().manual_seed(0)
    rows, width = config.model.padded_vocab_size, config.model.width
    x = torch.randn((tokens, width), generator=generator).to(made.device, dtype).requires_grad_()
    weight = torch.randn((rows, width), generator=generator).mul(0.1).to(made.device).requires_grad_()
    targets = torch.randint(config.model.vocab_size, (tokens,), generator=generator).to(made.device)

    def results(loss: Loss) -> list[Tensor]:
        value = loss(x, weight, targets, config.model.softcap)
        return [value, *torch.autograd.grad(value, (x, weight))]

    error = max(map(relative_error, results(model.loss), results(cross_entropy)))
    how = installed.as_json()["loss"]
    return judged(
        error <= TOLERANCES[dtype],
        f"{how} against plain: {error:.1e} of {TOLERANCES[dtype]:.0e} allowed",
        relative_error=error,
        loss=how,
    )


def check_curve(made: Subject) -> Finding:
    """A run of 20 steps against the losses that it had on a CPU in float32."""
    expected = stored_curve(made.size)
    if expected is None:
        raise NotApplicableError(f"no curve is stored for {made.size}")
    losses = made.train("curve")
    if len(losses) != len(expected):
        return judged(False, f"{len(losses)} steps instead of {len(expected)}", losses=losses)
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    detail = f"{STEPS} steps within {difference:.4f} of the stored losses, {CURVE_TOLERANCE} allowed"
    return judged(difference <= CURVE_TOLERANCE, detail, difference=difference, losses=losses)


def check_step(made: Subject) -> Finding:
    """Steps at the size's own batch: time, memory, waits for the device, recompilations, the head's share."""
    figures = measure_step(made.device, made.size, made.data)
    mfu = "unknown" if figures["mfu"] is None else f"{figures['mfu']:.0%}"
    as_planned, memory = judged_memory(figures["peak_memory_mib"], figures["planned_memory_mib"])
    return judged(
        not figures["waits"] and not figures["recompiled"] and as_planned,
        f"{figures['step_ms']:,.0f} ms per step, MFU {mfu}, {memory},"
        f" head {figures['head_share']:.0%} of the step;"
        f" {figures['waits'] or 'no wait for the device'}; {figures['recompiled'] or 'no recompilation'}",
        **figures,
    )


def judged_memory(measured_mib: float, planned_mib: float | None) -> tuple[bool, str]:
    """Whether the peak is as planned, and both in words. Off CUDA there is no plan to compare with."""
    peak = f"peak {measured_mib:,.0f} MiB"
    if planned_mib is None or planned_mib < LEAST_COMPARED_MIB:
        return True, peak
    difference = measured_mib / planned_mib - 1
    words = f"{peak}, {difference:+.1%} of the {planned_mib:,.0f} planned, {MEMORY_TOLERANCE:.0%} allowed"
    return abs(difference) <= MEMORY_TOLERANCE, words


def check_ranks(made: Subject) -> Finding:
    """Two ranks against one, over the same tokens per step."""
    refuse_one_gpu(made.device)
    one, two = made.train("one-rank"), made.train("two-ranks", "--procs", "2")
    difference = max(abs(a - b) for a, b in zip(one, two, strict=True))
    detail = f"two ranks within {difference:.4f} of one over {len(one)} steps, {CURVE_TOLERANCE} allowed"
    return judged(difference <= CURVE_TOLERANCE, detail, difference=difference)


def refuse_one_gpu(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        raise NotApplicableError(f"{torch.cuda.device_count()} GPU; two are needed")


def check_overlap(made: Subject) -> Finding:
    """Two ranks: gradients are reduced while the backward computes others, by the trace of one."""
    refuse_one_gpu(made.device)
    found = measure_reductions(made.device, made.size, made.data, made.scratch)
    if found.number < LEAST_REDUCTIONS:
        raise NotApplicableError(f"all gradients of {made.size} fit into {found.number} reductions")
    return judged(
        found.hidden_share >= LEAST_HIDDEN_SHARE,
        f"{found.hidden_share:.0%} of the time of {found.number} reductions is hidden behind the backward,"
        f" {LEAST_HIDDEN_SHARE:.0%} needed",
        **found._asdict(),
    )


def check_resume(made: Subject) -> Finding:
    """A run killed without warning goes on as if nothing had happened."""
    every = {"checkpoint__every_steps": 5}
    whole = made.train("whole", **every)
    killed = made.command("killed", **every)
    process = subprocess.Popen(
        killed,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=environment(),
        start_new_session=True,
    )
    directory = made.runs / "killed"
    while process.poll() is None and not list(directory.glob("checkpoints/step-000005")):
        time.sleep(0.02)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    before = len(read_losses(directory))
    resumed = train([*killed[:4], "--runs", str(made.runs), "--resume", str(directory)], directory)
    difference = max(abs(a - b) for a, b in zip(whole, resumed, strict=True))
    return judged(
        difference <= RESUME_TOLERANCE,
        f"killed after step {before} of {STEPS}, resumed within {difference:.1e} of the whole run",
        difference=difference,
        killed_after=before,
    )


CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "attention": check_attention,
    "loss": check_loss,
    "curve": check_curve,
    "step": check_step,
    "ranks": check_ranks,
    "overlap": check_overlap,
    "resume": check_resume,
}
