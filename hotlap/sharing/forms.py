"""The forms that `hotlap export --to` offers, by name."""

from __future__ import annotations

from importlib.util import find_spec

from hotlap.errors import ConfigError
from hotlap.inference.export import OWN_FORM, Form


def open_form(name: str) -> Form:
    """Refused if the package is missing with which it is checked."""
    if name == "hotlap":
        return OWN_FORM
    if find_spec(name) is None:  # a form has the name of the package that reads it
        raise ConfigError(
            expected=f"the package {name} for --to {name}, to check what is written",
            found="it is not installed",
            do=f"pip install {name}",
        )
    if name == "gguf":
        from hotlap.sharing.gguf_file import GGUF_FORM

        return GGUF_FORM
    from hotlap.sharing.repository import TRANSFORMERS_FORM

    return TRANSFORMERS_FORM
