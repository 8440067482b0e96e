"""Tests, run as the command runs: threads wait passively. Torch is loaded later, by the tests."""

from hotlap.waiting import wait_passively

wait_passively()
