"""FineWeb as ready-made shards of GPT-2 tokens, from the Hugging Face hub.

Downloads go through `huggingface_hub`, which honors `HF_ENDPOINT`, resumes interrupted transfers and caches
files; every shard is verified against the sha256 that the hub states for it. The result is a directory with a
manifest like any other; documents and bytes of text are counted from the tokens.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotlap.corpus.corpora import fetch_gpt2_tokenizer
from hotlap.corpus.tokenizer import GPT2, TOKENIZER_FILE, Tokenizer
from hotlap.data.manifest import Manifest, ShardEntry, TokenizerEntry
from hotlap.data.shards import map_tokens
from hotlap.errors import ConfigError, DataError
from hotlap.files import cache_directory, file_sha256
from hotlap.progress import Say

TOKENS_AT_ONCE = 2**22  # per pass over a shard, to bound memory


@dataclass(frozen=True)
class HubCorpus:
    name: str
    summary: str
    licence: str
    repository: str
    file_prefix: str

    def files(self, num_shards: int) -> Iterator[tuple[str, str]]:
        """The validation shard and the first `num_shards` training shards, as (split, file)."""
        yield "val", f"{self.file_prefix}_val_000000.bin"
        for index in range(1, num_shards + 1):
            yield "train", f"{self.file_prefix}_train_{index:06d}.bin"


FINEWEB_LICENSE = "ODC-By 1.0, and Common Crawl's terms of use"
HUB_CORPORA = {
    corpus.name: corpus
    for corpus in (
        HubCorpus(
            name="fineweb",
            summary="FineWeb, 10 B tokens of web text, GPT-2 tokens",
            licence=FINEWEB_LICENSE,
            repository="kjj0/fineweb10B-gpt2",
            file_prefix="fineweb",
        ),
        HubCorpus(
            name="fineweb-edu",
            summary="FineWeb-Edu, 10 B tokens of educational web text, GPT-2 tokens",
            licence=FINEWEB_LICENSE,
            repository="kjj0/finewebedu10B-gpt2",
            file_prefix="finewebedu",
        ),
    )
}


@dataclass(frozen=True)
class HubSource:
    """`num_shards` training shards of a corpus on the hub, and its validation shard."""

    corpus: HubCorpus
    num_shards: int

    def __post_init__(self) -> None:
        if self.num_shards < 1:
            raise ConfigError(
                expected="1 shard or more", found=str(self.num_shards), do="ask for at least one"
            )

    @property
    def settings(self) -> dict[str, str]:
        return {"corpus": self.corpus.name, "shards": str(self.num_shards), "tokenizer": GPT2}

    def write_shards(self, directory: Path, say: Say) -> Manifest:
        corpus = self.corpus
        tokenizer = fetch_gpt2_tokenizer(say)
        shards, revision = [], None
        for split, file in corpus.files(self.num_shards):
            remote = _look_up(corpus, file, revision)
            revision = remote.revision  # that of the first file, so that all shards belong together
            _link_or_copy(_download(corpus, remote, say), directory / file)
            shards.append(_describe(directory / file, split, remote.sha256, tokenizer))
        tokenizer.save(directory)
        return Manifest(
            tokenizer=TokenizerEntry(tokenizer.name, tokenizer.fingerprint, TOKENIZER_FILE),
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            shards=tuple(shards),
            source=f"{corpus.name}: {corpus.summary} ({corpus.repository}, revision {revision})",
            licence=corpus.licence,
            settings=self.settings,
        )


@dataclass(frozen=True)
class _RemoteFile:
    name: str
    revision: str
    sha256: str


def _look_up(corpus: HubCorpus, file: str, revision: str | None) -> _RemoteFile:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(
        corpus.repository,
        file,
        repo_type="dataset",
        revision=revision,
        endpoint=os.environ.get("HF_ENDPOINT"),
    )
    try:
        found = get_hf_file_metadata(url)
    except Exception as error:  # which ones depends on the library's version
        raise _failed(corpus, file, error) from error
    if found.commit_hash is None or not re.fullmatch(r"[0-9a-f]{64}", found.etag or ""):
        raise DataError(
            expected=f"a revision and a sha256 for {file} from {corpus.repository}",
            found=f"{found.commit_hash} and {found.etag}",
            do="check HF_ENDPOINT: this server does not speak the hub's protocol",
        )
    assert found.etag is not None, "it has just matched"
    return _RemoteFile(file, found.commit_hash, found.etag)


def _download(corpus: HubCorpus, remote: _RemoteFile, say: Say) -> Path:
    """The path of a file in the cache, downloaded if need be, with its checksum verified."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    cache = cache_directory() / "hub" / corpus.repository.replace("/", "--")
    if (cache / remote.name).is_file() and file_sha256(cache / remote.name) == remote.sha256:
        return cache / remote.name
    say(f"fetching {remote.name} from {corpus.repository}")
    (cache / remote.name).unlink(missing_ok=True)
    try:
        path = hf_hub_download(
            corpus.repository,
            remote.name,
            repo_type="dataset",
            revision=remote.revision,
            local_dir=cache,
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except Exception as error:  # as above
        raise _failed(corpus, remote.name, error) from error
    arrived = Path(path)
    found = file_sha256(arrived)
    if found != remote.sha256:
        arrived.unlink()
        raise DataError(
            expected=f"sha256 {remote.sha256} for {remote.name}, as {corpus.repository} states",
            found=found,
            do="the transfer was damaged: run this again; nothing was kept of the file",
        )
    return arrived


def _failed(corpus: HubCorpus, file: str, error: Exception) -> DataError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return DataError(
        expected=f"{file} from {corpus.repository} on the Hugging Face hub",
        found=f"{type(error).__name__}: {' '.join(lines)[:200]}",
        do="check the network, HF_ENDPOINT and the number of shards; finished downloads are kept",
    )


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, target)


def _describe(path: Path, split: str, sha256: str, tokenizer: Tokenizer) -> ShardEntry:
    tokens = map_tokens(path)
    documents = text_bytes = 0
    for start in range(0, len(tokens), TOKENS_AT_ONCE):
        part = tokens[start : start + TOKENS_AT_ONCE]
        if int(part.max()) >= tokenizer.vocab_size:
            raise DataError(
                expected=f"token ids below {tokenizer.vocab_size} in {path.name}",
                found=f"id {int(part.max())}",
                do="check HF_ENDPOINT: these are not GPT-2 tokens",
            )
        documents += int(np.count_nonzero(part == tokenizer.end_of_text))
        text_bytes += tokenizer.text_bytes(part)
    return ShardEntry(path.name, split, len(tokens), documents, text_bytes, sha256)
