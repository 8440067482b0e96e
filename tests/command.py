"""Runs the `hotlap` command: as a user does, in a process of its own, or in this one where that is enough."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from hotlap.cli import main

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


def hotlap_here(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """As `hotlap`, without the seconds that a new process takes to import torch."""
    out, err = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    with (
        contextlib.chdir(cwd or Path.cwd()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as end,
    ):
        main(arguments)
    torch.set_num_threads(threads)
    assert isinstance(end.value.code, int)
    return subprocess.CompletedProcess(arguments, end.value.code, out.getvalue(), err.getvalue())


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
