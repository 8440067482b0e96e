"""Signs of life: who is named, by whom, and when nobody is."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from hotlap.distributed.heartbeat import Heartbeat, period_of

TIMEOUT = timedelta(seconds=3)


class Silence:
    """What a heartbeat says in the place of ending its process."""

    def __init__(self):
        self.said = None
        self.broken = threading.Event()

    def __call__(self, error):
        self.said = str(error)
        self.broken.set()


def heartbeat(store, rank, silence, world_size=2):
    return Heartbeat(store, rank, world_size, TIMEOUT, silence)


def test_a_period_is_a_fraction_of_the_timeout_and_never_long():
    assert period_of(timedelta(seconds=12)) == timedelta(seconds=1.2)
    assert period_of(timedelta(minutes=10)) == timedelta(seconds=5)


def test_the_rank_that_is_silent_is_named_and_no_other():
    store, silence = dist.HashStore(), Silence()
    never_beats_again = heartbeat(store, 1, Silence(), world_size=3)
    never_beats_again._beat(0)
    with heartbeat(store, 2, Silence(), world_size=3), heartbeat(store, 0, silence, world_size=3):
        assert silence.broken.wait(timeout=30)
    assert "expected a sign of life of every rank within 0.05 minutes" in silence.said
    assert "found none of rank 1 (process " in silence.said


def test_ranks_that_live_or_have_left_are_not_named():
    store, silences = dist.HashStore(), [Silence(), Silence()]
    with heartbeat(store, 0, silences[0]):
        with heartbeat(store, 1, silences[1]) as other:
            assert not silences[0].broken.wait(timeout=1.5 * TIMEOUT.total_seconds())
        other._thread.join()
        assert not silences[0].broken.wait(timeout=1.5 * TIMEOUT.total_seconds())
    assert not silences[1].broken.is_set()


def test_a_failed_collective_is_blamed_on_a_rank_that_was_silent_before():
    store = dist.HashStore()
    gone, here = heartbeat(store, 1, Silence()), heartbeat(store, 0, Silence())
    gone._beat(0)
    here._listen()
    assert here.find_culprit() is None
    here._signs[1].seen -= TIMEOUT.total_seconds() / 2
    assert here.find_hanging() is None
    assert "none of rank 1" in str(here.find_culprit())


@pytest.mark.parametrize("has_noticed", [True, False])
def test_a_process_that_was_stopped_says_so_itself(monkeypatch, has_noticed):
    beats = heartbeat(dist.HashStore(), 1, Silence())
    clock = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: clock)
    if has_noticed:

        def stopped(_):
            nonlocal clock
            clock += 30
            return False

        monkeypatch.setattr(beats._ended, "wait", stopped)
        assert not beats._pause()
    else:
        beats._sleeps_since = clock - 30
    for error in (beats.find_hanging(), beats.find_culprit()):
        assert "found rank 1, this process, stopped for 30 s" in str(error)
    if has_noticed:
        clock += 60
        assert beats.find_culprit() is None, "long ago"


@pytest.mark.parametrize("has_noticed", [True, False])
def test_a_process_that_was_stopped_does_not_blame_those_whom_it_could_not_hear(monkeypatch, has_noticed):
    store = dist.HashStore()
    heartbeat(store, 0, Silence())._beat(0)
    beats = heartbeat(store, 1, Silence())
    clock = time.monotonic()
    monkeypatch.setattr("time.monotonic", lambda: clock)
    beats._listen()
    almost = 0.9 * TIMEOUT.total_seconds()  # and with the period before it, more than the time-out

    def stopped(_):
        nonlocal clock
        clock += beats.period_s + almost
        return False

    clock += beats.period_s
    if has_noticed:
        monkeypatch.setattr(beats._ended, "wait", stopped)
        beats._pause()
    else:
        beats._sleeps_since = clock
        stopped(None)
    assert beats.find_hanging() is None
    assert "found rank 1, this process, stopped for" in str(beats.find_culprit())


def test_nothing_follows_from_a_store_that_does_not_answer():
    class Unreachable:
        def set(self, *_):
            if threading.current_thread() is not threading.main_thread():
                raise dist.DistNetworkError("timed out")

    silence = Silence()
    with heartbeat(Unreachable(), 0, silence) as beats:
        beats._thread.join(timeout=30)
        assert not beats._thread.is_alive()
    assert silence.said is None
