"""Inductor's kernels compiled to machine code by the real compilers, for GPUs that are not there."""

from __future__ import annotations

import functools

import pytest

from hotlap.emulation import call, compiled_step
from hotlap.gpus import find_gpu
from hotlap.recipes import resolve

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
    """Attention's, whose tiles depend on the GPU, are in the test below."""
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


@pytest.mark.parametrize(
    "gpu", [gpu if gpu == "4090" else pytest.param(gpu, marks=pytest.mark.slow) for gpu in GPUS]
)
def test_attention_in_bfloat16_fits(gpu: str) -> None:
    (cubins,) = call("hotlap.emulation.cubins:compile_flex", gpu=gpu, cases=[("bfloat16", 128)])
    assert set(cubins) == {"forward", "backward"}
    for direction, cubin in cubins.items():
        print(f"{gpu} {direction}: {cubin}")
        assert not cubin["error"]
        assert cubin["shared_bytes"] <= find_gpu(gpu).shared_memory_bytes
