"""Ladders with made-up runs, and `hotlap lab`: the table, and the page in a browser."""

import json

import pytest

from hotlap.commands.ladder import flops_of_sizes
from hotlap.errors import ConfigError
from hotlap.lab.ladder import conclude_ladder, make_ladder
from hotlap.lab.ledger import Ledger
from hotlap.lab.page import cumulated, rows, summary
from hotlap.progress import silent
from hotlap.race.directory import RaceDirectory
from tests.browser import browser, console_complaints, needs_browser, requested_urls, wait_until
from tests.command import complaint, hotlap_here
from tests.synthetic_runs import make_run

SPECS = ("softcap", "softcap:plain,model.values=plain")
SIZES = ("pico", "nano", "micro")


def verdict(outcome, effect, **other):
    known = {"effect": effect, "low": effect - 0.01, "high": effect + 0.01, "p": 0.01, "p_needed": 0.02}
    known |= {
        "rounds": 5,
        "metric": "bpb",
        "unit": "bits/byte",
        "seconds": 90.0,
        "words": f"{outcome} (made up)",
    }
    return {"outcome": outcome, **known, **other}


@pytest.fixture
def ledger(tmp_path):
    """Four tries: helps, hurts <with markup in its name>, undecided, and one that is still running."""
    made = Ledger(tmp_path / "runs")
    verdicts = [verdict("helps", -0.02), verdict("hurts", 0.03), verdict("undecided", -0.004), None]
    for number, one in enumerate(verdicts, 1):
        idea = {
            "label": f"idea-{number}<b>",
            "sentence": "says & does",
            "changes": [],
            "hash": f"{number:016}",
        }
        facts = {"idea": idea, "parent": "softcap", "size": "pico", "comparison": str(number)}
        facts |= {"least_effect": 0.005, "most_seeds": 12, "first_seed": 0}
        made.begin(f"gate-{number}", facts, 0.05, silent)
        if one:
            made.end(number, f"gate-{number}", one, silent)
    made.add("race", {**facts, "words": "no evidence", "seeds": 3, "seconds": 12.0}, silent)
    return made


def test_the_table_has_a_row_per_try_and_the_summary_adds_up(ledger):
    tries = ledger.tries()
    assert [row[4] for row in rows(tries)] == ["helps", "hurts", "undecided", "running"]
    assert rows(tries)[0][5] == "−0.0200 bits/byte (−0.0300 to −0.0100)"
    assert rows(tries)[3][5:7] == ["–", "–"]
    assert cumulated(tries) == {("pico", "bits/byte"): pytest.approx(0.02)}
    told = dict(summary(tries))
    assert told["tries"] == "4"
    assert told["helped"] == "1"
    assert told["training time"] == "270.0 s"
    assert told["false among what helped"] == "at most 5 % expected"


def test_lab_prints_the_table_and_writes_the_page(ledger, tmp_path):
    result = hotlap_here("lab", "--runs", str(ledger.path.parent))
    assert result.returncode == 0, result.stderr
    assert "idea-2<b>" in result.stdout
    assert "cumulated gain at pico: 0.0200 bits/byte" in result.stdout
    page = (ledger.path.parent / "lab.html").read_text()
    assert "idea-2&lt;b&gt;" in page
    assert "idea-2<b>" not in page
    lines = json.loads(hotlap_here("lab", "--runs", str(ledger.path.parent), "--json").stdout)
    assert [line["kind"] for line in lines].count("try") == 4


def test_a_torn_line_is_noted_and_not_repaired_by_a_reader(ledger):
    ledger.path.write_bytes(ledger.path.read_bytes() + b'{"kind"')
    result = hotlap_here("lab", "--runs", str(ledger.path.parent))
    assert "a torn last line of 7 bytes was left out" in result.stdout
    assert ledger.torn_bytes() == 7


