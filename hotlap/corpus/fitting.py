"""Settings that follow from the data, where the user has not given them: a small text needs small batches."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from hotlap.config import Config
from hotlap.corpus.tokenizer import GPT2
from hotlap.data.manifest import Manifest
from hotlap.data.validation import BLOCK_TOKENS

# With the records' rule up to a batch is dropped at the end of a shard. A text of fewer is carried on.
FEW_BATCHES = 20


def follow_data(
    config: Config, given: Collection[str], manifest: Manifest
) -> tuple[dict[str, Any], list[str]]:
    """The settings to change for this data, and each change in words. `given`: names that are left alone."""
    train_tokens = sum(shard.tokens for shard in manifest.of_split("train"))
    val_tokens = sum(shard.tokens for shard in manifest.of_split("val"))
    changes: dict[str, Any] = {}
    reasons: list[str] = []

    def change(name: str, value: Any) -> bool:
        before: Any = config
        for part in name.split("."):
            before = getattr(before, part)
        if name in given or before == value:
            return False
        changes[name] = value
        return True

    change("data.tokenizer", "gpt2" if manifest.tokenizer.name == GPT2 else "bpe")
    if change("model.vocab_size", manifest.vocab_size):
        reasons.append(f"vocabulary of {manifest.vocab_size:,} tokens, the data's")
    batch = config.batch
    fitting = fitting_batch(train_tokens)
    are_given = {"batch.tokens_per_step", "batch.sequence_tokens", "data.chunk_tokens"} & set(given)
    if fitting < batch.tokens_per_step and not are_given:
        sequence = min(batch.sequence_tokens, fitting)
        change("batch.tokens_per_step", fitting)
        change("batch.sequence_tokens", sequence)
        change("data.chunk_tokens", min(config.data.chunk_tokens, sequence))
        reasons.append(f"{fitting} tokens per step, because there are only {train_tokens:,}")
    few = train_tokens < FEW_BATCHES * batch.tokens_per_step
    if few and config.data.order == "stream" and change("data.tail", "carry"):
        reasons.append("no tail dropped, because it would be much of the text")
    asked = config.evaluation.tokens
    if asked is not None and 0 < val_tokens <= asked and change("evaluation.tokens", None):
        reasons.append(f"validation on all {val_tokens:,} tokens that there are")
    return changes, reasons


def fitting_batch(train_tokens: int) -> int:
    """The largest batch, a power of two in blocks, that is at most half of the text."""
    blocks = max(1, train_tokens // (2 * BLOCK_TOKENS))
    return int(BLOCK_TOKENS * 2 ** (blocks.bit_length() - 1))
