"""The tokenizer as `transformers` loads it, with one difference: encoding a text starts with end of text.

Hotlap treats a prompt as the start of a document, and a document starts with that token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hotlap.corpus.tokenizer import END_OF_TEXT, TOKENIZER_FILE, Tokenizer
from hotlap.errors import CheckpointError
from hotlap.inference.generate import encode_prompt

CONFIG_FILE = "tokenizer_config.json"
# Letters with accents, other scripts, digits, blanks in a row: what pre-tokenization has rules for.
CHECKED_TEXT = "Once upon a time, in 1790:  the café's 日本\n\n\tGrüße — we'll see."


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_tokens: int | None) -> None:
    """`max_tokens`: how long a text may be, None without a limit."""
    content = json.loads(tokenizer.content)
    special = {END_OF_TEXT: {"id": END_OF_TEXT, "ids": [tokenizer.end_of_text], "tokens": [END_OF_TEXT]}}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [token_piece(), text_piece("A")],
        "pair": [token_piece(), text_piece("A"), token_piece(), text_piece("B")],
        "special_tokens": special,
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "padding_side": "left",  # so that `generate` goes on where each text of a batch ends
        "clean_up_tokenization_spaces": False,
        **({"model_max_length": max_tokens} if max_tokens else {}),
    }
    text = json.dumps(content, ensure_ascii=False, indent=0)
    (directory / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    (directory / CONFIG_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")


def token_piece() -> dict[str, Any]:
    return {"SpecialToken": {"id": END_OF_TEXT, "type_id": 0}}


def text_piece(which: str) -> dict[str, Any]:
    return {"Sequence": {"id": which, "type_id": 0}}


def check_tokenizer(tokenizer: Tokenizer, directory: Path) -> None:
    from tokenizers import Tokenizer as Reader

    found = Reader.from_file(str(directory / TOKENIZER_FILE)).encode(CHECKED_TEXT).ids
    expected = encode_prompt(tokenizer, CHECKED_TEXT)
    if found != expected:
        raise CheckpointError(
            expected=f"the tokens {expected} from the exported tokenizer",
            found=str(found),
            do="install the version of tokenizers that constraints.txt names",
        )
