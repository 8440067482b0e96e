"""Tests run side by side, so their threads wait passively: set before torch is loaded, which reads it."""

import os

from hotlap.waiting import WAIT_VARIABLES

if not any(name in os.environ for name in WAIT_VARIABLES):
    os.environ["OMP_WAIT_POLICY"] = "passive"
