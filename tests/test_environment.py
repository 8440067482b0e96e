import json
import shutil
import subprocess
from datetime import UTC, datetime

import pytest
import torch

from hotlap.train.environment import RECORDED_VARIABLES, describe_environment, source_commit


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


def test_the_users_home_is_not_named(monkeypatch):
    monkeypatch.setenv("HOME", "/home/jo")
    monkeypatch.setenv("LD_PRELOAD", "/home/jo/lib/malloc.so:/home/jo2/x.so:/opt/home/jo/y.so")
    assert describe()["variables"]["LD_PRELOAD"] == "~/lib/malloc.so:/home/jo2/x.so:/opt/home/jo/y.so"
    for nowhere in ("/", ""):
        monkeypatch.setenv("HOME", nowhere)
        assert "LD_PRELOAD" in describe()["variables"]


def git(*arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@needs_git
def test_the_commit_is_that_of_the_checkout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert source_commit(tmp_path) is None
    git("init", "--quiet")
    assert source_commit(tmp_path) is None
    (tmp_path / "recipe.py").write_text("lr = 1")
    git("add", "recipe.py")
    git("commit", "--quiet", "-m", "first")
    git("tag", "-a", "v1", "-m", "v1")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "untracked").write_text("")
    assert source_commit(tmp_path) == commit
    (tmp_path / "recipe.py").write_text("lr = 20")
    assert source_commit(tmp_path) == f"{commit}-dirty"
    # A package that is installed below another repository has no commit of its own.
    (tmp_path / "site-packages").mkdir()
    assert source_commit(tmp_path / "site-packages") is None


@needs_git
@pytest.mark.parametrize("setting", ["core.fsmonitor", "core.hooksPath"])
def test_no_program_of_a_repository_runs(tmp_path, monkeypatch, setting):
    """Neither one of the working directory, nor of the checkout itself."""
    monkeypatch.chdir(tmp_path)
    hook = tmp_path / "hooks" / "post-index-change"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\ntouch '{tmp_path / 'ran'}'\n")
    hook.chmod(0o755)
    git("init", "--quiet")
    (tmp_path / "recipe.py").write_text("lr = 1")
    git("add", "recipe.py")
    git("commit", "--quiet", "-m", "first")
    git("config", setting, str(hook if setting == "core.fsmonitor" else hook.parent))
    describe()
    assert source_commit(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_machine_without_git_has_no_commit(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    monkeypatch.setenv("PATH", "")
    assert source_commit(tmp_path) is None
