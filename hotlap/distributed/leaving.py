"""How one of several processes ends: at once, and with one line that says why."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

from hotlap.distributed.launch import tell_launcher
from hotlap.errors import USER_MISTAKE, HotlapError
from hotlap.terminal import printable

PR_SET_PDEATHSIG = 1  # of Linux's prctl

# Held by the thread that ends the process. Another one may have found the same reason.
_leaving = threading.Lock()


def leave_with(mistake: HotlapError) -> NoReturn:
    """Tell the launcher why, or print it, and end this process."""
    _leaving.acquire()
    if not tell_launcher(mistake):
        with contextlib.suppress(OSError):
            print(f"hotlap: {printable(str(mistake))}", file=sys.stderr)  # noqa: T201
    leave_at_once(USER_MISTAKE)


def leave_at_once(code: int) -> NoReturn:
    """End one of several processes, or their launcher, without Python's own shutdown.

    Threads of torch may still be receiving from other processes, and then the shutdown aborts or hangs. All
    files are already written.
    """
    for stream in (sys.stdout, sys.stderr):
        # The reader of a pipe may have ended.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def stop_with_parent(parent: int) -> bool:
    """Let this process be told to stop, as by SIGTERM, when its parent ends, even by SIGKILL. Only Linux can.

    Returns whether the parent is still there.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent
