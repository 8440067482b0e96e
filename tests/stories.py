"""Small documents as files, what preparing them should give, and what it gave."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from hotlap.corpus.prepare import ShardSettings
from hotlap.corpus.tokenizer import load_tokenizer
from hotlap.data.stream import open_split

SMALL = ShardSettings(vocabulary=300)


def story(index: int) -> str:
    return f"Story {index}: " + " ".join(f"word{index * i % 97}" for i in range(60 + index)) + " é漢\n"


STORIES = [story(i) for i in range(40)]


def folder_of(directory: Path, texts: list[str]) -> Path:
    directory.mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (directory / f"{index:03d}.txt").write_text(text, newline="")
    return directory


def jsonl(path: Path, texts: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts)))
    return path


def documents_in(directory: Path, split: str) -> list[str]:
    """The documents of a split, decoded from its shards."""
    made_by = load_tokenizer(directory)
    stream = open_split(directory, split)
    tokens = stream.read(0, len(stream))
    starts = np.flatnonzero(tokens == made_by.end_of_text)
    assert starts[0] == 0, "the end of text stands at the start of a document"
    return [made_by.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def shards_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.glob("*.bin"))}


def splits_of(texts: list[str]) -> tuple[list[str], list[str]]:
    val = texts[10::20]
    return [text for text in texts if text not in val], val
