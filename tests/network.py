"""Two nodes on one machine: network namespaces that a link of limited rate connects. Needs root.

Each namespace has its own addresses and interfaces and no other way to the other one, as two machines have.
The link can be cut and put back. Names end with the process id, so that several tests may run at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil

NUM_NODES = 2
PORT = 29500
BURST_BYTES = 64 * 1024  # that the limiter lets through at once, a few large packets
LATENCY_MS = 400  # how long a packet may wait in the limiter's queue


def why_no_nodes() -> str:
    """Why two nodes cannot be made here; empty if they can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need `{missing[0]}` of iproute2"
    probe = f"hotlap-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", probe], check=True)
    return ""


class TwoNodes:
    def __init__(self) -> None:
        self.namespaces = [f"hotlap-{os.getpid()}-{node}" for node in range(NUM_NODES)]
        self.addresses = [f"10.77.0.{node + 1}" for node in range(NUM_NODES)]
        self.interface = "wire"  # the same name on both nodes

    def run_on(self, node: int, command: Sequence[str]) -> None:
        subprocess.run(["ip", "netns", "exec", self.namespaces[node], *command], check=True)

    def kill_all(self) -> None:
        """End whatever runs on the nodes."""
        for namespace in self.namespaces:
            listed = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True)
            for process in listed.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)

    def cut(self) -> None:
        self.run_on(0, ["ip", "link", "set", self.interface, "down"])

    def mend(self) -> None:
        self.run_on(0, ["ip", "link", "set", self.interface, "up"])

    def torchrun(
        self,
        node: int,
        arguments: Sequence[str],
        *,
        cwd: Path,
        output: IO[str],
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """One rank on a node, in the background: `torchrun … ARGUMENTS` as a user types it there.

        The first node is said to be the host, since no name resolves to its address.
        """
        words = [
            *("ip", "netns", "exec", self.namespaces[node]),
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NUM_NODES)),
            *("--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "lap"),
            *("--rdzv-endpoint", f"{self.addresses[0]}:{PORT}"),
            *("--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", self.addresses[node]),
            *arguments,
        ]
        variables = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.interface,
            **(environment or {}),
        }
        return subprocess.Popen(words, cwd=cwd, env=variables, stdout=output, stderr=output, text=True)


@contextmanager
def two_nodes(megabits_per_s: int) -> Iterator[TwoNodes]:
    """Two connected namespaces. On exit they are removed, and what runs in them is ended."""
    remove_leftovers()
    nodes = TwoNodes()
    made = []
    try:
        for namespace in nodes.namespaces:
            subprocess.run(["ip", "netns", "add", namespace], check=True)
            made.append(namespace)
        first, second = nodes.namespaces
        link = ["ip", "link", "add", "name", nodes.interface, "netns", first, "type", "veth"]
        subprocess.run([*link, "peer", "name", nodes.interface, "netns", second], check=True)
        for node, address in enumerate(nodes.addresses):
            nodes.run_on(node, ["ip", "address", "add", f"{address}/24", "dev", nodes.interface])
            for interface in (nodes.interface, "lo"):
                nodes.run_on(node, ["ip", "link", "set", interface, "up"])
            limit = ["rate", f"{megabits_per_s}mbit", "burst", str(BURST_BYTES), "latency", f"{LATENCY_MS}ms"]
            nodes.run_on(node, ["tc", "qdisc", "add", "dev", nodes.interface, "root", "tbf", *limit])
        yield nodes
    finally:
        nodes.kill_all()
        for namespace in made:  # with their interfaces
            subprocess.run(["ip", "netns", "delete", namespace], check=True)


def remove_leftovers() -> None:
    """Remove the namespaces of processes that were killed."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for namespace, process in re.findall(r"^(hotlap-(\d+)-\d)\b", listed, flags=re.MULTILINE):
        if not psutil.pid_exists(int(process)):
            subprocess.run(["ip", "netns", "delete", namespace], check=True)
