import faulthandler
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from hotlap import hardware
from hotlap.errors import DeviceError
from hotlap.train.run import open_device

CPU = torch.device("cpu")
WITH_AMX = "flags\t\t: fpu avx512f avx512_bf16 amx_bf16 amx_tile amx_int8\n"

on_linux = pytest.mark.skipif(
    hardware.platform.system() != "Linux", reason="the flags are those of Linux's /proc/cpuinfo"
)


@pytest.fixture
def processor(monkeypatch, tmp_path):
    """Called with the text of /proc/cpuinfo: a processor that nobody has asked yet, no variables set."""

    def appear(cpuinfo: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(cpuinfo)
        monkeypatch.setattr(hardware, "CPUINFO", path)
        monkeypatch.setattr(os, "environ", {})
        hardware._cpu_amx_faults.cache_clear()

    yield appear
    hardware._cpu_amx_faults.cache_clear()


def illegal_instruction() -> None:
    os.kill(os.getpid(), signal.SIGILL)


def no_fork() -> int:
    raise AssertionError("a process was forked")


@on_linux
@pytest.mark.parametrize(
    "cpuinfo, native",
    [
        ("flags\t\t: fpu avx2 fma\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
    ],
)
def test_native_bf16_is_read_from_the_cpu_s_own_flags(monkeypatch, processor, cpuinfo, native):
    processor(cpuinfo)
    monkeypatch.setattr(os, "fork", no_fork)  # there is no AMX to try out
    assert hardware.has_native_bf16(CPU) is native
    assert hardware.select_precision("auto", CPU) is (torch.bfloat16 if native else torch.float32)
    assert os.environ == {}


@on_linux
def test_a_processor_that_faults_on_its_amx_computes_in_float32_without_it(monkeypatch, processor):
    processor(WITH_AMX)
    monkeypatch.setattr(hardware, "_bfloat16_matmul", illegal_instruction)
    assert not hardware.has_native_bf16(CPU)
    assert hardware.amx_faults(CPU)
    assert hardware.select_precision("auto", CPU) is torch.float32
    assert os.environ == {"HOTLAP_AMX_FAULTS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
    with pytest.raises(
        DeviceError, match="found a processor that lists AMX but faults on it; use --precision"
    ):
        hardware.select_precision("bfloat16", CPU)


@on_linux
def test_a_processor_whose_amx_works_uses_it(monkeypatch, processor):
    processor(WITH_AMX)
    monkeypatch.setattr(hardware, "_bfloat16_matmul", lambda: None)
    assert hardware.has_native_bf16(CPU)
    assert hardware.select_precision("auto", CPU) is torch.bfloat16
    assert os.environ == {}


@on_linux
@pytest.mark.parametrize("survived", [True, False])
def test_amx_is_tried_out_once_a_process(monkeypatch, processor, survived):
    processor(WITH_AMX)
    trials = []
    monkeypatch.setattr(hardware, "survives", lambda trial: trials.append(trial) or survived)
    assert [hardware.has_native_bf16(CPU) for _ in range(3)] == [survived] * 3
    assert trials == [hardware._bfloat16_matmul]


@on_linux
def test_what_the_user_lets_onednn_use_stays(monkeypatch, processor):
    processor(WITH_AMX)
    os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_AMX"
    monkeypatch.setattr(hardware, "_bfloat16_matmul", illegal_instruction)
    assert not hardware.has_native_bf16(CPU)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_AMX"


@on_linux
def test_a_process_started_by_one_that_knows_is_of_the_same_mind(monkeypatch, processor):
    processor(WITH_AMX)
    os.environ["HOTLAP_AMX_FAULTS"] = "1"
    monkeypatch.setattr(os, "fork", no_fork)  # kept off AMX, its product would survive
    assert not hardware.has_native_bf16(CPU)
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_FP16"


@pytest.mark.parametrize("trial, survived", [(illegal_instruction, False), (lambda: None, True)])
def test_a_trial_is_survived_or_not_and_nothing_of_it_is_heard(capfd, trial, survived):
    was_on = faulthandler.is_enabled()
    faulthandler.enable(file=2)
    try:
        print("said before", end="")
        assert hardware.survives(trial) is survived
    finally:
        faulthandler.enable() if was_on else faulthandler.disable()
    assert capfd.readouterr() == ("said before", "")


def test_a_trial_that_raises_is_not_survived_and_ends_in_its_own_process(capfd):
    here = os.getpid()
    assert not hardware.survives(lambda: 1 / 0)
    assert os.getpid() == here
    assert capfd.readouterr() == ("", "")


def test_a_trial_that_hangs_is_ended_at_its_limit(tmp_path):
    def hang() -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        time.sleep(60)

    start = time.monotonic()
    assert not hardware.survives(hang, limit_s=1.0)
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_having_asked_a_process_can_multiply_in_bfloat16_whatever_its_processor_lists():
    program = (
        "import torch; from hotlap import hardware; hardware.has_native_bf16(torch.device('cpu'));"
        "a = torch.ones(64, 64).bfloat16(); print((a @ a)[0, 0].item())"
    )
    unset = (hardware.AMX_FAULTS_VARIABLE, hardware.ISA_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "64.0\n", "")


def test_bfloat16_that_would_be_emulated_is_refused(monkeypatch):
    monkeypatch.setattr(hardware, "has_native_bf16", lambda _: False)
    monkeypatch.setattr(hardware, "amx_faults", lambda _: False)
    with pytest.raises(DeviceError, match="found cpu without it; use --precision float32"):
        hardware.select_precision("bfloat16", CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_a_device_that_is_not_there_is_refused_never_replaced():
    with pytest.raises(DeviceError, match="found cuda"):
        hardware.select_device("cuda")


@pytest.mark.parametrize(
    "quota, cores",
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 2),
        ("1000 100000\n", 1),
        ("6400000 100000\n", 32),
        ("max 100000\n", 32),
        ("", 32),
        (None, 32),
    ],
)
def test_a_container_s_share_of_the_cores_is_what_it_may_use(monkeypatch, tmp_path, quota, cores):
    path = tmp_path / "cpu.max"
    if quota is not None:
        path.write_text(quota)
    monkeypatch.setattr(hardware, "CPU_QUOTA", path)
    monkeypatch.setattr(hardware.os, "sched_getaffinity", lambda _: range(32), raising=False)
    monkeypatch.setattr(hardware.psutil, "cpu_count", lambda **_: 32)
    assert hardware.usable_cores() == cores


# The order is the run's own: the allocator reads its configuration once, when the device is opened.
ALLOCATOR_OF_A_RUN = """
import contextlib, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train import run

class Opened(Exception):
    pass

def opened(device):
    print(torch._C._accelerator_getAllocatorSettings())
    print(*(f"{name}={value}" for name, value in os.environ.items() if name.endswith("ALLOC_CONF")))
    raise Opened

torch.cuda.device_count = lambda: 1
run.select_device = torch.device
run.process_group = lambda device, _: contextlib.nullcontext(SimpleNamespace(device=torch.device(device)))
run.open_device = opened
try:
    config = updated(resolve("softcap", "pico"), {"runtime.device": sys.argv[1]})
    run.run(config, run.RunOptions(Path("."), None), None)
except Opened:
    pass
"""


@pytest.mark.skipif(
    not hasattr(torch._C, "_accelerator_getAllocatorSettings"),
    reason="this release of torch does not tell its allocator's settings",
)
@pytest.mark.parametrize(
    ("device", "given", "settings"),
    [
        ("cuda", {}, "expandable_segments:True"),
        pytest.param(
            *("cuda", {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
            marks=pytest.mark.slow,
        ),
        ("cuda", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "max_split_size_mb:64"),
        pytest.param("cpu", {}, "", marks=pytest.mark.slow),
    ],
)
def test_the_allocator_is_configured_before_cuda_is_opened_unless_the_user_did(device, given, settings):
    environment = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    child = subprocess.run(
        [sys.executable, "-c", ALLOCATOR_OF_A_RUN, device],
        env={**environment, **given},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    found, variables = child.stdout.splitlines()
    assert found == settings
    both = {"PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings} if settings else {}
    assert dict(pair.split("=") for pair in variables.split()) == (given or both)


def test_opening_a_device_runs_a_backward_on_it(monkeypatch):
    made, empty = [], torch.empty

    def empty_on_the_cpu(*size, device, **options):
        made.append((device, empty(*size, **options)))
        return made[-1][1]

    monkeypatch.setattr(torch, "empty", empty_on_the_cpu)
    open_device(CPU)
    assert not made
    open_device(torch.device("cuda", 1))
    ((device, tensor),) = made
    assert device == torch.device("cuda", 1)
    assert tensor.grad is not None


def test_measured_rate_is_that_of_a_matrix_product():
    assert hardware.measure_matmul_gflops(size=128, repeats=1) > 0


@pytest.mark.parametrize("name", ["auto", "bfloat16"])
def test_a_gpu_without_bf16_is_refused_with_the_reason(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(DeviceError, match="found Tesla T4, whose tensor cores have float16 only"):
        hardware.select_precision(name, torch.device("cuda"))
    assert hardware.select_precision("float32", torch.device("cuda")) is torch.float32
