"""A run at `pico` on made-up text, trained once for all tests; commands without a process of their own."""

from __future__ import annotations

import atexit
import functools
import random
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from hotlap.cli import main
from tests.command import hotlap_here

WORDS = "time people government state law peace war labor trade naïve café 日本 Grüße Congress power"


def write_texts(folder: Path, documents: int = 40, words: int = 500, seed: int = 0) -> Path:
    folder.mkdir()
    chosen, words_known = random.Random(seed), WORDS.split()
    for number in range(documents):
        text = " ".join(
            chosen.choice(words_known) + chosen.choice(["", "s", "ing", ".", ","]) for _ in range(words)
        )
        (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return folder


def succeed(result: subprocess.CompletedProcess[str]) -> str:
    assert result.returncode == 0, result.stderr
    return result.stdout


@functools.cache
def prepared_texts() -> Path:
    """A temporary folder with `data`, for runs."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    texts, data = write_texts(folder / "texts"), str(folder / "data")
    succeed(hotlap_here("data", "prepare", str(texts), "--vocab", "300", "--out", data, "--licence", "CC0"))
    return folder


@functools.cache
def trained_run(recipe: str = "softcap", name: str = "lap", settings: str = "--steps 3") -> Path:
    """`<temporary>/runs/<name>`, beside the `data` that it was trained on; not to be changed."""
    folder = prepared_texts()
    options = f"--size pico --vocab-size 300 {settings} --precision float32 --device cpu --compile off"
    evaluation = ["--evaluation.tokens", "none", "--evaluation.every-steps", "0"]
    where = ["--name", name, "--data.source", str(folder / "data"), "--runs", str(folder / "runs")]
    succeed(hotlap_here("train", recipe, *options.split(), *evaluation, *where))
    return folder / "runs" / name


def copied_run(target: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(trained_run(), target / "lap")


def in_process(capsys: pytest.CaptureFixture[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """As `tests.command.hotlap`, without the time that a new process takes."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    out, err = capsys.readouterr()
    code = exit_info.value.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out, err)
