"""The kernels in C under AddressSanitizer and UBSan, called from Python with odd sizes.

Tensors, and with them workspaces, are allocated exactly to size; the sanitizer's build also puts
poisoned floats between the parts of a workspace (`part` of common.h).
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hotlap.kernels.cpu import library
from tests.kernel_calls import KERNELS
from tests.kernels_here import needs_kernels

REPOSITORY = Path(__file__).parents[1]
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-fno-omit-frame-pointer")
COMPILE = "from hotlap.kernels.cpu import library; library.COMPILE_SECONDS = 600; print(library._compiled())"

pytestmark = [needs_kernels, pytest.mark.slow, pytest.mark.timeout(900)]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", **variables}
    return subprocess.run(words, cwd=REPOSITORY, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of a process whose kernels are compiled with sanitizers."""
    compiler = library._compiler()
    found = [run(*compiler, f"-print-file-name=lib{name}.so").stdout.strip() for name in ("asan", "stdc++")]
    if not all(Path(path).is_absolute() for path in found):
        pytest.skip("no AddressSanitizer beside the C compiler")
    folder = tmp_path_factory.mktemp("sanitized")
    script = folder / "compiler"
    # The last -O counts: -O3 would take a minute to compile and check nothing else.
    script.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} {" ".join(SANITIZERS)} "$@" -O1\n')
    script.chmod(0o755)
    variables = {"CC": str(script), "HOTLAP_CACHE": str(folder)}
    # Without the sanitizer's runtime in it, under which a compiler would be slow.
    compiled = run(sys.executable, "-c", COMPILE, **variables)
    assert compiled.returncode == 0, compiled.stderr
    # Python is not compiled with it, so the runtime has to be loaded before everything else.
    return {
        **variables,
        "LD_PRELOAD": " ".join(found),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


@pytest.fixture(scope="module")
def checked_blas(tmp_path_factory: pytest.TempPathFactory) -> str:
    checked = tmp_path_factory.mktemp("blas") / "libchecked.so"
    source = str(Path(__file__).with_name("checked_blas.c"))
    options = (*SANITIZERS, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror")
    done = run(*library._compiler(), *options, source, "-o", str(checked))
    assert done.returncode == 0, done.stderr
    return str(checked)


@pytest.mark.parametrize("blas", ["torch", "checked"])
def test_no_kernel_leaves_its_memory(blas, sanitized, checked_blas, tmp_path) -> None:
    plain, checked = tmp_path / "plain.pt", tmp_path / "checked.pt"
    options = [checked_blas] if blas == "checked" else []
    done = run(sys.executable, "-m", "tests.kernel_calls", str(checked), *options, **sanitized)
    assert done.returncode == 0, done.stderr[-6000:]
    # What ran were the kernels: they agree with those that are not sanitized.
    assert run(sys.executable, "-m", "tests.kernel_calls", str(plain)).returncode == 0
    expected, found = torch.load(plain), torch.load(checked)
    assert len({name.split()[0] for name in found}) == len(KERNELS)
    for name, tensors in expected.items():
        for ours, others in zip(tensors, found[name], strict=True):
            torch.testing.assert_close(
                ours, others, rtol=1e-3, atol=1e-3, msg=lambda text, n=name: f"{n}: {text}"
            )


# Past the checks of Python: three rows in tensors of two.
OVERRUN = """
import torch
from hotlap.kernels.cpu.library import needed_library
from hotlap.kernels.cpu.operands import pointer
table, grad, squares = torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3)
tensors = (pointer(table), pointer(grad), pointer(squares))
needed_library().hotlap_step_rows(*tensors, 3, 3, 0.1, 0.9, 1.0, 1e-8, 1)
"""


def test_an_overrun_is_caught(sanitized) -> None:
    done = run(sys.executable, "-c", OVERRUN, **sanitized)
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "hotlap_step_rows" in done.stderr
