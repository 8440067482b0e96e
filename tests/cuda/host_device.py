"""The emulated device of `host_device.cpp`: loading it, and reading what it counted."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from hotlap.emulation.device import load_before_torch

SOURCE = Path(__file__).with_name("host_device.cpp")


class _Counts(ctypes.Structure):
    """`Counts` of host_device.cpp."""

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ("pinned_allocations", "asynchronous_copies", "event_waits", "waits", "peak_bytes")
    )


@dataclass(frozen=True)
class Counts:
    """Since the process began."""

    pinned_allocations: int
    asynchronous_copies: int
    event_waits: int
    waits: int  # for the device, other than for an event

    def since(self, before: Counts) -> dict[str, int]:
        return {name: value - getattr(before, name) for name, value in vars(self).items()}


class HostDevice:
    """Must be made before torch is imported."""

    def __init__(self) -> None:
        self._library = load_before_torch(SOURCE)
        self._library.host_device_counts.restype = _Counts
        self._library.host_device_wait_reason.restype = ctypes.c_char_p

    def counts(self) -> Counts:
        found = self._library.host_device_counts()
        return Counts(**{name: getattr(found, name) for name in Counts.__annotations__})

    def wait_reasons(self, first: int, end: int) -> list[str]:
        """What the waits with these numbers, counted from 0, were for."""
        reason = self._library.host_device_wait_reason
        return [reason(ctypes.c_int64(number)).decode() for number in range(first, end)]

    @property
    def peak_bytes(self) -> int:
        return int(self._library.host_device_counts().peak_bytes)

    def synchronize(self) -> None:
        """Let every queued copy arrive."""
        self._library.host_device_synchronize()

    def forbid_waits(self, forbidden: bool) -> None:
        """Whether a wait raises RuntimeError, as after `torch.cuda.set_sync_debug_mode("error")`."""
        self._library.host_device_forbid_waits(int(forbidden))
