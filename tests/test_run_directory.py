import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hotlap.config import Config
from hotlap.errors import CheckpointError, ConfigError
from hotlap.recipes import resolve
from hotlap.runs.directory import RunDirectory

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path):
    with RunDirectory.create(tmp_path / "runs", "lap") as run:
        run.write_config(Config())
        yield run


def in_another_process(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", f"from hotlap.runs.directory import *\n{code}", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_reading_a_run_needs_no_torch():
    result = in_another_process("import sys; assert 'torch' not in sys.modules, 'torch was imported'")
    assert result.returncode == 0, result.stderr


def test_what_is_written_is_read(run):
    config = resolve("softcap", "nano")
    run.write_config(config)
    run.write_environment({"torch": "2", "peak_gflops": None})
    assert run.read_summary() is None
    run.write_summary({"status": "diverged", "val_loss": float("nan"), "seconds": {"total": float("inf")}})
    again = RunDirectory.open(run.path)
    assert again.read_config() == config
    assert again.read_environment() == {"torch": "2", "peak_gflops": None}
    summary = again.read_summary()
    assert summary.pop("sha256").keys() == {"config.json", "environment.json"}
    assert summary == {"status": "diverged", "val_loss": None, "seconds": {"total": None}}
    assert not list(run.path.glob("*.partial"))


def test_a_name_that_exists_is_never_overwritten(run):
    before = run.config_path.read_bytes()
    with pytest.raises(CheckpointError, match="found `lap`, which exists; choose another name, or resume"):
        RunDirectory.create(run.path.parent, "lap")
    assert run.config_path.read_bytes() == before


def test_many_that_start_at_once_get_different_names(tmp_path):
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: RunDirectory.create_numbered(tmp_path, "softcap-nano"), range(32)))
    for run in runs:
        run.close()
    assert {run.path.name for run in runs} == {f"softcap-nano-{number}" for number in range(32)}


def test_numbers_go_upward_and_never_back(tmp_path):
    for name in ("a-7", "a-b-12", "a-x", "ba-30", "a.-40"):
        (tmp_path / name).mkdir()
    with RunDirectory.create_numbered(tmp_path, "a") as run:
        assert run.path.name == "a-8"
    with RunDirectory.create_numbered(tmp_path / "new", "a") as run:
        assert run.path.name == "a-0"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", ".hidden", "-x", "a\nb", "a b", "a\0"])
def test_names_that_are_not_plain_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="expected a run name"):
        RunDirectory.create(tmp_path, name)
    assert not list(tmp_path.iterdir())


def test_a_place_where_no_run_can_be_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="expected to write"):
        RunDirectory.create(tmp_path / "file", "lap")
    with pytest.raises(CheckpointError, match="expected to write"):
        RunDirectory.create_numbered(tmp_path / "file", "lap")


def test_what_is_no_run_is_not_opened(tmp_path, run):
    with pytest.raises(CheckpointError, match="found no such directory"):
        RunDirectory.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"found no config\.json in it"):
        RunDirectory.open(tmp_path)
    run.config_path.write_text('{"recipe": ')
    with pytest.raises(CheckpointError, match=r"a JSON object in .*config\.json; found "):
        RunDirectory.open(run.path)
    run.config_path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json; found list"):
        RunDirectory.open(run.path)
    run.config_path.write_text('{"recipes": 1}')
    with pytest.raises(CheckpointError, match=r"in .*config\.json; .*did you mean `recipe`"):
        RunDirectory.open(run.path)


def test_metrics_are_visible_line_by_line(run):
    assert run.read_metrics() == ([], False)
    for step in (1, 2):
        run.append_metrics({"kind": "train", "step": step, "loss": 1 / 3, "text": "a\nb"})
        assert [line["step"] for line in RunDirectory.open(run.path).read_metrics().lines] == list(
            range(1, step + 1)
        )
    run.append_metrics({"kind": "train", "step": 3, "loss": float("nan")})
    assert run.read_metrics().lines[0] == {"kind": "train", "step": 1, "loss": 1 / 3, "text": "a\nb"}
    assert run.read_metrics().lines[2]["loss"] is None
    assert run.metrics_path.read_bytes().count(b"\n") == 3


def test_half_a_line_at_the_end_is_left_out_and_said(run):
    run.append_metrics({"kind": "train", "step": 1})
    with run.metrics_path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert run.read_metrics() == ([{"kind": "train", "step": 1}], True)


