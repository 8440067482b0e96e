"""The table of all recipes: races them, and writes what the race says into README.md and docs/recipes.md.

`python -m bench.recipes_table [options of hotlap race]` races (or goes on with) `runs/recipes`; those of the
published table are in the Makefile. `python -m bench.recipes_table --race DIR` only writes, from a race that
is over. The figures are kept as docs/recipes.json, which a test compares with the README.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hotlap.cli import USER_MISTAKE, dispatch
from hotlap.errors import HotlapError, ReportError
from hotlap.race.directory import RaceDirectory
from hotlap.race.results import load_race, table, table_note, verdict_lines
from hotlap.recipes import RECIPES, Recipe
from hotlap.report.page import write_atomically
from hotlap.report.picture import write_picture

ROOT = Path(__file__).parents[1]
RACE = ["--runs", "runs", "--name", "recipes"]
START, END = "<!-- recipes-table:start -->", "<!-- recipes-table:end -->"


def main(words: Sequence[str]) -> int:
    if words[:1] == ["--race"] and len(words) == 2:
        directory = Path(words[1])
    else:
        directory = Path("runs/recipes")
        # A recipe with a shape of its own has no place among equal shapes and steps; see bench.marks.
        raced = [recipe.name for recipe in RECIPES.values() if not recipe.at_size]
        code = dispatch(["race", *raced, *RACE, *words])
        if code:
            return code
    write_documents(directory, ROOT)
    return 0


def write_documents(race: Path, root: Path) -> None:
    """recipes.json and recipes.png in docs, and the tables between the markers of the two documents."""
    directory = RaceDirectory(race)
    plan = directory.read_plan()
    if not directory.results_path.exists():
        raise ReportError(
            expected=f"a race that is over in {race}", found="no results.json", do=f"run `{plan.command}`"
        )
    results = json.loads(directory.results_path.read_text())
    texts = {
        path: between_markers(path, text)
        for path, text in (
            (root / "README.md", short_text(results)),
            (root / "docs" / "recipes.md", long_text(results)),
        )
    }
    write_picture(
        load_race(directory, plan, whole_rounds=True),
        root / "docs" / "recipes.png",
        f"recipes at {plan.size}",
    )
    shutil.copyfile(directory.results_path, root / "docs" / "recipes.json")
    for path, text in texts.items():
        write_atomically(path, text.encode())


def between_markers(path: Path, text: str) -> str:
    """The file's text with `text` between its two markers."""
    content = path.read_text() if path.exists() else ""
    if content.count(START) != 1 or content.count(END) != 1 or content.index(START) > content.index(END):
        raise ReportError(
            expected=f"`{START}` and then `{END}`, once each, in {path}",
            found="something else",
            do="put the two lines where the table belongs",
        )
    before, rest = content.split(START)
    after = rest.split(END)[1]
    return f"{before}{START}\n{text}\n{END}{after}"


def short_text(results: Mapping[str, Any]) -> str:
    """The table and picture for README.md."""
    headers, rows = table(results["statistics"], full=False)
    rows = [[row[0], summary_of(row[0]), *row[1:]] for row in rows]
    return "\n\n".join(
        [
            markdown([headers[0], "what it adds", *headers[1:]], rows),
            f"{provenance(results)} All figures: [docs/recipes.md](docs/recipes.md).",
            "![Validation over training time, mean and range of each recipe](docs/recipes.png)",
        ]
    )


def long_text(results: Mapping[str, Any]) -> str:
    """All figures, how they came about and on what, for docs/recipes.md."""
    headers, rows = table(results["statistics"], full=True)
    published = [[recipe.name, *record_of(recipe)] for recipe in RECIPES.values() if recipe.record]
    machine = [[key.replace("_", " "), str(value)] for key, value in results["machine"].items() if value]
    verdicts = [line for line in verdict_lines(results) if line]
    return "\n\n".join(
        [
            f"{provenance(results)} {table_note()}",
            markdown(headers, rows),
            "```\n" + "\n".join(verdicts) + "\n```",
            "![Validation over training time, mean and range of each recipe](recipes.png)",
            f"Made with `{results['command']}` on:",
            markdown(["", ""], machine),
            "What was published of the same recipes (8×H100, FineWeb, to a validation loss of 3.28):",
            markdown(["recipe", "date", "minutes", "validation loss"], published),
        ]
    )


def provenance(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    return (
        f"Size `{results['plan']['size']}`, {machine['cores']} cores of {machine['device_name']},"
        f" torch {machine['torch']}, {results['date']}."
    )


def summary_of(label: str) -> str:
    recipe = RECIPES.get(label)
    return recipe.summary if recipe else ""


def record_of(recipe: Recipe) -> list[str]:
    record = recipe.record
    assert record is not None, "only recipes with a record are listed"
    loss = "–" if record.val_loss is None else f"{record.val_loss:.4f}"
    return [record.date, f"{record.minutes:.2f}", loss]


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except HotlapError as mistake:
        print(f"recipes_table: {mistake}", file=sys.stderr)
        sys.exit(USER_MISTAKE)
