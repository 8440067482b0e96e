"""How a value that cannot work is refused, by the name of its setting."""

from __future__ import annotations

import math
from typing import Any

from hotlap.errors import ConfigError


def require(condition: bool, expected: str, found: str, do: str) -> None:
    if not condition:
        raise ConfigError(expected=expected, found=found, do=do)


def require_positive(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(math.isfinite(value) and value > 0, f"`{name}` above 0", str(value), "give a positive value")


def require_not_negative(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(
            math.isfinite(value) and value >= 0, f"`{name}` of 0 or more", str(value), "give such a number"
        )


def require_fraction(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value <= 1, f"`{name}` between 0 and 1", str(value), "give a fraction")


def require_decay(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value < 1, f"`{name}` of 0 or more and below 1", str(value), "give a smaller fraction")