@pytest.mark.parametrize(
    "bad",
    [
        '{"step": 2, "lo',
        "[]",
        '{"kind": "train"}',
        '{"kind": "train", "step": true}',
        '{"step": 2}',
        "",
        "\xff",
    ],
)
def test_any_other_bad_line_is_damage_with_its_number(run, bad):
    lines = ['{"kind": "train", "step": 1}', bad, '{"kind": "train", "step": 3}']
    run.metrics_path.write_bytes("".join(f"{line}\n" for line in lines).encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl:2; found "):
        run.read_metrics()
    before = run.metrics_path.read_bytes()
    with pytest.raises(CheckpointError):
        run.rewind(1, 1)
    assert run.metrics_path.read_bytes() == before


def test_rewinding_drops_what_came_after_a_step_and_half_lines(run):
    for step in range(1, 6):
        run.append_metrics({"kind": "train", "step": step})
        run.append_log(f"step:{step}/10 val_loss:4.3719")
        if step == 1:
            run.append_log("a note\rwith a carriage return")
    run.append_metrics({"kind": "validation", "step": 2})
    run.append_metrics({"kind": "validation", "step": 3})
    run.append_metrics({"kind": "sample", "step": 3, "text": "of a validation that is to come again"})
    run.sync()
    run.close()
    for path in (run.metrics_path, run.log_path):
        with path.open("a") as file:
            file.write('{"step": 1')
    run.write_summary({"status": "interrupted"})

    resumed = RunDirectory.open(run.path)
    resumed.lock()
    with pytest.raises(AssertionError, match="rewind before going on"):
        resumed.append_metrics({"kind": "train", "step": 4})
    resumed.rewind(3, 2)
    resumed.append_metrics({"kind": "resume", "step": 3})
    resumed.append_log("step:4/10 again")
    resumed.close()
    found = [(line["kind"], line["step"]) for line in resumed.read_metrics().lines]
    assert found == [("train", 1), ("train", 2), ("train", 3), ("validation", 2), ("resume", 3)]
    assert resumed.log_path.read_bytes().split(b"\n") == [
        b"step:1/10 val_loss:4.3719",
        b"a note\rwith a carriage return",
        b"step:2/10 val_loss:4.3719",
        b"step:4/10 again",
        b"",
    ]
    assert resumed.read_summary() is None


@pytest.mark.parametrize(
    "name, damage",
    [
        ("metrics.jsonl", '{"kind": "train", "step": Infinity}'),
        ("environment.json", '{"earlier": 5}'),
        ("environment.json", "{"),
    ],
)
def test_a_damaged_run_is_not_rewound_and_loses_nothing(run, name, damage):
    run.append_metrics({"kind": "train", "step": 1})
    run.write_environment({"torch": "2"})
    run.write_summary({"status": "interrupted"})
    run.close()
    (run.path / name).write_text(f"{damage}\n")
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "lock"}
    resumed = RunDirectory.open(run.path)
    resumed.lock()
    with resumed, pytest.raises(CheckpointError, match=name):
        resumed.rewind(1, -1)
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "lock"} == before


@pytest.mark.parametrize("damage", ["cut short", "a line lost", "lines exchanged", "emptied"])
@pytest.mark.parametrize("has_ended", [True, False])
def test_metrics_that_lack_steps_are_not_gone_on_with(run, damage, has_ended):
    for step in range(1, 6):
        run.append_metrics({"kind": "train", "step": step})
    if has_ended:
        run.write_summary({"status": "interrupted"})
    run.close()
    lines = run.metrics_path.read_text().splitlines(keepends=True)
    kept = {"cut short": lines[:2], "a line lost": [*lines[:1], *lines[2:]], "emptied": []}
    run.metrics_path.write_text("".join(kept.get(damage, [*lines[:2], lines[3], lines[2], lines[4]])))
    before = {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "lock"}
    resumed = RunDirectory.open(run.path)
    resumed.lock()
    with resumed, pytest.raises(CheckpointError, match=r"metrics\.jsonl"):
        resumed.rewind(4, -1)
    assert {path.name: path.read_bytes() for path in run.path.iterdir() if path.name != "lock"} == before
    run.metrics_path.unlink()
    run.summary_path.unlink(missing_ok=True)
    resumed.lock()
    with resumed:
        resumed.rewind(4, -1)


