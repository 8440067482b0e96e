"""A run that is to be started elsewhere, and its command on a node."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

RENDEZVOUS_PORT = 29500
LINE_CHARACTERS = 96  # of a command, before it goes on in the next line


@dataclass(frozen=True)
class Job:
    recipe: str  # as it is given to `hotlap train`
    size: str
    name: str  # of the run
    nodes: int
    gpus: int  # per node, one process each
    options: tuple[str, ...]  # further words of `hotlap train`
    command: str  # that wrote this file

    @property
    def place(self) -> str:
        gpus = "1 GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return gpus if self.nodes == 1 else f"{self.nodes} nodes with {gpus} each"

    @property
    def train_words(self) -> list[str]:
        """The arguments of `hotlap`, the same at every start: the run is started, or goes on."""
        words = ["train", self.recipe, "--size", self.size, "--name", self.name, "--resume", "auto"]
        return [*words, *self.options]

    @property
    def processes(self) -> list[str]:
        """The option for all ranks of one node."""
        return ["--procs", str(self.gpus)] if self.gpus > 1 else []

    def node_command(self, *, host: str, is_host: str, run_id: str) -> str:
        """What each node runs, with shell expressions for what only the node knows.

        `host`: the address of the first node; `is_host`: 1 there and 0 elsewhere; `run_id`: of this job.
        One node needs no torchrun, and exits with 143 where it was preempted, which torchrun would hide.
        """
        if self.nodes == 1:
            return wrapped("hotlap", [*self.train_words, *self.processes])
        return (
            f"torchrun --nnodes {self.nodes} --nproc-per-node {self.gpus} \\\n"
            f'    --rdzv-backend c10d --rdzv-endpoint "{host}:{RENDEZVOUS_PORT}" --rdzv-id "{run_id}" \\\n'
            f"    --rdzv-conf is_host={is_host} \\\n"
            f"    {wrapped('-m hotlap', self.train_words)}"
        )


def wrapped(start: str, words: list[str]) -> str:
    """A command in the shell's lines; an option stays with its value."""
    lines, line = [], start
    for number, word in enumerate(words):
        is_option = word.startswith("--")
        value = words[number + 1] if is_option and number + 1 < len(words) else ""
        if is_option and len(f"{line} {word} {value}") > LINE_CHARACTERS:
            lines.append(line)
            line = "   "
        line += f" {shlex.quote(word)}"
    return " \\\n".join([*lines, line])
