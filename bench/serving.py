"""How many tokens per second do many clients of `hotlap serve` get together, against one client alone?

The clients are coroutines of this process, on the same cores as the server. Each asks for a text of a hundred
tokens, again and again. Memory is the server's resident set, before the first client and at its highest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

TOKENS = 100
PROMPT = "The state of the Union is"
# Clients, seconds, whether they read a stream.
LOADS = ((1, 15, False), (8, 15, False), (32, 60, False), (1, 15, True), (32, 15, True))
HANG_UPS = 32


@dataclass
class Load:
    clients: int
    seconds: float
    statuses: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    latencies: list[float] = field(default_factory=list)
    largest_mb: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


async def ask(port: int, body: dict[str, object]) -> tuple[int, bytes]:
    """One request on a connection of its own, and its whole answer."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Type: application/json\r\n\r\n".encode() + content)
    answer = await reader.read()
    writer.close()
    return int(answer[9:12]), answer


async def client(port: int, model: str, number: int, load: Load, *, stream: bool) -> None:
    until, seed = time.monotonic() + load.seconds, number * 10**6
    while (began := time.monotonic()) < until:
        seed += 1
        body = {"model": model, "prompt": PROMPT, "max_tokens": TOKENS, "seed": seed, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        status, answer = await ask(port, body)
        load.statuses[status] += 1
        if status == 200:
            found = re.findall(rb'"completion_tokens": ?(\d+)', answer)
            load.tokens += int(found[-1])
            load.latencies.append(time.monotonic() - began)
        else:
            await asyncio.sleep(0.1)


async def run_load(
    port: int, model: str, server: psutil.Process, clients: int, seconds: float, *, stream: bool
) -> Load:
    load = Load(clients, seconds)
    began = time.monotonic()
    working = [asyncio.create_task(client(port, model, n, load, stream=stream)) for n in range(clients)]
    while any(not task.done() for task in working):
        load.largest_mb = max(load.largest_mb, server.memory_info().rss / 1e6)
        await asyncio.sleep(0.25)
    await asyncio.gather(*working)
    load.seconds = time.monotonic() - began  # the last texts end a little later
    return load


async def hang_up(port: int, model: str) -> tuple[float, dict[str, int]]:
    """Seconds until clients that hang up in mid-stream have left their rows, and what the model then does."""
    writers = []
    for seed in range(HANG_UPS):
        content = json.dumps({"model": model, "max_tokens": 1500, "stream": True, "seed": seed}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(content)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + content)
        await reader.read(300)
        writers.append(writer)
    for writer in writers:
        writer.transport.abort()
    began = time.monotonic()
    while (state := await health(port, model))["writing"]:
        pass
    return time.monotonic() - began, state


async def health(port: int, model: str) -> dict[str, int]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    found: dict[str, dict[str, int]] = json.loads(answer.partition(b"\r\n\r\n")[2])
    return found[model]


async def measure(port: int, model: str, server: psutil.Process) -> None:
    print(f"| clients | | tokens/s | against one | median s per text | answers | server MB |\n|{'---|' * 7}")
    alone: dict[bool, float] = {}
    idle_mb = server.memory_info().rss / 1e6
    for clients, seconds, stream in LOADS:
        load = await run_load(port, model, server, clients, seconds, stream=stream)
        alone.setdefault(stream, load.rate)
        middle = sorted(load.latencies)[len(load.latencies) // 2]
        answers = ", ".join(f"{count} × {status}" for status, count in sorted(load.statuses.items()))
        kind, ratio = "stream" if stream else "whole", load.rate / alone[stream]
        print(
            f"| {clients} | {kind} | {load.rate:,.0f} | {ratio:.1f} | {middle:.2f} | {answers}"
            f" | {load.largest_mb:,.0f} |",
            flush=True,
        )
    seconds, state = await hang_up(port, model)
    steps = state["steps"]
    await asyncio.sleep(1)
    more = (await health(port, model))["steps"] - steps
    print(
        f"\nThe server began with {idle_mb:,.0f} MB and ended with {server.memory_info().rss / 1e6:,.0f} MB."
    )
    print(f"{HANG_UPS} clients that hung up in mid-stream had left their rows after {1000 * seconds:.0f} ms;")
    print(f"in the second after that the model took {more} steps.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", nargs="?", type=Path, help="default: `sprint` at `nano`, after three steps")
    parser.add_argument("--threads", help="of the server (default: as it chooses)")
    arguments = parser.parse_args()
    run, threads = arguments.run, arguments.threads
    with tempfile.TemporaryDirectory() as folder:
        if run is None:
            words = "train sprint --size nano --steps 3 --evaluation.tokens none --name made"
            subprocess.run(
                [sys.executable, "-m", "hotlap", *words.split()],
                cwd=folder,
                check=True,
                stdout=subprocess.DEVNULL,
            )
            run = Path(folder) / "runs" / "made"
        command = [sys.executable, "-m", "hotlap", "serve", str(run.resolve()), "--port", "0"]
        command += ["--device", "cpu", *(["--threads", threads] if threads else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None, "stdout is a pipe"
            described, _, address = (process.stdout.readline().strip() for _ in range(3))
            print(f"{described}\n")
            port = int(address.split(":")[2].partition("/")[0])
            try:
                asyncio.run(measure(port, run.name, psutil.Process(process.pid)))
            finally:
                process.terminate()


if __name__ == "__main__":
    main()
