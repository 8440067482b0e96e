"""The CUDA path with its values, on a machine without a GPU.

`host_device.cpp` is a `cuda:0` in the memory of the CPU, on which Triton's interpreter runs the kernels that
Inductor writes for a GPU. Both have to be there before torch is imported, so what is tested runs in processes
of its own, which `emulated.py` starts and `site/sitecustomize.py` sets up. What is replaced in torch and
Triton stands in `torch_interfaces.py`. Speed, races between streams and the rounding of tensor cores do not
show here.
"""
