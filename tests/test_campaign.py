"""The campaign itself: how it judges, damages and remembers. Among the slow tests, a cut of it runs."""

from __future__ import annotations

import gzip
import io
import json
import math
import signal
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import ClassVar

import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from safetensors.torch import save

from campaign import faults, formats, inputs, jobs, results, table
from campaign.commands import Ended, Limits
from campaign.damage import ON_BYTES, ON_JSON, ON_JSON_LINES, Damage
from campaign.inputs import DamagedInput
from campaign.ledger import Ledger, Trial
from campaign.outcomes import Outcome, Verdict, is_refusal, mistake
from hotlap.data.shards import write_shard
from hotlap.json_files import seal, unseal

ROOT = Path(__file__).parents[1]
TRACEBACK = "Traceback (most recent call last):\n  File\n"
LINE = "hotlap: expected a; found b; do c\n"


def ended(code: int, err: str = "", *, out: str = "", hung: bool = False) -> Ended:
    return Ended(code, hung, out, err, 0.1)


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (ended(0), None),
        (ended(2, LINE), None),
        (ended(2, "a warning\n" + LINE), None),
        (ended(2, LINE.replace("b", "b" * 1000)), None),
        (ended(2, LINE + LINE), Outcome.CRASH),
        (ended(2, LINE + "more\n"), Outcome.CRASH),
        (ended(1, TRACEBACK + "KeyError: 'a'\n"), Outcome.TRACEBACK),
        (ended(0, TRACEBACK + "KeyError: 'a'\n"), Outcome.TRACEBACK),
        (ended(1, TRACEBACK + "MemoryError\n"), Outcome.MEMORY),
        (ended(1), Outcome.CRASH),
        (ended(-signal.SIGSEGV), Outcome.CRASH),
        (ended(-signal.SIGKILL), Outcome.CRASH),
        (ended(-signal.SIGKILL, hung=True), Outcome.HANG),
    ],
)
def test_how_a_command_ended_is_judged(end: Ended, outcome: Outcome | None) -> None:
    found = mistake(end)
    assert (found and found[0]) == outcome
    if outcome is None:
        assert is_refusal(end) == (end.code == 2)


def test_a_kill_of_ours_is_no_mistake_but_another_signal_is() -> None:
    assert mistake(ended(-signal.SIGKILL), may_be_killed=True) is None
    assert mistake(ended(-signal.SIGABRT), may_be_killed=True) is not None


def whole_contents(folder: Path) -> dict[str, tuple[bytes, tuple[Damage, ...]]]:
    text = "One naïve text, and another.\n".encode() * 50
    lines = "".join(json.dumps({"kind": "train", "step": n, "text": "a"}) + "\n" for n in range(9)).encode()
    table = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"] * 20}), table)
    write_shard(folder / "train_0.bin", list(range(100)), 300)
    tensors = save({"a": torch.ones(8), "b": torch.zeros(2, 3)})
    sealed = seal({"step": 3, "files": {"a": [1, 2.5, None]}})
    return {
        "text": (text, ON_BYTES),
        "json": (sealed, (*ON_JSON, formats.sealed_again)),
        "lines": (lines, ON_JSON_LINES),
        "tensors": (tensors, (formats.tensors_header, formats.tensors_not_finite)),
        "shard": ((folder / "train_0.bin").read_bytes(), (formats.shard_header, formats.shard_tokens)),
        "parquet": (table.getvalue(), (formats.parquet_table,)),
        "gzip": (gzip.compress(lines), (*formats.inside("jsonl", formats.gzip_of), formats.gzip_bomb)),
        "zstd": (zstandard.compress(text), formats.inside("txt", formats.zstd_of)),
    }


def test_every_damage_works_and_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    for content, damages in whole_contents(tmp_path).values():
        for damage in set(damages):
            made = [[damage(content, Random(seed)) for seed in range(12)] for _ in range(2)]
            assert made[0] == made[1], damage.__name__
            assert sum(damaged != content for damaged in made[0]) >= 4, damage.__name__


def test_what_is_sealed_again_is_valid() -> None:
    content = seal({"step": 3, "files": {"a": [1, 2]}})
    changed = [formats.sealed_again(content, Random(seed)) for seed in range(20)]
    assert all(isinstance(unseal(sealed), dict) for sealed in changed)


def test_a_header_of_tensors_has_the_length_that_it_says() -> None:
    content, seen = save({"a": torch.ones(8)}), 0
    for seed in range(30):
        damaged = formats.tensors_header(content, Random(seed))
        (length,) = struct.unpack("<Q", damaged[:8])
        if length < len(damaged):
            seen += damaged[8 + length :] == content[-32:]
    assert seen > 5


