"""Values as strict JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


def finite(value: Any) -> Any:
    """A copy in which NaN and infinities, which JSON does not have, are None; tuples and arrays are lists."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, np.ndarray):
        return finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
