"""Byte-level BPE tokenizers: trained on a corpus, or GPT-2's.

Both are stored as a `tokenizer.json` in the format of Hugging Face tokenizers
(https://github.com/huggingface/tokenizers) next to the shards. Training uses that library. Encoding uses
tiktoken (https://github.com/openai/tiktoken), which produces the same ids several times faster and releases
the GIL. The literal text `<|endoftext|>` is encoded as ordinary text, never as the end-of-text token.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
from numpy.typing import NDArray

from hotlap.data.manifest import read_manifest, verify_file
from hotlap.errors import ConfigError, DataError
from hotlap.files import reading, write_atomically, writing

END_OF_TEXT = "<|endoftext|>"
TOKENIZER_FILE = "tokenizer.json"
GPT2 = "gpt2"

# GPT-2's pre-tokenization: no merge crosses a match. `ByteLevel` of the `tokenizers` library is the same.
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# Text is encoded in pieces of at most this many characters. This bounds memory and avoids a failure of
# tiktoken's regex engine on very long runs of whitespace.
PIECE_CHARACTERS = 2**18

# The last position between a non-blank and a blank. Every match of GPT2_WORDS ends there and none looks past
# it, so cutting there does not change the tokens.
_LAST_CUT = re.compile(r".*\S(?=[ \n])", re.DOTALL)

_SURROGATE = re.compile("[\ud800-\udfff]")

# Sizes that are chosen for a text, and how much of it there has to be for each entry.
VOCABULARIES = (320, 512, 1024, 2048, 4096)
BYTES_PER_ENTRY = 200

BYTE_TOKENS = 256
SMALLEST_VOCABULARY = BYTE_TOKENS + 1  # bytes and end of text

Ids = NDArray[np.uint32]


def cut_length(text: str) -> int:
    """Length of the first piece of `text`, which is longer than one piece."""
    last_cut = _LAST_CUT.match(text, 0, PIECE_CHARACTERS)
    return last_cut.end() if last_cut else PIECE_CHARACTERS


def pieces(text: str) -> Iterator[str]:
    """Cut `text` into pieces whose concatenated tokens are those of the whole text.

    Exception: a word longer than a whole piece is cut in the middle.
    """
    while len(text) > PIECE_CHARACTERS:
        length = cut_length(text)
        yield text[:length]
        text = text[length:]
    if text:
        yield text


def without_surrogates(text: str) -> tuple[str, int]:
    """Replace lone surrogates, which UTF-8 cannot encode, with U+FFFD. Returns the text and their number."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.subn("\ufffd", text)
    return text, 0


