import pytest
import torch

from hotlap import hardware
from hotlap.errors import DeviceError

CPU = torch.device("cpu")


@pytest.mark.skipif(hardware.platform.system() != "Linux", reason="reads Linux's /proc/cpuinfo")
@pytest.mark.parametrize(
    "cpuinfo, native",
    [
        ("flags\t\t: fpu avx2 fma\n", False),
        ("flags\t\t: fpu avx512f avx512_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("Features\t: fp asimd\n", False),
    ],
)
def test_native_bf16_is_read_from_the_cpu_s_own_flags(monkeypatch, tmp_path, cpuinfo, native):
    path = tmp_path / "cpuinfo"
    path.write_text(cpuinfo)
    monkeypatch.setattr(hardware, "CPUINFO", path)
    assert hardware.has_native_bf16(CPU) is native
    assert hardware.select_precision("auto", CPU) is (torch.bfloat16 if native else torch.float32)


def test_bfloat16_that_would_be_emulated_is_refused(monkeypatch):
    monkeypatch.setattr(hardware, "has_native_bf16", lambda _: False)
    with pytest.raises(DeviceError, match="--precision float32"):
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


def test_measured_rate_is_that_of_a_matrix_product():
    assert hardware.measure_matmul_gflops(size=128, repeats=1) > 0
