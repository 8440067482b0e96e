"""How much of the communication between two nodes is hidden behind computation?

    python -m bench.overlap [--megabits 200] [--tokens 2048] [--ways compiled|kernels]

Steps of `softcap` at 8 layers × 256 on two nodes with one thread each, in network namespaces that a slow link
connects; needs root. DDP averages the gradients, Muon gathers its updates. Compiled as one graph, all
gradients are ready at the end of the backward, and their reduction overlaps with nothing; compiled in parts,
a block's gradients are reduced while earlier blocks compute theirs. So it is with kernels in C, unless all
gradients share one bucket. "Waited for" are Muon's gathers if each is completed before the next chunk is
computed. Graphs are traced but not made into kernels: when their gradients are ready does not depend on that,
and minutes of compilation are saved. All ways take turns, step by step; medians of three steps. "Hidden" is
how much shorter a step is than its computation, timed without the other node, and its bytes at the link's
rate, one after the other.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from hotlap.config import Config
from hotlap.distributed.process_group import Distributed, process_group
from hotlap.kernels import choose_backend, install, unavailable
from hotlap.model import build_model
from hotlap.optim.routing import build_optimizers
from hotlap.plan.state import meta_model
from hotlap.plan.wire import step_traffic
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.compile import apply_compile, warm_up
from hotlap.train.lap import bucket_size_mib, route_parameters, wrap_ddp
from hotlap.train.masking import Masking
from tests.network import NUM_NODES, two_nodes, why_no_nodes

CPU = torch.device("cpu")
LAYERS, WIDTH, VOCABULARY = 8, 256, 4096
REPEATS = 3
ONE_BUCKET_MIB = 1024  # more than the gradients of the model
ENDS_WITHIN_S = 900
WIRE = ("gradients", "Muon's updates")  # as `hotlap plan` names them
GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_single", "broadcast")


class Way(NamedTuple):
    name: str
    compile: str
    reduces_late: bool = False  # all gradients in one bucket
    waits_for_gathers: bool = False


class Step(NamedTuple):
    gradients: Callable[[], None]  # forward and backward, with the reduction
    gradients_alone: Callable[[], None]  # without it
    update: Callable[[], None]


class Taken(NamedTuple):
    """Milliseconds of a step."""

    gradients: float
    gradients_alone: float
    update: float

    @property
    def step(self) -> float:
        return self.gradients + self.update


COMPILED = (
    Way("one graph, gathers waited for", "model", waits_for_gathers=True),
    Way("one graph", "model"),
    Way("parts", "parts"),
)
KERNELS = (
    Way("kernels in C, one bucket, gathers waited for", "off", reduces_late=True, waits_for_gathers=True),
    Way("kernels in C", "off"),
)


def configuration(tokens: int) -> Config:
    return updated(
        resolve("softcap", "nano"),
        {
            "model.num_layers": LAYERS,
            "model.width": WIDTH,
            "model.num_heads": WIDTH // 64,
            "model.vocab_size": VOCABULARY,
            "batch.sequence_tokens": tokens,
            "batch.tokens_per_step": NUM_NODES * tokens,
            "batch.micro_sequences": 1,
        },
    )


def make_step(way: Way, config: Config, distributed: Distributed) -> Step:
    tokens = config.batch.sequence_tokens
    torch.manual_seed(0)
    model = build_model(config.model, tokens, torch.float32)
    backend = choose_backend("auto" if way.compile == "off" else "blocked", CPU)
    optimizers = build_optimizers(route_parameters(model, config, distributed.world_size))
    install(model, optimizers, backend=backend, tokens=tokens, compiled=way.compile != "off")
    batch_loss = BatchLoss(model, Masking(config, backend, 0, CPU))
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        apply_compile(batch_loss, way.compile, coordinate_descent=False)
    warm_up(batch_loss, config, distributed)
    bucket_mib = ONE_BUCKET_MIB if way.reduces_late else bucket_size_mib(model.blocks)
    module = wrap_ddp(batch_loss, CPU, bucket_mib)
    ids = torch.randint(1, VOCABULARY, (tokens + 1,))

    def gradients() -> None:
        module.zero_grad(set_to_none=True)
        module(ids[:-1].int(), ids[1:], None).backward()

    def gradients_alone() -> None:
        with module.no_sync():
            gradients()

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return Step(gradients, gradients_alone, update)


class Done:
    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def every_gather_waited_for() -> Iterator[None]:
    """Asynchronous collectives of the optimizers complete before they return."""

    def waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            work = collective(*args, **options)
            if work is None:
                return None
            work.wait()
            return Done()

        return call

    with contextlib.ExitStack() as stack:
        for name in GATHERS:
            if hasattr(dist, name):
                stack.enter_context(patch.object(dist, name, waiting(getattr(dist, name))))
        yield


def chosen_ways(group: str) -> list[tuple[Way, ...]]:
    groups = {"compiled": COMPILED, **({} if unavailable() else {"kernels": KERNELS})}
    return [ways for name, ways in groups.items() if group in (name, "all")]


def measure(tokens: int, group: str, output: Path) -> None:
    """On each node: all ways in turn. The first one writes {way: [`Taken`, …]}."""
    torch.set_num_threads(1)
    config = configuration(tokens)
    with process_group("cpu") as distributed:
        ways = [way for ways in chosen_ways(group) for way in ways]
        # Ways that differ only in how Muon gathers share a model.
        made = {way._replace(name="", waits_for_gathers=False): way for way in ways}
        steps = {key: make_step(way, config, distributed) for key, way in made.items()}
        taken: dict[str, list[Taken]] = {way.name: [] for way in ways}
        for _ in range(1 + REPEATS):
            for way in ways:
                step = steps[way._replace(name="", waits_for_gathers=False)]
                alone_ms = milliseconds(step.gradients_alone)
                gradients_ms = milliseconds(step.gradients)
                with every_gather_waited_for() if way.waits_for_gathers else contextlib.nullcontext():
                    update_ms = milliseconds(step.update)
                taken[way.name].append(Taken(gradients_ms, alone_ms, update_ms))
        if distributed.is_main:
            # Without the first: DDP orders its buckets by what it saw there.
            output.write_text(json.dumps({name: times[1:] for name, times in taken.items()}))
        dist.barrier()
    os._exit(0)  # see docs/distributed.md, "Shutdown"


def milliseconds(function: Callable[[], None]) -> float:
    """From when both nodes are ready."""
    dist.barrier()
    began = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - began)


def wire_ms(tokens: int, megabits: int) -> tuple[float, float]:
    """Of the gradients and of Muon's updates, at the rate of the link."""
    config = configuration(tokens)
    traffic = step_traffic(meta_model(config, torch.float32), config, NUM_NODES, torch.float32)
    ms_per_byte = 8 / (megabits * 1e3)
    sent = {what: sum(each.sent_bytes for each in traffic if each.what == what) for what in WIRE}
    gradients, updates = (sent[what] * ms_per_byte for what in WIRE)
    return gradients, updates


