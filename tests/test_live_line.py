"""The line at the bottom of a terminal: what it keeps where there is little room, and what it leaves."""

import io

import pytest
from rich.console import Console

from hotlap.live_line import LiveLine, TimeLeft, duration, fitted
from hotlap.runs.directory import RunDirectory
from hotlap.runs.recorder import MainRecorder
from hotlap.runs.trackers import Trackers

NEEDED = ["1:12 left", "loss 3.9421", "bpb 1.3607"]
WANTED = ["step 640/1300", "val 4.0401", "56,504 tok/s", "lr ×1.00", "window 256"]


def test_at_80_columns_bar_percent_time_loss_and_bits_per_byte_stay():
    line = fitted(80, 0.49, NEEDED, WANTED, ascii_only=False)
    assert len(line) <= 79
    assert line.startswith(" 49% ━━━")
    assert line.count("━") + line.count("─") >= 20
    assert all(part in line for part in NEEDED)
    assert "window" not in line


def test_at_140_columns_everything_is_there():
    line = fitted(140, 1.0, NEEDED, WANTED, ascii_only=True)
    assert len(line) <= 139
    assert all(part in line for part in NEEDED + WANTED)
    assert "#" in line
    assert "━" not in line


@pytest.mark.parametrize("columns", [1, 10, 40, 60])
def test_a_narrow_terminal_gets_what_fits(columns):
    assert len(fitted(columns, 0.5, NEEDED, WANTED, ascii_only=False)) <= max(0, columns - 1)


def test_durations():
    assert [duration(s) for s in (None, 0, 59.4, 61, 3723)] == ["--:--", "0:00", "0:59", "1:01", "1:02:03"]


def test_the_time_left_follows_the_last_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("hotlap.live_line.time.monotonic", lambda: now[0])
    left = TimeLeft(1000, 100)
    assert left.after(100) is None
    now[0] = 10.0
    assert left.after(200) == pytest.approx(80)
    for minute in range(1, 9):
        now[0] = 10.0 + 60 * minute
        estimate = left.after(200 + 10 * minute)
    assert estimate == pytest.approx(720 * 6)


def test_the_cursor_waits_at_the_start_and_what_is_below_is_erased(monkeypatch):
    monkeypatch.setattr("hotlap.live_line.REWRITE_SECONDS", 0.0)
    out = io.StringIO()
    live = LiveLine(out)
    live.hide()
    assert out.getvalue() == ""
    live.show("one")
    live.show("two")
    live.hide()
    assert out.getvalue() == "\r\x1b[Jone\r\r\x1b[Jtwo\r\r\x1b[J"


def record(step: int) -> dict:
    return {"kind": "train", "step": step, "loss": 3.5, "lr": 1.0, "window": 256, "tokens_per_s": 5e4}


def test_lines_are_printed_above_the_live_line(tmp_path, monkeypatch):
    monkeypatch.setattr("hotlap.live_line.REWRITE_SECONDS", 0.0)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, legacy_windows=False, highlight=False)
    with (
        RunDirectory.create(tmp_path, "run") as run,
        MainRecorder(run, console, 10, 0, Trackers()) as recorder,
    ):
        recorder.trained(record(1))
        recorder.validated({"kind": "validation", "step": 1, "val_loss": 3.0, "val_bpb": 1.5, "train_s": 1.0})
        recorder.trained(record(2))
    shown = out.getvalue()
    assert "\r\x1b[Jstep:1/10 val_loss:3.0000" in shown
    assert " 20% " in shown.split("val_bpb:1.5000\n")[1]
    assert "bpb 1.5000" in shown.split("val_bpb:1.5000\n")[1]
    assert shown.endswith("\r\x1b[J")
