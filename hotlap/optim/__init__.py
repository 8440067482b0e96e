"""Optimizers, parameter routing, and learning-rate and momentum schedules.

Everything here takes named parameters, never a model. `Muon` works on its own in any PyTorch
training loop.
"""

from hotlap.optim.gradients import clip_global_norm
from hotlap.optim.muon import Muon
from hotlap.optim.newton_schulz import orthogonalize, step_coefficients

__all__ = ["Muon", "clip_global_norm", "orthogonalize", "step_coefficients"]