class Tokenizer:
    """Converts text to token ids and back. See `train_tokenizer`, `gpt2_tokenizer` and `load_tokenizer`."""

    def __init__(self, name: str, content: bytes) -> None:
        """`content`: the bytes of a `tokenizer.json` with a byte-level BPE model. See `read_tokenizer`."""
        self.name = name
        self.content = content
        self.fingerprint = hashlib.sha256(content).hexdigest()
        vocabulary: dict[str, int] = json.loads(content)["model"]["vocab"]
        self.vocab_size = len(vocabulary)
        self.end_of_text = vocabulary[END_OF_TEXT]
        ranks = {_as_bytes(token): rank for token, rank in vocabulary.items() if token != END_OF_TEXT}
        if sorted([*ranks.values(), self.end_of_text]) != list(range(self.vocab_size)):
            raise ValueError("ids have gaps")
        missing = next((byte for byte in range(BYTE_TOKENS) if bytes([byte]) not in ranks), None)
        if missing is not None:  # text with this byte would abort tiktoken
            raise ValueError(f"no token for the byte {missing:#04x}")
        self._encoding = tiktoken.Encoding(
            name, pat_str=GPT2_WORDS, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.end_of_text}
        )
        # Bytes of text per id; 0 for end of text.
        self._byte_lengths = np.zeros(self.vocab_size, np.int64)
        self._byte_lengths[list(ranks.values())] = [len(token) for token in ranks]

    def encode(self, text: str) -> Ids:
        text, _ = without_surrogates(text)
        encoded = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces(text)]
        return np.concatenate(encoded) if encoded else np.empty(0, np.uint32)

    def encode_batch(self, texts: Sequence[str], workers: int = 1) -> list[Ids]:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(self.encode, texts))

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        wanted = [int(token) for token in ids]
        wrong = next((token for token in wanted if not 0 <= token < self.vocab_size), None)
        if wrong is not None:
            raise DataError(
                expected=f"token ids from 0 to {self.vocab_size - 1} for tokenizer {self.name}",
                found=f"id {wrong}",
                do="decode with the tokenizer that produced them",
            )
        return self._encoding.decode_bytes(wanted)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`. Bytes of an incomplete character become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def text_bytes(self, ids: NDArray[np.unsignedinteger[Any]]) -> int:
        """Number of bytes of text that `ids` encode. End-of-text tokens count as 0."""
        return int(self._byte_lengths[ids].sum())

    def save(self, directory: Path) -> None:
        path = directory / TOKENIZER_FILE
        with writing(path):
            write_atomically(path, self.content)


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of a prepared directory. Its file is verified against the manifest's checksum."""
    manifest = read_manifest(directory)
    if manifest is None or manifest.tokenizer.file is None:
        raise DataError(
            expected=f"a manifest that names a tokenizer in {directory}",
            found="none",
            do="prepare the data with `hotlap data prepare`",
        )
    verify_file(directory, manifest.tokenizer)
    return read_tokenizer(directory / manifest.tokenizer.file, manifest.tokenizer.name)


def read_tokenizer(path: Path, name: str) -> Tokenizer:
    """The tokenizer in a `tokenizer.json`, without a manifest."""
    with reading(path):
        content = path.read_bytes()
    try:
        return Tokenizer(name, content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            expected=f"a byte-level BPE tokenizer in {path}",
            found=f"{type(error).__name__}: {error}",
            do="restore the file",
        ) from error


def check_vocabulary(vocab_size: int) -> None:
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            expected=f"a vocabulary of at least {SMALLEST_VOCABULARY} ({BYTE_TOKENS} bytes and end of text)",
            found=str(vocab_size),
            do="choose a larger vocabulary",
        )


def fitting_vocabulary(text_bytes: int) -> int:
    """The size of a vocabulary for a text: the largest whose tokens each occur often enough to be learned."""
    fitting = [size for size in VOCABULARIES if size * BYTES_PER_ENTRY <= text_bytes]
    return max(fitting, default=VOCABULARIES[0])


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, or_fewer: bool = False) -> Tokenizer:
    """Train a vocabulary on `texts`: id 0 is end of text, ids 1 to 256 are bytes, then merges by rank.

    With `or_fewer`, a text that does not have that many distinct words gets a smaller vocabulary.
    Deterministic: the same texts in the same order give a byte-identical `tokenizer.json`.
    """
    from tokenizers import Tokenizer as Learner
    from tokenizers import models, pre_tokenizers, trainers

    check_vocabulary(vocab_size)
    learner: Any = Learner(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer: Any = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer=trainer)
    found = learner.get_vocab_size()
    if found != vocab_size and not or_fewer:
        raise DataError(
            expected=f"text with enough distinct words for a vocabulary of {vocab_size}",
            found=f"enough for {found}",
            do=f"leave --vocab out, give at most {found}, or provide more text",
        )
    model = json.loads(learner.to_str())["model"]
    return Tokenizer(f"bpe{found}", _tokenizer_json(model["vocab"], [tuple(m) for m in model["merges"]]))


def gpt2_tokenizer(ranks: dict[bytes, int]) -> Tokenizer:
    """GPT-2's tokenizer, built from its token ranks, which are also the ids."""
    vocabulary = {_as_text(token): rank for token, rank in ranks.items()}
    vocabulary[END_OF_TEXT] = len(ranks)
    by_rank = sorted(ranks, key=ranks.__getitem__)
    merges = [_halves(token, ranks) for token in by_rank if len(token) > 1]
    spelled = [(_as_text(left), _as_text(right)) for left, right in merges]
    tokenizer = Tokenizer(GPT2, _tokenizer_json(vocabulary, spelled))
    hello = tokenizer.encode("Hello world").tolist()
    if (hello, tokenizer.end_of_text) != ([15496, 995], 50256):
        raise DataError(
            expected="GPT-2's vocabulary, in which `Hello world` is [15496, 995] and end of text is 50256",
            found=f"{hello} and {tokenizer.end_of_text}",
            do="delete the file from the cache and download it again",
        )
    return tokenizer


def ranks_of_merges(merges_file: str) -> dict[bytes, int]:
    """GPT-2's token ranks from its `vocab.bpe`: the bytes in GPT-2's order, then one token per merge."""
    tokens = [_as_bytes(char) for char in _byte_of_char()]
    for line in merges_file.splitlines()[1:]:  # the first line is a version
        tokens.append(_as_bytes(line.replace(" ", "")))
    return {token: rank for rank, token in enumerate(tokens)}


def _tokenizer_json(vocabulary: Mapping[str, int], merges: Iterable[tuple[str, str]]) -> bytes:
    """The content of `tokenizer.json`. The library does not write it, because its format may change."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": vocabulary[END_OF_TEXT], "content": END_OF_TEXT, "special": True, "normalized": False}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"single_word": False, "lstrip": False, "rstrip": False}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocabulary.items(), key=lambda entry: entry[1])),
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    return json.dumps(content, ensure_ascii=False, indent=0).encode()


def _halves(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """The merge (left, right) that produces `token`, found by applying all merges of lower rank."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 2:
        joined = [ranks.get(parts[i] + parts[i + 1], len(ranks)) for i in range(len(parts) - 1)]
        first = joined.index(min(joined))
        parts[first : first + 2] = [parts[first] + parts[first + 1]]
    return parts[0], parts[1]


@functools.cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes, in the order of the byte tokens' ids.

    Printable Latin-1 characters map to themselves. They are followed by the other bytes, as U+0100 and up.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


@functools.cache
def _char_of_byte() -> dict[int, str]:
    return {byte: char for char, byte in _byte_of_char().items()}


def _as_bytes(token: str) -> bytes:
    table = _byte_of_char()
    return bytes(table[char] for char in token)


def _as_text(token: bytes) -> str:
    table = _char_of_byte()
    return "".join(table[byte] for byte in token)