@pytest.mark.parametrize("name", ["config.json", "environment.json", "samples.txt"])
def test_a_run_that_was_changed_after_its_end_is_not_gone_on_with(run, name):
    run.write_environment({"torch": "2"})
    run.append_sample(0, "text")
    run.write_summary({"status": "interrupted"})
    run.close()
    (run.path / name).write_text((run.path / name).read_text() + " ")
    resumed = RunDirectory.open(run.path)
    resumed.lock()
    with resumed, pytest.raises(CheckpointError, match=rf"{name} as it was when the run ended"):
        resumed.rewind(0, -1)
    assert run.summary_path.exists()


def test_a_sample_with_other_fields_is_rewound(run):
    for step in (1, 2):
        run.append_metrics({"kind": "train", "step": step})
    run.append_metrics({"kind": "sample", "step": 1, "text": "first \ud800", "seed": 3})
    run.append_metrics({"kind": "sample", "step": 2})
    run.append_log("step:" + "9" * 5000 + "/10")
    run.close()
    resumed = RunDirectory.open(run.path)
    resumed.lock()
    with resumed:
        resumed.rewind(2, 2)
    assert resumed.samples_path.read_text() == "sample at step 1:\nfirst \\ud800\nsample at step 2:\n\n"


def test_rewinding_a_run_that_wrote_nothing_yet(run):
    run.rewind(0, -1)
    assert run.read_metrics() == ([], False)
    assert not run.log_path.exists()


def test_only_the_owner_of_the_lock_writes(run):
    reader = RunDirectory.open(run.path)
    with pytest.raises(AssertionError, match="lock the run"):
        reader.append_metrics({"kind": "train", "step": 1})
    with pytest.raises(AssertionError, match="lock the run"):
        reader.rewind(0, 0)


TRY_TO_LOCK = """
import sys
from hotlap.errors import CheckpointError
try:
    RunDirectory.open(Path(sys.argv[1])).lock()
except CheckpointError as error:
    sys.exit(f"refused: {error}")
"""

HOLD_THE_LOCK = """
import sys
run = RunDirectory.open(Path(sys.argv[1]))
run.lock()
run.append_metrics({"kind": "train", "step": 1})
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_while_the_first_trains(run):
    refused = in_another_process(TRY_TO_LOCK, run.path)
    assert refused.returncode == 1
    assert "refused: expected no other process that trains in" in refused.stderr
    assert f"found process {os.getpid()};" in refused.stderr
    run.close()
    allowed = in_another_process(TRY_TO_LOCK, run.path)
    assert allowed.returncode == 0, allowed.stderr


def test_a_killed_process_leaves_no_lock_behind(run):
    run.close()
    holder = subprocess.Popen(
        [sys.executable, "-c", f"from hotlap.runs.directory import *\n{HOLD_THE_LOCK}", str(run.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with holder:
        assert holder.stdout.readline() == "locked\n"
        with pytest.raises(CheckpointError, match=f"found process {holder.pid};"):
            run.lock()
        holder.kill()
        holder.wait()
    run.lock()
    assert run.read_metrics().lines == [{"kind": "train", "step": 1}]


def test_a_full_disk_leaves_whole_lines(run, monkeypatch):
    run.append_metrics({"kind": "train", "step": 1})

    class FullDisk:
        """Takes five bytes of a line, then refuses, as a full disk does."""

        def __init__(self, file):
            self.file, self.refuses = file, False

        def __getattr__(self, name):
            return getattr(self.file, name)

        def write(self, content):
            if self.refuses:
                raise OSError(28, "No space left on device")
            self.refuses = True
            return self.file.write(content[:5])

    file = run._appending[run.metrics_path]
    monkeypatch.setitem(run._appending, run.metrics_path, FullDisk(file))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl; found No space left on device"):
        run.append_metrics({"kind": "train", "step": 2})
    monkeypatch.setitem(run._appending, run.metrics_path, file)
    run.append_metrics({"kind": "train", "step": 3})
    assert run.read_metrics() == ([{"kind": "train", "step": 1}, {"kind": "train", "step": 3}], False)


def test_config_json_holds_the_settings(run):
    content = json.loads(run.config_path.read_text())
    assert content["schedule"]["steps"] == Config().schedule.steps
