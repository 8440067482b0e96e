"""A conversation with a model in a terminal: a line is the start of a text, which the model goes on with.

A line that starts with a colon changes how; `HELP` lists them. Ctrl-C stops the text that is being written,
or clears the line that is being typed; the session ends at `:quit` or at the end of its input.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from hotlap.errors import ConfigError, HotlapError
from hotlap.inference.options import SampleOptions
from hotlap.settings import nearest
from hotlap.terminal import printable

if TYPE_CHECKING:
    from hotlap.inference.load import LoadedModel

HELP = """\
TEXT              go on from TEXT
(an empty line)   the same start again, continued differently
:more [N]         go on from where the last text, or the Nth of several, ended
:temperature X    0 takes the likeliest token each time; higher is more surprising
:tokens N         how many tokens to write at most
:samples N        how many texts to write for each start
:top-k K, :top-p P, :seed N   as for `hotlap sample`; `none` takes the first two back
:show             what these are
:quit             as Ctrl-D
Ctrl-C stops the text, arrow keys bring back earlier lines."""

# Commands that change an option → its name in `SampleOptions`.
OPTIONS = {
    "temperature": "temperature",
    "tokens": "max_tokens",
    "samples": "num_samples",
    "top-k": "top_k",
    "top-p": "top_p",
    "seed": "seed",
}
OTHERS = ("more", "show", "help", "quit")

Write = Callable[[str], None]


class Session:
    def __init__(self, loaded: LoadedModel, options: SampleOptions, write: Write) -> None:
        self.loaded = loaded
        self.options = options
        self._write = write
        self._start = ""  # the last one
        self._texts: list[str] = []  # with which it was continued, each with the start

    def run(self, read: Callable[[], str]) -> None:
        """Answer one line after the other until the end of the input."""
        while True:
            try:
                line = read()
            except EOFError:
                return
            except KeyboardInterrupt:
                self._write("\n")
                continue
            try:
                if not self.answer(line):
                    return
            except KeyboardInterrupt:
                self._write("\n(stopped)\n")
            except HotlapError as mistake:
                self._write(f"{mistake}\n")

    def answer(self, line: str) -> bool:
        """Carry out one line; False if it ends the session."""
        if not line.startswith(":"):
            self.go_on(line or self._start)
            return True
        name, _, value = line[1:].strip().partition(" ")
        if name == "quit":
            return False
        if name == "more":
            self.go_on(self._text(value.strip()), echo=False)
        elif name == "help":
            self._write(f"{HELP}\n")
        elif name == "show":
            self._write(f"{self.described_options()}\n")
        elif name in OPTIONS:
            self._change(name, value.strip())
        else:
            known = [*OPTIONS, *OTHERS]
            raise ConfigError(
                expected=f"one of :{', :'.join(known)}",
                found=f":{name}",
                do=nearest(name, known).replace("`", "`:", 1),
            )
        return True

    def go_on(self, start: str, *, echo: bool = True) -> None:
        """Write `start` and how it goes on, once per sample. Each text has a seed of its own."""
        self._start, self._texts = start, []
        count = self.options.num_samples
        for number in range(1, count + 1):
            if count > 1:
                self._write(f"── {number} of {count}\n")
            one = replace(self.options, num_samples=1)
            self.options = replace(self.options, seed=self.options.seed + 1)
            self._texts.append(start)
            if echo:
                self._write(printable(start, lines=True))
            drawn = 0
            for piece in self.loaded.stream(start, one):
                drawn += 1
                self._texts[-1] += piece
                self._write(printable(piece, lines=True))
            self._write("\n(end of the text)\n" if drawn < one.max_tokens else "\n")

    def described_options(self) -> str:
        return "  ".join(f":{name} {getattr(self.options, field)}" for name, field in OPTIONS.items())

    def _text(self, number: str) -> str:
        known = [str(n) for n in range(1, len(self._texts) + 1)]
        if not known or (number and number not in known):
            raise ConfigError(
                expected=f"a text to go on from ({', '.join(known) or 'none yet'})",
                found=f":more {number}".strip(),
                do="type the start of a text first" if not known else "choose one of them",
            )
        return self._texts[int(number) - 1 if number else -1]

    def _change(self, name: str, value: str) -> None:
        field = OPTIONS[name]
        (kind,) = (str(one.type) for one in fields(SampleOptions) if one.name == field)
        changed: dict[str, Any] = {field: None}
        try:
            if value.lower() != "none" or "None" not in kind:
                changed[field] = float(value) if "float" in kind else int(value)
        except ValueError:
            raise ConfigError(
                expected=f":{name} with a number", found=f"`{value}`" if value else "none", do="give one"
            ) from None
        self.options = replace(self.options, **changed)
        self._write(f"{self.described_options()}\n")
