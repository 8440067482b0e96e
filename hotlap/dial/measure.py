"""How long a training step of a configuration takes here: a few real ones, of a model that is thrown away."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from hotlap.config import Config
from hotlap.distributed.process_group import Distributed
from hotlap.distributed.signals import StopRequest
from hotlap.hardware import select_device
from hotlap.recipes import IdeaFile
from hotlap.runs.recorder import Recorder
from hotlap.settings import updated
from hotlap.train.clock import Clock, wait_for
from hotlap.train.ideas import Ideas
from hotlap.train.lap import build_lap
from hotlap.train.loop import Trainer
from hotlap.train.run import set_up_process
from hotlap.train.snapshot import Snapshots, TrainingProgress

WARMUP_STEPS = 2
MEASURE_S = 1.0
FEWEST_STEPS, MOST_STEPS = 3, 30


def seconds_per_step(config: Config, directory: Path, ideas: tuple[IdeaFile, ...] = ()) -> float:
    """The median of about a second of steps on the data in `directory`, or of the first if they are slow."""
    alone = Distributed(0, 0, 1, 1, select_device(config.runtime.device), has_group=False)
    set_up_process(config, alone)
    random_state = torch.get_rng_state()
    lap = build_lap(updated(config, {"runtime.compile": "off"}), directory, alone, Clock(), Ideas(ideas))
    wait = wait_for(alone.device)
    snapshots = Snapshots(None, config.checkpoint, TrainingProgress())
    trainer = Trainer(lap, TrainingProgress(), Clock(), Recorder(), snapshots, StopRequest())
    seconds: list[float] = []
    try:
        while not is_enough(seconds):
            began = time.perf_counter()
            trainer.update()
            wait()
            seconds.append(time.perf_counter() - began)
    finally:
        lap.data.loader.close()
        torch.set_rng_state(random_state)
    return statistics.median(seconds[WARMUP_STEPS:] or seconds[-1:])


def is_enough(seconds: list[float]) -> bool:
    """Of steps that took so long; the first ones also allocate memory."""
    counted = len(seconds) - WARMUP_STEPS
    return (
        sum(seconds) >= 2 * MEASURE_S
        or counted >= MOST_STEPS
        or (counted >= FEWEST_STEPS and sum(seconds[WARMUP_STEPS:]) >= MEASURE_S)
    )
