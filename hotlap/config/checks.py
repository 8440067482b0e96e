"""Range checks for settings. Each raises a `ConfigError` that names the setting."""

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
        require(math.isfinite(value) and value >= 0, f"`{name}` of at least 0", str(value), "give 0 or more")


def require_fraction(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value <= 1, f"`{name}` between 0 and 1", str(value), "give a fraction")


def require_decay(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        require(0 <= value < 1, f"`{name}` in [0, 1)", str(value), "give a fraction below 1")
