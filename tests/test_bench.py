"""Benchmarks are run by hand; here only that each of them still finds what it measures."""

import importlib
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.mark.parametrize("part", sorted(path.stem for path in BENCH.glob("[!_]*.py")))
def test_it_imports(part) -> None:
    importlib.import_module(f"bench.{part}")
