"""What a CPU computes in float32, in C. `compiled.py` compiles it; the other modules call it with tensors."""

from hotlap.kernels.cpu.library import kernels_take, library, unavailable

__all__ = ["kernels_take", "library", "unavailable"]
