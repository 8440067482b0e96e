"""What a text is like for a model: how much there is of it, and how predictable its validation is."""

from __future__ import annotations

import bz2
from dataclasses import dataclass
from pathlib import Path

from hotlap.corpus.tokenizer import load_tokenizer
from hotlap.data.manifest import read_manifest
from hotlap.data.stream import open_split
from hotlap.errors import DataError

# Of the end of the training text, and of the validation after it. Together they fit a block of bzip2.
TRAIN_SAMPLE, VAL_SAMPLE = 800_000, 50_000


@dataclass(frozen=True)
class Text:
    train_bytes: int
    train_tokens: int
    val_bytes: int  # 0: no validation split
    compressed_bpb: float  # bits per byte of validation, compressed after the training text; 0 without any


def measure_text(directory: Path) -> Text:
    """Of prepared data."""
    manifest = read_manifest(directory)
    tokens, text_bytes = {"train": 0, "val": 0}, {"train": 0, "val": 0}
    for shard in manifest.shards if manifest else ():
        tokens[shard.split] += shard.tokens
        text_bytes[shard.split] += shard.text_bytes or 0
    if not text_bytes["train"]:
        raise DataError(
            expected=f"a manifest that counts the bytes of text in {directory}",
            found="none",
            do="prepare the text with `hotlap data prepare`, or name a RECIPE beside --minutes",
        )
    compressed_bpb = 0.0
    if text_bytes["val"]:
        before = sample_of(directory, "train", TRAIN_SAMPLE)
        compressed_bpb = added_bits_per_byte(before, sample_of(directory, "val", VAL_SAMPLE))
    return Text(text_bytes["train"], tokens["train"], text_bytes["val"], compressed_bpb)


def sample_of(directory: Path, split: str, size: int) -> bytes:
    """The last bytes of the training text, or the first of validation."""
    stream = open_split(directory, split)
    count = min(size, len(stream))  # a token has at least one byte
    start = len(stream) - count if split == "train" else 0
    text = load_tokenizer(directory).decode_bytes(stream.read(start, count).tolist())
    return text[-size:] if split == "train" else text[:size]


def added_bits_per_byte(before: bytes, text: bytes) -> float:
    """What compressing `text` adds after `before`: a compressor, too, predicts from what it has seen."""
    return 8 * (len(bz2.compress(before + text)) - len(bz2.compress(before))) / len(text)
