"""How OpenMP's threads wait for each other: asleep after a short spin, so that a machine can be shared.

A training step has hundreds of parallel regions. Threads that spin at the end of each save microseconds on an
idle machine; beside other work they take a core from the very thread they wait for (`python -m bench
contention`). Only programs call this, never an import of the package: a process's variables belong to whoever
started it.
"""

from __future__ import annotations

import os
import sys

# OpenMP's own, and those of GNU's and LLVM's implementations. Whoever has set one of them has chosen.
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")

# GNU's threads spin for some microseconds first, which saves most wake-ups of an idle machine. At `nano` on
# two cores in float32, passive waiting alone costs 8 % of the idle speed, with this spin 3 %; beside one busy
# process the spin costs 2 %. LLVM's threads go by the policy alone.
PASSIVE = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}


def wait_passively() -> None:
    """Choose passive waiting for this process and those it starts, unless the user has chosen.

    Torch's OpenMP reads its variables once, when it is loaded. After that nothing is set, because a run would
    record a policy that it does not have.
    """
    if "torch" not in sys.modules and not any(name in os.environ for name in WAIT_VARIABLES):
        os.environ.update(PASSIVE)
