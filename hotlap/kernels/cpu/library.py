"""Kernels in C for float32 on a CPU: compiled when first needed, or the reason why there are none.

They fuse what PyTorch's own operators cannot keep in a core's cache. Compiling takes a few seconds and needs
no headers but the compiler's own; the result is kept in the cache, one file per kind of processor, and is
loaded only from where no other user can write. Nothing depends on it: without gcc, with another BLAS, or with
HOTLAP_NATIVE=off PyTorch computes the same. A run's header says which.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import cffi
import torch

from hotlap.errors import HotlapError
from hotlap.files import cache_directory, sync

CSRC = Path(__file__).parent / "csrc"
SOURCES = sorted(CSRC.glob("*.[ch]"))
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=gnu11",
    # Only what kernels.h declares is exported.
    "-fvisibility=hidden",
    # Sums may be reordered, as a vectorized sum is; NaN and infinity keep their meaning.
    "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
    # Compilers do not use all of AVX-512 by default; the head gains a fifth by it.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)  # fmt: skip
# What `hotlap_set_blas` takes, and its types. Every BLAS has the first, only MKL the others.
BLAS_FUNCTIONS = {
    "sgemm_": "hotlap_sgemm_t",
    "cblas_sgemm_pack_get_size": "hotlap_sgemm_pack_get_size_t",
    "cblas_sgemm_pack": "hotlap_sgemm_pack_t",
    "cblas_sgemm_compute": "hotlap_sgemm_compute_t",
}
COMPILE_SECONDS = 60
SWITCH = "HOTLAP_NATIVE"
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def _without_preprocessor_lines(header: str) -> str:
    return "\n".join(line for line in header.splitlines() if not line.startswith("#"))


# The types of kernels.h, with which every call is checked and converted.
ffi = cffi.FFI()
ffi.cdef(_without_preprocessor_lines((CSRC / "kernels.h").read_text()))


class _UnavailableError(Exception):
    """Its text is the reason, for a header."""


def unavailable() -> str | None:
    """Why there is no library, in a few words; None where there is one."""
    return _load()[1]


def needed_library() -> Any:
    found = _load()[0]
    if found is None:
        raise RuntimeError(f"kernels in C were called, but there are none: {unavailable()}")
    return found


@functools.cache
def _load() -> tuple[Any | None, str | None]:
    try:
        if os.environ.get(SWITCH) == "off":
            raise _UnavailableError(f"{SWITCH}=off")
        blas = _torch_blas()
        loaded = ffi.dlopen(str(_compiled()))
    except (_UnavailableError, OSError) as reason:
        return None, str(reason)
    except HotlapError as mistake:  # there is no place for a cache
        return None, f"{mistake.found}; {mistake.do}"
    loaded.hotlap_set_blas(*blas)
    return loaded, None


def _torch_blas() -> list[Any]:
    """Arguments of `hotlap_set_blas`, from torch's BLAS: one BLAS and one thread pool per process.

    Looked up in torch's library and what it is linked to, whatever else the process has loaded.
    """
    of_blas = cffi.FFI()
    # Declared without arguments: only their addresses are taken.
    of_blas.cdef("".join(f"void {name}(void);" for name in BLAS_FUNCTIONS))
    directory = Path(torch.__file__).parent / "lib"
    for file in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (directory / file).exists():
            found = of_blas.dlopen(str(directory / file))
            functions = [getattr(found, name, ffi.NULL) for name in BLAS_FUNCTIONS]
            if not functions[0]:
                continue
            if not all(functions):
                functions[1:] = [ffi.NULL] * (len(functions) - 1)
            return [ffi.cast(*pair) for pair in zip(BLAS_FUNCTIONS.values(), functions, strict=True)]
    raise _UnavailableError("no BLAS in torch that could be called")


def _compiled() -> Path:
    """The library's file, compiled unless it is in the cache."""
    compiler = _compiler()
    name = f"{_fingerprint(compiler)}.so"
    directory = cache_directory() / "native"
    directory.mkdir(parents=True, exist_ok=True)
    path = directory.resolve() / name
    _close_to_others(path.parent)
    if not (_is_safe(path) and _is_whole(path)):
        _compile(compiler, path)
    return path


def _close_to_others(directory: Path) -> None:
    """Make sure that nobody else can put a file into the directory, whose files become code of this process.

    Some systems make every new directory writable by the user's group, so one of our own is closed.
    """
    status = directory.stat()
    if status.st_uid == os.geteuid() and status.st_mode & _WRITABLE_BY_OTHERS:
        directory.chmod(stat.S_IMODE(status.st_mode) & ~_WRITABLE_BY_OTHERS)
    if not _is_safe(directory):
        raise _UnavailableError(
            f"other users can write to {directory}: set HOTLAP_CACHE to another directory"
        )


def _is_safe(path: Path) -> bool:
    """Whether a file or directory exists that only this user or root could have written."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    is_plain = stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)  # no link, which may change
    return is_plain and status.st_uid in (0, os.geteuid()) and not status.st_mode & _WRITABLE_BY_OTHERS


def _compiler() -> list[str]:
    """The words of CC, which may be several, as in `ccache gcc`."""
    try:
        command = shlex.split(os.environ.get("CC", "cc"))
    except ValueError as error:
        raise _UnavailableError(f"CC is not a command: {error}") from None
    if not command or shutil.which(command[0]) is None:
        raise _UnavailableError("no C compiler")
    return command


def _compile(compiler: list[str], path: Path) -> None:
    # Other processes may be compiling too; the last one replaces a file by an equal one.
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        files = [str(source) for source in SOURCES if source.suffix == ".c"]
        _run([*compiler, *FLAGS, *files, "-o", str(made), "-lm"])
        library_bytes = made.read_bytes()
        made.write_bytes(library_bytes + hashlib.sha256(library_bytes).digest())
        made.chmod(0o755)  # whatever the umask: see `_is_safe`
        sync(made)
        made.replace(path)
        sync(path.parent)


def _is_whole(path: Path) -> bool:
    """Whether the file ends in the checksum of the rest, which the dynamic loader ignores.

    Loading a truncated library can kill the process.
    """
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _fingerprint(compiler: list[str]) -> str:
    """A hash of all that the library depends on: a cache may be shared by different machines."""
    version = _run([*compiler, "--version"])
    # These name every instruction set extension that the compiler will use.
    macros = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull])
    if "#define __clang__ " in macros:
        # Its OpenMP runtime is not torch's: in its threads, torch's BLAS would start others.
        raise _UnavailableError("kernels need gcc, found clang")
    sources = (source.read_text() for source in SOURCES)
    parts = (*sources, *compiler, *FLAGS, version, macros, platform.machine())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS)
    except subprocess.TimeoutExpired:
        raise _UnavailableError("the C compiler takes too long") from None
    if done.returncode:
        first_line = next(iter(done.stderr.splitlines()), f"exit code {done.returncode}")
        raise _UnavailableError(f"the C compiler failed: {first_line}")
    return done.stdout
