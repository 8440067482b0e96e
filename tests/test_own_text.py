"""`hotlap train --data`: a user's own text is prepared on the way, and the sizes fit it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from hotlap.config import Config
from hotlap.corpus.fitting import fitting_batch, follow_data
from hotlap.corpus.own_text import is_own_text, prepared_from
from hotlap.corpus.tokenizer import VOCABULARIES, fitting_vocabulary
from hotlap.data.manifest import Manifest, ShardEntry, TokenizerEntry, read_manifest
from hotlap.recipes import resolve
from hotlap.settings import updated
from tests.command import complaint
from tests.trained_run import in_process

OPTIONS = "--size pico --steps 2 --precision float32 --device cpu --compile off"
WORDS = "these are some of the words that make a paragraph"
PLAIN = OPTIONS.split()


def text_of(characters: int) -> str:
    words = WORDS.split()
    chosen = random.Random(1)
    lines = (" ".join(chosen.choices(words, k=9)) + chosen.choice(["\n", ".\n\n"]) for _ in range(characters))
    text = ""
    while len(text) < characters:
        text += next(lines)
    return text


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_one_file_trains_without_a_size_to_know(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "book.txt").write_text(text_of(30_000))
    first = in_process(capsys, "train", "softcap", *PLAIN, "--data", "book.txt", "--name", "first")
    assert first.returncode == 0, first.stderr
    assert "validation the last " in first.stderr
    assert "fitted     vocabulary of " in first.stderr
    config = json.loads((here / "runs" / "first" / "config.json").read_text())
    manifest = read_manifest(Path(config["data"]["source"]))
    assert manifest is not None
    assert config["model"]["vocab_size"] == manifest.vocab_size <= 512
    evaluated = in_process(capsys, "eval", "runs/first")
    assert evaluated.returncode == 0, evaluated.stderr

    again = in_process(capsys, "train", "softcap", *PLAIN, "--data", "book.txt", "--dry-run", "--json")
    assert json.loads(again.stdout)["data"]["source"] == config["data"]["source"]
    assert "nothing to do" in again.stderr
    resumed = in_process(
        capsys, "train", "softcap", *PLAIN, "--data", "book.txt", "--name", "first", "--resume", "auto"
    )
    assert resumed.returncode == 0, resumed.stderr
    assert "runs/first is over" in resumed.stdout

    (here / "book.txt").write_text(text_of(40_000))
    changed = in_process(capsys, "train", "softcap", *PLAIN, "--data", "book.txt", "--dry-run")
    assert changed.returncode == 0, changed.stderr
    assert "preparing again: files changed since" in changed.stderr


def test_a_folder_with_a_few_lines_trains_too(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "notes").mkdir()
    for name in ("one", "two"):
        (here / "notes" / f"{name}.txt").write_text(text_of(1500) + name)
    (here / "notes" / "empty.txt").touch()
    result = in_process(capsys, "train", "sprint", *PLAIN, "--data.source", "notes")
    assert result.returncode == 0, result.stderr
    assert "problem    notes/empty.txt: an empty file" in result.stderr
    assert "256 tokens per step, because there are only " in result.stderr
    assert "validation on all " in result.stderr


def test_mistakes_are_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "five.txt").write_text("Hello")
    both = in_process(capsys, "train", "softcap", "--data", "five.txt", "--data.source", "sotu")
    assert "--data or --data.source; found both" in complaint(both)
    nowhere = in_process(capsys, "train", "softcap", "--device", "cpu", "--data", "nowhere")
    assert "a file or folder of text" in complaint(nowhere)
    short = in_process(capsys, "train", "softcap", *PLAIN, "--data", "five.txt")
    assert short.returncode == 2
    assert "one batch" in short.stderr.splitlines()[-1]


def test_what_counts_as_text(here: Path) -> None:
    (here / "sotu").mkdir()
    (here / "shards").mkdir()
    (here / "shards" / "fineweb_train_1.bin").touch()
    (here / "a.txt").write_text(text_of(3000))
    assert is_own_text("a.txt")
    assert is_own_text("./sotu")
    assert not is_own_text("sotu")
    assert not is_own_text("nowhere")
    assert not is_own_text("shards")
    assert not is_own_text(str(prepared_from(here / "a.txt")))
    assert prepared_from(here / "a.txt") != prepared_from(here / "a.txt", 258)


def manifest_with(train: int, val: int, vocabulary: int = 512) -> Manifest:
    shards = tuple(
        ShardEntry(f"{split}.bin", split, tokens, 1, tokens, "0" * 64)
        for split, tokens in (("train", train), ("val", val))
        if tokens
    )
    tokenizer = TokenizerEntry(f"bpe{vocabulary}", "0" * 64, "tokenizer.json")
    return Manifest(tokenizer, vocabulary, 0, shards, "", "")


def fitted(config: Config, manifest: Manifest, *given: str) -> Config:
    return updated(config, follow_data(config, given, manifest)[0])


def test_settings_follow_a_small_text_and_nothing_else() -> None:
    pico = resolve("softcap", "pico")
    assert follow_data(pico, [], manifest_with(10**6, 10**5)) == ({}, [])
    tiny = fitted(pico, manifest_with(2000, 300, 320))
    assert (tiny.batch.tokens_per_step, tiny.batch.sequence_tokens) == (512, 512)
    assert (tiny.model.vocab_size, tiny.evaluation.tokens) == (320, None)
    given = fitted(pico, manifest_with(2000, 300), "batch.tokens_per_step", "evaluation.tokens")
    assert given.batch == pico.batch
    assert given.evaluation == pico.evaluation
    small = fitted(resolve("softcap", "small"), manifest_with(10**6, 10**5, 4096))
    assert (small.data.tokenizer, small.model.vocab_size, small.data.tail) == ("bpe", 4096, "carry")
    assert small.batch.tokens_per_step == 262_144
    adamw = fitted(resolve("adamw", "pico"), manifest_with(600, 0))
    assert adamw.batch.tokens_per_step == adamw.batch.sequence_tokens == adamw.data.chunk_tokens == 256


def test_a_batch_is_at_most_half_of_the_text() -> None:
    for tokens in (256, 300, 511, 512, 5000, 10**6):
        assert 128 <= fitting_batch(tokens) <= tokens / 2
        assert fitting_batch(tokens) * 4 > tokens / 2
    assert fitting_batch(5) == 128


def test_a_vocabulary_grows_with_the_text() -> None:
    sizes = [fitting_vocabulary(10**power) for power in range(1, 9)]
    assert sizes == sorted(sizes)
    assert (sizes[0], sizes[-1]) == (VOCABULARIES[0], VOCABULARIES[-1])
