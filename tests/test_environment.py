import json
import shutil
import subprocess
from datetime import UTC, datetime

import pytest
import torch

from hotlap.train import environment
from hotlap.train.environment import RECORDED_VARIABLES, describe_environment, working_commit


def describe():
    return describe_environment(
        device=torch.device("cpu"),
        precision=torch.bfloat16,
        attention_backend="blocked",
        kernels={"loss": "C"},
        compile_mode="off",
        world_size=3,
        threads=2,
    )


def test_the_facts_are_plain_and_complete():
    facts = describe()
    assert json.loads(json.dumps(facts)) == facts
    assert facts.keys() == {
        *("hotlap", "python", "torch", "system", "device", "device_name", "world_size", "threads"),
        *("precision", "attention_backend", "compile", "cores", "memory_gib", "git_commit", "started"),
        *("kernels", "variables"),
    }
    assert facts["torch"] == torch.__version__
    assert (facts["device"], facts["precision"], facts["world_size"]) == ("cpu", "bfloat16", 3)
    assert facts["cores"] >= 1
    assert facts["memory_gib"] > 0
    age = datetime.now(UTC) - datetime.fromisoformat(facts["started"])
    assert abs(age.total_seconds()) < 60


def test_what_runs_the_parts_of_a_lap_is_a_fact(monkeypatch):
    monkeypatch.setenv("HOTLAP_NATIVE", "off")
    monkeypatch.setenv("CC", "clang")
    facts = describe()
    assert facts["kernels"] == {"loss": "C"}
    assert (facts["variables"]["HOTLAP_NATIVE"], facts["variables"]["CC"]) == ("off", "clang")


def test_no_variable_is_recorded_but_those_named(monkeypatch):
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "HF_TOKEN",
        "WANDB_API_KEY",
        "OMP_NUM_THREADS_TOKEN",
        "MALLOC_SECRET",
    ):
        monkeypatch.setenv(name, "hunter2-very-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "4000000")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    facts = describe()
    assert "hunter2" not in json.dumps(facts)
    assert facts["variables"].keys() <= set(RECORDED_VARIABLES)
    assert facts["variables"]["OMP_NUM_THREADS"] == "1"
    assert facts["variables"]["MALLOC_TRIM_THRESHOLD_"] == "4000000"
    assert "CUDA_VISIBLE_DEVICES" not in facts["variables"]


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_commit_is_that_of_the_working_directory(tmp_path, monkeypatch):
    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        command = ["git", *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert working_commit() is None
    git("init", "--quiet")
    assert working_commit() is None
    (tmp_path / "recipe.py").write_text("lr = 1")
    git("add", "recipe.py")
    git("commit", "--quiet", "-m", "first")
    git("tag", "-a", "v1", "-m", "v1")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("")
    assert working_commit() == commit
    (tmp_path / "recipe.py").write_text("lr = 20")
    assert working_commit() == f"{commit}-dirty"


def test_a_machine_without_git_has_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment.working_commit() is None
