"""Small token directories for the tests of the data modules."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hotlap.data.manifest import Manifest, TokenizerEntry, describe_shard, write_manifest
from hotlap.data.shards import shard_name, write_shard
from hotlap.data.stream import TokenStream


def stream_of(*shard_lengths: int, vocab_size: int = 2**16) -> TokenStream:
    """A stream in memory whose token i is i (modulo the vocabulary), so that tokens show their own place."""
    ends = np.cumsum(shard_lengths)
    shards = [
        (np.arange(end - length, end) % vocab_size).astype(np.uint16)
        for end, length in zip(ends, shard_lengths, strict=True)
    ]
    return TokenStream(shards, name="test", manifest=None, split="train")


def write_directory(
    directory: Path,
    *,
    train: Sequence[Sequence[int]],
    val: Sequence[Sequence[int]] = ((1, 2, 3),),
    vocab_size: int = 100,
) -> Manifest:
    """A prepared directory: shards and their manifest."""
    entries = []
    for split, shards in (("train", train), ("val", val)):
        for index, tokens in enumerate(shards):
            path = directory / shard_name(split, index)
            write_shard(path, tokens, vocab_size)
            entries.append(describe_shard(path, split, documents=index + 1, text_bytes=10 * len(tokens)))
    manifest = Manifest(
        tokenizer=TokenizerEntry(name="test", sha256="0" * 64, file="tokenizer.json"),
        vocab_size=vocab_size,
        end_of_text=0,
        shards=tuple(entries),
        source="made up",
        licence="none needed",
        counters={"invalid_utf8_replaced": 3},
    )
    write_manifest(directory, manifest)
    return manifest
