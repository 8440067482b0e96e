"""Versions of the package in a race: `softcap@commit` trains by that commit's own code."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hotlap import versions
from hotlap.errors import ConfigError
from hotlap.race.plan import from_json, make_plan, to_json
from hotlap.versions import split_version
from tests.command import hotlap

PACKAGE = Path(versions.__file__).parent
needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="no git here")


def git(*words, cwd):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *identity, *words], cwd=cwd, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    """A repository of two commits of the package. The second, on the branch `halved`, has another MLP."""
    root = tmp_path / "checkout"
    shutil.copytree(PACKAGE, root / "hotlap", ignore=shutil.ignore_patterns("__pycache__"))
    git("init", "-q", "-b", "main", cwd=root)
    git("add", "-A", cwd=root)
    git("commit", "-q", "-m", "one", cwd=root)
    git("checkout", "-q", "-b", "halved", cwd=root)
    mlp = root / "hotlap" / "model" / "mlp.py"
    mlp.write_text(mlp.read_text().replace("hidden * hidden", "hidden * hidden * 0.5"))
    git("commit", "-q", "-a", "-m", "two", cwd=root)
    return root


@pytest.mark.parametrize(
    "recipe, expected",
    [
        ("softcap", ("softcap", None)),
        ("softcap@main", ("softcap", "main")),
        ("softcap@feature/x@2", ("softcap", "feature/x@2")),
        ("runs/r/ideas/swiglu@0123.py", ("runs/r/ideas/swiglu@0123.py", None)),
    ],
)
def test_a_version_is_told_from_a_copy_of_an_idea(recipe, expected):
    assert split_version(recipe) == expected


@pytest.mark.parametrize("recipe", ["ideas/swiglu.py@main", "softcap@"])
def test_what_is_no_version_is_refused(recipe):
    with pytest.raises(ConfigError, match="RECIPE@VERSION"):
        split_version(recipe)


@needs_git
def test_versions_of_one_recipe_get_the_same_seeds_and_their_own_worktrees(checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "ROOT", checkout)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    plan = make_plan(["softcap@main", "softcap@halved:optim.muon.lr=0.03", "softcap@halved"], "pico", 2, {})
    assert [entry.label for entry in plan.entries] == [
        "softcap@main",
        "softcap@halved:optim.muon.lr=0.03",
        "softcap@halved",
    ]
    assert [entry.first_seed for entry in plan.entries] == [0, 0, 0]
    assert from_json(json.loads(json.dumps(to_json(plan))), "race.json") == plan
    one, _, two = (versions.worktree_of(entry.commit) for entry in plan.entries)
    assert "hidden * hidden * 0.5" in (two / "hotlap" / "model" / "mlp.py").read_text()
    assert "hidden * hidden * 0.5" not in (one / "hotlap" / "model" / "mlp.py").read_text()
    assert plan.words(plan.rounds()[0][0], tmp_path)[0] == f"softcap@{git('rev-parse', 'main', cwd=checkout)}"
    with pytest.raises(ConfigError, match="found `nowhere`"):
        make_plan(["softcap@nowhere"], "pico", 2, {})


KILLED_HALFWAY = """
import os, pathlib, sys
from hotlap import versions

def halfway(*words):
    if words[:2] == ("worktree", "add"):
        (pathlib.Path(words[-2]) / "hotlap").mkdir(parents=True)
        os._exit(9)

versions.ROOT, versions._git = pathlib.Path(sys.argv[1]), halfway
versions.worktree_of(sys.argv[2])
"""


@needs_git
def test_a_checkout_that_was_killed_halfway_is_made_again(checkout, monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "ROOT", checkout)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    commit = versions.commit_of("halved")
    killed = subprocess.run([sys.executable, "-c", KILLED_HALFWAY, str(checkout), commit], check=False)
    assert killed.returncode == 9
    found = versions.worktree_of(commit)
    assert "hidden * hidden * 0.5" in (found / "hotlap" / "model" / "mlp.py").read_text()
    assert git("rev-parse", "HEAD", cwd=found) == commit


@needs_git
def test_an_installed_package_has_no_versions(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    with pytest.raises(ConfigError, match="in a git checkout"):
        make_plan(["softcap@main"], "pico", 2, {})


@pytest.mark.slow
@needs_git
def test_a_race_of_two_versions_trains_each_by_its_own_code(checkout, tiny_data, tmp_path):
    words = ["race", "softcap@main", "softcap@halved", "--size", "pico", "--seeds", "2", "--name", "race"]
    words += [f"--data.source={tiny_data}", "--steps=4", "--evaluation.tokens=1024", "--threads=1"]
    where = {"PYTHONPATH": str(checkout), "HOTLAP_CACHE": str(tmp_path / "cache")}
    done = hotlap(*words, cwd=tmp_path, env=where)
    assert done.returncode == 0, done.stderr
    assert "trained by different versions of the code" in done.stdout
    results = json.loads((tmp_path / "runs" / "race" / "results.json").read_text())
    loss = {(run["label"], run["seed"]): run["val_loss"] for run in results["runs"]}
    for seed in range(2):
        facts = {}
        for version in ("main", "halved"):
            run = tmp_path / "runs" / "race" / f"softcap-{version}-seed{seed}"
            facts[version] = json.loads((run / "environment.json").read_text())
        assert facts["main"]["git_commit"] == git("rev-parse", "main", cwd=checkout)
        assert facts["main"]["code"]["package"] != facts["halved"]["code"]["package"]
        assert loss["softcap@main", seed] != loss["softcap@halved", seed]
