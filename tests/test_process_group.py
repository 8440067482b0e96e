"""The process group: from torchrun's environment, or none at all, and gone afterwards whatever happened."""

import os
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hotlap.distributed.process_group import explain_lost_connections, process_group, read_environment
from hotlap.distributed.same_start import check_same
from hotlap.errors import ConfigError, ConnectionLostError, DeviceError, TrainingError
from tests.ranks import ADDRESS, free_port, run_ranks

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}


def test_without_torchrun_there_is_one_process_and_no_group(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    with process_group("cpu") as distributed:
        assert (distributed.rank, distributed.local_rank, distributed.world_size) == (0, 0, 1)
        assert distributed.is_main
        assert distributed.device == torch.device("cpu")
        assert not dist.is_initialized()


@pytest.mark.skipif(sys.platform != "linux", reason="looks threads up in /proc")
def test_a_group_is_left_but_not_freed():
    """To free one waits for its threads, which wait for Python's lock, which whoever frees it holds: rarely,
    but then for ever. That cannot be waited for here; whether its threads are still there can be seen.
    """
    program = """
import gc, os
from pathlib import Path
from hotlap.distributed.process_group import process_group

with process_group("cpu"):
    pass
gc.collect()
threads = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
print(threads.count("pt_gloo_runloop"), flush=True)
os._exit(0)
"""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": ADDRESS}
    environment = {**os.environ, **place, "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert int(done.stdout) > 0, done.stderr


def test_torchrun_s_environment_gives_the_place():
    distributed = read_environment("cpu", TORCHRUN)
    assert (distributed.rank, distributed.local_rank, distributed.world_size) == (5, 1, 8)
    assert not distributed.is_main


@pytest.mark.parametrize(
    "changes, found",
    [
        ({"LOCAL_RANK": None}, "LOCAL_RANK unset"),
        ({"WORLD_SIZE": None}, "WORLD_SIZE unset"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR unset"),
        ({"RANK": "first"}, "RANK='first'"),
        ({"RANK": "-1"}, "RANK='-1'"),
        ({"MASTER_PORT": ""}, "MASTER_PORT=''"),
        ({"RANK": "8"}, "RANK=8, LOCAL_RANK=1, WORLD_SIZE=8"),
        ({"LOCAL_RANK": "6"}, "RANK=5, LOCAL_RANK=6"),
        ({"LOCAL_WORLD_SIZE": "all"}, "LOCAL_WORLD_SIZE='all'"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE=0, WORLD_SIZE=8"),
    ],
)
def test_a_malformed_environment_is_refused(changes, found):
    environment = {k: v for k, v in {**TORCHRUN, **changes}.items() if v is not None}
    with pytest.raises(ConfigError, match=found):
        read_environment("cpu", environment)


def test_more_processes_than_cuda_devices_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceError, match=r"found 1 devices, local rank 1; .* at most 1"):
        read_environment("cuda", TORCHRUN)
    assert read_environment("cuda", {**TORCHRUN, "LOCAL_RANK": "0"}).device == torch.device("cuda", 0)


def joins(rank, world_size, port, second_port):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=ADDRESS,
        MASTER_PORT=str(port),
    )
    with process_group("cpu") as distributed:
        backend = dist.get_backend()
        total = torch.tensor(float(distributed.rank))
        dist.all_reduce(total)
    after_success = dist.is_initialized()
    os.environ["MASTER_PORT"] = str(second_port)
    try:
        with process_group("cpu"):
            raise ValueError("on purpose")
    except ValueError:
        after_failure = dist.is_initialized()
    return backend, total.item(), distributed.is_main, after_success, after_failure


def test_ranks_join_and_the_group_is_gone_afterwards_also_after_an_exception():
    results = run_ranks(joins, 2, free_port(), free_port(), with_group=False)
    assert results == [("gloo", 1.0, True, False, False), ("gloo", 1.0, False, False, False)]


def waits_in_vain(rank, world_size, port):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR=ADDRESS,
        MASTER_PORT=str(port),
    )
    try:
        with process_group("cpu", timedelta(seconds=6)) as distributed:
            if distributed.is_main:
                dist.all_reduce(torch.zeros(1))
            else:
                time.sleep(8)
    except ConnectionLostError as error:
        return str(error)
    return None


def test_a_rank_that_waits_in_vain_says_so():
    said, nothing = run_ranks(waits_in_vain, 2, free_port(), with_group=False)
    assert said.startswith("expected rank 0 of 2 to reach all others within 0.1 minutes;")
    assert "found the connection lost (Timed out waiting 6000ms" in said
    assert nothing is None


@pytest.mark.parametrize(
    "error, is_explained",
    [
        (RuntimeError("[/src/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.2]:1"), True),
        (dist.DistNetworkError("The client socket has timed out"), True),
        (RuntimeError("a bug of ours"), False),
    ],
)
def test_only_lost_connections_are_explained(error, is_explained):
    expected = ConnectionLostError if is_explained else RuntimeError
    place = read_environment("cpu", TORCHRUN)
    with pytest.raises(expected) as caught, explain_lost_connections(place, timedelta(minutes=10)):
        raise error
    assert isinstance(caught.value, ConnectionLostError) == is_explained
    assert "pair.cc" not in str(caught.value)


def compares(rank, world_size, steps):
    try:
        check_same({"precision": "float32", "step": steps[rank]})
    except TrainingError as mistake:
        return str(mistake)
    return "same"


@pytest.mark.parametrize(
    "steps, said", [((4, 4, 4), "same"), ((4, 4, 2), "step on all ranks; found 4 on rank 0 and 2 on rank 2")]
)
def test_ranks_that_do_not_start_from_the_same_are_refused_on_every_rank(steps, said):
    answers = run_ranks(compares, 3, steps)
    assert len(set(answers)) == 1
    assert said in answers[0]


def test_a_process_alone_has_nobody_to_differ_from():
    check_same({"step": 4})
