"""Fixtures that several test files share. None of them needs a network."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hotlap.hardware import amx_faults, measure_matmul_gflops
from tests.command import hotlap_here

SYLLABLES = "the of and to in a state union con gress peo ple year gov ern ment that for by be is with as it"


def pytest_configure() -> None:
    """Before the first product: where AMX faults, tests and the commands that they start do without."""
    amx_faults(torch.device("cpu"))


def made_up_text(documents: int = 80, words: int = 900) -> str:
    """Documents with some structure to learn and a few hundred words, as JSON lines; the same each time."""
    syllables = SYLLABLES.split()
    count = len(syllables)
    lines = []
    for document in range(documents):
        numbers = [i * i + document * (i % 7) + i // 5 for i in range(words)]
        chosen = [
            syllables[n % count] + syllables[n // 7 % count] + syllables[n // 31 % count] * (n % 2)
            for n in numbers
        ]
        lines.append(f'{{"text": "{" ".join(chosen)}."}}')
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared directory with a vocabulary of 512, as `pico` needs it."""
    folder = tmp_path_factory.mktemp("tiny")
    source = folder / "text.jsonl"
    source.write_text(made_up_text())
    result = hotlap_here("data", "prepare", str(source), "--vocab", "512", "--out", str(folder / "data"))
    assert result.returncode == 0, result.stderr
    return folder / "data"


@pytest.fixture(autouse=True)
def threads_are_put_back() -> Iterator[None]:
    """Some tests set how many threads torch has, which holds for the whole process."""
    before = torch.get_num_threads()
    yield
    if torch.get_num_threads() != before:
        torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def peak_is_measured_once() -> Iterator[None]:
    """Every run measures the machine's peak, which takes longer than training at `pico`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hotlap.train.flops.measure_matmul_gflops", functools.cache(measure_matmul_gflops))
        yield
