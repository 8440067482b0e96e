"""Runs the `hotlap` command as a user does: another process, its output and its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def hotlap(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hotlap", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **(env or {})},
    )


def complaint(result: subprocess.CompletedProcess[str]) -> str:
    """The one line that a user's mistake is answered with."""
    assert result.returncode == 2, (result.returncode, result.stdout, result.stderr)
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("hotlap: expected ")
    assert "; found " in lines[0]
    return lines[0]
