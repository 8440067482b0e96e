"""The whole model compiled for an H100 by the real compiler, on fake tensors: graphs, launches, memory."""

from __future__ import annotations

import functools

import pytest

from hotlap.attention.visibility import window_tokens
from hotlap.config import Config
from hotlap.emulation import CompiledStep, compiled_step
from hotlap.recipes import resolve

pytestmark = pytest.mark.timeout(900)

# Peak MiB that the public logs of the records print for one of eight H100s (torch.cuda.max_memory_allocated).
PUBLISHED_PEAK_MIB = {"block-window": 34_239, "sparse-value-embeds": 31_361, "softcap": 31_563}


def windows_and_steps(config: Config) -> dict[int, int]:
    """{window of the schedule, in tokens: the first step that has it}."""
    steps = range(config.schedule.steps, -1, -1)
    return {window_tokens(step, config.schedule): step for step in steps}


@functools.cache
def compiled(recipe: str) -> CompiledStep:
    """Over the whole schedule of windows."""
    config = resolve(recipe, "small")
    return compiled_step(config, gpu="H100", window_steps=tuple(windows_and_steps(config).values()))


def check_graphs(step: CompiledStep, windows: set[int]) -> None:
    print(
        f"{step.kernels} kernels; launches forward {step.forward}, backward {step.backward},"
        f" optimizer {step.optimizer}; outside matmuls {step.launches_outside_matmuls} of {step.launches},"
        f" {step.bytes_outside_matmuls / 1e9:.0f} GB; {len(step.windows)} windows; {step.seconds:.0f} s"
    )
    assert step.mode == "model"
    assert step.graphs == 2, "one forward and one backward"
    assert step.graph_breaks == 0
    assert set(step.windows) == windows
    assert step.recompilations == 0


@pytest.mark.slow
def test_at_pico_the_model_is_one_graph_that_no_window_recompiles() -> None:
    config = resolve("softcap", "pico")
    schedule = windows_and_steps(config)
    step = compiled_step(config, gpu="H100", window_steps=tuple(schedule.values()))
    assert step.tokens == 512
    check_graphs(step, windows={128, 256})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["softcap", "block-window"])
def test_at_small_the_model_is_one_graph_that_no_window_recompiles(recipe: str) -> None:
    check_graphs(compiled(recipe), windows={128 * blocks for blocks in range(1, 15)})


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PUBLISHED_PEAK_MIB)
def test_peak_memory_is_that_of_the_public_log(recipe: str) -> None:
    step = compiled(recipe)
    published = PUBLISHED_PEAK_MIB[recipe]
    print(f"{recipe}: peak {step.peak_mib:.0f} MiB, published {published}, resident {step.resident_mib:.0f}")
    assert step.peak_mib == pytest.approx(published, rel=0.05)
