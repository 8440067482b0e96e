"""Skips what needs a compiler or Triton where there is none, by name."""

import pytest

from hotlap.emulation import unavailable


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = unavailable()
    if reason is None:
        return
    for item in items:
        if item.path.is_relative_to(__file__.rpartition("/")[0]):
            item.add_marker(pytest.mark.skip(reason=f"a GPU cannot be emulated here: {reason}"))
