"""Every private interface of torch and Triton that the emulation replaces, in this one file.

Tried with torch 2.13.0 (CPU build) and triton 3.7.1. Another release may have moved any of these names; the
tests in tests/cuda/ then fail at the first of them. To be called once per process, in a process that has
loaded the emulated device (`device.py`), before anything is compiled: torch caches a device's properties.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch._dynamo.device_interface as device_interface
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._subclasses.fake_tensor as fake_tensor
import torch.nn.attention.flex_attention as flex
from torch import Tensor, nn
from torch.nn import functional as F

from hotlap.gpus import FIRST_BF16_CAPABILITY, Gpu


class Kernel(Protocol):
    """What Inductor's wrapper code calls in place of a compiled Triton kernel."""

    def run(self, *arguments: Any, **options: Any) -> None: ...


# Called with the name and the Triton source of each kernel that Inductor writes.
MakeKernel = Callable[[str, str], Kernel]

# The same on all GPUs in our table.
WARP_THREADS = 32
REGISTERS_PER_MULTIPROCESSOR = 65536


def always(answer: Any) -> Callable[..., Any]:
    """A function that returns `answer` whatever it is asked."""
    return lambda *_, **__: answer


def replace(owner: Any, name: str, replacement: Any) -> None:
    assert hasattr(owner, name), f"torch {torch.__version__} has no {owner.__name__}.{name}"
    setattr(owner, name, replacement)


def pretend(gpu: Gpu) -> None:
    """Make torch, Inductor and Triton see `gpu` as the one CUDA device."""
    properties = device_properties(gpu)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "synchronize": None,
        "current_stream": None,
        "is_current_stream_capturing": False,
        "get_device_name": gpu.driver_names[0],
        "get_device_capability": gpu.capability,
        "get_device_properties": properties,
        "is_bf16_supported": gpu.capability >= FIRST_BF16_CAPABILITY,
        # There are no random numbers on the device: fake tensors are initialized without any.
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
        "_lazy_init": None,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
    }
    for name, answer in answers.items():
        replace(torch.cuda, name, always(answer))
    # The compiler's view of a device holds on to functions of torch.cuda that it found when imported.
    interface = device_interface.CudaInterface
    replace(interface, "current_device", staticmethod(always(0)))
    replace(interface, "get_device_properties", staticmethod(always(properties)))
    replace(interface.Worker, "get_device_properties", staticmethod(always(properties)))
    # Fake tensors would otherwise allocate a real one to initialize the device.
    replace(fake_tensor.FakeTensorMode, "avoid_device_init", property(always(True)))
    replace(fake_tensor, "init_gpu_context", always(None))
    _pretend_to_triton(gpu)


def pretend_for_fake_tensors(gpu: Gpu) -> None:
    """`pretend`, and replace what fake tensors on a device without operators cannot do."""
    from triton.runtime.jit import JITFunction

    pretend(gpu)
    replace(nn.Module, "bfloat16", _bfloat16)
    replace(F, "scaled_dot_product_attention", _flash_attention)
    # Kernels that are launched by hand, without Inductor: there is nothing to launch them on.
    replace(JITFunction, "run", always(None))


