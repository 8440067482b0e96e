"""Every command of the README is run: quick ones here, a whole lap among the slow tests."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.command import hotlap, hotlap_here

# Many runs each: among the slow tests.
RACES = ("race", "ablate")

README = Path(__file__).parents[1] / "README.md"

# A short run stands for the README's: the same command, with these added.
SHORT = "--size pico --steps 3 --evaluation.tokens 1024 --threads 1 --precision float32 --data.source {data}"


def sh_lines() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line]


def hotlap_lines() -> list[list[str]]:
    return [shlex.split(line)[1:] for line in sh_lines() if line.startswith("hotlap ")]


def test_there_are_only_make_targets_that_exist_and_hotlap_commands():
    makefile = (README.parent / "Makefile").read_text()
    for line in sh_lines():
        if line.startswith("make "):
            assert re.search(rf"^{line.removeprefix('make ')}:", makefile, flags=re.MULTILINE), line
        else:
            assert line.startswith("hotlap "), line


@pytest.fixture(scope="module")
def after_the_page(tiny_data, tmp_path_factory) -> Path:
    """The directory in which all commands of the page have run, in its order."""
    folder = tmp_path_factory.mktemp("page")
    texts = folder / "my-texts"
    texts.mkdir()
    for number in range(30):
        (texts / f"{number}.txt").write_text(README.read_text(encoding="utf-8")[number * 50 :])
    done = []
    for words in hotlap_lines():
        # Elsewhere: test_acceptance.py, test_play.py, with a terminal, and test_serve.py.
        if words[0] in (*RACES, "play", "serve") or words[:2] == ["doctor", "--gpu"]:
            continue
        if "--minutes" in words:  # test_dial.py has a whole one
            words = [*words, "--dry-run"]
        if words[0] == "train" and "--dry-run" not in words:
            words = shorten(words, tiny_data)
        if "4096" in words:
            words[words.index("4096")] = "512"
        # A launcher leaves its process at once, so it needs one of its own.
        run = hotlap if "--procs" in words else hotlap_here
        with pytest.MonkeyPatch.context() as patch:
            if "--data" in words:  # prepared text goes into the cache
                patch.setenv("HOTLAP_CACHE", str(folder / "cache"))
            result = run(*words, cwd=folder)
        assert result.returncode == 0, (words, result.stderr)
        done.append(words[0])
    assert {"recipes", "plan", "train", "sample", "eval", "report", "export", "data", "doctor"} <= set(done)
    return folder


def test_the_commands_run_in_the_order_of_the_page(after_the_page):
    assert (after_the_page / "runs" / "first" / "report.html").exists()


@pytest.mark.slow
def test_the_races_of_the_page_run(tiny_data, tmp_path):
    races = [words for words in hotlap_lines() if words[0] in RACES]
    assert {words[0] for words in races} == set(RACES)
    for words in races:
        result = hotlap(*shorten(words, tiny_data), cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
        assert result.returncode == 0, (words, result.stderr)
        assert "no evidence" in result.stdout or "helps" in result.stdout or "hurts" in result.stdout


def shorten(words: list[str], data: Path) -> list[str]:
    """The same run, small: its own values of what SHORT sets are left out."""
    extra = shlex.split(SHORT.format(data=data))
    kept = list(words)
    for option, value in zip(extra[::2], extra[1::2], strict=True):
        if option in kept and option != "--data.source":
            at = kept.index(option)
            del kept[at : at + 2]
        if option != "--data.source" or not {option, "--data"} & set(kept):
            kept += [option, value]
    return kept


def python_example(part: str) -> str:
    examples = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    (example,) = (example for example in examples if part in example)
    return example


def test_the_example_of_muon_in_a_plain_loop_runs_and_learns():
    setup, loop = python_example("Muon").split("\nfor step", maxsplit=1)
    torch.manual_seed(0)
    names: dict[str, object] = {}
    exec(setup, names)
    before = torch.nn.functional.mse_loss(names["model"](names["inputs"]), names["targets"]).item()
    exec("for step" + loop, names)
    assert names["loss"].item() < before / 2
    trained_by_muon = [name for name, _ in names["matrices"]]
    assert trained_by_muon == ["0.weight", "2.weight"]
    assert len(names["others"]) == 4


def test_the_example_that_loads_a_model_runs(after_the_page):
    program = [sys.executable, "-c", python_example("hotlap.load")]
    environment = {**os.environ, "PYTHONPATH": str(README.parent)}
    run = subprocess.run(program, cwd=after_the_page, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("The state of the Union is")


def test_nothing_advises_to_install_a_package_that_no_index_has():
    for path in (*README.parent.glob("hotlap/**/*.py"), *README.parent.glob("docs/*.md"), README):
        assert not re.search(r"pip install\W+hotlap", path.read_text(encoding="utf-8")), path


def test_links_lead_to_files():
    for target in re.findall(r"\]\(([^)#:]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_make_lap_in_a_fresh_clone(tmp_path):
    root = README.parent
    subprocess.run(["git", "clone", "--quiet", str(root), str(tmp_path / "clone")], check=True)
    lap = subprocess.run(["make", "lap"], cwd=tmp_path / "clone", capture_output=True, text=True)
    assert lap.returncode == 0, lap.stderr
    assert "report:" in lap.stdout
    bpb = float(re.search(r"bits per byte ([\d.]+)", lap.stdout)[1])
    assert bpb <= 1.45
