"""CUDA without a device, for the compiler and for fake tensors: what needs no values can be proven anywhere.

Fake tensors (`torch._subclasses.FakeTensorMode`) have shapes, dtypes and a device, but no data. On an
emulated `cuda:0` a whole training step runs on them in torch's CPU build: which operators it calls, in which
dtypes, what Inductor writes for a named GPU, how often it launches what, and how much memory is live.
Nothing here shows values or speed.

The emulated device has to be loaded before torch, so all of it runs in child processes: `call` runs a
function there, and `compiled_step` is what most callers want. This file imports no torch.
"""

from hotlap.emulation.child import call
from hotlap.emulation.compiled_step import CompiledStep, Launches, compiled_step
from hotlap.emulation.device import unavailable

__all__ = ["CompiledStep", "Launches", "call", "compiled_step", "unavailable"]
