"""GPUs by name: what a plan, an emulation and the peak of a run need to know of them. Needs no torch.

Figures are the vendor's, of the data sheet and of the CUDA programming guide's table of compute
capabilities. Peaks are dense bfloat16 with float32 accumulation.
"""

from __future__ import annotations

from dataclasses import dataclass

from hotlap.errors import DeviceError

# Below this compute capability there are no bfloat16 tensor cores.
FIRST_BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Gpu:
    name: str  # on our command line
    # Full names as the driver reports them: a prefix would also match models with other peaks (Ti, D,
    # Laptop GPU, NVL, a MIG slice).
    driver_names: tuple[str, ...]
    capability: tuple[int, int]
    multiprocessors: int
    memory_gb: float  # nominal; the driver keeps a few percent of it
    memory_gb_per_s: float
    bf16_tflops: float

    @property
    def shared_memory_bytes(self) -> int:
        """The most that one thread block can have."""
        return SHARED_MEMORY_KIB[self.capability] * 1024

    @property
    def threads_per_multiprocessor(self) -> int:
        return THREADS_PER_MULTIPROCESSOR[self.capability]

    @property
    def architecture(self) -> int:
        """The compiler's number, as in sm_90."""
        major, minor = self.capability
        return 10 * major + minor


SHARED_MEMORY_KIB = {
    (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99,
}  # fmt: skip
THREADS_PER_MULTIPROCESSOR = {
    (7, 5): 1024, (8, 0): 2048, (8, 6): 1536, (8, 9): 1536, (9, 0): 2048, (10, 0): 2048, (12, 0): 1536,
}  # fmt: skip

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", ("NVIDIA H100 80GB HBM3",), (9, 0), 132, 80, 3350, 989.4),
        Gpu("H100-PCIe", ("NVIDIA H100 PCIe",), (9, 0), 114, 80, 2000, 756.0),
        Gpu("H200", ("NVIDIA H200",), (9, 0), 132, 141, 4800, 989.4),
        Gpu("B200", ("NVIDIA B200",), (10, 0), 148, 180, 7700, 2250.0),
        Gpu("A100", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"), (8, 0), 108, 80, 2039, 312.0),
        Gpu("A100-40GB", ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"), (8, 0), 108, 40, 1555, 312.0),
        Gpu("L40S", ("NVIDIA L40S",), (8, 9), 142, 48, 864, 362.0),
        Gpu("5090", ("NVIDIA GeForce RTX 5090",), (12, 0), 170, 32, 1792, 209.5),
        Gpu("4090", ("NVIDIA GeForce RTX 4090",), (8, 9), 128, 24, 1008, 165.2),
        Gpu("3090", ("NVIDIA GeForce RTX 3090",), (8, 6), 82, 24, 936, 71.0),
        # Without bfloat16: known so that it can be refused with the reason.
        Gpu("T4", ("Tesla T4",), (7, 5), 40, 16, 320, 0.0),
    )
}


def find_gpu(name: str) -> Gpu:
    by_folded_name = {known.lower(): gpu for known, gpu in GPUS.items()}
    gpu = by_folded_name.get(name.lower())
    if gpu is None:
        raise DeviceError(
            expected=f"a GPU out of {', '.join(GPUS)}", found=f"`{name}`", do="name the closest one"
        )
    return gpu


def bf16_tflops(driver_name: str) -> float | None:
    """The peak of the GPU with this full name, None if it is not known or has no bfloat16."""
    for gpu in GPUS.values():
        if driver_name in gpu.driver_names:
            return gpu.bf16_tflops or None
    return None