def print_table(taken: dict[str, list[Taken]], gradients_wire_ms: float, updates_wire_ms: float) -> None:
    print(
        f"On the wire alone: {gradients_wire_ms:.0f} ms gradients, {updates_wire_ms:.0f} ms Muon's updates.\n"
    )
    print("| way | forward, backward | with reduction | hidden | optimizers | step | vs nothing overlapped |")
    print("|---|---|---|---|---|---|---|")
    for ways in (COMPILED, KERNELS):
        for way in (way for way in ways if way.name in taken):
            ratio = statistics.median(
                base.step / here.step for base, here in zip(taken[ways[0].name], taken[way.name], strict=True)
            )
            here = Taken(*map(statistics.median, zip(*taken[way.name], strict=True)))
            hidden = here.gradients_alone + gradients_wire_ms - here.gradients
            print(
                f"| {way.name} | {here.gradients_alone:.0f} ms | {here.gradients:.0f} ms | {hidden:.0f} ms |"
                f" {here.update:.0f} ms | {here.step:.0f} ms | {ratio:.2f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabits", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--ways", choices=("all", "compiled", "kernels"), default="all")
    parser.add_argument("--on-node", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.on_node:
        measure(arguments.tokens, arguments.ways, arguments.on_node)
    reason = why_no_nodes()
    if reason:
        print(f"skipped: {reason}")
        return
    with tempfile.TemporaryDirectory() as folder, two_nodes(arguments.megabits) as nodes:
        output = Path(folder) / "taken.json"
        words = ["-m", "bench.overlap", "--tokens", str(arguments.tokens), "--ways", arguments.ways]
        words += ["--on-node", str(output)]
        agents = [nodes.torchrun(node, words, cwd=Path.cwd(), output=sys.stderr) for node in range(NUM_NODES)]
        exit_codes = [agent.wait(timeout=ENDS_WITHIN_S) for agent in agents]
        if any(exit_codes):
            sys.exit("a node failed")
        measured = json.loads(output.read_text())
        taken = {way: [Taken(*step) for step in steps] for way, steps in measured.items()}
        print_table(taken, *wire_ms(arguments.tokens, arguments.megabits))


if __name__ == "__main__":
    main()