def made_input(
    stage: Path, root: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[bytes, Ended]
) -> DamagedInput:
    """A subject whose file is b"whole", read by a command that answers by the file's content."""
    (stage / "in").mkdir(parents=True)
    (stage / "in" / "file").write_bytes(b"whole")

    def run(_words: object, place: Path, _scratch: Path, _limits: Limits | None = None) -> Ended:
        return answers[(place / "in" / "file").read_bytes()]

    monkeypatch.setattr(inputs, "run", run)
    damages: tuple[Damage, ...] = (lambda _content, _chance: b"hurt",)
    return DamagedInput(
        stage, root, "made up", "in/file", ["read"], results.printed, damages, 1, needs=["in"], writes=["out"]
    )


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (ended(0, out="4"), Outcome.HARMLESS),
        (ended(0, out="5"), Outcome.WRONG),
        (ended(2, LINE), Outcome.REFUSED),
        (ended(1, TRACEBACK + "ValueError\n"), Outcome.TRACEBACK),
        (ended(-signal.SIGXCPU, hung=True), Outcome.HANG),
    ],
)
def test_a_damaged_file_is_judged_by_what_its_reader_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Ended, outcome: Outcome
) -> None:
    answers = {b"whole": ended(0, out="4"), b"hurt": answer}
    subject = made_input(tmp_path / "stage", tmp_path / "root", monkeypatch, answers)
    assert subject.run(0, Random(0)).outcome is outcome
    assert (subject.place / "in" / "file").read_bytes() == b"whole"  # for the next trial


def test_what_a_refused_command_leaves_behind_is_a_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {b"whole": ended(0), b"hurt": ended(2, LINE)}
    subject = made_input(tmp_path / "stage", tmp_path / "root", monkeypatch, answers)
    assert subject.reference == {"printed": ""}
    (subject.place / "out").mkdir()
    assert subject.run(0, Random(0)).outcome is Outcome.LOST
    assert not (subject.place / "out").exists()


def test_a_ledger_goes_on_after_half_a_line_and_keeps_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    ledger = Ledger(path)
    ledger.begin({"seed": 0})
    for number, outcome in ((0, Outcome.WRONG), (1, Outcome.REFUSED), (0, Outcome.REFUSED)):
        ledger.record(Trial("inputs", "sample file", number, Verdict(outcome, "truncate"), 1800.0))
    with path.open("a") as file:
        file.write('{"part": "inp')
    again = Ledger(path)
    again.record(Trial("inputs", "sample file", 2, Verdict(Outcome.HARMLESS, "flip_bits"), 1800.0))
    found = Ledger(path)
    outcomes = [trial.verdict.outcome for trial in found.trials.values()]
    assert outcomes == [Outcome.REFUSED, Outcome.REFUSED, Outcome.HARMLESS]
    assert len(found.sessions) == 1
    row = table.as_text(found).splitlines()[-1]
    assert [cell.strip() for cell in row.split("|")][1:7] == ["all", "", "3", "2", "1", ""]
    assert row.endswith("| 1.50 |")


class Answering:
    """Stands for a command that is disturbed: it writes its words, and ends as it is told."""

    said: ClassVar[list[tuple[str, ...]]] = []
    end = ended(0)

    def __init__(self, words: Sequence[str], *_: object) -> None:
        self.said.append(tuple(words))

    def has_ended(self, _within_s: float) -> bool:
        return True

    def wait(self) -> Ended:
        return self.end


def made_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *ends: Ended) -> jobs.Job:
    """A job whose command ends in these ways, one after the other."""
    later = iter(ends)
    monkeypatch.setattr(Answering, "said", [])
    monkeypatch.setattr(Answering, "wait", lambda _self: next(later))
    monkeypatch.setattr(jobs, "Running", Answering)
    words = ["train", "--threads", "1"]
    return jobs.Job(
        *(tmp_path / "stage", tmp_path, "made up", words, [], "out"),
        *(lambda _place, _ended: {"a": 1}, lambda _place: 0),
        threads_option="--threads",
    )


def test_another_number_of_threads_has_to_come_to_the_same_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = made_job(tmp_path, monkeypatch, *[ended(0)] * 3)
    assert job.reference
    assert faults.other_threads(job, Random(6)).outcome is Outcome.HARMLESS
    counts = [int(words[-1]) for words in Answering.said]
    assert counts == [1, 7, 1]
    job = made_job(tmp_path, monkeypatch, ended(0), ended(2, LINE))
    assert job.reference
    assert faults.other_threads(job, Random(6)).outcome is Outcome.LOST


@pytest.mark.parametrize(
    ("end", "outcome"),
    [
        (ended(1, "hotlap: expected " * 9), Outcome.REFUSED),  # cut off where the file may not grow
        (ended(1, "hotlap: expected"), Outcome.CRASH),
        (ended(1, TRACEBACK * 9), Outcome.TRACEBACK),
    ],
)
def test_a_line_that_the_limit_cut_off_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: Ended, outcome: Outcome
) -> None:
    job = made_job(tmp_path, monkeypatch, ended(0), end, ended(0))
    assert job.reference
    size = len((end.err).encode()) if outcome is not Outcome.CRASH else 1000
    monkeypatch.setattr(faults, "MIN_FILE_BITS", math.log2(size))
    monkeypatch.setattr(faults, "MAX_FILE_BITS", math.log2(size))
    assert faults.file_size_limit(job, Random(0)).outcome is outcome


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_cut_of_the_campaign_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "campaign", "--share", "0.03", "--minutes", "10"]
    command += ["--soak-steps", "1000", "--seed", "1"]
    command += ["--results", str(tmp_path / "results.jsonl"), "--place", str(tmp_path / "place")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
