"""Hotlap trains small GPT language models against the clock."""

__version__ = "0.1.0"
