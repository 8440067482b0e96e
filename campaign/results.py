"""What a command has come to, as text that two commands can be compared by."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import zstandard

from campaign.commands import Ended
from hotlap.corpus.tokenizer import load_tokenizer
from hotlap.data.stream import open_split
from hotlap.runs import checkpoint as store
from hotlap.runs.reader import RunFiles

Result = dict[str, Any]
Observe = Callable[[Path, Ended], Result]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def files_of(directory: Path) -> Result:
    """Checksums of the files that are not hidden, by their path."""
    found = sorted(path for path in directory.rglob("*") if path.is_file() and not path.name.startswith("."))
    return {str(path.relative_to(directory)): sha256(path) for path in found}


def printed(_place: Path, ended: Ended) -> Result:
    return {"printed": ended.out}


def inspected(_place: Path, ended: Ended) -> Result:
    """The first tokens of bare shards, and how many each has."""
    found = json.loads(ended.out)
    return {
        "first": found["opening"]["ids"],
        "tokens": {shard["file"]: shard["tokens"] for shard in found["shards"]},
    }


def plain_shards(path: Path) -> Result:
    """The same, read without Hotlap: there is no checksum, so what is in the file counts."""
    shards = {other.name: other.read_bytes() for other in sorted(path.parent.glob("*.bin"))}
    kinds = {20240520: "<u2", 20240801: "<u4"}
    tokens = {
        name: np.frombuffer(content[1024:], kinds[int.from_bytes(content[:4], "little")])
        for name, content in shards.items()
    }
    first = next(values for name, values in tokens.items() if "train" in name)
    return {"first": first[:24].tolist(), "tokens": {name: len(values) for name, values in tokens.items()}}


def written(name: str) -> Observe:
    """The files that a command has written into a directory."""
    return lambda place, _ended: files_of(place / name)


def page(name: str) -> Observe:
    """A report: the statistics that were printed, their notes, and the page."""

    def observe(place: Path, ended: Ended) -> Result:
        notes = json.loads(ended.out).get("notes") if ended.out.startswith("{") else None
        return {"printed": ended.out, "page": sha256(place / name), "notes": notes}

    return observe


def training(name: str) -> Observe:
    """Weights and optimizer at the end of a run, bit for bit, and its losses at every step."""

    def observe(place: Path, _ended: Ended) -> Result:
        run = RunFiles(place / name)
        newest = store.latest(run.checkpoints)
        lines = run.read_metrics().lines
        return {
            "tensors": {path.name: sha256(path) for path in newest.glob("*.safetensors")},
            "step": newest.name,
            "losses": [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"],
            "validations": [
                (line["step"], line["val_loss"]) for line in lines if line["kind"] == "validation"
            ],
            "summary": (run.read_summary() or {}).get("val_loss"),
        }

    return observe


def race(name: str) -> Observe:
    """The losses of all runs of a race, and whether it was concluded."""

    def observe(place: Path, ended: Ended) -> Result:
        runs = sorted(path.parent for path in (place / name).glob("*/summary.json"))
        losses = {run.name: training(f"{name}/{run.name}")(place, ended) for run in runs}
        return {**losses, "concluded": (place / name / "results.json").exists()}

    return observe


def prepared(place: Path, _ended: Ended) -> Result:
    return {"documents": documents_in(place / "out")}


def documents_in(directory: Path) -> list[str]:
    """The training documents of a prepared directory, decoded from its shards."""
    tokenizer, stream = load_tokenizer(directory), open_split(directory, "train")
    tokens = stream.read(0, len(stream))
    starts = np.flatnonzero(tokens == tokenizer.end_of_text)
    return [tokenizer.decode(part[1:].tolist()) for part in np.split(tokens, starts[1:])]


def plainly_read(path: Path) -> list[str] | None:
    """The documents of an input file by a few lines of code; None if they cannot be read."""
    content = path.read_bytes()
    try:
        if path.suffix == ".parquet":
            texts = pyarrow.parquet.read_table(path, columns=["text"]).column(0).to_pylist()
            return not_blank([text or "" for text in texts])
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        elif path.suffix == ".zst":
            with zstandard.ZstdDecompressor().stream_reader(content, read_across_frames=True) as stream:
                content = stream.read()
        if ".jsonl" not in path.name:
            return not_blank([content.decode(errors="replace")])
        lines = [line.decode(errors="replace") for line in content.split(b"\n")]
        texts = [json.loads(line)["text"] for line in lines if line.strip()]
        return not_blank(
            [text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") for text in texts]
        )
    except (ValueError, OSError, EOFError, TypeError, KeyError, RecursionError, zstandard.ZstdError):
        return None


def not_blank(texts: list[str]) -> list[str]:
    return [text for text in texts if text.strip()]


def difference(expected: Result, found: Result) -> str:
    """Where two results differ first."""
    for key in expected.keys() | found.keys():
        if expected.get(key) != found.get(key):
            return f"{key}: {repr(found.get(key))[-150:]} instead of {repr(expected.get(key))[-150:]}"
    return ""
