"""The emulated device is compiled before the first test that needs it."""

import pytest

from hotlap.emulation.device import compiled
from hotlap.files import cache_directory, lock, make_directory
from tests.cuda.emulated import MISSING
from tests.cuda.host_device import SOURCE


@pytest.fixture(scope="session", autouse=True)
def device_is_compiled() -> None:
    """Half a minute, once for all of pytest's workers."""
    if MISSING is None:
        make_directory(cache_directory())
        with lock(cache_directory() / "host_device.lock", when_held=lambda _: None):
            compiled(SOURCE)
