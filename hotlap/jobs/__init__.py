"""Files that start a run elsewhere: a Slurm batch script, a SkyPilot task, a Dockerfile.

Each is a text made of a `Job`, the run's own command, and nothing is started here.
"""

from hotlap.jobs.docker import dockerfile
from hotlap.jobs.job import Job
from hotlap.jobs.sky import sky_task
from hotlap.jobs.slurm import slurm_script

__all__ = ["Job", "dockerfile", "sky_task", "slurm_script"]
