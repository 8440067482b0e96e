"""The CUDA path on a machine without a GPU. Each test says what of it is real and what is emulated."""
