"""Triton kernels compiled to machine code for a GPU that is not there: do they compile, and do they fit?

`compile_kernels` and `compile_flex` are for the child process, with JSON in and out:

    call("hotlap.emulation.cubins:compile_kernels", sources=…, gpu="4090")
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from hotlap.attention.flex import FlexBackend
from hotlap.attention.mask import Mask
from hotlap.emulation.kernel_traffic import TEMPLATE_PREFIX
from hotlap.emulation.recorder import CompilerRecorder
from hotlap.emulation.torch_internals import DEVICE_PROPERTIES, compiled_kernel, inductor_properties, pretend
from hotlap.files import cache_directory
from hotlap.gpus import Gpu, find_gpu


@dataclass(frozen=True)
class Cubin:
    shared_bytes: int  # of one thread block
    registers: int  # of one thread
    spilled_bytes: int  # of one thread, to slow memory
    num_warps: int
    num_stages: int
    tiles: dict[str, int]  # of a template, as written in its source: BLOCK_M and the like
    error: str = ""  # why there is none


def compile_kernels(*, sources: dict[str, str], gpu: str) -> dict[str, dict[str, Any]]:
    """{kernel: Cubin as JSON}, of the first configuration of each kernel."""
    model = find_gpu(gpu)
    pretend(model)
    return {name: asdict(compile_for(model, name, source)) for name, source in sources.items()}


def compile_flex(*, gpu: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Our attention forward and backward, for each (dtype, head dim), with the tiles that Inductor chooses.

    {"forward": Cubin as JSON, "backward": …} per case.
    """
    model = find_gpu(gpu)
    pretend(model)
    torch.backends.cuda.matmul.allow_tf32 = True  # as in a run
    recorder = CompilerRecorder()
    recorder.install()
    found = []
    for dtype, head_dim in cases:
        recorder.sources.clear()
        _attend(getattr(torch, dtype), head_dim)
        found.append(
            {
                "backward" if "backward" in name else "forward": asdict(compile_for(model, name, source))
                for name, source in recorder.sources.items()
                if is_template(name)
            }
        )
    return found


def _attend(dtype: torch.dtype, head_dim: int) -> None:
    """Attention on fake tensors of the records' shape, forward and backward."""
    tokens, heads = 65_536, 6
    with FakeTensorMode(), torch.device("cuda:0"):
        q, k, v = (torch.empty(tokens, heads, head_dim, dtype=dtype, requires_grad=True) for _ in range(3))
        documents, window = (torch.empty(shape, dtype=torch.int32) for shape in ((tokens,), ()))
        backend = FlexBackend()
        out = backend.attend(q, k, v, backend.plan(Mask(documents, window, "blocks")), head_dim**-0.5)
        out.backward(torch.empty_like(out))


def is_template(kernel: str) -> bool:
    """Whether the kernel is of a template, such as flex_attention's, whose tiles depend on the GPU."""
    return kernel.startswith(TEMPLATE_PREFIX)


def compile_for(gpu: Gpu, name: str, source: str) -> Cubin:
    """Compile a kernel that may have been written for another GPU. Tiles stay as they are written."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache_directory() / "emulation" / "triton"))
    source = DEVICE_PROPERTIES.sub(lambda _: inductor_properties(gpu), source)
    tiles = {tile: int(size) for tile, size in re.findall(r"(BLOCK_[MN]\d?) : tl.constexpr = (\d+)", source)}
    try:
        kernel = compiled_kernel(name.rstrip("_"), source)
    except Exception as error:  # whatever the compiler raises is what is asked for
        return Cubin(0, 0, 0, 0, 0, tiles, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    registers, spilled = resources(kernel.asm["cubin"])
    metadata = kernel.metadata
    return Cubin(metadata.shared, registers, spilled, metadata.num_warps, metadata.num_stages, tiles)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and spilled bytes per thread, as the disassembler that comes with Triton says."""
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run(
            [str(program), "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout)
    assert found is not None, f"cuobjdump says {done.stdout!r}"
    return int(found[1]), int(found[2])
