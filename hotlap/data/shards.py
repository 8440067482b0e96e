"""The `.bin` shard format of llm.c (https://github.com/karpathy/llm.c) and modded-nanogpt.

A header of 256 little-endian int32 (magic, version, token count, zeros) is followed by the tokens. Two
variants are read and written: 2-byte and 4-byte tokens. A shard appears under its name only when it is
complete, and tokens are mapped only if the header matches the file size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from hotlap.errors import DataError
from hotlap.files import partial_path, publish, reading, writing

Tokens = NDArray[np.unsignedinteger[Any]]

HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
HEADER_DTYPE = np.dtype("<i4")
MAX_SHARD_TOKENS = 2**31 - 1  # the header counts tokens in an int32
MAX_VOCABULARY = 2**31  # the loader returns inputs as int32

SPLITS = ("train", "val")


@dataclass(frozen=True)
class Variant:
    magic: int
    version: int
    dtype: np.dtype[Any]


NARROW = Variant(magic=20240520, version=1, dtype=np.dtype("<u2"))
WIDE = Variant(magic=20240801, version=7, dtype=np.dtype("<u4"))
VARIANTS = (NARROW, WIDE)


@dataclass(frozen=True)
class Header:
    variant: Variant
    tokens: int


def variant_for(vocab_size: int) -> Variant:
    """The narrowest variant that can hold every id of the vocabulary."""
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        raise DataError(
            expected=f"a vocabulary of 1 to {MAX_VOCABULARY} tokens",
            found=str(vocab_size),
            do="check the tokenizer",
        )
    return NARROW if vocab_size <= 2**16 else WIDE


def shard_name(split: str, index: int) -> str:
    assert split in SPLITS, f"unknown split {split!r}"
    return f"{split}_{index:06d}.bin"


def find_shards(directory: Path, split: str) -> list[Path]:
    """The shards of a split in name order: all `.bin` files whose name contains the split's name."""
    assert split in SPLITS, f"unknown split {split!r}"
    shards = sorted(directory.glob(f"*{split}*.bin"))
    for shard in shards:
        if all(name in shard.name for name in SPLITS):
            raise DataError(
                expected=f"either {' or '.join(SPLITS)} in the name of a shard",
                found=f"both in {shard}",
                do="rename it, so that the model is not trained on validation data",
            )
    return shards


def read_header(path: Path) -> Header:
    """Read a shard's header and check it, including against the file size."""
    with reading(path), path.open("rb") as file:
        raw = file.read(HEADER_BYTES)
        file_bytes = file.seek(0, 2)
    if len(raw) < HEADER_BYTES:
        raise DataError(
            expected=f"a header of {HEADER_BYTES} bytes in {path}",
            found=f"{len(raw)} bytes",
            do="the file is truncated: copy or prepare it again",
        )
    magic, version, tokens = (int(value) for value in np.frombuffer(raw, HEADER_DTYPE, count=3))
    variant = next((known for known in VARIANTS if (known.magic, known.version) == (magic, version)), None)
    if variant is None:
        raise DataError(
            expected=f"{' or '.join(f'magic {v.magic} version {v.version}' for v in VARIANTS)} in {path}",
            found=f"magic {magic} version {version}",
            do="this is not a token shard; create one with `hotlap data prepare`",
        )
    if tokens < 1:
        raise DataError(
            expected=f"at least one token in {path}", found=f"a count of {tokens}", do="remove the shard"
        )
    expected_bytes = HEADER_BYTES + tokens * variant.dtype.itemsize
    if file_bytes != expected_bytes:
        raise DataError(
            expected=f"{expected_bytes} bytes in {path}, for the {tokens} tokens its header counts",
            found=f"{file_bytes} bytes",
            do="the file is truncated or damaged: copy or prepare it again",
        )
    return Header(variant, tokens)


def map_tokens(path: Path) -> Tokens:
    """A shard's tokens, memory-mapped and read-only. Pages are read from disk on first use."""
    header = read_header(path)
    with reading(path):
        mapped = np.memmap(
            path, dtype=header.variant.dtype, mode="r", offset=HEADER_BYTES, shape=(header.tokens,)
        )
    return np.asarray(mapped)  # slicing a plain array is several times faster than slicing a memmap


class ShardWriter:
    """Writes one shard incrementally. `commit` renames it into place after the last byte is on disk.

    As a context manager it commits on success and removes the partial file if the body raises.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.tokens = 0
        self._variant = variant_for(vocab_size)
        with writing(path):
            self._file = partial_path(path).open("wb")
            self._file.write(bytes(HEADER_BYTES))  # placeholder; commit writes the header

    def append(self, tokens: Tokens | NDArray[np.signedinteger[Any]] | Sequence[int]) -> None:
        values = np.asarray(tokens)
        if values.size == 0:
            return
        assert values.ndim == 1, f"tokens must be one-dimensional, not {values.shape}"
        assert values.dtype.kind in "iu", f"tokens must be integers, not {values.dtype}"
        smallest, largest = int(values.min()), int(values.max())
        if smallest < 0 or largest >= self.vocab_size:
            raise DataError(
                expected=f"token ids from 0 to {self.vocab_size - 1} for {self.path}",
                found=f"id {smallest if smallest < 0 else largest}",
                do="pass the vocabulary size of the tokenizer that produced them",
            )
        if self.tokens + values.size > MAX_SHARD_TOKENS:
            raise DataError(
                expected=f"at most {MAX_SHARD_TOKENS} tokens in {self.path}",
                found=f"{self.tokens + values.size}",
                do="use smaller shards",
            )
        with writing(self.path):
            self._file.write(values.astype(self._variant.dtype, copy=False).tobytes())
        self.tokens += values.size

    def commit(self) -> None:
        if self.tokens == 0:
            self.abort()
            raise DataError(
                expected=f"at least one token in {self.path}", found="none", do="check the input text"
            )
        header = np.zeros(HEADER_INTS, HEADER_DTYPE)
        header[:3] = self._variant.magic, self._variant.version, self.tokens
        try:
            with writing(self.path):
                self._file.seek(0)
                self._file.write(header.tobytes())
                publish(self._file, self.path)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """Remove the partial file."""
        # close() flushes, which can fail again on a full disk. The file must be removed in any case.
        try:
            self._file.close()
        except OSError:
            pass
        finally:
            partial_path(self.path).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


def write_shard(path: Path, tokens: Tokens | Sequence[int], vocab_size: int) -> None:
    with ShardWriter(path, vocab_size) as writer:
        writer.append(tokens)
