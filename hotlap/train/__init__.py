"""Training: the loop, and what surrounds it, from the process group to checkpoints."""
