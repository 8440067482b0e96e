"""The identity of the code that trains a run, and what races and reports make of it."""

import ast
import json
import shutil

import pytest

from hotlap.code_identity import NOT_TRAINING, PACKAGE, code_identity
from hotlap.errors import RaceError
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.report.analysis import analyze, label_runs
from hotlap.runs.reader import load_run
from tests.synthetic_runs import make_run


@pytest.fixture
def package(tmp_path):
    copy = tmp_path / "hotlap"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def add_line(path):
    path.write_text(path.read_text() + "\n/* */\n" if path.suffix == ".c" else path.read_text() + "\n# \n")


def test_a_copy_of_the_package_has_the_same_identity(package):
    assert code_identity(package=package) == code_identity()


@pytest.mark.parametrize(
    ("file", "part"),
    [("model/mlp.py", "package"), ("train/loop.py", "package"), ("kernels/cpu/csrc/mlp.c", "kernels")],
)
def test_a_changed_line_of_what_trains_changes_one_part_and_the_fingerprint(package, file, part):
    before = code_identity(package=package)
    add_line(package / file)
    after = code_identity(package=package)
    assert {name for name in before if before[name] != after[name]} == {part, "fingerprint"}


def test_a_changed_report_leaves_runs_comparable(package):
    before = code_identity(package=package)
    add_line(package / "report" / "sections.py")
    assert code_identity(package=package) == before


def test_ideas_are_a_part_of_the_fingerprint():
    plain, gated = code_identity(), code_identity(["gate@0123"])
    assert plain["package"] == gated["package"]
    assert plain["fingerprint"] != gated["fingerprint"] != code_identity(["gate@4567"])["fingerprint"]


def test_training_imports_nothing_that_does_not_count():
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in {*NOT_TRAINING, "__init__.py"}:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                room = [*name.split("."), ""][1] if name.startswith("hotlap.") else ""
                assert room not in NOT_TRAINING, f"{path} imports {name}"


def trained_by(run, **code):
    """Write into a made-up run what code has trained it."""
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "code": {**code_identity(), **code}}))


def test_a_race_that_goes_on_with_other_code_is_refused(tmp_path):
    plan = make_plan(["softcap"], "pico", 2, {"schedule.steps": 50})
    directory = RaceDirectory(tmp_path)
    directory.write_plan(plan)
    first = make_run(tmp_path / "softcap-seed0")
    trained_by(first)
    directory.check(plan)
    trained_by(first, fingerprint="000000000000")
    with pytest.raises(RaceError, match=r"softcap-seed0, 000000000000, .*other --name"):
        directory.check(plan)


def test_a_race_that_is_over_can_be_shown_by_other_code(tmp_path):
    plan = make_plan(["softcap"], "pico", 2, {"schedule.steps": 50})
    directory = RaceDirectory(tmp_path)
    directory.write_plan(plan)
    for seed in range(2):
        trained_by(make_run(tmp_path / f"softcap-seed{seed}", seed=seed), fingerprint="000000000000")
    directory.check(plan)


def test_runs_of_different_code_get_different_labels(tmp_path):
    for seed, code in enumerate(["aaaa", "aaaa", "bbbb"]):
        trained_by(make_run(tmp_path / str(seed), seed=seed), fingerprint=code, package=code)
    runs = [load_run(tmp_path / str(seed)) for seed in range(3)]
    labeled = label_runs(runs)
    assert {label: len(group) for label, group in labeled.items()} == {
        "softcap (code aaaa)": 2,
        "softcap (code bbbb)": 1,
    }
    assert any("softcap (code bbbb): package bbbb" in note for note in analyze(labeled).notes)
    assert "its runs are of different code: aaaa, bbbb" in " ".join(analyze({"softcap": runs}).notes)


def test_a_run_that_was_resumed_by_other_code_says_so(tmp_path):
    run = make_run(tmp_path / "run")
    path = run / "environment.json"
    facts = json.loads(path.read_text())
    earlier = {**facts, "code": {"fingerprint": "aaaa"}}
    path.write_text(json.dumps({**facts, "code": {"fingerprint": "bbbb"}, "earlier": [earlier]}))
    notes = analyze({"softcap": [load_run(run)]}).notes
    assert "run: resumed by other code: aaaa → bbbb" in notes
