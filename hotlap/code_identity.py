"""The identity of the code that trains: runs of different code are different runs, whatever their settings.

A hash of the package's sources, of the kernels' sources in C, torch's version and the idea files of a run.
Only the rooms that training can import count, so that a change of a report does not make runs incomparable.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parent
# What training never imports; tests/test_code_identity.py looks.
NOT_TRAINING = frozenset(
    ("acceptance", "commands", "emulation", "lab", "plan", "race", "report", "cli.py", "__main__.py")
)
DIGITS = 12


def code_identity(ideas: Sequence[str] = (), package: Path = PACKAGE) -> dict[str, Any]:
    """What trains a run, as `code` of its environment: the hash of each part, and `fingerprint` of them all.

    `ideas`: as the setting of this name. Read from the files each time, since they can change while a race
    runs.
    """
    sources = [path for path in sorted(package.rglob("*.py")) if _trains(path.relative_to(package))]
    parts: dict[str, Any] = {
        "package": _digest(sources, package),
        "kernels": _digest(sorted(package.glob("kernels/cpu/csrc/*.[ch]")), package),
        "torch": importlib.metadata.version("torch"),  # without importing it
        "ideas": list(ideas),
    }
    content = "\0".join([parts["package"], parts["kernels"], parts["torch"], *ideas])
    return {"fingerprint": _short(content.encode()), **parts}


def _trains(path: Path) -> bool:
    return path.parts[0] not in NOT_TRAINING


def _digest(files: Iterable[Path], package: Path) -> str:
    digest = hashlib.sha256()
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()[:DIGITS]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:DIGITS]
