"""What files and models say cannot command a terminal."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path

import pytest
from rich.table import Table

from hotlap.data.manifest import Manifest, read_manifest, write_manifest
from hotlap.terminal import make_console, printable
from tests.synthetic_runs import make_run
from tests.token_data import write_directory
from tests.trained_run import in_process

ESCAPE = "\x1b]0;owned\x07"  # renames the window of a terminal
SHOWN = r"\u001b]0;owned\u0007"


def test_control_characters_become_escapes_and_all_else_stays() -> None:
    assert printable(ESCAPE) == SHOWN
    assert printable("a\nb\tc") == r"a\u000ab\u0009c"
    assert printable("a\nb\tc\r", lines=True) == "a\nb\tc\\u000d"
    assert printable("Grüße 日本 😀 [bold]") == "Grüße 日本 😀 [bold]"
    for unsafe in ("\x00", "\x7f", "\x9b", "\u202e", "\u2066", "\ud800", "\udcff"):
        assert json.loads(f'"{printable(unsafe)}"') == unsafe
    printable("\udcff").encode()


def test_a_console_prints_no_control_character_also_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    console = make_console()
    table = Table("name")
    table.add_row(ESCAPE)
    console.print(table)
    console.print(f"[bold]a[/bold]\n{ESCAPE}")
    console.print(ESCAPE, markup=False, soft_wrap=True)
    assert "\x1b]" not in out.getvalue()
    assert out.getvalue().count(SHOWN) == 3


def test_a_manifests_words_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_directory(tmp_path, train=[[1, 2, 3]])
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    (tmp_path / "tokenizer.json").unlink(missing_ok=True)
    tokenizer = {"name": ESCAPE, "sha256": manifest.tokenizer.sha256, "file": None}
    changed = Manifest(**{**vars(manifest), "source": ESCAPE, "licence": f"free\n{ESCAPE}"})
    object.__setattr__(changed, "tokenizer", type(manifest.tokenizer)(**tokenizer))
    write_manifest(tmp_path, changed)
    for more in ([], ["--json"]):
        result = in_process(capsys, "data", "inspect", str(tmp_path), *more)
        assert result.returncode == 0, result.stderr
        assert "\x1b" not in result.stdout
        assert SHOWN in result.stdout


def test_a_path_that_is_no_text_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    run = make_run(folder / "run")
    result = in_process(capsys, "report", str(run))
    assert result.returncode == 0, result.stderr
    assert r"caf\udce9" in result.stdout
    assert (run / "report.html").is_file()
    missing = in_process(capsys, "report", str(folder / "\x1bnowhere"))
    assert missing.returncode == 2
    assert r"\u001bnowhere" in missing.stderr
