"""The files inside `.zip` and `.tar` archives, read where they are: nothing is extracted.

A member is refused if its name leads out of the archive or if it is a link, and a whole archive if its
content is out of proportion to its size. Members come in the archive's own order.
"""

from __future__ import annotations

import stat
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from hotlap.corpus.decoding import (
    BLOCK_BYTES,
    Bounded,
    ExpandsTooFarError,
    Tally,
    decompressing,
    opened_file,
    uncompressed,
)
from hotlap.corpus.inputs import ARCHIVES, ZIP, Found, Input, is_hidden, kind_of
from hotlap.errors import ConfigError, DataError
from hotlap.files import reading, writing

# Text shrinks to a tenth or so, repetitive logs to a fiftieth; a bomb of Deflate to a thousandth.
LARGEST_EXPANSION = 100
FREE_EXPANSION_BYTES = 2**26  # small archives may expand to this much, whatever their own size
SPOOLED_BYTES = 2**23  # members of a tar up to this size are held in memory, larger ones in a temporary file

Skip = Callable[[str, str], None]  # takes the name of a file and the reason why it is skipped


def most_bytes_of(size: int) -> int:
    """How many bytes an archive of `size` bytes may expand to."""
    return max(FREE_EXPANSION_BYTES, LARGEST_EXPANSION * size)


def members(archive: Found, tally: Tally, skip: Skip) -> Iterator[Input]:
    """The files in an archive, each to be read before the next one. `skip` is told what is left out."""
    read = _zip_members if archive.kind == ZIP else _tar_members
    seen: set[str] = set()
    with damage_named(archive.path):
        for name, problem, member in read(archive, tally):
            kind, _ = kind_of(name)
            if problem is None and is_hidden(PurePosixPath(name).parts):
                continue
            full_name = f"{archive.path}/{name}"
            if problem is None and name in seen:
                problem = "a second member of that name: refused"
            if problem is None and kind in ARCHIVES:
                problem = "an archive inside an archive: extract it first"
            if problem is None and not kind:
                problem = "not a format that is read"
            seen.add(name)
            if problem is not None:
                skip(full_name, problem)
            else:
                with member(full_name) as file:
                    yield file


@contextmanager
def damage_named(path: Path) -> Iterator[None]:
    """Convert what the readers of archives raise to a `DataError`."""
    try:
        with reading(path), decompressing(str(path)):
            yield
    except (zipfile.BadZipFile, tarfile.TarError, NotImplementedError) as error:
        raise DataError(
            expected=f"a complete {path.suffix} archive at {path}",
            found=" ".join(str(error).split())[:200] or type(error).__name__,
            do="copy or create it again",
        ) from error


def unsafe(name: str) -> str | None:
    """Why a member of this name is refused, or None."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    leads_out = name.startswith(("/", "\\")) or ".." in parts or (len(name) > 1 and name[1] == ":")
    return "its name leads out of the archive: refused" if leads_out else None


# Name in the archive, problem, and what opens it under its full name.
Member = tuple[str, str | None, Callable[[str], AbstractContextManager[Input]]]


def _zip_members(archive: Found, tally: Tally) -> Iterator[Member]:
    size = archive.path.stat().st_size
    with opened_file(archive.path, Tally()) as file, zipfile.ZipFile(file) as content:
        check_expansion(content, str(archive.path), size)
        for info in content.infolist():
            if info.is_dir():
                continue
            problem = unsafe(info.filename)
            if stat.S_ISLNK(info.external_attr >> 16):
                problem = "a link: refused"
            elif info.flag_bits & 1:
                problem = "encrypted"
            yield info.filename, problem, partial(_zip_member, content, info, size)
            tally.bytes_read += info.compress_size


def check_expansion(content: zipfile.ZipFile, name: str, size: int) -> None:
    """Refuse a zip that states more content than fits its size. `zipfile` never reads more than is stated."""
    if sum(info.file_size for info in content.infolist()) > most_bytes_of(size):
        raise ExpandsTooFarError(name, most_bytes_of(size))


@contextmanager
def _zip_member(content: zipfile.ZipFile, info: zipfile.ZipInfo, size: int, name: str) -> Iterator[Input]:
    kind, compression = kind_of(info.filename)

    @contextmanager
    def open_stored() -> Iterator[BinaryIO]:
        with member_damage_named(name), content.open(info) as member:
            yield cast(BinaryIO, member)

    yield Input(
        name=name,
        kind=kind,
        compression=compression,
        is_given=False,
        size=info.file_size,
        open_stored=open_stored,
        most_bytes=most_bytes_of(size),
    )


@contextmanager
def member_damage_named(name: str) -> Iterator[None]:
    """Convert what `zipfile` raises for one member, so that the others can still be read."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DataError(
            expected=f"a complete {name}",
            found=" ".join(str(error).split())[:200],
            do="create the archive again",
        ) from error


def _tar_members(archive: Found, tally: Tally) -> Iterator[Member]:
    most_bytes = most_bytes_of(archive.path.stat().st_size)
    name = str(archive.path)
    with (
        opened_file(archive.path, tally) as file,
        uncompressed(name, file, archive.compression) as plain,
        tarfile.open(fileobj=cast(Any, Bounded(plain, name, most_bytes)), mode="r|") as content,
    ):
        for info in content:
            if info.isdir():
                continue
            problem = unsafe(info.name)
            if info.issym() or info.islnk():
                problem = "a link: refused"
            elif not info.isreg():
                problem = "no regular file: refused"
            yield info.name, problem, partial(_tar_member, content, info, most_bytes)


@contextmanager
def _tar_member(
    content: tarfile.TarFile, info: tarfile.TarInfo, most_bytes: int, name: str
) -> Iterator[Input]:
    """A member of a tar, which is a stream: it is copied to where it can be read more than once."""
    kind, compression = kind_of(info.name)
    with tempfile.SpooledTemporaryFile(SPOOLED_BYTES) as copy:
        is_copied = False

        @contextmanager
        def open_stored() -> Iterator[BinaryIO]:
            nonlocal is_copied
            if not is_copied:
                member = content.extractfile(info)
                assert member is not None, f"{info.name} is a regular file"
                while block := member.read(BLOCK_BYTES):
                    # A full disk is no fault of the archive.
                    with writing(Path(tempfile.gettempdir()), ConfigError):
                        copy.write(block)
                is_copied = True
            copy.seek(0)
            yield cast(BinaryIO, copy)

        yield Input(
            name=name,
            kind=kind,
            compression=compression,
            is_given=False,
            size=info.size,
            open_stored=open_stored,
            most_bytes=most_bytes,
        )
