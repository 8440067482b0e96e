"""The words that a real bash offers after `hotlap completion bash`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from hotlap.cli import COMMANDS
from hotlap.recipes import RECIPES, SIZES
from tests.command import complaint, hotlap_here

BASH, ZSH, FISH = shutil.which("bash"), shutil.which("zsh"), shutil.which("fish")
needs_bash = pytest.mark.skipif(BASH is None, reason="no bash here")


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    made = {shell: hotlap_here("completion", shell) for shell in ("bash", "zsh", "fish")}
    assert all(result.returncode == 0 for result in made.values())
    return {shell: result.stdout for shell, result in made.items()}


@pytest.fixture(scope="module")
def offered(scripts, tmp_path_factory):
    path = tmp_path_factory.mktemp("completion") / "hotlap.bash"
    path.write_text(scripts["bash"])

    def ask(*words: str) -> list[str]:
        """What the Tab key would offer at the end of the last word."""
        program = (
            'source "$1"; shift; COMP_WORDS=(hotlap "$@"); COMP_CWORD=$#; _hotlap;'
            "printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(
            ["bash", "--norc", "-uc", program, "bash", str(path), *words], capture_output=True, text=True
        )
        assert not done.stderr
        return [line for line in done.stdout.splitlines() if line]

    return ask


@needs_bash
def test_commands_come_first(offered):
    assert offered("") == list(COMMANDS)
    assert offered("tr") == ["train"]


@needs_bash
def test_recipes_sizes_and_settings_follow_their_command(offered):
    assert offered("train", "soft") == ["softcap"]
    assert offered("train", "") == list(RECIPES)
    assert offered("train", "softcap", "--size", "") == list(SIZES)
    assert offered("train", "softcap", "--optim.muon.n") == [
        "--optim.muon.nesterov",
        "--optim.muon.newton-schulz-steps",
    ]
    assert offered("train", "softcap", "--optim.matrices", "a") == ["adamw"]
    assert offered("data", "pre") == ["prepare"]
    assert "--vocab" in offered("data", "prepare", "--v")
    assert offered("launch", "sl") == ["slurm"]
    assert offered("launch", "docker", "--device", "c") == ["cuda", "cpu"]


@needs_bash
def test_where_a_file_may_follow_bash_completes_files(offered):
    assert offered("train", "softcap", "--data", "soft") == []
    assert offered("train", "softcap", "--verb") == ["--verbose"]
    assert "softcap" in offered("train", "--verbose", "soft")


@pytest.mark.skipif(ZSH is None, reason="no zsh here")
def test_zsh_reads_its_script(scripts, tmp_path):
    (tmp_path / "hotlap.zsh").write_text(scripts["zsh"])
    done = subprocess.run([ZSH, "-n", str(tmp_path / "hotlap.zsh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(FISH is None, reason="no fish here")
def test_fish_offers_sizes(scripts, tmp_path):
    (tmp_path / "hotlap.fish").write_text(scripts["fish"])
    program = f"source {tmp_path / 'hotlap.fish'}; complete -C 'hotlap train softcap --size '"
    done = subprocess.run([FISH, "-c", program], capture_output=True, text=True)
    assert {line.split("\t")[0] for line in done.stdout.splitlines()} == set(SIZES)


def test_every_command_is_in_every_script(scripts):
    for shell, text in scripts.items():
        assert all(command in text for command in COMMANDS), shell
        assert "--optim.muon.lr" in text or "-l optim.muon.lr" in text


def test_an_unknown_shell_is_one_line(tmp_path: Path):
    assert "one of the shells bash, zsh, fish; found `tcsh`" in complaint(hotlap_here("completion", "tcsh"))
    assert "|" in complaint(hotlap_here("completion"))
