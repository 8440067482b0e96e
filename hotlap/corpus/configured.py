"""The data that a run's configuration names: where it is, and preparing it. Needs no torch."""

from __future__ import annotations

import os
from pathlib import Path

from hotlap.config import Config
from hotlap.corpus.catalog import NAMES, ensure_prepared, prepared_directory
from hotlap.errors import DataError
from hotlap.progress import Say


def ensure_data(config: Config, say: Say) -> None:
    """Prepare the corpus of a run, unless its directory is there."""
    if not data_directory(config).is_dir():
        ensure_prepared(config.data.source, vocabulary(config), config.data.num_shards, say=say)


def data_directory(config: Config) -> Path:
    """The directory of the run's data, which may not exist yet."""
    path = Path(os.path.expanduser(config.data.source))
    if path.is_dir():
        return path
    if config.data.source not in NAMES:
        raise DataError(
            expected=f"a file or folder of text, a directory of shards or a corpus ({', '.join(NAMES)})",
            found=f"data.source = {config.data.source}",
            do="check the path, or see `hotlap data list`",
        )
    return prepared_directory(config.data.source, vocabulary(config), config.data.num_shards)


def vocabulary(config: Config) -> int | str:
    return "gpt2" if config.data.tokenizer == "gpt2" else config.model.vocab_size
