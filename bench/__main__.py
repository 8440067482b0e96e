"""Run the benchmarks and print their results with a description of the machine.

    python -m bench [PART …] [--write]

`--write` writes the tables to docs/benchmarks.md, each under the question it answers. Parts that were not run
keep their previous table.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import torch

from bench.peak import sgemm_peak_flops
from hotlap import __version__
from hotlap.hardware import device_name, usable_cores

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
PARTS = (
    *("step", "attention", "head", "head_traffic", "muon"),
    *("loader", "scaling", "contention", "start", "lap", "serving"),
)
LONG_PARTS = ("marks", "memory", "overlap", "fixed", "dial")  # not run by default; overlap needs root
WITH_A_FILE = ("dial",)  # these also write a file of their own
TITLE = """# Benchmarks

Written by `python -m bench --write`; do not edit. Compare ratios within one run, not times across
runs: machine speed varies.
"""
WIDTH = 100  # columns of the page


def described() -> str:
    cpu = torch.device("cpu")
    return (
        f"{datetime.date.today().isoformat()}, hotlap {__version__}, torch {torch.__version__}, Python"
        f" {platform.python_version()}, {usable_cores()} cores of {device_name(cpu)}"
        f" ({torch.backends.cpu.get_cpu_capability()}), float32 matmul peak {sgemm_peak_flops() / 1e9:.0f}"
        f" GFLOP/s on {torch.get_num_threads()} threads"
    )


def run_part(part: str, *, write: bool) -> str:
    """Run one part, echo its output, and return it."""
    command = [sys.executable, "-u", "-m", f"bench.{part}"]
    command += ["--write"] if write and part in WITH_A_FILE else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    assert process.stdout is not None, "stdout is a pipe"
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    if process.wait():
        sys.exit(f"bench.{part} failed")
    return "".join(lines)


def write_section(part: str, question: str, where: str, output: str) -> None:
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else TITLE
    if not page.startswith(TITLE):
        page = TITLE
    question, where = (textwrap.fill(text, WIDTH, break_on_hyphens=False) for text in (question, where))
    section = f"\n## {part}\n\n{question}\n\n{where}\n\n{output.strip()}\n"
    pattern = rf"\n## {part}\n.*?(?=\n## |\Z)"
    if re.search(pattern, page, flags=re.DOTALL):
        page = re.sub(pattern, lambda _: section, page, flags=re.DOTALL)
    else:
        page = page.rstrip("\n") + "\n" + section
    PAGE.write_text(page.rstrip("\n") + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts",
        nargs="*",
        metavar="PART",
        help=f"one of {', '.join(PARTS)} (default: all of these), {', '.join(LONG_PARTS)}",
    )
    parser.add_argument("--write", action="store_true", help="write the tables to docs/benchmarks.md")
    arguments = parser.parse_args()
    torch.set_num_threads(usable_cores())
    began = time.monotonic()
    for part in arguments.parts or PARTS:
        question = (importlib.import_module(f"bench.{part}").__doc__ or "").splitlines()[0]
        where = described()
        print(f"\n{part}: {question}\n{where}\n", flush=True)
        started = time.monotonic()
        output = run_part(part, write=arguments.write)
        print(f"\n{part} took {time.monotonic() - started:.0f} s", flush=True)
        if arguments.write:
            write_section(part, question, where, output)
    print(f"\ntotal: {(time.monotonic() - began) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
