"""A user's own text as a training run wants it: prepared on the way, once, and again when a file changes."""

from __future__ import annotations

import hashlib
from pathlib import Path

from hotlap.corpus.catalog import NAMES
from hotlap.corpus.prepare import AUTO, ShardSettings, Vocabulary, prepare
from hotlap.corpus.sources import FilesSource
from hotlap.data.manifest import MANIFEST_NAME, UNFINISHED_NAME
from hotlap.files import cache_directory
from hotlap.progress import Say, silent


def is_own_text(source: str) -> bool:
    """Whether a data source is text: a file, or a folder without shards, and no corpus."""
    path = Path(source)
    if source in NAMES or not path.exists():
        return False
    if path.is_file():
        return True
    prepared = (path / MANIFEST_NAME).exists() or (path / UNFINISHED_NAME).exists()
    return not prepared and not any(path.glob("*.bin"))


def prepared_from(path: Path, vocabulary: Vocabulary = AUTO, *, say: Say = silent) -> Path:
    """The directory with the shards of a file or a folder; prepared first if it is new or has changed."""
    settings = ShardSettings(vocabulary)
    directory = directory_for(path, settings)
    prepare(FilesSource([path]), settings, directory, replace_other=True, say=say)
    return directory


def directory_for(path: Path, settings: ShardSettings) -> Path:
    """In the cache, by the text's path and the tokenizer."""
    absolute = path.resolve()
    digest = hashlib.sha256(f"{absolute}\0{settings.tokenizer_name}".encode(errors="surrogateescape"))
    name = absolute.name.split(".")[0] or "text"
    return cache_directory() / "data" / f"{name}-{digest.hexdigest()[:12]}"
