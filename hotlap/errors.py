"""Errors that a user can cause. Each says what was expected, what was found and what to do about it.

The command line prints them as one line and exits with 2; anything else that is raised is a bug and keeps
its traceback. Raise them where the mistake is first visible: at construction, before work starts.
"""

# What the process exits with.
BUG = 1  # as Python itself does after a traceback
USER_MISTAKE = 2
INTERRUPTED = 130  # as a shell reports a process that Ctrl-C ended


class HotlapError(Exception):
    """A user's mistake, in three parts."""

    def __init__(self, *, expected: str, found: str, do: str) -> None:
        super().__init__(f"expected {expected}; found {found}; {do}")
        self.expected = expected
        self.found = found
        self.do = do


class ConfigError(HotlapError):
    """A setting, recipe, size or command-line argument that cannot be used."""


class DataError(HotlapError):
    """Text, shards, a manifest or a download that cannot be used."""


class DeviceError(HotlapError):
    """A device, precision or backend that this machine does not have."""


class OptimizerError(HotlapError):
    """A parameter or gradient that an optimizer cannot take."""


class CheckpointError(HotlapError):
    """A checkpoint or run directory that is missing, damaged or does not fit."""


class TrainingError(HotlapError):
    """A run that cannot go on: a loss that is not finite, a rank that died."""


class DivergenceError(TrainingError):
    """A run whose loss is no longer finite: a result, not a fault of the machine."""


class RaceError(HotlapError):
    """A race that cannot start or go on."""


class ReportError(HotlapError):
    """A run directory or a set of runs that a report cannot be made of."""
