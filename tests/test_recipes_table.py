"""The table of recipes: README and docs say what the race's JSON says."""

import json
from pathlib import Path

import pytest

from bench.recipes_table import END, START, between_markers, long_text, short_text, write_documents
from hotlap.errors import ReportError
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.results import conclude
from tests.synthetic_runs import make_run

ROOT = Path(__file__).parents[1]
STORED = ROOT / "docs" / "recipes.json"
EMPTY = f"before\n\n{START}\n{END}\n\nafter\n"


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    directory = RaceDirectory(tmp_path_factory.mktemp("race"))
    plan = make_plan(["adamw", "softcap"], "pico", 3, {"schedule.steps": 50, "schedule.warmup_steps": 0})
    directory.write_plan(plan)
    for start in (start for round_ in plan.rounds() for start in round_):
        loss = {"adamw": 4.0, "softcap": 3.3}[start.entry.recipe] + 0.01 * start.seed
        make_run(
            directory.path / start.name,
            recipe=start.entry.recipe,
            seed=start.seed,
            changes=dict(plan.settings),
            final_loss=loss,
        )
    conclude(directory, plan)
    return directory


@pytest.fixture
def root(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(EMPTY)
    (tmp_path / "docs" / "recipes.md").write_text(EMPTY)
    return tmp_path


def test_documents_get_the_figures_between_their_markers(race, root):
    for _ in range(2):  # writing again changes nothing
        write_documents(race.path, root)
        readme, page = (root / "README.md").read_text(), (root / "docs" / "recipes.md").read_text()
        assert readme.startswith("before\n")
        assert readme.endswith("\nafter\n")
        # Losses 3.30, 3.31, 3.32 at 0.35 bits a nat.
        assert "| 3 | 1.1585 ± 0.0035 |" in readme
        assert "helps (−0.2450 bits/byte, 95 % CI −0.2529 to −0.2371)" in readme
        for part in ("hotlap race adamw softcap --size pico", "2.13.0", "2026-01-01", "3.3100 ± 0.0100"):
            assert part in page
        assert "2026-01-01" in readme
    assert json.loads((root / "docs" / "recipes.json").read_text())["name"] == race.path.name
    assert (root / "docs" / "recipes.png").read_bytes().startswith(b"\x89PNG")


def test_a_document_without_markers_is_refused_and_nothing_is_written(race, root):
    (root / "docs" / "recipes.md").write_text("no markers")
    with pytest.raises(ReportError, match=r"recipes\.md"):
        write_documents(race.path, root)
    assert (root / "README.md").read_text() == EMPTY
    assert not (root / "docs" / "recipes.json").exists()


def test_a_race_that_is_not_over_is_refused(tmp_path, root):
    directory = RaceDirectory(tmp_path / "race")
    directory.write_plan(make_plan(["adamw", "softcap"], "pico", 3, {}))
    with pytest.raises(ReportError, match="hotlap race adamw softcap"):
        write_documents(directory.path, root)


@pytest.mark.parametrize(
    "path, text", [("README.md", short_text), ("docs/recipes.md", long_text)], ids=["README", "docs"]
)
def test_the_documents_say_what_the_stored_race_says(path, text):
    document = ROOT / path
    if not STORED.exists():
        assert START in document.read_text()
        pytest.skip("no race of all recipes is stored yet: `make recipes-table`")
    expected = between_markers(document, text(json.loads(STORED.read_text())))
    assert document.read_text() == expected
