"""Kernels in C for float32 on a CPU.

`library.py` compiles and loads them, `operands.py` checks what they are called with, the others
call them.
"""
