"""Runs that lose an agent of torchrun and get it back, and ranks that hang, on one machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

import psutil
import pytest

from hotlap.runs.directory import RunDirectory
from tests.command import hotlap
from tests.ranks import ADDRESS, free_port
from tests.training import assert_one_curve, command, final_weights, losses

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = 250  # more than are done while a process starts
ENDS_WITHIN_S = 400
TIMEOUT_MINUTES = 0.2
# By default torchrun waits half a minute for more nodes. A busy machine may need longer than other limits:
# a living agent whose signs of life come late is taken for lost, and a store that answers late for gone.
RENDEZVOUS = (
    "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=20,"
    "read_timeout=300,heartbeat_timeout=60,close_timeout=120"
)
# docs/distributed.md: a node that comes later would wait in vain for the address of the shared store.
NO_SHARED_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class Job:
    """Agents of torchrun with one rank each, and the run that they train."""

    def __init__(self, folder: Path, nodes: str, restarts: int, words: list[str]) -> None:
        self.folder, self.nodes, self.restarts, self.words = folder, nodes, restarts, words
        self.run = folder / "runs" / "run"
        self.port = free_port()
        self.agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self) -> subprocess.Popen[bytes]:
        number = len(self.agents)
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", self.nodes),
            *("--nproc-per-node", "1", "--max-restarts", str(self.restarts), "--local-addr", ADDRESS),
            *("--rdzv-backend", "c10d", "--rdzv-id", "lap", "--rdzv-endpoint", f"{ADDRESS}:{self.port}"),
            *("--rdzv-conf", f"is_host={int(number == 0)},{RENDEZVOUS}", "-m", "hotlap", *self.words),
        ]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            **(NO_SHARED_STORE if ":" in self.nodes else {}),
        }
        with self.log_of(number).open("wb") as log:
            agent = subprocess.Popen(torchrun, cwd=self.folder, env=environment, stdout=log, stderr=log)
        self.agents.append(agent)
        return agent

    def log_of(self, number: int) -> Path:
        return self.folder / f"agent{number}.txt"

    def lines_of(self, number: int) -> list[str]:
        """What the ranks of an agent have said, without torchrun's own report."""
        return [line for line in self.log_of(number).read_text().splitlines() if line.startswith("hotlap: ")]

    def metrics(self, kind: str) -> list[dict[str, object]]:
        if not (self.run / "metrics.jsonl").exists():
            return []
        return [line for line in RunDirectory(self.run).read_metrics().lines if line["kind"] == kind]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENDS_WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert None in [agent.poll() for agent in self.agents], self.output()
            time.sleep(0.05)

    def wait_for_world(self, world_size: int) -> None:
        """Until the run has gone on with so many ranks."""
        self.wait_for(lambda: [line["world_size"] for line in self.metrics("resume")][-1:] == [world_size])

    def worker_of(self, agent: subprocess.Popen[bytes]) -> psutil.Process:
        (worker,) = [one for one in psutil.Process(agent.pid).children() if "hotlap" in one.cmdline()]
        return worker

    def output(self) -> str:
        logs = [self.log_of(number) for number in range(len(self.agents))]
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in logs)


