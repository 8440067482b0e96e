"""Races on a real Ray cluster of two nodes on this machine; skipped by name where Ray is not installed."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from hotlap.files import cache_directory
from hotlap.kernels import unavailable
from hotlap.runs.reader import RunFiles
from tests.command import complaint, hotlap
from tests.test_race import race_command
from tests.training import start as start_command

pytest.importorskip("ray", reason="Ray is not installed: `make ray`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.filterwarnings("ignore")]

OBJECT_STORE = 80 << 20  # bytes; the least that Ray takes
RECIPES = ("softcap", "unet-value-embeds")
STEPS = 12
# One micro-batch per step, and a checkpoint before a run can be lost.
SHORT = ("--batch.tokens-per-step", "512", "--checkpoint.every-steps", "2", "--cooldown-fraction", "0.4")


class TwoNodes:
    """Each node has its own cache, as two machines have, with the kernels that were compiled here.

    Compiling can take too long on a busy machine, and plain PyTorch has other bits.
    """

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        self.folder = folder
        with pytest.MonkeyPatch.context() as patch:
            for name in ("head", "other"):
                if unavailable() is None:
                    shutil.copytree(cache_directory() / "native", folder / name / "native")
                patch.setenv("HOTLAP_CACHE", str(folder / name))
                patch.setenv("RAY_worker_niceness", "0")  # as a process that is started here
                options = {"num_cpus": 1, "object_store_memory": OBJECT_STORE, "include_dashboard": False}
                if name == "head":
                    self.cluster = Cluster(initialize_head=True, head_node_args=options)
                else:
                    self.other = self.cluster.add_node(**options)
        self.on = f"--on=ray={self.cluster.address}"

    def training(self) -> set[str]:
        """The nodes on which a run trains."""
        return {
            path.relative_to(self.folder).parts[0]
            for path in self.folder.glob("*/races/*/*/*/metrics.jsonl")
            if '"train"' in path.read_text()
        }

    def kill_other(self) -> None:
        """Everything that runs on the second node, at once."""
        for process in family_of(self.other):
            process.kill()

    def trainer_on_head(self) -> psutil.Process:
        (found,) = [
            process for process in family_of(self.cluster.head_node) if "train" in process.cmdline()[:4]
        ]
        return found

    def stop(self) -> None:
        self.cluster.shutdown()


def family_of(node) -> list[psutil.Process]:
    """The process that stands for a node, and those that it has started."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    return [raylet, *raylet.children(recursive=True)]


@pytest.fixture
def nodes(tmp_path_factory):
    started = TwoNodes(tmp_path_factory.mktemp("nodes"))
    yield started
    started.stop()


def finish(arguments: list[str], cwd: Path) -> str:
    """Run a command to its end; what it said on standard error."""
    process = start_command(arguments, cwd)
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, (out, err)
    return err


@pytest.fixture(scope="module")
def local(tiny_data, tmp_path_factory):
    """The same race, run here."""
    folder = tmp_path_factory.mktemp("local")
    finish(words(tiny_data, "race", 4), folder)
    return folder / "runs" / "race"


def words(data: Path, name: str, seeds: int, *more: str) -> list[str]:
    return race_command(
        *(data, STEPS, "race", *RECIPES, "--seeds", str(seeds), "--cooldown-steps", "0"),
        *(*SHORT, "--name", name, *more),
    )


def written(race: Path) -> dict[str, int]:
    """When the runs ended that are in their place; one that is being fetched has a hidden name."""
    return {path.parent.name: path.stat().st_mtime_ns for path in race.glob("[!.]*/summary.json")}


def wait_for(condition, process) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)


