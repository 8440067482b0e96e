"""Fixtures that several test files share. None of them needs a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import hotlap

WORDS = "the of and to in a state union congress people year government that for by be is with as it has will"


def made_up_text(documents: int = 60, words: int = 700) -> str:
    """Documents with some structure to learn, as JSON lines; the same each time."""
    words_known = WORDS.split()
    lines = []
    for document in range(documents):
        chosen = [words_known[(i * i + document * (i % 7) + i // 5) % len(words_known)] for i in range(words)]
        lines.append(f'{{"text": "{" ".join(chosen)}."}}')
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared directory with a vocabulary of 512, as `pico` needs it."""
    folder = tmp_path_factory.mktemp("tiny")
    source = folder / "text.jsonl"
    source.write_text(made_up_text())
    result = hotlap("data", "prepare", str(source), "--vocab", "512", "--out", str(folder / "data"))
    assert result.returncode == 0, result.stderr
    return folder / "data"
