"""A task for SkyPilot (https://docs.skypilot.co/en/latest/reference/yaml-spec.html)."""

from __future__ import annotations

import textwrap
from dataclasses import replace

from hotlap.errors import PREEMPTED
from hotlap.gpus import Gpu
from hotlap.jobs.job import Job

# SkyPilot's names of our GPUs, where they differ.
NAMES = {
    "A100": "A100-80GB",
    "A100-40GB": "A100",
    "H100-PCIe": "H100",
    "5090": "RTX5090",
    "4090": "RTX4090",
    "3090": "RTX3090",
}
VOLUME = "/hotlap"  # where a volume is mounted
TASK = """\
# {recipe} at {size} on {place}. Written by:
#   {command}
#
# {start}, in a clone of Hotlap. {kept}
name: {name}
workdir: .
num_nodes: {nodes}
resources:
  accelerators: {accelerators}
{spot}{volumes}setup: |
  python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --constraint constraints.txt --editable .
run: |
{run}
"""
SPOT = f"""\
  use_spot: true
  job_recovery:
    recover_on_exit_codes: [{PREEMPTED}]
"""
ADDRESSES = """\
HOST=$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)
"""


def sky_task(job: Job, gpu: Gpu, *, volume: str | None, spot: bool) -> str:
    """`volume`: the name of SkyPilot's volume that keeps data and runs; None: they stay on the machine."""
    if volume is not None:
        job = replace(job, options=(*job.options, "--runs", f"{VOLUME}/runs"))
    command = job.node_command(
        host="$HOST", is_host="$((SKYPILOT_NODE_RANK == 0))", run_id="$SKYPILOT_TASK_ID"
    )
    lines = [
        ". .venv/bin/activate\n",
        f"export HOTLAP_CACHE={VOLUME}/cache\n" if volume else "",
        ADDRESSES if job.nodes > 1 else "",
        command,
    ]
    return TASK.format(
        recipe=job.recipe,
        size=job.size,
        place=job.place,
        command=job.command,
        start=f"Start it with `{'sky jobs launch' if spot else f'sky launch -c {job.name}'} FILE`",
        kept=f"The volume {volume} keeps data and runs." if volume else "Data and runs stay on the machine.",
        name=job.name,
        nodes=job.nodes,
        accelerators=f"{NAMES.get(gpu.name, gpu.name)}:{job.gpus}",
        spot=SPOT if spot else "",
        volumes=f"volumes:\n  {VOLUME}: {volume}\n" if volume else "",
        run=textwrap.indent("".join(lines), "  "),
    )
