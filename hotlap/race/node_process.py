"""`python -m hotlap.race.node_process PARENT RUN`: checks code and data on a machine, then becomes the run.

The training is told to stop when its parent ends, so that a run whose machine or actor was lost does not
train on unseen. The data is prepared under the cache's lock, so once on each machine; its checksums are those
of its manifest, and its fingerprints have to be those of whoever started the race.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

import hotlap
from hotlap.config import Config
from hotlap.corpus.configured import data_directory, ensure_data
from hotlap.data.stream import open_split
from hotlap.distributed.leaving import stop_with_parent
from hotlap.errors import USER_MISTAKE, DataError, HotlapError, RaceError
from hotlap.json_files import read_sealed
from hotlap.race.process import train_command
from hotlap.runs.recorded import MACHINE_VARIABLE
from hotlap.settings import from_json

SOURCE_SUFFIXES = (".py", ".c", ".h", ".cpp")


def main(parent: int, path: Path) -> None:
    if not stop_with_parent(parent):
        raise RaceError(expected="whoever started this run", found="that it has ended", do="repeat the race")
    order = read_sealed(path.parent / "order.json", RaceError)["identity"]
    config = from_json(Config, order["config"])
    check_version(order["version"])
    check_data(config, order["fingerprints"])
    command = train_command(path, order["words"], order["procs"], order["title"], _print)
    os.execv(command[0], command)


def code_version() -> str:
    """Names the code that a run depends on: Hotlap's version and sources, Python's and torch's versions."""
    package = Path(hotlap.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(path for path in package.rglob("*") if path.suffix in SOURCE_SUFFIXES):
        digest.update(f"{path.relative_to(package).as_posix()}\n".encode() + path.read_bytes())
    python = ".".join(platform.python_version_tuple()[:2])
    torch = version("torch").split("+")[0]
    return f"hotlap {hotlap.__version__} ({digest.hexdigest()[:8]}), Python {python}, torch {torch}"


def check_version(expected: str) -> None:
    found = code_version()
    if found != expected:
        raise RaceError(expected=expected, found=found, do="install the same code on every machine")


def data_fingerprints(config: Config) -> tuple[str, str]:
    """Of the training and the validation data, whose files are verified against the manifest's checksums."""
    directory = data_directory(config)
    train, val = (
        open_split(directory, split, vocab_size=config.model.vocab_size).fingerprint
        for split in ("train", "val")
    )
    return train, val


def check_data(config: Config, expected: list[str]) -> None:
    ensure_data(config, _print)
    found = data_fingerprints(config)
    if list(found) != list(expected):
        raise DataError(
            expected=f"data with the fingerprints {', '.join(expected)} in {data_directory(config)}",
            found=", ".join(found),
            do="copy or prepare the same data on every machine",
        )


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), Path(sys.argv[2]))
    except HotlapError as mistake:
        machine = os.environ.get(MACHINE_VARIABLE, "?")
        _print(f"hotlap: on machine {machine}: {mistake}")
        sys.exit(USER_MISTAKE)