def without_times(value):
    """Results as they do not depend on the machine: without seconds, speeds and machines."""
    left_out = ("train_s", "tokens_per_s", "equal_time", "machine", "machines", "notes")
    left_out += ("name", "command", "date")
    if isinstance(value, dict):
        return {key: without_times(item) for key, item in value.items() if key not in left_out}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def assert_same_runs(found: Path, expected: Path, count: int) -> None:
    """Every loss and every weight, bit for bit."""
    configs = list(found.glob("[!.]*/config.json"))
    assert len(configs) == count
    for config in configs:
        name = config.parent.name
        assert config.read_bytes() == (expected / name / "config.json").read_bytes()
        kernels = [
            json.loads((race / name / "environment.json").read_text())["kernels"]
            for race in (found, expected)
        ]
        assert kernels[0] == kernels[1], name
        curves = [
            [
                (line["kind"], line["step"], line.get("loss"), line.get("val_loss"), line.get("val_bpb"))
                for line in RunFiles(race / name).read_metrics().lines
                if line["kind"] in ("train", "validation")
            ]
            for race in (found, expected)
        ]
        assert curves[0] == curves[1], name
        weights = sorted(path.relative_to(expected / name) for path in (expected / name).rglob("model.*"))
        assert weights
        for path in weights:
            assert (found / name / path).read_bytes() == (expected / name / path).read_bytes(), (name, path)


def test_a_race_survives_a_lost_node_and_a_killed_driver(tiny_data, tmp_path, local, nodes):
    race = tmp_path / "runs" / "far"
    command = words(tiny_data, "far", 4, nodes.on)
    process = start_command(command, tmp_path)
    wait_for(lambda: len(written(race)) >= 2 and len(nodes.training()) == 2, process)
    nodes.kill_other()
    enough = len(written(race)) + 1
    wait_for(lambda: len(written(race)) >= enough and nodes.training() >= {"head"}, process)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    before = written(race)
    assert len(before) < 8
    assert (race / ".ray.json").exists()
    assert "found again on the cluster" in finish(command, tmp_path)
    after = written(race)
    assert len(after) == 8
    assert {name: after[name] for name in before} == before
    assert_same_runs(race, local, 8)
    results, expected = (json.loads((one / "results.json").read_text()) for one in (race, local))
    assert without_times(results) == without_times(expected)
    assert len({run["machine"] for run in results["runs"]}) == 2
    assert any("machines" in note for note in results["statistics"]["notes"])
    assert not list(race.glob(".*"))
    assert not list(nodes.folder.glob("head/races/*/*/"))


def test_a_stopped_race_comes_back_with_its_checkpoints_and_goes_on(tiny_data, tmp_path, local, nodes):
    race = tmp_path / "runs" / "far"
    command = words(tiny_data, "far", 2, nodes.on)
    process = start_command(command, tmp_path)
    wait_for(lambda: len(nodes.training()) == 2, process)
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, (out, err)
    assert not (race / ".ray.json").exists()
    stopped = [path.parent for path in race.glob("*/summary.json") if '"interrupted"' in path.read_text()]
    assert stopped
    assert all(any(path.glob("checkpoints/step-*")) for path in stopped)
    assert "resumes from its last checkpoint" in finish(command, tmp_path)
    assert_same_runs(race, local, 4)


def test_a_machine_lost_while_a_race_stops_takes_only_its_own_run_with_it(tiny_data, tmp_path, local, nodes):
    race = tmp_path / "runs" / "far"
    command = words(tiny_data, "far", 2, nodes.on)
    process = start_command(command, tmp_path)
    wait_for(lambda: len(nodes.training()) == 2, process)
    trainer = nodes.trainer_on_head()
    trainer.suspend()  # it saves after the other machine is known to be lost
    process.terminate()
    nodes.kill_other()
    lost = next((line for line in process.stderr if ": lost with " in line), None)
    trainer.resume()
    said = process.stderr.read()
    assert (lost is not None, process.wait()) == (True, 130), said
    assert not (race / ".ray.json").exists()
    (kept,) = written(race)  # interrupted, or stopped by then only to write its report
    assert any((race / kept).glob("checkpoints/step-*"))
    finish(command, tmp_path)
    assert_same_runs(race, local, 4)


def test_mistakes_get_one_line(tiny_data, tmp_path, nodes):
    for address in ("127.0.0.1:1", "127.0.0.1", "nowhere.invalid:6379"):
        nowhere = hotlap(*words(tiny_data, "far", 2, f"--on=ray={address}"), cwd=tmp_path)
        assert f"a Ray cluster at {address}" in complaint(nowhere)
    command = ["race", *RECIPES, "--size", "pico", "--data.source", str(tiny_data), nodes.on]
    assert "--threads N with --on ray" in complaint(hotlap(*command, cwd=tmp_path))
    assert not (tmp_path / "runs").exists()