@pytest.mark.parametrize(
    "arguments, part", [([], "no directory runs"), (["--runs", "."], "a ledger at lab.jsonl")]
)
def test_without_a_ledger_one_line(tmp_path, arguments, part):
    assert part in complaint(hotlap_here("lab", *arguments, cwd=tmp_path))
    assert not any(tmp_path.iterdir())


@needs_browser
def test_the_page_draws_its_figures_and_asks_no_network(ledger):
    hotlap_here("lab", "--runs", str(ledger.path.parent))
    with browser() as driver:
        driver.get((ledger.path.parent / "lab.html").as_uri())
        wait_until(driver, "document.body.dataset.drawn")
        assert driver.execute_script("return document.querySelectorAll('.plot .main-svg').length") >= 3
        assert not requested_urls(driver)
        assert not console_complaints(driver)
        header = driver.find_element("xpath", "//th/button[text()='effect']")
        header.click()
        first = driver.execute_script("return document.querySelector('tbody tr').cells[1].dataset.value")
        assert first == "idea-1<b>"


def make_rungs(path, plans, gains):
    for plan in plans:
        directory = RaceDirectory(path / plan.size)
        directory.write_plan(plan)
        for number, (a, b) in enumerate(plan.rounds()):
            noise = 0.002 * (-1) ** number
            for start, loss in ((a, 3.3 + 3 * noise), (b, 3.3 + 3 * noise - gains[plan.size] + noise)):
                config = plan.config(start)
                make_run(
                    directory.run(start).path,
                    recipe="softcap",
                    seed=start.seed,
                    steps=config.schedule.steps,
                    changes=start.entry.changes,
                    final_loss=loss,
                )
                env = directory.run(start).environment_path
                facts = json.loads(env.read_text())
                facts["model"]["flops_per_token"] = 10.0 ** (5 + SIZES.index(plan.size))
                env.write_text(json.dumps(facts))


def test_a_ladder_says_how_the_effect_goes(tmp_path):
    plans = make_ladder(SPECS, SIZES, 4, {}, 0.2)
    assert [plan.config(plan.rounds()[0][0]).schedule.steps for plan in plans] == [20, 128, 160]
    make_rungs(tmp_path, plans, {"pico": 0.3, "nano": 0.1756, "micro": 0.1})  # on a line in log compute
    data = conclude_ladder(tmp_path, plans, flops_of_sizes(plans))
    assert data["words"].startswith("the gain fades from pico to micro")
    assert "it would cross zero at" in data["words"]
    assert [one["size"] for one in data["rungs"]] == list(SIZES)
    assert json.loads((tmp_path / "ladder.json").read_text()) == data
    page = (tmp_path / "report.html").read_text()
    assert "the gain fades" in page
    assert "training FLOPs of a run" in page


@pytest.mark.parametrize(
    "sizes, share, settings, part",
    [
        (("pico", "nano"), 1.0, {}, "at least 3 different sizes"),
        (("pico", "nano", "pico"), 1.0, {}, "at least 3 different sizes"),
        (SIZES, 0.0, {}, "--steps-share above 0"),
        (SIZES, 0.5, {"schedule.steps": 3}, "--steps or --steps-share"),
        (("pico", "nano", "macro"), 1.0, {}, "did you mean `micro`"),
    ],
)
def test_ladders_that_make_no_sense_are_refused(sizes, share, settings, part):
    with pytest.raises(ConfigError, match=part):
        make_ladder(SPECS, sizes, 3, settings, share)


def test_a_ladder_needs_two_recipes(tmp_path):
    assert "a baseline and an idea" in complaint(hotlap_here("ladder", "softcap", cwd=tmp_path))
    assert not any(tmp_path.iterdir())


def test_flops_grow_with_the_size_and_shrink_with_the_share():
    whole = flops_of_sizes(make_ladder(SPECS, SIZES, 2, {}, 1.0))
    assert whole["pico"] < whole["nano"] < whole["micro"] < whole["small"]
    part = flops_of_sizes(make_ladder(SPECS, SIZES, 2, {}, 0.25))
    assert part["nano"] == pytest.approx(whole["nano"] / 4, rel=0.01)
