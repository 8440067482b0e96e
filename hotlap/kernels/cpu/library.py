"""Kernels in C for float32 on a CPU, compiled when first needed, or the reason why there are none.

They take what PyTorch's own operators cannot keep in a core's cache: attention and what comes before it, the
MLP and the head, from the first product to the last, norms and mixes in one pass, Newton-Schulz a matrix at a
time, and the optimizers' steps. The compiler needs a few seconds and no headers but its own; what it made is
kept in the cache, one file for each kind of processor. Nothing depends on it: without gcc, with another BLAS,
or with HOTLAP_NATIVE=off the same is computed in PyTorch, and a run's header says which.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from hotlap.files import cache_directory, sync

SOURCES = sorted((Path(__file__).parent / "csrc").glob("*.[ch]"))
# Sums may be taken in another order, as a vectorised sum is; NaN and infinity keep their meaning.
FLAGS = (
    "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-std=gnu11", "-fno-math-errno",
    "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math",
    # Compilers hold AVX-512 back by default; the head gains a fifth by it.
    *(("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()),
)  # fmt: skip
# Functions that return numbers of floats.
WORKSPACE_SIZES = (
    "attention_forward_floats", "attention_backward_floats", "head_floats", "inputs_forward_floats",
    "inputs_backward_floats", "mlp_forward_floats", "mlp_backward_floats", "newton_schulz_floats",
)  # fmt: skip
# Of Intel's BLAS, beside what every BLAS has.
PACKING = ("cblas_sgemm_pack_get_size", "cblas_sgemm_pack", "cblas_sgemm_compute")
COMPILE_SECONDS = 60
SWITCH = "HOTLAP_NATIVE"


class _UnavailableError(Exception):
    """Its text is the reason, for a header."""


def library() -> ctypes.CDLL | None:
    return _load()[0]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def are_available() -> bool:
    """Whether there is a library; a compiler takes the answer for granted."""
    return library() is not None


def kernels_take(*operands: torch.Tensor) -> bool:
    """Whether there are kernels, for such operands."""
    fit = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in operands)
    return fit and are_available()


def unavailable() -> str | None:
    """Why there is no library, in a few words; None where there is one."""
    return _load()[1]


def needed_library() -> ctypes.CDLL:
    found = library()
    assert found is not None, f"kernels are called only where they are: {unavailable()}"
    return found


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    """NULL for an empty tensor."""
    return ctypes.c_void_p(x.data_ptr() or None)


def addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(tensors))(*map(pointer, tensors))


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str | None]:
    try:
        if os.environ.get(SWITCH) == "off":
            raise _UnavailableError(f"{SWITCH}=off")
        blas = _torch_blas()
        loaded = _loaded()
    except (_UnavailableError, OSError) as reason:
        return None, str(reason)
    for name in WORKSPACE_SIZES:
        getattr(loaded, name).restype = ctypes.c_int64
    loaded.set_blas(*blas)
    return loaded, None


def _torch_blas() -> list[ctypes.c_void_p]:
    """What `set_blas` takes, of torch's own BLAS: one BLAS, and one set of threads, in the process."""
    directory = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib"):
        if (directory / name).exists():
            found = ctypes.CDLL(str(directory / name))
            if hasattr(found, "sgemm_"):
                packing = PACKING if all(hasattr(found, function) for function in PACKING) else ()
                functions = [getattr(found, function) for function in ("sgemm_", *packing)]
                missing = [None] * (len(PACKING) - len(packing))
                return [ctypes.cast(function, ctypes.c_void_p) for function in (*functions, *missing)]
    raise _UnavailableError("no BLAS in torch that could be called")


def _loaded() -> ctypes.CDLL:
    compiler = _compiler()
    path = cache_directory() / "native" / f"{_fingerprint(compiler)}.so"
    if not _is_whole(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _compile(compiler, path)
    return ctypes.CDLL(str(path))


def _compiler() -> list[str]:
    """A command, of several words where CC is one, as `ccache gcc`."""
    try:
        command = shlex.split(os.environ.get("CC", "cc"))
    except ValueError as error:
        raise _UnavailableError(f"CC is not a command: {error}") from None
    if not command or shutil.which(command[0]) is None:
        raise _UnavailableError("no C compiler")
    return command


def _compile(compiler: list[str], path: Path) -> None:
    # Other processes may be compiling too; whoever is last replaces equal by equal.
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        made = Path(directory) / path.name
        files = [str(source) for source in SOURCES if source.suffix == ".c"]
        _run([*compiler, *FLAGS, *files, "-o", str(made), "-lm"])
        library_bytes = made.read_bytes()
        made.write_bytes(library_bytes + hashlib.sha256(library_bytes).digest())
        sync(made)
        made.replace(path)
        sync(path.parent)


def _is_whole(path: Path) -> bool:
    """Whether the file ends in the checksum of the rest, which a loader passes over.

    Loading a file that was cut short can end the process, not just the attempt.
    """
    if not path.exists():
        return False
    content = path.read_bytes()
    size = hashlib.sha256().digest_size
    return hashlib.sha256(content[:-size]).digest() == content[-size:]


def _fingerprint(compiler: list[str]) -> str:
    """Of all that the result depends on: a cache may be shared by different machines."""
    version = _run([*compiler, "--version"])
    # They name every extension of the processor that the compiler will use.
    macros = _run([*compiler, "-march=native", "-dM", "-E", "-x", "c", os.devnull])
    if "#define __clang__ " in macros:
        # Its OpenMP is not torch's: in a thread of it, torch's BLAS would start threads of its own.
        raise _UnavailableError("kernels need gcc, found clang")
    parts = (*(source.read_text() for source in SOURCES), *FLAGS, version, macros, platform.machine())
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
