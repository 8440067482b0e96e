"""Runs the `hotlap` command as a user does: another process, its output and its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

HANGS_AFTER_SECONDS = 240  # before pytest's own limit, which could not say where the processes are


def hotlap(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "hotlap", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTHONFAULTHANDLER": "1",
            **(env or {}),
        },
    )
    try:
        out, err = process.communicate(timeout=HANGS_AFTER_SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"hotlap {' '.join(arguments)} hangs\n{where_they_are(process)}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def where_they_are(process: subprocess.Popen[str]) -> str:
    """End a command and its processes; what they printed, and the stacks of all their threads."""
    for one in (*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)):
        one.send_signal(signal.SIGABRT)
    return "\n".join(process.communicate(timeout=30))


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a user's mistake is answered with."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("hotlap: expected ")
    assert "; found " in lines[0]
    return lines[0]
