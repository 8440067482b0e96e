"""`--data` of the commands that train: a user's own text becomes shards, and settings follow from them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotlap.config import Config
from hotlap.errors import ConfigError
from hotlap.progress import silent, to_stderr
from hotlap.settings import updated

SOURCE = "data.source"
HELP = "text to train on, a file or a folder; or prepared data, or a corpus (the same as --data.source)"


def with_source(changes: Mapping[str, Any], source: str | None) -> dict[str, Any]:
    """`changes` with the argument of --data."""
    if source is None:
        return dict(changes)
    if SOURCE in changes:
        raise ConfigError(expected="--data or --data.source", found="both", do="leave one out")
    return {**changes, SOURCE: source}


def with_data(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` for the data that `changes` name: own text is prepared, and the other settings fit it."""
    if SOURCE not in changes:
        return config
    from hotlap.corpus.fitting import follow_data
    from hotlap.corpus.own_text import is_own_text, prepared_from
    from hotlap.corpus.prepare import AUTO
    from hotlap.data.manifest import read_manifest

    say = to_stderr if os.environ.get("RANK", "0") == "0" else silent  # every rank comes here
    source = os.path.expanduser(config.data.source)
    if is_own_text(source):
        wanted = changes.get("model.vocab_size", AUTO)
        vocabulary = "gpt2" if changes.get("data.tokenizer") == "gpt2" else wanted
        source = str(prepared_from(Path(source), vocabulary, say=say))
    manifest = read_manifest(Path(source)) if Path(source).is_dir() else None
    if manifest is None:
        return config
    following, reasons = follow_data(config, changes, manifest)
    if reasons:
        say(f"fitted     {'; '.join(reasons)}")
    return updated(config, {**following, SOURCE: source})
