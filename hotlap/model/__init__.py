"""The model: from tokens to a loss, read top to bottom."""
