"""Inductor's kernels compiled to machine code by the real compilers, for GPUs that are not there."""

from __future__ import annotations

import functools

import pytest
import torch

from hotlap.emulation import call, compiled_step
from hotlap.gpus import find_gpu
from hotlap.kernels.cuda.flex_limits import LARGEST_HEAD_DIM
from hotlap.recipes import resolve

pytestmark = pytest.mark.timeout(900)

GPUS = ("A100", "3090", "4090", "H100", "B200", "5090")  # sm_80, 86, 89, 90, 100, 120


@functools.cache
def sources(recipe: str, size: str) -> dict[str, str]:
    """Of all kernels that Inductor writes for a step on an H100."""
    step = compiled_step(resolve(recipe, size), gpu="H100", with_sources=True)
    assert step.sources is not None
    return step.sources


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("recipe", ["softcap", "block-window"])
def test_all_kernels_compile_and_fit(recipe: str, gpu: str) -> None:
    """On other GPUs than the H100 without attention's, whose tiles differ: they are in the test below."""
    chosen = {
        name: source
        for name, source in sources(recipe, "small").items()
        if gpu == "H100" or not name.startswith("triton_tem")
    }
    cubins = call("hotlap.emulation.cubins:compile_kernels", sources=chosen, gpu=gpu)
    assert {name: cubin["error"] for name, cubin in cubins.items() if cubin["error"]} == {}
    most = max(cubin["shared_bytes"] for cubin in cubins.values())
    spilled = [name for name, cubin in cubins.items() if cubin["spilled_bytes"]]
    print(f"{recipe}, {gpu}: {len(cubins)} kernels, at most {most} bytes shared, spilled: {spilled}")
    assert len(cubins) > 40
    assert most <= find_gpu(gpu).shared_memory_bytes


def flex_fits(gpu: str, cases: list[tuple[str, int]]) -> list[bool]:
    """Whether attention's kernels, forward and backward, fit, for each dtype and head dim."""
    found = call("hotlap.emulation.cubins:compile_flex", gpu=gpu, cases=cases)
    for case, cubins in zip(cases, found, strict=True):
        assert set(cubins) == {"forward", "backward"}
        print(f"{gpu} {case}: {cubins}")
        assert [cubin["error"] for cubin in cubins.values()] == ["", ""]
    limit = find_gpu(gpu).shared_memory_bytes
    return [all(cubin["shared_bytes"] <= limit for cubin in cubins.values()) for cubins in found]


def test_the_records_attention_fits_on_a_4090() -> None:
    assert flex_fits("4090", [("bfloat16", 128)]) == [True]


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
def test_the_largest_head_dims_that_fit_are_those_of_the_table(gpu: str) -> None:
    largest = LARGEST_HEAD_DIM[find_gpu(gpu).capability]
    cases = [(name, dim) for name in ("bfloat16", "float32") for dim in (64, 128, 256)]
    expected = [dim <= largest[getattr(torch, name)] for name, dim in cases]
    assert flex_fits(gpu, cases) == expected
