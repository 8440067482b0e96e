"""Threads that each compute one thing at a time on one core, for `runtime.reduction = fixed`.

A library divides a sum among its threads, so that the last bits of the sum depend on their number.
Here a sequence or a matrix is computed by one thread from beginning to end, and several of them at
once: only the time depends on the number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """`count` threads. torch itself may use one thread only where they are in use."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count, "worker", partial(torch.set_num_threads, 1))

    def map(self, function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
        """The results in the order of the items. No more than `count` of them wait to be taken."""
        ahead: deque[Future[R]] = deque()
        for item in items:
            if len(ahead) == self.count:
                yield ahead.popleft().result()
            ahead.append(self._threads.submit(function, item))
        while ahead:
            yield ahead.popleft().result()

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
