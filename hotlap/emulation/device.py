"""Compiles the emulated device and loads it, before torch is imported: nothing here imports it.

The library is kept in the cache, one file per source, torch release and compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hotlap.errors import DeviceError
from hotlap.files import cache_directory, sync

SOURCE = Path(__file__).parent / "device.cpp"
COMPILER = "g++"
FLAGS = ("-O1", "-std=c++20", "-shared", "-fPIC", "-Wall", "-Wno-unused-parameter")
COMPILE_SECONDS = 300


def unavailable() -> str | None:
    """What is missing for an emulation here, in a few words; None where it works."""
    if sys.platform != "linux":
        return f"the emulated device loads on Linux only, this is {sys.platform}"
    if shutil.which(COMPILER) is None:
        return f"no {COMPILER}"
    if importlib.util.find_spec("triton") is None:
        return "no triton (pip install --no-deps triton)"
    return None


def check_available() -> None:
    reason = unavailable()
    if reason:
        raise DeviceError(
            expected="g++ and triton, with which a GPU is emulated",
            found=reason,
            do="install what is missing; a GPU is not needed",
        )


def load_before_torch(source: Path = SOURCE) -> ctypes.CDLL:
    """Compile `source` unless it is in the cache, and load it into this process."""
    assert "torch" not in sys.modules, "the emulated device must be loaded before torch"
    libraries = torch_directory() / "lib"
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(libraries / name), mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(str(compiled(source)), mode=ctypes.RTLD_GLOBAL)


def compiled(source: Path) -> Path:
    """The library of a C++ source that uses torch's headers."""
    check_available()
    path = cache_directory() / "emulation" / f"{source.stem}-{_fingerprint(source)}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # Other processes may be compiling too; the last one replaces a file by an equal one.
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = Path(directory) / path.name
            _compile(source, made)
            sync(made)
            made.replace(path)
        sync(path.parent)
    return path


def torch_directory() -> Path:
    """Where torch is installed, found without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None, "torch is not installed"
    assert found.origin is not None, "torch is not a package on disk"
    return Path(found.origin).parent


def _compile(source: Path, library: Path) -> None:
    torch = torch_directory()
    done = subprocess.run(
        [
            *(COMPILER, *FLAGS),
            *("-isystem", str(torch / "include"), str(source), "-o", str(library)),
            *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"),
        ],
        capture_output=True,
        text=True,
        timeout=COMPILE_SECONDS,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
        raise DeviceError(
            expected=f"{COMPILER} to compile {source.name} against torch {_torch_version()}",
            found=errors[0],
            do="use a release of torch that hotlap/emulation/torch_internals.py names",
        )


def _fingerprint(source: Path) -> str:
    version = subprocess.run([COMPILER, "--version"], capture_output=True, text=True).stdout
    parts = (source.read_text(), *FLAGS, version, _torch_version(), str(torch_directory()))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _torch_version() -> str:
    return importlib.metadata.version("torch")
