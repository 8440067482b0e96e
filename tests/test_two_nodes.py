"""Training on two nodes, in network namespaces with a slow link, by the torchrun command of the docs."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from hotlap.runs import checkpoint as store
from tests.command import hotlap
from tests.network import NUM_NODES, TwoNodes, two_nodes, why_no_nodes
from tests.training import command, final_weights, losses

WHY_NO_NODES = why_no_nodes()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NO_NODES), reason=WHY_NO_NODES)]

STEPS = 120
MEGABITS_PER_S = 200
ENDS_WITHIN_S = 200
CUT_S = 10
TIMEOUT_MINUTES = 0.3  # longer than the nodes' starts are apart on a busy machine


@pytest.fixture(scope="module")
def nodes() -> Iterator[TwoNodes]:
    with two_nodes(MEGABITS_PER_S) as made:
        yield made


@pytest.fixture(scope="module")
def uncut(tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run directory of the same training, by two ranks on one node."""
    folder = tmp_path_factory.mktemp("uncut")
    result = hotlap(*training(tiny_data, "--name", "run", "--procs", "2"), cwd=folder)
    assert result.returncode == 0, result.stderr
    return folder / "runs" / "run"


def training(data: Path, *more: str) -> list[str]:
    return command(data, STEPS, "--checkpoint.every-steps", "10", *more)


class Job:
    """A run on both nodes."""

    def __init__(self, agents: list[subprocess.Popen[str]], folder: Path) -> None:
        self.agents = agents
        self.run = folder / "runs" / "run"
        self.logs = [folder / f"node{node}.txt" for node in range(NUM_NODES)]

    def steps_done(self) -> int:
        metrics = self.run / "metrics.jsonl"
        return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.steps_done() >= step)

    def wait_for_complaints(self) -> None:
        """Until each rank has said why it ends."""
        self.wait_for(lambda: all("hotlap: " in log.read_text() for log in self.logs))

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + ENDS_WITHIN_S
        while not condition():
            assert time.monotonic() < deadline, self.output()
            assert None in [agent.poll() for agent in self.agents], self.output()
            time.sleep(0.05)

    def complaints(self) -> list[str]:
        """The one line that each rank has said."""
        texts = [log.read_text() for log in self.logs]
        lines = [[line for line in text.splitlines() if line.startswith("hotlap: ")] for text in texts]
        assert [len(said) for said in lines] == [1] * NUM_NODES, self.output()
        return [said for (said,) in lines]

    def exit_codes(self) -> list[int]:
        return [agent.wait(timeout=ENDS_WITHIN_S) for agent in self.agents]

    def output(self) -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()}" for log in self.logs)


@contextmanager
def started(nodes: TwoNodes, folder: Path, words: list[str]) -> Iterator[Job]:
    """`hotlap WORDS` on both nodes, ended when the block is left."""
    agents = []
    try:
        for node in range(NUM_NODES):
            with (folder / f"node{node}.txt").open("w") as output:
                agents.append(nodes.torchrun(node, ["-m", "hotlap", *words], cwd=folder, output=output))
        yield Job(agents, folder)
    finally:
        nodes.kill_all()
        for agent in agents:
            agent.wait()


def test_two_nodes_train_as_two_ranks_of_one_do(nodes, uncut, tiny_data, tmp_path):
    with started(nodes, tmp_path, training(tiny_data, "--name", "run")) as job:
        assert job.exit_codes() == [0, 0], job.output()
    assert losses(job.run) == losses(uncut)


def test_a_short_cut_of_the_link_is_waited_out(nodes, uncut, tiny_data, tmp_path):
    with started(nodes, tmp_path, training(tiny_data, "--name", "run")) as job:
        job.wait_for_step(15)
        nodes.cut()
        try:
            time.sleep(CUT_S / 2)
            done = job.steps_done()
            time.sleep(CUT_S / 2)
            assert job.steps_done() == done < STEPS, "training went on without a link"
        finally:
            nodes.mend()
        assert job.exit_codes() == [0, 0], job.output()
    assert losses(job.run) == losses(uncut)


def test_a_long_cut_ends_both_nodes_with_a_clear_line_and_the_run_goes_on(nodes, uncut, tiny_data, tmp_path):
    words = training(tiny_data, "--name", "run", "--timeout-minutes", str(TIMEOUT_MINUTES))
    with started(nodes, tmp_path, words) as job:
        job.wait_for_step(15)
        nodes.cut()
        try:
            job.wait_for_complaints()
        finally:
            nodes.mend()
        # Not before: torchrun itself waits for the first node as long as TCP sends again.
        assert all(job.exit_codes()), job.output()
    for rank, line in enumerate(job.complaints()):
        assert f"expected a sign of life of every rank within {TIMEOUT_MINUTES:g} minutes" in line
        assert f"found none of rank {1 - rank} (process " in line
        assert "`--resume`" in line
    saved = store.load_latest(job.run / "checkpoints")[0].step
    assert 0 < saved < STEPS
    with started(nodes, tmp_path, ["train", "--resume", "runs/run"]) as job:
        assert job.exit_codes() == [0, 0], job.output()
    assert losses(job.run) == losses(uncut)
    weights, uncut_weights = final_weights(job.run), final_weights(uncut)
    assert all(weights[name].equal(weight) for name, weight in uncut_weights.items())


def test_a_stopped_rank_is_named_on_both_nodes(nodes, tiny_data, tmp_path):
    words = training(tiny_data, "--name", "run", "--timeout-minutes", str(TIMEOUT_MINUTES))
    with started(nodes, tmp_path, words) as job:
        job.wait_for_step(15)
        (worker,) = [one for one in psutil.Process(job.agents[1].pid).children() if "hotlap" in one.cmdline()]
        worker.suspend()
        try:
            job.wait_for(lambda: "hotlap: " in job.logs[0].read_text())
        finally:
            worker.resume()
        job.wait_for_complaints()
        said, said_itself = job.complaints()
    assert f"found none of rank 1 (process {worker.pid} on " in said
    assert "found rank 1, this process, stopped for " in said_itself
