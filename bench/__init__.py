"""Benchmarks, run as the command runs: threads wait passively. Torch is loaded later, by the parts."""

from hotlap.waiting import wait_passively

wait_passively()
