import json

import numpy as np
import pytest

from hotlap.errors import CheckpointError, ReportError
from hotlap.report.sections import environment
from hotlap.runs.directory import RunDirectory
from hotlap.runs.reader import RunFiles, load_run, load_runs
from tests.synthetic_runs import append_metrics, end_without_finite_loss, make_run


def test_a_run_is_read_as_written(tmp_path):
    run = load_run(make_run(tmp_path / "a", steps=50, final_loss=3.25, seed=7))
    assert (run.name, run.config.seed, run.config.recipe, run.status) == ("a", 7, "softcap", "finished")
    assert run.train["step"].tolist() == list(range(1, 51))
    assert run.validation["step"].tolist() == [0, 10, 20, 30, 40, 50]
    assert run.last("val_loss") == pytest.approx(3.25)
    assert run.train_s == pytest.approx(5.0)
    assert run.tokens == 50 * 512
    assert run.tokens_per_s == pytest.approx(5120)
    assert run.samples[0].text.startswith("The state")
    assert run.environment["device"] == "cpu"
    assert run.notes == ()
    assert run.is_final


def test_a_run_still_going_has_no_summary_and_may_have_no_metrics_yet(tmp_path):
    directory = make_run(tmp_path / "a", status=None)
    assert load_run(directory).status == "running"
    assert not load_run(directory).is_final
    (directory / "metrics.jsonl").unlink()
    run = load_run(directory)
    assert run.train["loss"].size == 0
    assert run.train_s == 0
    assert np.isnan(run.last("val_loss"))
    assert np.isnan(run.tokens_per_s)


def test_a_half_line_at_the_end_is_left_out_and_noted(tmp_path):
    directory = make_run(tmp_path / "a", steps=10, status=None)
    whole = load_run(directory)
    file = directory / "metrics.jsonl"
    lines = file.read_text().count("\n")
    with file.open("ab") as out:
        out.write('{"kind": "sample", "text": "é'.encode()[:-1])
    run = load_run(directory)
    assert run.train["loss"].tolist() == whole.train["loss"].tolist()
    assert run.notes == (f"metrics.jsonl: line {lines + 1}, the last, is incomplete and was skipped",)


def test_a_last_line_without_its_newline_counts_no_more_than_for_the_trainer(tmp_path):
    directory = make_run(tmp_path / "a", steps=10)
    file = directory / "metrics.jsonl"
    file.write_text(file.read_text().rstrip("\n"))
    run = load_run(directory)
    assert (len(run.samples), len(run.notes)) == (0, 1)
    trained = RunDirectory(directory).read_metrics()
    assert trained.half_line
    assert len(trained.lines) == run.train["step"].size + run.validation["step"].size


@pytest.mark.parametrize(
    "line, part",
    [
        ("{oops", "JSON object"),
        ("[1, 2]", "JSON object"),
        ('{"step": 3}', "`kind`"),
        ('{"kind": "train", "step": 3}', "number as `loss`"),
        ('{"kind": "validation", "step": 3, "val_loss": "low"}', "number as `val_loss`"),
        ("", "JSON object"),
    ],
)
def test_a_damaged_line_is_named(tmp_path, line, part):
    directory = make_run(tmp_path / "a", steps=10)
    file = directory / "metrics.jsonl"
    lines = file.read_text().splitlines()
    lines[4] = line
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(CheckpointError, match=part) as caught:
        load_run(directory)
    assert "metrics.jsonl:5" in str(caught.value)


def test_null_and_nan_numbers(tmp_path):
    run = load_run(make_run(tmp_path / "a", has_bpb=False))
    assert np.isnan(run.last("val_bpb"))
    append_metrics(
        run.directory,
        [
            {"kind": "validation", "step": 60, "val_loss": float("nan"), "tokens": 1, "train_s": 9},
            # As the trainer writes a loss that was not finite.
            {"kind": "validation", "step": 70, "val_loss": None, "tokens": 1, "train_s": 9},
        ],
    )
    assert load_run(run.directory).last("val_loss") == pytest.approx(3.3)


@pytest.mark.parametrize(
    "written, status", [("finished", "diverged"), ("interrupted", "interrupted"), (None, "running")]
)
def test_a_run_that_ended_without_a_finite_validation_has_diverged(tmp_path, written, status):
    directory = make_run(tmp_path / "a", status=written)
    end_without_finite_loss(directory)
    assert load_run(directory).status == RunFiles(directory).read_status() == status


