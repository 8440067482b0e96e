"""Hotlap trains small GPT language models against the clock.

`hotlap.load(path)` gives the model of a run or of an exported directory; `hotlap.idea(parent, …)` is what an
idea file calls. Nothing heavy is imported before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hotlap.inference.load import load
    from hotlap.recipes.idea import Idea, idea

__all__ = ["Idea", "__version__", "idea", "load"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        from hotlap.inference.load import load

        return load
    if name in ("Idea", "idea"):
        import hotlap.recipes.idea as ideas

        return getattr(ideas, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
