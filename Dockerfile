# sprint at nano on 1 GPU. Written by:
#   hotlap launch docker sprint --size nano
#
#   docker build --tag hotlap .
#   docker run --rm --gpus all --ipc host --volume "$PWD:/laps" hotlap
#
# in a clone of Hotlap; /laps keeps runs and data. Without a GPU leave out `--gpus all --ipc host`, and build
# with --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu
FROM python:3.12-slim

# A compiler: of the kernels in C on a CPU, and for Triton on a GPU.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /hotlap
ARG TORCH_INDEX=https://pypi.org/simple
COPY constraints.txt ./
RUN pip install --no-cache-dir --no-deps --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY hotlap hotlap
RUN pip install --no-cache-dir --constraint constraints.txt .

ENV HOTLAP_CACHE=/laps/.cache/hotlap
WORKDIR /laps
ENTRYPOINT ["hotlap"]
CMD ["train", "sprint", "--size", "nano", "--name", "sprint-nano", "--resume", "auto", "--checkpoint.every-minutes", "2"]