def sealed_run(directory):
    """A finished run whose summary has the checksums of its files."""
    make_run(directory)
    summary = json.loads((directory / "summary.json").read_text())
    with RunDirectory.open(directory) as run:
        run.write_summary(summary)
    return directory


def test_what_was_changed_after_the_end_is_noted(tmp_path):
    directory = sealed_run(tmp_path / "a")
    assert load_run(directory).notes == ()
    for name in ("config.json", "environment.json", "metrics.jsonl"):
        path = directory / name
        before = path.read_bytes()
        path.write_bytes(before.replace(b"1", b"2", 1))
        assert any(note == f"{name} was changed after the run ended" for note in load_run(directory).notes)
        path.write_bytes(before)
    (directory / "environment.json").unlink()
    assert load_run(directory).notes == ("environment.json was changed after the run ended",)


def test_a_changed_summary_is_refused(tmp_path):
    directory = sealed_run(tmp_path / "a")
    path = directory / "summary.json"
    path.write_text(path.read_text().replace('"steps": 50', '"steps": 51'))
    with pytest.raises(CheckpointError, match=r"unmodified content in .*summary\.json"):
        load_run(directory)


def swapped(lines):
    return [*lines[:4], lines[5], lines[4], *lines[6:]]


@pytest.mark.parametrize(
    "change",
    [swapped, lambda lines: lines[::-1], lambda lines: lines[:20] + lines[21:]],
    ids=["swapped", "reversed", "dropped"],
)
def test_lines_in_disorder_are_noted_in_a_run_that_goes_on(tmp_path, change):
    directory = make_run(tmp_path / "a", status=None)
    path = directory / "metrics.jsonl"
    lines = path.read_text().splitlines()
    assert load_run(directory).notes == ()
    path.write_text("".join(f"{line}\n" for line in change(lines)))
    notes = load_run(directory).notes
    assert notes
    assert all("lines are missing or out of order" in note for note in notes)


def test_resumes_are_kept(tmp_path):
    directory = make_run(tmp_path / "a")
    append_metrics(directory, [{"kind": "resume", "step": 20, "world_size": 2}])
    assert load_run(directory).resumed_at == (20,)


@pytest.mark.parametrize(
    "name, text, part",
    [
        ("config.json", "{", "a JSON object"),
        ("config.json", "{}", "recipe"),
        ("summary.json", "[]", "a JSON object"),
        ("summary.json", "{}", "status"),
        ("environment.json", "\x00", "environment.json"),
    ],
)
def test_other_damaged_files_are_named(tmp_path, name, text, part):
    directory = make_run(tmp_path / "a")
    (directory / name).write_text(text)
    with pytest.raises(CheckpointError, match=part) as caught:
        load_run(directory)
    assert name in str(caught.value)


def test_runs_below_a_directory_come_as_they_started(tmp_path):
    for name, minute in (("race/b-0", 1), ("race/a-0", 2), ("race/deep/c-0", 0), ("alone", 9)):
        make_run(tmp_path / name, started=f"2026-01-01T00:0{minute}:00Z")
    runs = load_runs([tmp_path / "alone", tmp_path / "race", tmp_path / "alone"])
    assert [run.name for run in runs] == ["alone", "c-0", "b-0", "a-0"]


def test_a_directory_without_runs_is_refused(tmp_path):
    with pytest.raises(ReportError, match=r"without config\.json"):
        load_runs([tmp_path])
    with pytest.raises(ReportError, match="no directory"):
        load_runs([tmp_path / "nowhere"])


def test_json_of_the_builder_matches_the_contract(tmp_path):
    directory = make_run(tmp_path / "a", steps=10)
    kinds = {json.loads(line)["kind"] for line in (directory / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"train", "validation", "sample"}


def test_a_resumed_run_stands_where_its_first_process_started(tmp_path):
    for name, started in (("a", "2026-01-03"), ("b", "2026-01-02")):
        make_run(tmp_path / name, started=started)
    facts = {"started": "2026-01-04", "earlier": [{"started": "2026-01-01", "git_commit": "abc"}]}
    (tmp_path / "a" / "environment.json").write_text(json.dumps(facts))
    resumed, other = load_runs([tmp_path])
    assert (resumed.name, resumed.started) == ("a", "2026-01-01")
    assert other.started == "2026-01-02"
    assert "abc" in environment({"all": [resumed, other]})
