"""A batch script for Slurm (https://slurm.schedmd.com/sbatch.html): one task per node."""

from __future__ import annotations

import shlex

from hotlap.jobs.job import Job

CPUS_PER_GPU = 8
SCRIPT = """\
#!/bin/bash
# {recipe} at {size} on {place}. Written by:
#   {command}
#
# Submit it with `sbatch FILE`, in the directory that has .venv, which all nodes share. Options given to
# sbatch, such as --partition or --time, come before those below. Preempted, the job starts again by
# itself. To go on past a time limit, submit it several times: the jobs wait for one another, each goes on
# from the last checkpoint, and those after the end of the run have nothing to do.
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --cpus-per-task={cpus}
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --dependency=singleton
#SBATCH --open-mode=append
#SBATCH --output=%x.txt
set -euo pipefail

# shellcheck source=/dev/null
. .venv/bin/activate
{host}srun bash -c {task}
"""
HOST = """\
HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
export HOST
# Each node fills in what is its own.
# shellcheck disable=SC2016
"""


def slurm_script(job: Job) -> str:
    task = job.node_command(host="$HOST", is_host="$((SLURM_NODEID == 0))", run_id="$SLURM_JOB_ID")
    return SCRIPT.format(
        recipe=job.recipe,
        size=job.size,
        place=job.place,
        command=job.command,
        name=job.name,
        nodes=job.nodes,
        gpus=job.gpus,
        cpus=CPUS_PER_GPU * job.gpus,
        host=HOST if job.nodes > 1 else "",
        task=shlex.quote(task),
    )
