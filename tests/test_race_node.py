"""A run on a machine of a cluster, without Ray: how its directory travels, and the process that trains it."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from hotlap.errors import RaceError
from hotlap.files import lock
from hotlap.race import node
from hotlap.race.node import NodeRun, Order
from hotlap.race.node_process import code_version, data_fingerprints
from hotlap.race.transfer import Piece, inventory, read_chunk, receive
from hotlap.recipes import resolve
from hotlap.runs.reader import RunFiles
from hotlap.settings import to_json
from tests.training import PLAIN, final_weights, losses


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """A directory with a file of several chunks, one that is empty, and one further down."""
    monkeypatch.setattr("hotlap.race.transfer.CHUNK_BYTES", 7)
    directory = tmp_path / "sent"
    (directory / "deep" / "er").mkdir(parents=True)
    (directory / "deep" / "er" / "weights").write_bytes(bytes(range(100)))
    (directory / "empty").touch()
    (directory / "config.json").write_text("{}")
    return directory


def content(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def test_a_directory_arrives_as_it_was_sent_and_replaces_the_one_before(sent, tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "old").touch()
    receive(there, inventory(sent), lambda name, offset: read_chunk(sent, name, offset))
    assert content(there) == content(sent)


@pytest.mark.parametrize("damage", ["a changed byte", "a short file", "a lost connection"])
def test_a_directory_that_does_not_arrive_whole_changes_nothing(sent, tmp_path, damage):
    there = tmp_path / "there"
    there.mkdir()
    (there / "old").touch()

    def read(name, offset):
        chunk = read_chunk(sent, name, offset)
        if not name.endswith("weights") or offset < 50:
            return chunk
        if damage == "a lost connection":
            raise ConnectionError
        return b"" if damage == "a short file" else b"x" + chunk[1:]

    with pytest.raises((RaceError, ConnectionError)):
        receive(there, inventory(sent), read)
    assert content(there) == {"old": b""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sent", "there"]


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "a/../../b", ""])
def test_a_name_that_leads_out_of_the_directory_is_refused(tmp_path, name):
    with pytest.raises(RaceError, match="names of files within"):
        receive(tmp_path / "there", [Piece(name, 1, "")], lambda _name, _offset: b"x")
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_handed_out_from_where_they_were_and_again_if_they_shrank(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    assert node._grown(metrics, 0) == (0, b"")
    metrics.write_bytes(b"0123456789")
    assert node._grown(metrics, 0) == (0, b"0123456789")
    assert node._grown(metrics, 7) == (7, b"789")
    assert node._grown(metrics, 10) == (10, b"")
    metrics.write_bytes(b"01")
    assert node._grown(metrics, 10) == (0, b"01")


def test_leftovers_are_removed_when_they_are_old_and_nobody_holds_them(tmp_path):
    held = lock(tmp_path / "held.lock", lambda _owner: None)
    for name in ("old", "held", "recent"):
        (tmp_path / name).mkdir()
        (tmp_path / f"{name}.lock").touch()
        if name != "recent":
            os.utime(tmp_path / f"{name}.lock", (1, 1))
    node.remove_leftovers(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held", "held.lock", "recent", "recent.lock"]
    held.close()


def test_the_code_has_a_version_that_follows_its_sources(monkeypatch, tmp_path):
    before = code_version()
    assert before == code_version()
    (tmp_path / "changed.py").write_text("pass")
    monkeypatch.setattr("hotlap.__file__", str(tmp_path / "__init__.py"))
    assert code_version() != before


# --- with a real run ---

STEPS = 12


def order(data, **changes):
    settings = {
        **PLAIN,
        "data.source": str(data),
        "schedule.steps": STEPS,
        "schedule.warmup_steps": 0,
        "evaluation.tokens": 1024,
        "checkpoint.every_steps": 4,
        "seed": 3,
        **changes,
    }
    config = resolve("softcap", "pico", settings)
    words = ("softcap", "--size", "pico", *(f"--{name}={value}" for name, value in settings.items()))
    return Order(
        race="0123",
        name="softcap-seed3",
        title="softcap, seed 3",
        words=words,
        config=to_json(config),
        procs=None,
        steps=config.schedule.steps,
        folder=os.getcwd(),
        variables={"OMP_NUM_THREADS": "1"},
        fingerprints=data_fingerprints(config),
        version=code_version(),
        is_resumed=False,
    )


def ended(run):
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        look = run.look(0)
        if look.exit_code is not None:
            return look
        time.sleep(0.1)
    raise AssertionError(run.read_log(0).decode())


def fetched(run, directory):
    receive(directory, run.inventory(), run.read)
    return directory


@pytest.mark.slow
def test_a_run_on_a_node_is_the_run_here_and_goes_on_from_what_is_sent(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    first = order(tiny_data)
    plain = tmp_path / "runs" / first.name
    subprocess.run(
        [
            sys.executable,
            "-m",
            "hotlap",
            "train",
            *first.words,
            "--runs",
            str(plain.parent),
            "--name",
            plain.name,
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    run = NodeRun(first, "machine-a")
    look = ended(run)
    assert (look.exit_code, look.share, look.machine) == (0, 1.0, "machine-a"), run.read_log(0).decode()
    assert json.loads(look.files["environment.json"])["machine"] == "machine-a"
    far = fetched(run, tmp_path / "far" / first.name)
    run.remove()
    assert list((tmp_path / "cache" / "races").rglob("*.*")) == []
    assert losses(far) == losses(plain)
    assert final_weights(far)["head.weight"].equal(final_weights(plain)["head.weight"])

    half = tmp_path / "half"
    receive(
        half,
        [piece for piece in inventory(far) if "step-000012" not in piece.name],
        lambda n, o: read_chunk(far, n, o),
    )
    (half / "summary.json").unlink()
    resumed = NodeRun(Order(**{**vars(first), "is_resumed": True}), "machine-b")
    assert not resumed.look(0).is_begun
    for piece in inventory(half):
        resumed.receive(piece.name, 0, read_chunk(half, piece.name, 0))
    resumed.begin(inventory(half))
    assert ended(resumed).exit_code == 0, resumed.read_log(0).decode()
    again = fetched(resumed, tmp_path / "again")
    assert losses(again) == losses(plain)
    machines = [
        facts["machine"]
        for facts in (RunFiles(again).read_environment(), *RunFiles(again).read_environment()["earlier"])
    ]
    assert machines == ["machine-b", "machine-a"]
    resumed.remove()


@pytest.mark.slow
def test_other_data_and_other_code_are_refused_before_training(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    plain = order(tiny_data)
    for change, part in (
        ({"fingerprints": ("a", "b")}, "the fingerprints a, b"),
        ({"version": "hotlap 0"}, "expected hotlap 0;"),
    ):
        run = NodeRun(Order(**{**vars(plain), **change}), "machine-a")
        assert ended(run).exit_code == 2
        assert "hotlap: on machine machine-a: expected " in (said := run.read_log(0).decode())
        assert part in said
        assert run.inventory() == []
        run.remove()


@pytest.mark.slow
def test_a_run_whose_actor_is_killed_saves_ends_and_goes_on_there(tiny_data, tmp_path, monkeypatch):
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    long = order(tiny_data, **{"schedule.steps": 2000, "checkpoint.every_steps": 5})
    script = (
        "import sys, time, pickle; from hotlap.race.node import NodeRun;"
        "run = NodeRun(pickle.loads(bytes.fromhex(sys.argv[1])), 'machine-a');"
        "print(run._process.pid, flush=True); time.sleep(1000)"
    )
    import pickle

    actor = subprocess.Popen(
        [sys.executable, "-c", script, pickle.dumps(long).hex()], stdout=subprocess.PIPE, text=True
    )
    training = psutil.Process(int(actor.stdout.readline()))
    (race,) = (tmp_path / "cache" / "races").glob("*/0123-*/")
    metrics = race / long.name / "metrics.jsonl"
    while not (metrics.exists() and '"step": 7,' in metrics.read_text()):
        assert actor.poll() is None
        time.sleep(0.05)
    os.kill(actor.pid, signal.SIGKILL)
    actor.communicate()
    again = NodeRun(long, "machine-a")  # waits until the one before has ended
    assert not training.is_running() or training.status() == psutil.STATUS_ZOMBIE
    while not again.look(0).share > 0.01:
        time.sleep(0.05)
    again.stop()
    assert ended(again).exit_code == 143
    found = fetched(again, tmp_path / "found")
    assert len(RunFiles(found).read_environment()["earlier"]) == 1
    assert RunFiles(found).read_status() == "interrupted"
    again.remove()
