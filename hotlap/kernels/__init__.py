"""Fused replacements of parts of a lap, applied from outside by one call: `install`."""

from hotlap.kernels.cpu.library import unavailable
from hotlap.kernels.install import BACKENDS, Installed, Part, choose_backend, install

__all__ = ["BACKENDS", "Installed", "Part", "choose_backend", "install", "unavailable"]
