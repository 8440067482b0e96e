"""The `train` command: in processes of its own where signals, kills and ranks matter, else in this one."""

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil
import pytest
import torch

from hotlap.config import Config
from hotlap.errors import CheckpointError
from hotlap.files import writing
from hotlap.recipes import RECIPES
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.train.run import RunOptions, open_directory
from hotlap.train.snapshot import TrainingProgress
from tests.command import complaint, hotlap, hotlap_here
from tests.ranks import ADDRESS, free_port
from tests.trained_run import copied_run, in_process
from tests.training import assert_one_curve, command, final_weights, losses, start

STEADY = ("--checkpoint.every-steps", "1", "--evaluation.every-steps", "10")


def train(data: Path, cwd: Path, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    result = hotlap(*command(data, steps, *more), cwd=cwd, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    return result


def train_here(data: Path, cwd: Path, steps: int, *more: str) -> subprocess.CompletedProcess[str]:
    result = hotlap_here(*command(data, steps, *more), cwd=cwd)
    assert result.returncode == 0, result.stderr
    return result


def resume_here(cwd: Path, *more: str) -> subprocess.CompletedProcess[str]:
    return hotlap_here("train", "--resume", "runs/run", "--allow-change", *more, cwd=cwd)


@pytest.fixture(scope="module")
def finished_run(tiny_data, tmp_path_factory) -> Path:
    """A run of two steps, with a checkpoint of each, called `run`; to be copied."""
    folder = tmp_path_factory.mktemp("finished")
    train_here(tiny_data, folder, 2, "--name", "run", *STEADY)
    return folder / "runs" / "run"


@pytest.fixture
def finished(finished_run, tmp_path) -> Path:
    """A directory with a copy of that run in its `runs`."""
    shutil.copytree(finished_run, tmp_path / "runs" / "run")
    return tmp_path


def wait_for_step(run: Path, step: int, process: subprocess.Popen[str]) -> None:
    while process.poll() is None:
        if (run / "metrics.jsonl").exists() and f'"train", "step": {step},' in (
            run / "metrics.jsonl"
        ).read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"ended before step {step}: {process.communicate()}")


def test_a_lap_ends_with_its_table_a_sample_and_the_report_and_the_next_gets_the_next_number(
    tiny_data, tmp_path
):
    result = train(tiny_data, tmp_path, 3)
    run = tmp_path / "runs" / "softcap-pico-0"
    for part in (" backend; ", "optimizers", "step:3/3 val_loss:", "bits per byte", "sample", "report:"):
        assert part in result.stdout
    assert (run / "report.html").stat().st_size > 10_000
    assert (run / "samples.txt").read_text().strip()
    train_here(tiny_data, tmp_path, 1)
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["softcap-pico-0", "softcap-pico-1"]


def test_ctrl_c_saves_and_says_how_to_go_on(tiny_data, tmp_path):
    process = start(command(tiny_data, 400, "--name", "run"), tmp_path)
    wait_for_step(tmp_path / "runs" / "run", 2, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "hotlap train --resume runs/run" in out
    saved = store.load_latest(tmp_path / "runs" / "run" / "checkpoints")[0]
    assert saved.step >= 2
    again = hotlap_here("train", "--resume", "runs/run", "--steps", str(saved.step + 2), cwd=tmp_path)
    assert "schedule.steps 400" in complaint(again)
    allowed = resume_here(tmp_path, "--steps", str(saved.step + 2))
    assert allowed.returncode == 0, allowed.stderr
    assert len(losses(tmp_path / "runs" / "run")) == saved.step + 2


def test_the_same_command_is_right_after_every_preemption(tiny_data, tmp_path):
    words = command(tiny_data, 12, "--name", "run", "--resume", "auto", "--checkpoint.every-steps", "1")
    run = tmp_path / "runs" / "run"
    process = start(words, tmp_path)
    wait_for_step(run, 2, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, (out, err)
    saved = store.load_latest(run / "checkpoints")[0].step
    assert 2 <= saved < 12
    resumed = hotlap_here(*words, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed    at step {saved}" in resumed.stdout
    over = hotlap_here(*words, cwd=tmp_path)
    assert over.returncode == 0, over.stderr
    assert "is over: step 12 of 12" in over.stdout
    whole = [*words, "--name", "whole"]
    assert hotlap_here(*whole, cwd=tmp_path).returncode == 0
    assert losses(run) == losses(tmp_path / "runs" / "whole")


def test_a_run_that_was_killed_before_its_first_checkpoint_starts_over(tiny_data, tmp_path):
    words = command(tiny_data, 3, "--name", "run", "--resume", "auto")
    assert hotlap_here(*words, cwd=tmp_path).returncode == 0
    run = tmp_path / "runs" / "run"
    first = losses(run)
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    again = hotlap_here(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert losses(run) == first


def test_a_run_that_was_killed_before_it_wrote_anything_starts_over(tiny_data, tmp_path):
    words = command(tiny_data, 1, "--name", "run", "--resume", "auto")
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "notes.txt").write_text("mine")
    assert "no config.json in it" in complaint(hotlap_here(*words, cwd=tmp_path))
    assert [path.name for path in run.iterdir()] == ["notes.txt"]
    (run / "notes.txt").unlink()
    (run / "lock").touch()
    again = hotlap_here(*words, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert len(losses(run)) == 1


def test_a_new_run_that_cannot_be_written_leaves_its_name_free(tiny_data, tmp_path, monkeypatch):
    def write_config(run_directory, _config):
        with writing(run_directory.config_path, CheckpointError):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunDirectory, "write_config", write_config)
    refused = hotlap_here(*command(tiny_data, 1, "--name", "run"), cwd=tmp_path)
    assert "found No space left on device" in complaint(refused)
    assert not (tmp_path / "runs" / "run").exists()


@pytest.mark.parametrize("missing", ["--name", "RECIPE"])
def test_resume_auto_needs_to_know_the_run(tiny_data, tmp_path, missing):
    words = ["train", "--resume", "auto", *(["softcap"] if missing == "--name" else ["--name", "run"])]
    assert f"found no {missing}" in complaint(hotlap_here(*words, cwd=tmp_path))


@pytest.mark.parametrize("procs", [(), ("--procs", "2")])
def test_tasks_of_srun_that_do_not_know_each_other_are_refused(tiny_data, tmp_path, monkeypatch, procs):
    for name, value in {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    refused = hotlap_here(*command(tiny_data, 3, "--name", "run", *procs), cwd=tmp_path)
    assert "4 tasks of srun that do not know each other" in complaint(refused)
    assert not (tmp_path / "runs").exists()


def test_two_processes_train_as_one_does(tiny_data, tmp_path):
    train_here(tiny_data, tmp_path, 6, "--name", "one")
    train(tiny_data, tmp_path, 6, "--name", "two", "--procs", "2")
    assert_one_curve(losses(tmp_path / "runs" / "two"), losses(tmp_path / "runs" / "one"))
    environment = json.loads((tmp_path / "runs" / "two" / "environment.json").read_text())
    assert environment["world_size"] == 2


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "train" in child.cmdline()]


@pytest.mark.parametrize(
    "number, to, code",
    [
        (signal.SIGINT, "launcher", 130),
        (signal.SIGTERM, "ranks", 143),
        pytest.param(signal.SIGHUP, "launcher", 143, marks=pytest.mark.slow),
    ],
)
def test_several_processes_save_when_interrupted_as_one_does(tiny_data, tmp_path, number, to, code):
    process = start(command(tiny_data, 400, "--name", "run", "--procs", "2"), tmp_path)
    wait_for_step(tmp_path / "runs" / "run", 2, process)
    for target in [process] if to == "launcher" else ranks_of(process):
        target.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (code, "")
    assert "hotlap train --resume runs/run" in out
    step = store.load_latest(tmp_path / "runs" / "run" / "checkpoints")[0].step
    assert step >= 2
    resumed = resume_here(tmp_path, "--steps", str(step + 1))
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(tmp_path / "runs" / "run")) == step + 1


@pytest.mark.parametrize(
    "second, saves",
    [(signal.SIGINT, False), pytest.param(signal.SIGTERM, True, marks=pytest.mark.slow)],
)
def test_a_second_ctrl_c_ends_several_processes_at_once_and_a_second_sigterm_does_not(
    tiny_data, tmp_path, second, saves
):
    process = start(command(tiny_data, 400, "--name", "run", "--procs", "2"), tmp_path)
    wait_for_step(tmp_path / "runs" / "run", 2, process)
    ranks = ranks_of(process)
    try:
        for rank in ranks:
            rank.suspend()  # in a step that takes for ever
        for number in (signal.SIGINT, second):
            process.send_signal(number)
            time.sleep(1)
        if saves:
            for rank in ranks:
                rank.resume()
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, "")
        assert not any(rank.is_running() for rank in ranks)
    finally:
        for rank in ranks:
            if rank.is_running():
                rank.kill()
    assert bool(store.stored(tmp_path / "runs" / "run" / "checkpoints")) == saves
    assert ("hotlap train --resume runs/run" in out) == saves


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent has ended")
def test_ranks_whose_launcher_is_killed_save_and_end(tiny_data, tmp_path):
    run = tmp_path / "runs" / "run"
    process = start(command(tiny_data, 100_000, "--name", "run", "--procs", "2"), tmp_path)
    wait_for_step(run, 2, process)
    ranks = ranks_of(process)
    process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    process.communicate()
    assert (len(ranks), alive) == (2, [])
    step = store.load_latest(run / "checkpoints")[0].step
    assert step >= 2
    resumed = resume_here(tmp_path, "--steps", str(step + 1))
    assert resumed.returncode == 0, resumed.stderr


def test_a_killed_rank_ends_the_job_with_a_clear_line_and_the_run_goes_on(tiny_data, tmp_path):
    job = command(tiny_data, 300, "--name", "run", "--procs", "2", *STEADY)
    process = start(job, tmp_path)
    wait_for_step(tmp_path / "runs" / "run", 3, process)
    ranks_of(process)[-1].kill()
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2, err
    assert "rank" in err.splitlines()[-1]
    assert "SIGKILL" in err.splitlines()[-1]
    done = store.load_latest(tmp_path / "runs" / "run" / "checkpoints")[0].step
    resumed = resume_here(tmp_path, "--steps", str(done + 2))
    assert resumed.returncode == 0, resumed.stderr
    assert len(losses(tmp_path / "runs" / "run")) == done + 2


def test_an_error_of_a_rank_is_told_with_its_number_and_the_last_checkpoint(tiny_data, tmp_path):
    diverging = ["--procs", "2", "--optim.adam.head-lr", "1e38", "--checkpoint.every-steps", "1"]
    line = complaint(hotlap(*command(tiny_data, 3, *diverging), cwd=tmp_path))
    assert "rank" in line
    assert "at step" in line
    assert "checkpoints/step-000001" in line


def test_ranks_that_would_compute_differently_do_not_start(tiny_data, tmp_path):
    torchrun = {"WORLD_SIZE": "2", "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(free_port())}
    ranks = [
        start(
            command(tiny_data, 2, "--name", "run", "--attention.backend", backend),
            tmp_path,
            RANK=rank,
            LOCAL_RANK=rank,
            **torchrun,
        )
        for rank, backend in (("0", "dense"), ("1", "blocked"))
    ]
    for process in ranks:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2, err
        assert "same attention backend on all ranks; found dense on rank 0 and blocked on rank 1" in err
    assert not (tmp_path / "runs").exists()


def test_what_is_over_is_left_alone_and_the_newest_run_is_the_one_that_trained_last(tiny_data, tmp_path):
    for name in ("old", "new"):
        train_here(tiny_data, tmp_path, 2, "--name", name)
    files = sorted(path for path in (tmp_path / "runs").rglob("*") if path.is_file())
    before = {path: path.read_bytes() for path in files}
    (tmp_path / "runs" / "old" / "report.html").rename(tmp_path / "runs" / "old" / "again.html")
    (tmp_path / "runs" / "old" / "again.html").rename(tmp_path / "runs" / "old" / "report.html")
    result = hotlap_here("train", "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("runs/new is over: step 2 of 2; nothing to do")
    assert {path: path.read_bytes() for path in files} == before
    further = hotlap_here("train", "--resume", "--steps", "3", "--allow-change", cwd=tmp_path)
    assert further.returncode == 0, further.stderr
    assert len(losses(tmp_path / "runs" / "new")) == 3


@pytest.mark.parametrize(
    "more, part",
    [
        (["--procs", "3"], "found 3 processes"),
        (["--procs", "0"], "--procs of 1 or more"),
        (["--device", "cuda"], "found cuda"),
        (["--data.source", "nowhere"], "data.source = nowhere"),
        (["--model.vocab-size", "256"], "512"),
        (["--resume"], "a run in runs"),
        (["--resume", "runs/none"], "runs/none"),
        (["--log", "carrier-pigeon"], "carrier-pigeon"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(tiny_data, tmp_path, more, part):
    words = command(tiny_data, 2)
    for option in ("--data.source",):
        if option in more:
            at = words.index(option)
            del words[at : at + 2]
    assert part in complaint(hotlap_here(*words, *more, cwd=tmp_path))
    assert not any((tmp_path / "runs").glob("*")) if (tmp_path / "runs").exists() else True


@pytest.mark.parametrize(
    "variables, found",
    [
        ({"WORLD_SIZE": "abc", "RANK": "0"}, "WORLD_SIZE='abc'"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "WORLD_SIZE=0"),
        ({"WORLD_SIZE": "2", "RANK": "first"}, "RANK='first'"),
    ],
)
def test_an_environment_that_torchrun_did_not_make_gets_one_line(
    tiny_data, tmp_path, monkeypatch, variables, found
):
    torchrun = {"LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", **variables}
    for name, value in torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os._exit", sys.exit)  # a rank leaves at once
    monkeypatch.setattr("hotlap.distributed.leaving._leaving", threading.Lock())  # and only once
    assert found in complaint(hotlap_here(*command(tiny_data, 2), cwd=tmp_path))


def test_a_name_that_exists_and_a_run_without_a_checkpoint(tiny_data, finished):
    again = hotlap_here(*command(tiny_data, 1, "--name", "run"), cwd=finished)
    assert "`run`, which exists" in complaint(again)
    for path in (finished / "runs" / "run" / "checkpoints").iterdir():
        shutil.rmtree(path)
    assert "a checkpoint in" in complaint(resume_here(finished))


@pytest.mark.parametrize(
    "change, part",
    [
        (["--steps", "1"], "at least the 2 steps"),
        (["--bigram-rows", "64"], "bigrams.table.weight"),
        (["--matrices", "adamw", "--optim.muon.lr", "0.1"], "AdamW updates the matrices"),
    ],
)
def test_a_change_that_a_checkpoint_cannot_follow_is_refused(finished, change, part):
    assert part in complaint(resume_here(finished, *change))


def test_a_flipped_byte_in_a_checkpoint_is_refused_with_its_file_named(finished):
    damaged = finished / "runs" / "run" / "checkpoints" / "step-000002" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    assert "optimizer.safetensors" in complaint(resume_here(finished, "--steps", "3"))
    fallen_back = resume_here(finished, "--steps", "3", "--fallback")
    assert fallen_back.returncode == 0, fallen_back.stderr
    assert "skipped" in fallen_back.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_while_saving_keeps_the_earlier_checkpoints(tiny_data, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=9m", "tmpfs", str(disk)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {mounted.stderr.decode().strip()}")
    try:
        job = command(tiny_data, 20, "--runs", str(disk / "runs"), "--name", "run", *STEADY)
        line = complaint(hotlap(*job, "--checkpoint.keep", "20", cwd=tmp_path))
        assert "No space left on device" in line
        kept = store.stored(disk / "runs" / "run" / "checkpoints")
        assert kept
        assert [store.load(path).step for path in kept.values()] == list(kept)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- slow ---


@pytest.mark.slow
@pytest.mark.parametrize("procs", [[], ["--procs", "2"]], ids=["one process", "two processes"])
def test_killed_at_random_points_a_run_ends_bit_for_bit_the_same(tiny_data, tmp_path, procs):
    train(tiny_data, tmp_path, 40, "--name", "whole", *procs)
    pick = random.Random(5)
    kills = sorted(pick.sample(range(2, 39), 5))
    arguments = command(tiny_data, 40, "--name", "parts", "--checkpoint.every-steps", "2", *procs)
    for kill in kills:
        process = start(arguments, tmp_path)
        wait_for_step(tmp_path / "runs" / "parts", kill, process)
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.communicate()
        arguments = ["train", "--resume", "runs/parts", *procs]
    result = hotlap(*arguments, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    assert losses(tmp_path / "runs" / "parts") == losses(tmp_path / "runs" / "whole")
    ours, expected = (final_weights(tmp_path / "runs" / name) for name in ("parts", "whole"))
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("procs", ["1", "4"])
def test_saved_with_two_ranks_a_run_goes_on_with_another_number(tiny_data, tmp_path, procs):
    train(tiny_data, tmp_path, 30, "--name", "whole", "--procs", "2")
    process = start(command(tiny_data, 30, "--name", "parts", "--procs", "2", *STEADY), tmp_path)
    wait_for_step(tmp_path / "runs" / "parts", 12, process)
    for child in psutil.Process(process.pid).children(recursive=True):
        child.kill()
    process.kill()
    process.communicate()
    resumed = hotlap("train", "--resume", "runs/parts", "--procs", procs, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    expected = losses(tmp_path / "runs" / "whole")
    assert losses(tmp_path / "runs" / "parts") == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--procs", "2"], ["--procs", "4"], ["--micro-sequences", "4"]])
def test_world_sizes_and_micro_batches_give_one_curve(tiny_data, tmp_path, more):
    train(tiny_data, tmp_path, 30, "--name", "one")
    train(tiny_data, tmp_path, 30, "--name", "other", *more)
    assert_one_curve(losses(tmp_path / "runs" / "other"), losses(tmp_path / "runs" / "one"))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_killed_while_saving_fifty_times_a_run_always_goes_on(tiny_data, tmp_path):
    pick = random.Random(7)
    arguments = command(tiny_data, 100_000, "--name", "run", *STEADY)
    run = tmp_path / "runs" / "run"
    interrupted = 0
    for _ in range(50):
        reached = max(store.stored(run / "checkpoints"), default=0)
        process = start(arguments, tmp_path)
        wait_for_step(run, reached + 2, process)
        time.sleep(pick.uniform(0, 0.3))
        process.kill()
        process.communicate()
        interrupted += any(run.glob("checkpoints/.step-*"))
        assert store.load_latest(run / "checkpoints")[0].step >= reached
        arguments = ["train", "--resume", "runs/run"]
    assert interrupted > 0, "no kill hit a save: the test shows nothing"


@pytest.mark.slow
def test_two_torchrun_agents_train_together(tiny_data, tmp_path):
    train(tiny_data, tmp_path, 6, "--name", "one")
    torchrun = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "lap"),
        *("-m", "hotlap", *command(tiny_data, 6, "--name", "nodes")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            torchrun, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    for agent in agents:
        _, err = agent.communicate(timeout=240)
        assert agent.returncode == 0, err
    assert_one_curve(losses(tmp_path / "runs" / "nodes"), losses(tmp_path / "runs" / "one"))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains_from_the_command_line(tiny_data, tmp_path, recipe):
    words = command(tiny_data, 30)
    words[1] = recipe
    result = hotlap(*words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    curve = losses(next((tmp_path / "runs").iterdir()))
    assert sum(curve[-5:]) / 5 < curve[0] - 0.8


def restart(run, monkeypatch, capsys, *more):
    """`hotlap train --name` again, as torchrun starts it; nothing is trained."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    config = json.loads((run / "config.json").read_text())
    settings = ["--vocab-size", "300", "--steps", "3", "--precision", "float32", "--device", "cpu"]
    settings += ["--compile", "off", "--evaluation.tokens", "none", "--evaluation.every-steps", "0"]
    where = ["--data.source", config["data"]["source"], "--runs", str(run.parent), "--name", run.name]
    return in_process(capsys, "train", "softcap", "--size", "pico", *settings, *where, *more)


def started_by(run, **facts):
    path = run / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **facts}))


def test_a_restart_by_torchrun_goes_on_with_its_own_run_and_no_other(tmp_path, monkeypatch, capsys):
    run = copied_run(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert "`lap`, which exists" in complaint(restart(run, monkeypatch, capsys))
    started_by(run, variables={"TORCHELASTIC_RUN_ID": "job-7"})
    again = restart(run, monkeypatch, capsys)
    assert again.returncode == 0, again.stderr
    assert "is over: step 3 of 3" in again.stdout
    # The first start of a job takes over nothing.
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    words = ["train", "softcap", "--size", "pico", "--runs", str(run.parent), "--name", run.name]
    assert "`lap`, which exists" in complaint(in_process(capsys, *words))


def test_a_restart_of_a_job_without_a_name_goes_on_with_what_was_started_since(tmp_path, monkeypatch, capsys):
    run = copied_run(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    started_by(run, started="2020-01-01T00:00:00+00:00")
    assert "`lap`, which exists" in complaint(restart(run, monkeypatch, capsys))
    started_by(run, started=datetime.now(UTC).isoformat(timespec="seconds"))
    again = restart(run, monkeypatch, capsys)
    assert again.returncode == 0, again.stderr
    assert "is over" in again.stdout
    # Without a checkpoint it starts over: the settings are taken, the lines of the first attempt are not.
    shutil.rmtree(run / "checkpoints")
    (run / "summary.json").unlink()
    dry = restart(run, monkeypatch, capsys, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    options = RunOptions(run.parent, run.name, starts_over=True)
    with open_directory(Config(), TrainingProgress(), options) as directory:
        assert directory.read_metrics().lines == []
        assert directory.read_summary() is None


@pytest.mark.slow
def test_torchrun_restarts_a_run_that_is_killed(tiny_data, tmp_path):
    """A rank kills itself once, after a checkpoint; the second attempt ends as an uncut run does."""
    script = tmp_path / "lap.py"
    script.write_text(
        "import os, pathlib, signal, sys\n"
        "from hotlap.cli import main\n"
        "from hotlap.train.snapshot import Snapshots\n"
        "save, died = Snapshots.save, pathlib.Path(sys.argv.pop(1))\n"
        "def save_and_die(self, *arguments):\n"
        "    save(self, *arguments)\n"
        "    if not died.exists():\n"
        "        died.touch()\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "Snapshots.save = save_and_die\n"
        "main()\n"
    )
    words = command(tiny_data, 6, "--name", "lap", "--checkpoint.every-steps", "3")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1", "--max-restarts", "1"]
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path / "died"), *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    uncut = hotlap(*command(tiny_data, 6, "--name", "uncut"), cwd=tmp_path)
    assert uncut.returncode == 0, uncut.stderr
    assert (tmp_path / "died").exists()
    assert losses(tmp_path / "runs" / "lap") == losses(tmp_path / "runs" / "uncut")
