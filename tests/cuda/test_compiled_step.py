"""The whole model compiled for an H100 by the real compiler, on fake tensors: graphs, launches, memory."""

from __future__ import annotations

import functools

import pytest

from hotlap.attention.visibility import window_tokens
from hotlap.config import Config
from hotlap.emulation import CompiledStep, compiled_step
from hotlap.recipes import resolve

# Peak MiB that the public logs of the records print for one of eight H100s (torch.cuda.max_memory_allocated).
PUBLISHED_PEAK_MIB = {"block-window": 34_239, "sparse-value-embeds": 31_361, "softcap": 31_563}


def steps_with_new_windows(config: Config) -> tuple[int, ...]:
    """The first step of each window of the schedule, after that of step 0, and the last step."""
    steps = range(config.schedule.steps + 1)
    first = {window_tokens(step, config.schedule): step for step in reversed(steps)}
    return (*sorted(set(first.values()) - {0}), config.schedule.steps)


@functools.cache
def compiled(recipe: str) -> CompiledStep:
    """Over the whole schedule of windows."""
    config = resolve(recipe, "small")
    return compiled_step(
        config,
        gpu="H100",
        window_steps=steps_with_new_windows(config),
    )


def check_graphs(step: CompiledStep, num_windows: int) -> None:
    print(
        f"{step.kernels} kernels; launches forward {step.forward}, backward {step.backward},"
        f" optimizer {step.optimizer}; {len(step.windows)} windows; {step.seconds:.0f} s"
    )
    assert step.mode == "model"
    assert step.graphs == 2, "one forward and one backward"
    assert step.graph_breaks == 0
    assert len(set(step.windows)) == num_windows
    assert step.recompilations == 0


def test_at_pico_the_model_is_one_graph_that_no_window_recompiles() -> None:
    config = resolve("softcap", "pico")
    step = compiled_step(config, gpu="H100", window_steps=steps_with_new_windows(config))
    check_graphs(step, num_windows=2)
    assert step.tokens == 512


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["softcap", "block-window"])
def test_at_small_the_model_is_one_graph_that_no_window_recompiles(recipe: str) -> None:
    check_graphs(compiled(recipe), num_windows=14)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", PUBLISHED_PEAK_MIB)
def test_peak_memory_is_that_of_the_public_log(recipe: str) -> None:
    step = compiled(recipe)
    published = PUBLISHED_PEAK_MIB[recipe]
    print(f"{recipe}: peak {step.peak_mib:.0f} MiB, published {published}, resident {step.resident_mib:.0f}")
    assert step.peak_mib == pytest.approx(published, rel=0.05)
