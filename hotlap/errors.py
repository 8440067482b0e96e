"""Errors that a user can cause. Each states what was expected, what was found and what to do.

The command line prints a `HotlapError` on one line and exits with code 2. Any other exception is a bug and
keeps its traceback. Raise these errors as early as possible: at construction, before any work starts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

# Exit codes.
BUG = 1  # Python's own, after a traceback
USER_MISTAKE = 2
# 128 + the signal's number, the shell's convention.
INTERRUPTED = 130  # Ctrl-C
PREEMPTED = 143  # SIGTERM: saved, and to be started again by whoever sent it


class HotlapError(Exception):
    """A user's mistake: what was expected, what was found, what to do."""

    def __init__(self, *, expected: str, found: str, do: str) -> None:
        super().__init__(f"expected {expected}; found {found}; {do}")
        self.expected = expected
        self.found = found
        self.do = do


class ConfigError(HotlapError):
    """An invalid setting, recipe, size or command-line argument."""


class IdeaError(ConfigError):
    """An idea file that is ill-formed: names the file and the line."""


class DataError(HotlapError):
    """Invalid text, shards, manifest or download."""


class DeviceError(HotlapError):
    """A device, precision or backend that this machine does not have."""


class CompileError(HotlapError):
    """A model that does not compile as one graph."""


class OptimizerError(HotlapError):
    """A parameter or gradient that an optimizer cannot handle."""


class CheckpointError(HotlapError):
    """A checkpoint or run directory that is missing, damaged or incompatible."""


class HubError(HotlapError):
    """An upload that the Hugging Face hub did not take."""


class TrainingError(HotlapError):
    """A run that cannot continue, for example because a rank died."""


class ConnectionLostError(TrainingError):
    """A rank that waited in vain for the others. Often the consequence of an error on another rank."""


class SilentRankError(TrainingError):
    """A rank without a sign of life. The error names it, whichever rank noticed."""


class DivergenceError(TrainingError):
    """A run whose loss is no longer finite. A race counts it as a result."""


class RaceError(HotlapError):
    """A race that cannot start or continue."""


class ReportError(HotlapError):
    """A run directory or a set of runs that cannot be reported on."""


# What torch and Python say when the system gives no more memory, by whatever class of error.
NO_MEMORY = ("out of memory", "can't allocate memory", "Cannot allocate memory", "can't start new thread")


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turn the many errors of too little memory into one line for the user."""
    try:
        yield
    except (MemoryError, RuntimeError, OSError) as error:
        said = " ".join(str(error).split())
        if not isinstance(error, MemoryError) and not any(words in said for words in NO_MEMORY):
            raise
        raise DeviceError(
            expected="enough memory for this command",
            found=said or "none left",
            do="free some, raise its limit, or use a smaller --size, vocabulary or batch.micro_sequences",
        ) from error
