"""Race all recipes and write the results to README.md and docs/recipes.md.

`python -m bench.recipes_table [options of hotlap race]` runs or resumes the race `runs/recipes`; the Makefile
has the options of the published table. `python -m bench.recipes_table --race DIR` only writes the documents
from a finished race. The results are stored in docs/recipes.json, and a test compares README.md with them.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
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
WIDTH = 100  # columns of the documents


def main(words: Sequence[str]) -> int:
    if words[:1] == ["--race"] and len(words) == 2:
        directory = Path(words[1])
    else:
        directory = Path("runs/recipes")
        # A recipe with its own dimensions is not comparable with the others at equal steps; see bench.marks.
        raced = [recipe.name for recipe in RECIPES.values() if not recipe.at_size]
        code = dispatch(["race", *raced, *RACE, *words])
        if code:
            return code
    write_documents(directory, ROOT)
    return 0


def write_documents(race: Path, root: Path) -> None:
    """Write recipes.json and recipes.png to docs, and the tables between the markers of both documents."""
    directory = RaceDirectory(race)
    plan = directory.read_plan()
    if not directory.results_path.exists():
        raise ReportError(
            expected=f"a finished race in {race}", found="no results.json", do=f"run `{plan.command}`"
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
    """The file's content with `text` between its two markers."""
    content = path.read_text() if path.exists() else ""
    if content.count(START) != 1 or content.count(END) != 1 or content.index(START) > content.index(END):
        raise ReportError(
            expected=f"`{START}` and then `{END}`, once each, in {path}",
            found="something else",
            do="add both markers where the table belongs",
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
            wrapped(f"{provenance(results)} All results: [docs/recipes.md](docs/recipes.md)."),
            "![Validation over training time, mean and range of each recipe](docs/recipes.png)",
        ]
    )


def long_text(results: Mapping[str, Any]) -> str:
    """All results, the command and the machine, for docs/recipes.md."""
    headers, rows = table(results["statistics"], full=True)
    published = [[recipe.name, *record_of(recipe)] for recipe in RECIPES.values() if recipe.record]
    machine = [[key.replace("_", " "), str(value)] for key, value in results["machine"].items() if value]
    verdicts = [line for line in verdict_lines(results) if line]
    return "\n\n".join(
        [
            wrapped(f"{provenance(results)} {table_note()}"),
            markdown(headers, rows),
            "```\n" + "\n".join(verdicts) + "\n```",
            "![Validation over training time, mean and range of each recipe](recipes.png)",
            "Command:",
            "```\n" + wrapped(results["command"], continuation=" \\\n  ") + "\n```",
            "Machine:",
            markdown(["", ""], machine),
            wrapped(
                "Published results of the same recipes, from the"
                " [modded-nanogpt](https://github.com/KellerJordan/modded-nanogpt) speedrun (8×H100, FineWeb,"
                " to a validation loss of 3.28):"
            ),
            markdown(["recipe", "date", "minutes", "validation loss"], published),
        ]
    )


def provenance(results: Mapping[str, Any]) -> str:
    machine = results["machine"]
    return (
        f"Size `{results['plan']['size']}`, {machine['cores']} cores of {machine['device_name']},"
        f" torch {machine['torch']}, {results['date']}."
    )


def wrapped(text: str, continuation: str = "\n") -> str:
    lines = textwrap.wrap(text, WIDTH - len(continuation), break_long_words=False, break_on_hyphens=False)
    return continuation.join(lines)


def summary_of(label: str) -> str:
    recipe = RECIPES.get(label)
    return recipe.summary if recipe else ""


def record_of(recipe: Recipe) -> list[str]:
    record = recipe.record
    assert record is not None, f"{recipe.name} has no record"
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
