"""`hotlap play`, in a terminal and at the end of a pipe."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hotlap.inference.options import SampleOptions
from hotlap.inference.session import Session
from tests.trained_run import trained_run

SECONDS = 120

# Its Ctrl-C interrupts it only if the terminal is its own, and shells let background programs ignore that.
PLAY = """
import fcntl, runpy, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("hotlap", run_name="__main__")
"""


class Model:
    """Goes on with numbered words, and ends after `length` of them."""

    def __init__(self, length: int = 10**9) -> None:
        self.length = length
        self.asked: list[tuple[str, SampleOptions]] = []

    def stream(self, prompt, options):
        self.asked.append((prompt, options))
        for number in range(min(self.length, options.max_tokens)):
            yield f" w{number}"


def session(model: Model, **options) -> tuple[Session, list[str]]:
    written: list[str] = []
    return Session(model, SampleOptions(**{"max_tokens": 3, **options}), written.append), written


def test_each_text_has_a_seed_of_its_own_and_an_empty_line_asks_again():
    model = Model()
    one, written = session(model, seed=5)
    for line in ("Once", "", ":samples 2", "Twice"):
        assert one.answer(line)
    assert [prompt for prompt, _ in model.asked] == ["Once", "Once", "Twice", "Twice"]
    assert [options.seed for _, options in model.asked] == [5, 6, 7, 8]
    assert all(options.num_samples == 1 for _, options in model.asked)
    text = "".join(written)
    assert text.startswith("Once w0 w1 w2\n")
    assert "── 1 of 2\nTwice w0 w1 w2\n── 2 of 2\nTwice w0" in text


def test_more_goes_on_from_where_a_text_ended():
    model = Model()
    one, written = session(model)
    one.answer(":samples 2")
    one.answer("Once")
    one.answer(":samples 1")
    written.clear()
    one.answer(":more 1")
    assert model.asked[-1][0] == "Once w0 w1 w2"
    assert "".join(written) == " w0 w1 w2\n"
    one.answer(":more")
    assert model.asked[-1][0] == "Once w0 w1 w2 w0 w1 w2"


def test_options_change_and_a_mistake_changes_nothing():
    one, written = session(Model())
    for line in (":temperature 0.5", ":tokens 7", ":top-k 4", ":top-p 0.9"):
        one.answer(line)
    one.answer(":top-k none")
    changed = one.options
    assert changed == SampleOptions(max_tokens=7, temperature=0.5, top_p=0.9)
    lines = iter(
        [":tokens", ":tokens many", ":temperature -1", ":top-p 2", ":tempreature 1", ":more", ":more 3"]
    )

    def read() -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    written.clear()
    one.run(read)
    assert one.options == changed
    assert [text.startswith("expected ") for text in written] == [True] * 7
    assert "did you mean `:temperature`" in written[4]


def test_an_end_of_text_is_told_and_control_characters_are_not_obeyed():
    one, written = session(Model(length=2))
    one.answer("\x1b[2J")
    assert "".join(written) == "\\u001b[2J w0 w1\n(end of the text)\n"


def test_it_ends_at_quit_and_keeps_going_after_an_interrupt_while_typing():
    one, _ = session(Model())
    lines = iter([KeyboardInterrupt, "Once", ":quit", "never"])

    def read() -> str:
        line = next(lines)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    one.run(read)
    assert next(lines) == "never"


class Terminal:
    """A `hotlap play` on a pseudo-terminal of its own."""

    def __init__(self, *words: str, cache: Path) -> None:
        self.shown = ""
        self._main, end = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", PLAY, "play", *words],
            stdin=end,
            stdout=end,
            stderr=end,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": str(Path(__file__).parents[1]),
                "OMP_NUM_THREADS": "1",
                "HOTLAP_CACHE": str(cache),
                "TERM": "xterm",
            },
        )
        os.close(end)

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self._main, text.encode())

    def wait_for(self, pattern: str) -> str:
        """What has been shown since the last typing, once it has the pattern."""
        until = time.monotonic() + SECONDS
        while not re.search(pattern, self.shown):
            assert time.monotonic() < until, f"no {pattern!r} in {self.shown[-300:]!r}"
            if select.select([self._main], [], [], 1)[0]:
                try:
                    self.shown += os.read(self._main, 65536).decode(errors="replace")
                    self.shown = re.sub(r"\x1b\[\?2004[hl]\r?", "", self.shown)  # how readline takes pastes
                except OSError:
                    self.shown += "<end>"
        return self.shown

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminal(tmp_path):
    opened = []

    def start(*words: str) -> Terminal:
        opened.append(Terminal(str(trained_run()), "--device", "cpu", *words, cache=tmp_path / "cache"))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


@pytest.mark.slow
def test_in_a_terminal_it_streams_ctrl_c_stops_the_text_only_and_history_comes_back(terminal):
    play = terminal("--tokens", "1000000", "--samples", "1000")  # which would take hours
    assert "step 3" in play.wait_for("> $")
    play.type("The state\n")
    play.wait_for(r"(?s)The state\r\n── 1 of 1000\r\nThe state.{20}")
    os.kill(play.process.pid, signal.SIGINT)
    play.wait_for(r"\(stopped\)\r\n> $")
    for line in (":samples 1", ":tokens 2"):
        play.type(f"{line}\n")
        play.wait_for(rf"{line} .*\r\n> $")
    play.type("\x1b[A\x1b[A\x1b[A\n")  # three lines back
    play.wait_for(r"(?s)\nThe state.*> $")
    play.type("half a line\x03")  # Ctrl-C, as typed
    play.wait_for(r"\n> $")
    play.type("\x04")  # Ctrl-D
    assert play.process.wait(SECONDS) == 0

    again = terminal("--tokens", "2")
    again.wait_for("> $")
    again.type("\x1b[A\x1b[A\n")
    again.wait_for(r"(?s):tokens 2 .*> $")  # from the earlier session
    again.type(":quit\n")
    assert again.process.wait(SECONDS) == 0


def test_at_the_end_of_a_pipe_it_answers_line_by_line_without_a_prompt():
    result = subprocess.run(
        [sys.executable, "-m", "hotlap", "play", str(trained_run()), "--device", "cpu", "--tokens", "2"],
        input=":samples 2\nOnce\n",
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    assert "── 2 of 2\nOnce" in result.stdout
    assert "> " not in result.stdout
