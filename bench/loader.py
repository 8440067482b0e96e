"""How fast is the loader alone, with a warm page cache?

    python -m bench.loader

Two batch sizes: a GPT-2 step of long sequences, and a small step, where the cost per call dominates the cost
per token. The reference is a plain dtype conversion of the same number of tokens, measured in the same run.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hotlap.data.loader import Loader
from hotlap.data.shards import shard_name, write_shard
from hotlap.data.stream import TokenStream, open_split

VOCABULARY = 50257
SHARDS = 4
SHARD_TOKENS = 10_000_001
SECONDS_PER_CASE = 1.0


def tokens_per_second(step: Callable[[], object], tokens: int) -> float:
    for _ in range(3):
        step()
    steps, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SECONDS_PER_CASE:
        step()
        steps += 1
    return steps * tokens / elapsed


def plain_conversion(tokens: int) -> float:
    """The reference: convert tokens that are already in memory, without a loader."""
    source = np.zeros(tokens, np.uint16)
    return tokens_per_second(lambda: (source.astype(np.int32), source.astype(np.int64)), tokens)


def measure(stream: TokenStream, **settings: object) -> float:
    loader = Loader(stream, **settings)  # type: ignore[arg-type]
    rate = tokens_per_second(loader.next, int(settings["batch_tokens"]))  # type: ignore[call-overload]
    loader.close()
    return rate


def main() -> None:
    cases: dict[str, dict[str, object]] = {
        "stream, carry": {"batch_tokens": 524_288, "sequence_tokens": 65_536},
        "stream, drop": {"batch_tokens": 524_288, "sequence_tokens": 65_536, "tail": "drop"},
        "stream, carry, prefetch": {"batch_tokens": 524_288, "sequence_tokens": 65_536, "prefetch": True},
        "shuffled, chunks of 1024": {
            "batch_tokens": 524_288, "sequence_tokens": 65_536, "order": "shuffled", "chunk_tokens": 1024,
        },
        "small stream, carry": {"batch_tokens": 2048, "sequence_tokens": 2048},
        "small shuffled, chunks of 256": {
            "batch_tokens": 2048, "sequence_tokens": 2048, "order": "shuffled", "chunk_tokens": 256,
        },
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        generator = np.random.default_rng(0)
        for index in range(SHARDS):
            tokens = generator.integers(0, VOCABULARY, SHARD_TOKENS, dtype=np.uint16)
            write_shard(directory / shard_name("train", index), tokens, VOCABULARY)
        stream = open_split(directory, "train", vocab_size=VOCABULARY)  # reads all ids, which warms the cache
        references = {tokens: plain_conversion(tokens) for tokens in (524_288, 2048)}
        print(f"| {'loader':<30} | tokens per step | M tokens/s | vs conversion |")
        print(f"|{'-' * 32}|{'-' * 17}|{'-' * 12}|{'-' * 15}|")
        for name, settings in cases.items():
            batch_tokens = int(settings["batch_tokens"])  # type: ignore[call-overload]
            rate = measure(stream, **settings)
            ratio = rate / references[batch_tokens]
            print(f"| {name:<30} | {batch_tokens:>15,} | {rate / 1e6:>10.1f} | {ratio:>13.2f} |", flush=True)


if __name__ == "__main__":
    main()
