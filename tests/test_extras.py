"""Which extras are missing, and the command that adds each."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import tomllib
from email.message import Message
from pathlib import Path

import pytest

from hotlap.commands.doctor import extras_lines
from hotlap.extras import Extra, extras
from tests.command import hotlap_here

ROOT = Path(__file__).parents[1]


def declared() -> dict[str, list[str]]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)["project"]["optional-dependencies"]


class Installed:
    """What the metadata of an installed Hotlap would say."""

    requires = (
        "torch>=2.6",
        'wandb>=0.18; extra == "wandb"',
        "a_package_that_nobody_has>=1 ; extra == 'made-up'",
        'pytest>=8.2; (sys_platform == "linux") and extra == "made-up"',
    )

    def __init__(self) -> None:
        self.metadata = Message()
        for name in ("wandb", "made-up"):
            self.metadata["Provides-Extra"] = name


def test_extras_are_those_of_the_installed_package(monkeypatch):
    real = importlib.metadata.distribution
    made_up = {"hotlap": Installed()}
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: made_up.get(name) or real(name))
    of_two, wandb = extras()
    assert wandb.requirements == ("wandb>=0.18",)
    assert of_two.requirements == ("a_package_that_nobody_has>=1", "pytest>=8.2")
    assert of_two.missing == ("a_package_that_nobody_has>=1",)
    assert of_two.command.endswith("pip install 'a_package_that_nobody_has>=1'")


def test_a_package_that_was_never_installed_has_none(monkeypatch):
    def missing(_: str):
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    assert extras() == []


@pytest.mark.parametrize("has_pip, start", [(True, " -m pip install x"), (False, "uv pip install --python ")])
def test_the_command_is_for_the_python_that_runs(monkeypatch, has_pip, start):
    monkeypatch.setattr("hotlap.extras.is_installed", lambda _: has_pip)
    assert start in Extra("some", ("x",), ("x",)).command


def test_naming_the_command_leaves_the_compiler_what_it_imports():
    code = "from hotlap.extras import installer; installer(); import torch.utils.cpp_extension"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_doctor_names_each_that_is_missing_with_its_command(monkeypatch):
    found = [Extra("png", ("matplotlib>=3.8",), ()), Extra("made-up", ("x>=1",), ("x>=1",))]
    lines = extras_lines(found)
    assert "installed: png" in lines[0]
    assert lines[-2:] == ["  made-up: x>=1", f"    {found[1].command}"]
    assert len(extras_lines(found[:1])) == 1


def test_doctor_lists_every_extra(monkeypatch):
    monkeypatch.setattr("hotlap.hardware.measure_matmul_gflops", lambda: 1.0)
    listed = json.loads(hotlap_here("doctor", "--json").stdout)["extras"]
    assert set(listed) <= declared().keys()
    text = hotlap_here("doctor").stdout
    for name, command in listed.items():
        assert name in text
        assert command is None or command in text
