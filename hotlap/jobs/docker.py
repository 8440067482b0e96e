"""A Dockerfile for a clone of Hotlap. The image has the run as its default command."""

from __future__ import annotations

import json

from hotlap.jobs.job import Job

# PyPI's torch for Linux is built for CUDA and brings what it needs of it.
TORCH_INDEX = {"cuda": "https://pypi.org/simple", "cpu": "https://download.pytorch.org/whl/cpu"}
GPU_OPTIONS = "--gpus all --ipc host "
OTHER = {
    "cuda": f"Without a GPU leave out `{GPU_OPTIONS.strip()}`, and build\n"
    f"# with --build-arg TORCH_INDEX={TORCH_INDEX['cpu']}",
    "cpu": f"For GPUs build with --build-arg\n"
    f"# TORCH_INDEX={TORCH_INDEX['cuda']}, and run with `{GPU_OPTIONS.strip()}`.",
}
DOCKERFILE = """\
# {recipe} at {size} on {place}. Written by:
#   {command}
#
#   docker build --tag hotlap .
#   docker run --rm {gpus}--volume "$PWD:/laps" hotlap
#
# in a clone of Hotlap; /laps keeps runs and data. {other}
FROM python:3.12-slim

# A compiler: of the kernels in C on a CPU, and for Triton on a GPU.
# hadolint ignore=DL3008
RUN apt-get update \\
    && apt-get install --yes --no-install-recommends g++ \\
    && rm -rf /var/lib/apt/lists/*

WORKDIR /hotlap
ARG TORCH_INDEX={index}
COPY constraints.txt ./
RUN pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY hotlap hotlap
RUN pip install --no-cache-dir --constraint constraints.txt .

ENV HOTLAP_CACHE=/laps/.cache/hotlap
WORKDIR /laps
ENTRYPOINT ["hotlap"]
CMD {words}
"""


def dockerfile(job: Job, device: str) -> str:
    """`device`: cuda or cpu, of the image's torch."""
    return DOCKERFILE.format(
        recipe=job.recipe,
        size=job.size,
        place="a CPU" if device == "cpu" else job.place,
        command=job.command,
        index=TORCH_INDEX[device],
        gpus=GPU_OPTIONS if device == "cuda" else "",
        other=OTHER[device],
        words=json.dumps([*job.train_words, *job.processes], ensure_ascii=False),
    )
