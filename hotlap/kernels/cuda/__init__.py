"""What replaces parts of a lap on CUDA. Importing it needs neither a GPU nor Triton."""