def device_properties(gpu: Gpu) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` returns, as far as the compiler reads it."""
    return SimpleNamespace(
        name=gpu.driver_names[0],
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=int(gpu.memory_gb * 2**30),
        multi_processor_count=gpu.multiprocessors,
        max_threads_per_multi_processor=gpu.threads_per_multiprocessor,
        max_threads_per_block=1024,
        regs_per_multiprocessor=REGISTERS_PER_MULTIPROCESSOR,
        warp_size=WARP_THREADS,
        shared_memory_per_block=48 * 1024,
        shared_memory_per_block_optin=gpu.shared_memory_bytes,
        shared_memory_per_multiprocessor=gpu.shared_memory_bytes + 1024,
        L2_cache_size=50 * 2**20,
        gcnArchName="",
        is_integrated=0,
        is_multi_gpu_board=0,
        uuid="0",
    )


def _pretend_to_triton(gpu: Gpu) -> None:
    import torch._inductor.runtime.triton_helpers as triton_helpers
    import triton
    from triton.backends.compiler import GPUTarget

    class Driver:
        """Answers what Triton asks of a driver while it compiles."""

        utils = SimpleNamespace(
            get_device_properties=always(
                {
                    "max_shared_mem": gpu.shared_memory_bytes,
                    "multiprocessor_count": gpu.multiprocessors,
                    "max_num_regs": REGISTERS_PER_MULTIPROCESSOR,
                    "warpSize": WARP_THREADS,
                }
            )
        )

        get_current_target = staticmethod(always(GPUTarget("cuda", gpu.architecture, WARP_THREADS)))
        get_active_torch_device = staticmethod(always(torch.device("cuda", 0)))
        get_device_interface = staticmethod(always(torch.cuda))
        get_current_device = staticmethod(always(0))
        get_current_stream = staticmethod(always(0))
        is_active = staticmethod(always(True))

        def get_benchmarker(self) -> Any:
            raise RuntimeError("an emulated device has no speed to measure")

    triton.runtime.driver.set_active(Driver())
    replace(triton_helpers, "set_driver_to_gpu", always(None))


def _bfloat16(module: nn.Module) -> nn.Module:
    """`Module.bfloat16`, which swaps the parameters, in a form that fake parameters allow."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            part.register_parameter(name, nn.Parameter(parameter.detach().to(torch.bfloat16)))
        for name, buffer in list(part.named_buffers(recurse=False)):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(torch.bfloat16))
    return module


_plain_attention = F.scaled_dot_product_attention


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, **options: Any) -> Tensor:
    """The operator that a GPU chooses in half precision; torch's CPU build would choose plain matmuls."""
    if options or q.dtype not in (torch.bfloat16, torch.float16):
        return _plain_attention(q, k, v, is_causal=is_causal, **options)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=is_causal)[0]


def replace_kernels(make_kernel: MakeKernel, on_graph: Callable[[str], None]) -> None:
    """Let Inductor write its code for CUDA, and put `make_kernel`'s results where compiled kernels would be.

    `on_graph` is called with the wrapper code of each compiled graph. The wrapper runs as it would on a GPU,
    on fake tensors or on tensors of another emulated device: matmuls are torch's operators, kernels are ours.
    """
    import torch._inductor.async_compile as async_compile
    from torch._inductor.graph import GraphLowering

    # In this process and always anew, so that every source passes by.
    inductor_config.compile_threads = 1
    inductor_config.fx_graph_cache = False
    inductor_config.autotune_local_cache = False
    functorch_config.enable_autograd_cache = False
    # Folding constants would compute values.
    inductor_config.joint_graph_constant_folding = False

    def triton(_: Any, name: str, source: str, device_str: str = "cuda") -> Kernel:
        assert device_str == "cuda", f"a kernel for {device_str}"
        return make_kernel(name, source)

    replace(async_compile.AsyncCompile, "triton", triton)
    replace(async_compile.AsyncCompile, "wait", always(None))
    replace(GraphLowering, "save_output_code", staticmethod(on_graph))
    # Functions in C++ that the wrapper code allocates with, and looks up when it is loaded.
    guards = torch._C._dynamo.guards
    replace(guards, "_empty_strided_cuda", _empty_strided_cuda)
    replace(guards, "_reinterpret_tensor", _reinterpret_tensor)
    native: Any = torch._C
    native._cuda_getCurrentRawStream = always(0)  # not in the CPU build


def _empty_strided_cuda(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def _reinterpret_tensor(x: Tensor, size: Any, stride: Any, offset: int = 0) -> Tensor:
    return torch.as_strided(x, size, stride, x.storage_offset() + offset)


def run_flex_uncompiled() -> None:
    """Let flex_attention outside a compiled model be one operator, forward and backward, for a census."""
    import hotlap.attention.flex as ours

    replace(flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    replace(ours, "_compiled_flex_attention", always(flex.flex_attention))


def body_of(operator: Any) -> Callable[..., Any] | None:
    """The Python function behind an operator of ours, which fake tensors do not run; None for others."""
    from torch._library.custom_ops import OPDEFS

    schema = getattr(operator, "_schema", None)
    definition = OPDEFS.get(schema.name) if schema else None
    return None if definition is None else definition._init_fn


# How a kernel's source names the device that it was written for.
DEVICE_PROPERTIES = re.compile(r"DeviceProperties\([^)]*\)")


def inductor_properties(gpu: Gpu) -> str:
    """The text of `DEVICE_PROPERTIES` for this GPU."""
    from torch._inductor.runtime.hints import DeviceProperties

    properties = DeviceProperties(
        type="cuda",
        index=0,
        multi_processor_count=gpu.multiprocessors,
        cc=gpu.architecture,
        major=gpu.capability[0],
        regs_per_multiprocessor=REGISTERS_PER_MULTIPROCESSOR,
        max_threads_per_multi_processor=gpu.threads_per_multiprocessor,
        max_threads_per_block=1024,
        warp_size=WARP_THREADS,
    )
    return repr(properties)


def compiled_kernel(name: str, source: str) -> Any:
    """Triton's compiled kernel of a source that Inductor wrote, in its first configuration."""
    from torch._inductor.codecache import PyCodeCache

    inductor_config.use_static_cuda_launcher = False  # it would load the kernel into the driver
    autotuner = getattr(PyCodeCache.load(source), name)
    return autotuner._precompile_config(autotuner.configs[0]).kernel
