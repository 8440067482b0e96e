"""Optional parts of Hotlap, as the installed package declares them: which are missing, and how to add one."""

from __future__ import annotations

import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

# What each is for. One that is not listed here is shown with the packages that it needs.
PURPOSES = {
    "bench": "compare with transformers (make bench)",
    "dev": "tests, types and lint (make test)",
    "docs": "build these pages as a site (make docs)",
    "documents": "read PDF files as training text",
    "eval": "tasks of EleutherAI's harness (eval --tasks)",
    "png": "curves as a PNG file",
    "ray": "race on a Ray cluster (--on ray)",
    "serve": "a page and an OpenAI-compatible API for trained models (hotlap serve)",
    "share": "models for transformers and llama.cpp (export --to)",
    "tensorboard": "follow a run in TensorBoard (--log tensorboard)",
    "trackio": "follow a run in trackio, without an account (--log trackio)",
    "wandb": "follow a run in Weights & Biases (--log wandb)",
}


class Extra(NamedTuple):
    name: str
    requirements: tuple[str, ...]  # as pip takes them
    missing: tuple[str, ...]  # of these

    @property
    def purpose(self) -> str:
        return PURPOSES.get(self.name, ", ".join(self.requirements))

    @property
    def command(self) -> str:
        """What adds it to the Python that runs this."""
        return f"{installer()} {shlex.join(self.missing)}"


def extras() -> list[Extra]:
    """By name; none if Hotlap runs from a directory that was never installed."""
    try:
        distribution = metadata.distribution("hotlap")
    except metadata.PackageNotFoundError:
        return []
    declared: dict[str, list[str]] = {
        name: [] for name in distribution.metadata.get_all("Provides-Extra") or []
    }
    for line in distribution.requires or []:
        requirement, _, marker = line.partition(";")
        if found := re.search(r"extra == ['\"]([\w.-]+)['\"]", marker):
            declared[found[1]].append(requirement.strip())
    return [
        Extra(name, tuple(needed), tuple(one for one in needed if not is_installed(one)))
        for name, needed in sorted(declared.items())
    ]


def is_installed(requirement: str) -> bool:
    """Whether some version of the package is there."""
    name = re.match(r"[\w.-]+", requirement)
    assert name, f"a requirement without a name: {requirement}"
    try:
        metadata.version(name[0])
    except metadata.PackageNotFoundError:
        return False
    return True


def installer() -> str:
    """For this Python, which may not be the one that the shell's `pip` belongs to."""
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    # Not by find_spec: asked for pip, setuptools hands its `distutils` back to Python's own, and torch's
    # compiler then fails. Environments that uv has made lack pip.
    if not is_installed("pip"):
        return f"uv pip install --python {shlex.quote(str(python))}"
    return f"{shlex.quote(str(python))} -m pip install"
