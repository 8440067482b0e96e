"""Attention and the head in C, for float32 on a CPU. `compiled.py` compiles and finds them."""

from hotlap.kernels.compiled import library, unavailable

__all__ = ["library", "unavailable"]
