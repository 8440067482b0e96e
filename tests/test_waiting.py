"""Commands wait passively, unless their user has chosen; an import of the package chooses nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotlap.waiting import WAIT_VARIABLES, wait_passively

ROOT = Path(__file__).parents[1]
UNSET = {name: value for name, value in os.environ.items() if name not in WAIT_VARIABLES}

# The command as its entry point runs it; it prints what the modules of commands would find.
COMMAND = """
import os, sys
import hotlap.cli
assert "torch" not in sys.modules, "torch is loaded before the policy is chosen"
hotlap.cli.dispatch = lambda _: print(os.environ.get("OMP_WAIT_POLICY")) or 0
hotlap.cli.main()
"""


def output_of(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env={**UNSET, **variables}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_command_chooses_before_torch_is_loaded():
    assert output_of(COMMAND) == "passive"


@pytest.mark.parametrize(
    "name, value, policy",
    [
        ("OMP_WAIT_POLICY", "active", "active"),
        ("GOMP_SPINCOUNT", "1000", "None"),
        ("KMP_BLOCKTIME", "0", "None"),
    ],
)
def test_a_choice_of_the_user_stays(name, value, policy):
    assert output_of(COMMAND, **{name: value}) == policy


def test_importing_the_package_leaves_the_environment_alone():
    output_of(
        "import os; before = dict(os.environ); import hotlap, hotlap.cli;"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    # Torch's compiler, which these import, sets a variable of its own.
    output_of(
        "import os, hotlap.optim, hotlap.train.run; from hotlap.waiting import WAIT_VARIABLES; hotlap.load;"
        "assert not set(os.environ) & set(WAIT_VARIABLES)"
    )


def test_with_torch_loaded_nothing_is_set(monkeypatch):
    for name in WAIT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    wait_passively()
    assert "OMP_WAIT_POLICY" not in os.environ


def test_tests_wait_passively_too():
    assert any(name in os.environ for name in WAIT_VARIABLES)
