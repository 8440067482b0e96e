"""Where the kernels in C cannot be compiled, what needs them is skipped by name; and a way to do without."""

import pytest

from hotlap import kernels

needs_kernels = pytest.mark.skipif(
    kernels.unavailable() is not None, reason=f"kernels in C: {kernels.unavailable()}"
)


def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that cannot compile them."""
    monkeypatch.setattr("hotlap.kernels.cpu.library._load", lambda: (None, "left out by a test"))
