"""The ledger: numbers and levels of tries, two processes at once, torn and damaged lines."""

import json
import subprocess
import sys

import pytest

from hotlap.errors import RaceError
from hotlap.lab.discoveries import level_of_try
from hotlap.lab.ledger import Ledger
from hotlap.progress import silent


def facts(name="idea", first_seed=0, most_seeds=12):
    return {
        "idea": {"label": name, "sentence": "s", "changes": [], "hash": name},
        "parent": "softcap",
        "size": "pico",
        "comparison": name,
        "least_effect": 0.005,
        "most_seeds": most_seeds,
        "first_seed": first_seed,
    }


def begin(ledger, name, **other):
    return ledger.begin(f"gate-{name}", facts(name, **other), 0.05, silent)


def end(ledger, number, outcome):
    ledger.end(number, f"gate-{number}", {"outcome": outcome, "rounds": 4}, silent)


def test_tries_are_numbered_and_get_the_levels_of_the_series(tmp_path):
    ledger = Ledger(tmp_path / "runs")
    first, verdict = begin(ledger, "a")
    assert verdict is None
    assert (first["number"], first["level"]) == (1, level_of_try(1, [], 0.05))
    end(ledger, 1, "helps")
    second, _ = begin(ledger, "b")
    assert second["level"] == level_of_try(2, [1], 0.05) > level_of_try(2, [], 0.05)
    assert (second["discoveries_before"], second["tries_since_discovery"]) == (1, 0)
    assert [one.outcome for one in ledger.tries()] == ["helps", "running"]


def test_a_try_that_began_before_a_discovery_was_known_does_not_gain_from_it(tmp_path):
    ledger = Ledger(tmp_path)
    for name in "abc":
        begin(ledger, name)
    end(ledger, 1, "helps")
    assert ledger.entries()[-1]["tries_begun"] == 3
    assert begin(ledger, "d")[0]["level"] == level_of_try(4, [3], 0.05)


def test_the_same_gate_keeps_its_number_and_only_its_last_verdict_counts(tmp_path):
    ledger = Ledger(tmp_path)
    begun, _ = begin(ledger, "a")
    end(ledger, 1, "undecided")
    again, verdict = begin(ledger, "a")
    assert again == begun
    assert verdict["outcome"] == "undecided"
    end(ledger, 1, "helps")
    assert [one.outcome for one in ledger.tries()] == ["helps"]
    with pytest.raises(RaceError, match="another most_seeds"):
        begin(ledger, "a", most_seeds=20)


def test_a_comparison_is_not_tried_twice_on_the_same_seeds(tmp_path):
    ledger = Ledger(tmp_path)
    begin(ledger, "a")
    with pytest.raises(RaceError, match="give --first-seed 12"):
        ledger.begin("another-gate", facts("a", first_seed=6), 0.05, silent)
    fresh, _ = ledger.begin("another-gate", facts("a", first_seed=12), 0.05, silent)
    assert fresh["number"] == 2


WRITER = """
import sys
from pathlib import Path
from hotlap.lab.ledger import Ledger
from hotlap.progress import silent
from tests.test_ledger import begin, end
ledger = Ledger(Path(sys.argv[1]))
for i in range(20):
    number = begin(ledger, f"{sys.argv[2]}-{i}")[0]["number"]
    end(ledger, number, "undecided")
"""


def test_two_processes_write_at_once_and_every_line_is_whole(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), name]) for name in "xy"]
    assert [writer.wait() for writer in writers] == [0, 0]
    tries = Ledger(tmp_path).tries()
    assert [one.began["number"] for one in tries] == list(range(1, 41))
    assert all(one.outcome == "undecided" for one in tries)
    assert {one.began["gate"] for one in tries} == {f"gate-{n}-{i}" for n in "xy" for i in range(20)}


@pytest.mark.parametrize("torn", [b'{"kind": "ver', b"{", '{"words": "ü'.encode()[:-1]])
def test_a_torn_last_line_is_removed_and_reported(tmp_path, torn):
    ledger = Ledger(tmp_path)
    begin(ledger, "a")
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + torn)
    assert len(ledger.tries()) == 1
    assert ledger.torn_bytes() == len(torn)
    assert ledger.path.read_bytes() == whole + torn, "reading repairs nothing"
    said = []
    ledger.begin("gate-b", facts("b"), 0.05, said.append)
    assert len(said) == 1
    assert f"torn last line ({len(torn)} bytes)" in said[0]
    assert ledger.path.read_bytes().startswith(whole + b'{"kind": "try"')
    assert ledger.torn_bytes() == 0


def test_a_changed_or_missing_line_is_named(tmp_path):
    ledger = Ledger(tmp_path)
    for name in "abc":
        begin(ledger, name)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    ledger.path.write_bytes(lines[0] + lines[1].replace(b'"b"', b'"x"') + lines[2])
    with pytest.raises(RaceError, match=r"lab\.jsonl:2; found a changed line"):
        ledger.entries()
    ledger.path.write_bytes(lines[0] + lines[2])
    with pytest.raises(RaceError, match=r"tries 1, 2, 3, … in order"):
        ledger.tries()
    content = json.loads(lines[0])
    assert content["kind"] == "try"