def kill_with_workers(agent: subprocess.Popen[bytes]) -> None:
    """kill -9, the agent first, so that it cannot start its workers again."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = psutil.Process(agent.pid).children(recursive=True)
    agent.kill()
    for one in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    agent.wait()


@contextmanager
def job(folder: Path, nodes: str, restarts: int, words: list[str]) -> Iterator[Job]:
    made = Job(folder, nodes, restarts, words)
    try:
        yield made
    finally:
        for agent in made.agents:
            kill_with_workers(agent)


@pytest.mark.parametrize("reduction", ["fixed", "averaged"])
def test_a_run_goes_on_without_an_agent_that_was_killed_and_with_it_again(tiny_data, tmp_path, reduction):
    words = command(tiny_data, STEPS, "--name", "run", "--checkpoint.every-steps", "5")
    words += ["--reduction", reduction]
    (tmp_path / "uncut").mkdir()
    assert hotlap(*words, cwd=tmp_path / "uncut").returncode == 0
    uncut = tmp_path / "uncut" / "runs" / "run"
    with job(tmp_path, "1:2", 10, [*words, "--resume", "auto"]) as elastic:
        elastic.start_agent()
        other = elastic.start_agent()
        elastic.wait_for(lambda: len(elastic.metrics("train")) >= 20)
        kill_with_workers(other)
        elastic.wait_for_world(1)
        elastic.start_agent()
        elastic.wait_for_world(2)
        first, _, returned = elastic.agents
        assert first.wait(timeout=ENDS_WITHIN_S) == 0, elastic.output()
        assert returned.wait(timeout=ENDS_WITHIN_S) == 0, elastic.output()
    worlds = [line["world_size"] for line in elastic.metrics("resume")]
    assert worlds == [1, 2], worlds
    if reduction == "averaged":
        # Rounding grows to 0.03 in some hundred steps, 0.01 on average; a step left out would be 0.04.
        found, expected = losses(elastic.run), losses(uncut)
        assert_one_curve(found[:20], expected[:20])
        assert mean(abs(one - other) for one, other in zip(found, expected, strict=True)) < 0.02
        return
    assert losses(elastic.run) == losses(uncut)
    weights, expected = final_weights(elastic.run), final_weights(uncut)
    assert all(weights[name].equal(weight) for name, weight in expected.items())


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_on_every_side(tiny_data, tmp_path, stopped):
    words = command(tiny_data, 10 * STEPS, "--name", "run", "--timeout-minutes", str(TIMEOUT_MINUTES))
    with job(tmp_path, "2", 0, words) as hanging:
        agents = [hanging.start_agent(), hanging.start_agent()]
        hanging.wait_for(lambda: len(hanging.metrics("train")) >= 20)
        workers = [hanging.worker_of(agent) for agent in agents]
        ranks = [int(worker.environ()["RANK"]) for worker in workers]
        of_stopped, of_other = ranks.index(stopped), ranks.index(1 - stopped)
        worker = workers[of_stopped]
        worker.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        hanging.wait_for(lambda: bool(hanging.lines_of(of_other)))
        # Whole seconds, for a busy machine; a period is a tenth of the time-out.
        assert time.monotonic() - began < 60 * TIMEOUT_MINUTES * 1.2 + 5
        worker.send_signal(signal.SIGCONT)
        hanging.wait_for(lambda: bool(hanging.lines_of(of_stopped)))
        (said,), (said_itself,) = hanging.lines_of(of_other), hanging.lines_of(of_stopped)
        assert f"found none of rank {stopped} (process {worker.pid} on " in said
        assert f"found rank {stopped}, this process, stopped for " in said_itself
        # After the line, torchrun has a traceback of its own.
        assert "Traceback" not in hanging.log_of(of_other).read_text().partition("hotlap: ")[0]


def test_a_stopped_rank_is_named_by_the_launcher(tiny_data, tmp_path):
    words = command(tiny_data, 10 * STEPS, "--name", "run", "--timeout-minutes", str(TIMEOUT_MINUTES))
    run = RunDirectory(tmp_path / "runs" / "run")
    launcher = subprocess.Popen(
        [sys.executable, "-m", "hotlap", *words, "--procs", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + ENDS_WITHIN_S
    while not run.metrics_path.exists() or run.metrics_path.read_text().count('"train"') < 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    workers = psutil.Process(launcher.pid).children()
    (second,) = [worker for worker in workers if worker.environ().get("RANK") == "1"]
    second.send_signal(signal.SIGSTOP)
    _, errors = launcher.communicate(timeout=ENDS_WITHIN_S)
    assert launcher.returncode == 2
    (line,) = errors.splitlines()
    assert f"found none of rank 1 (process {second.pid} on " in line
