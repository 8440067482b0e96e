"""How long does it take from the command to the first step, and how much memory does a lap need?

    python -m bench.start [--repeats 3]

The data is prepared before the clock starts. Another process measures the time until the first line of
training metrics appears.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hotlap.corpus.catalog import ensure_prepared
from hotlap.recipes import resolve

COMMAND = "train softcap --size nano --steps 3 --evaluation.every-steps 0 --evaluation.tokens 1024 --name run"


def first_step() -> tuple[float, float]:
    """Seconds to the first step, and the peak memory of the run in MiB."""
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-m", "hotlap", *COMMAND.split(), "--runs", folder],
            stdout=subprocess.DEVNULL,
        )
        while process.poll() is None and not (metrics.exists() and '"train"' in metrics.read_text()):
            time.sleep(0.01)
        seconds = time.perf_counter() - start
        assert process.wait() == 0, "the run failed"
        summary = json.loads((Path(folder) / "run" / "summary.json").read_text())
        return seconds, summary["peak_rss_mib"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    ensure_prepared("sotu", resolve("softcap", "nano").model.vocab_size)
    measured = [first_step() for _ in range(repeats)]
    seconds, mib = (statistics.median(column) for column in zip(*measured, strict=True))
    print("| seconds to the first step | peak MiB |\n|---|---|")
    print(f"| {seconds:.1f} | {mib:.0f} |")


if __name__ == "__main__":
    main()
