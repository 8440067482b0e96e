"""Commands make room for other processes, unless their user has chosen; an import does nothing."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from hotlap.waiting import LOOK_SECONDS, WAIT_VARIABLES, OtherProcesses, is_crowded

ROOT = Path(__file__).parents[1]
UNSET = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}
LINUX = sys.platform.startswith("linux")

# The command as its entry point runs it; it prints what the modules of commands would find.
COMMAND = """
import os, sys, threading
import hotlap.cli
assert "torch" not in sys.modules, "torch is loaded before the command has chosen how threads wait"
watches = lambda: any(thread.name == "hotlap-sharing-cores" for thread in threading.enumerate())
hotlap.cli.dispatch = lambda _: print(watches(), os.environ.get("OMP_WAIT_POLICY")) or 0
hotlap.cli.main()
"""

# Counts the threads of a process with a team of two, in a crowd and out of it.
IN_A_CROWD = """
import sys, time, threading
import torch
from hotlap import waiting

torch.set_num_threads(2)
torch.zeros(2**20).exp_()
waiting.is_crowded = lambda *_: crowded
waiting.LOOK_SECONDS = 0.01

def teams(expected):
    deadline = time.monotonic() + 30
    while (found := [t.name for t in threading.enumerate()].count("hotlap-sleeping-team")) != expected:
        assert time.monotonic() < deadline, f"{found} teams instead of {expected}"
        time.sleep(0.01)

crowded = False
with waiting.sharing_cores():
    for crowded in (True, False, True):
        teams(expected=int(crowded))
teams(expected=0)
print("ended")
"""


def output_of(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env={**UNSET, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_shares_the_cores():
    assert output_of(COMMAND) == ("True None" if LINUX else "False passive")


@pytest.mark.parametrize(
    "name, value, policy",
    [
        ("OMP_WAIT_POLICY", "active", "active"),
        ("GOMP_SPINCOUNT", "1000", "None"),
        ("KMP_BLOCKTIME", "0", "None"),
    ],
)
def test_a_choice_of_the_user_stays(name, value, policy):
    assert output_of(COMMAND, **{name: value}) == f"False {policy}"


def test_importing_the_package_leaves_environment_and_threads_alone():
    output_of(
        "import os, threading; before = dict(os.environ); import hotlap, hotlap.cli;"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items());"
        "assert threading.active_count() == 1"
    )
    # Torch's compiler, which these import, sets a variable of its own.
    output_of(
        "import os, hotlap.optim, hotlap.train.run; from hotlap.waiting import WAIT_VARIABLES; hotlap.load;"
        "assert not set(os.environ) & set(WAIT_VARIABLES)"
    )


@pytest.mark.parametrize(
    "others, threads, cores, crowded",
    [
        (0.0, 2, 2, False),
        (0.1, 2, 2, False),  # a desktop
        (0.5, 2, 2, True),
        (2.0, 1, 2, False),  # one thread waits for nobody
        (4.0, 4, 8, False),  # another rank, on cores of its own
        (4.5, 4, 8, True),
    ],
)
def test_others_count_when_they_need_the_cores_of_this_process(others, threads, cores, crowded):
    assert is_crowded(others, threads, cores) == crowded


@pytest.mark.skipif(not LINUX, reason="other systems have no /proc/stat")
def test_the_time_of_other_processes_is_told_from_ones_own():
    others = OtherProcesses()
    with psutil.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        while busy.cpu_times().user < 0.1:  # until it has started
            time.sleep(0.01)
        others.cores_used()
        before, own_before, began = busy.cpu_times().user, time.process_time(), time.monotonic()
        while time.monotonic() < began + LOOK_SECONDS:  # busy as well, so that one's own time matters
            pass
        used = others.cores_used()
        of_busy = (busy.cpu_times().user - before) / LOOK_SECONDS
        own = (time.process_time() - own_before) / LOOK_SECONDS
        busy.kill()
    # Other tests may run beside this one, so there is only a range. Ticks are 10 ms.
    assert of_busy - 0.1 <= used <= len(os.sched_getaffinity(0)) - own + 0.1


@pytest.mark.skipif(not LINUX, reason="only GNU's OpenMP looks at the number of threads")
def test_a_second_team_sleeps_as_long_as_others_need_the_cores():
    assert output_of(IN_A_CROWD) == "ended"


def test_tests_wait_passively():
    assert any(name in os.environ for name in WAIT_VARIABLES)
