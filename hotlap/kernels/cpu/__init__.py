"""Kernels in C for float32 on a CPU. `library.py` compiles them; the other modules call them."""
