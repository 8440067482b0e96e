"""Saves a lap as a checkpoint and restores it, on any number of ranks.

A checkpoint has the parameters, the optimizer state and the random-number state by name, the position of the
loader, and the progress of the run. Its files are written by `hotlap.runs.checkpoint`.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotlap.config import CheckpointConfig, Config
from hotlap.data.order import LoaderState
from hotlap.data.stream import TokenStream
from hotlap.distributed.process_group import broadcast_from_main
from hotlap.errors import CheckpointError
from hotlap.optim.state import gather_state, restore_state
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.settings import to_json
from hotlap.train.evaluation import Evaluation
from hotlap.train.trend import Trend

if TYPE_CHECKING:
    from hotlap.train.lap import Lap

# Weights up to this size are saved at every better validation. With the optimizer's state that takes a
# fraction of a second.
SMALL_BYTES = 64 * 2**20
MOST_SAVING_FRACTION = 0.05


@dataclass
class TrainingProgress:
    """How far a run has trained."""

    step: int = 0  # steps done, including skipped updates
    tokens: int = 0
    training_s: float = 0.0
    other_s: dict[str, float] = field(default_factory=dict)  # seconds by phase; empty in older checkpoints
    nan_steps: int = 0
    evaluation: Evaluation | None = None  # the last one
    evaluated_step: int = -1
    trend: Trend = field(default_factory=Trend)  # of all evaluations


class Snapshots:
    """Saves a lap when a checkpoint is due; all ranks take part, the main rank writes."""

    def __init__(self, run: RunDirectory | None, config: CheckpointConfig, start: TrainingProgress) -> None:
        self.run = run  # None on ranks that do not write
        self.config = config
        # (step, validated step): a step that was saved before its validation is saved again after it.
        self._saved: tuple[int, int] | None = (start.step, start.evaluated_step) if start.step else None
        self._saved_at = time.monotonic()
        self._save_took_s = 0.0

    def due(self, step: int) -> bool:
        every = self.config.every_steps
        return every > 0 and step > 0 and step % every == 0

    def overdue(self, world_size: int) -> bool:
        """By the clock of this rank; the ranks have to agree on it."""
        minutes = (time.monotonic() - self._saved_at) / 60
        limit = self.config.minutes_between(world_size)
        return limit > 0 and minutes >= limit

    def affordable(self, lap: Lap) -> bool:
        """Whether a checkpoint may be saved whenever validation improves. All ranks must ask.

        A small one always, so that it does not depend on the clock which of them are saved; a large one if
        saving, as the main rank measured it, takes a small fraction of the time between two checkpoints.
        """
        if sum(p.numel() * p.element_size() for p in lap.model.parameters()) <= SMALL_BYTES:
            return True
        since = time.monotonic() - self._saved_at
        return broadcast_from_main(self._save_took_s <= MOST_SAVING_FRACTION * since)

    def write_config(self, config: Config) -> None:
        """Of a run that goes on with other settings than it began with."""
        if self.run is not None:
            self.run.write_config(config)

    def newest(self) -> Path | None:
        return next(reversed(store.stored(self.run.checkpoints).values()), None) if self.run else None

    def save(self, lap: Lap, progress: TrainingProgress) -> None:
        if (progress.step, progress.evaluated_step) == self._saved:
            return
        started = time.monotonic()
        # On every rank: the momentum of a matrix is only on the rank that owns it.
        optimizer = gather_state(lap.optimizers)
        if self.run is not None:
            tensors = {
                "model": {name: tensor.detach() for name, tensor in lap.model.state_dict().items()},
                "optimizer": optimizer,
                "random": random_state(lap.distributed.device),
            }
            self.run.sync()
            store.save(
                self.run.checkpoints,
                store.Checkpoint(progress.step, tensors, describe(lap, progress)),
                keep=self.config.keep,
                keep_best=self.config.keep_best,
            )
        self._saved = (progress.step, progress.evaluated_step)
        self._saved_at = time.monotonic()
        self._save_took_s = self._saved_at - started


def describe(lap: Lap, progress: TrainingProgress) -> dict[str, Any]:
    position = lap.data.loader.state
    return {
        "config": to_json(lap.config),
        "progress": asdict(progress),
        "loader": {"position": position.position, "epoch": position.epoch},
        "data": lap.data.train.fingerprint,
        "validation_data": fingerprint_of(lap.data.val),
        "tokenizer": lap.data.tokenizer.fingerprint if lap.data.tokenizer else None,
        "world_size": lap.distributed.world_size,
        "val_loss": comparable_loss_now(progress),
    }


def comparable_loss_now(progress: TrainingProgress) -> float | None:
    """The validation loss at this very step, if measured; it decides which checkpoint is the best."""
    if progress.evaluation is None or progress.evaluated_step != progress.step:
        return None
    return progress.evaluation.comparable_loss


def restore(lap: Lap, saved: store.Checkpoint) -> TrainingProgress:
    """Restore a checkpoint into a newly built lap."""
    check_same_data(lap, saved)
    try:
        lap.model.load_state_dict(dict(saved.tensors["model"]))
    except RuntimeError as error:
        raise CheckpointError(
            expected="a checkpoint whose weights fit the configuration",
            found=" ".join(str(error).split()),
            do="use the model settings of the run, or start a new run",
        ) from error
    restore_state(lap.optimizers, saved.tensors["optimizer"])
    set_random_state(lap.distributed.device, dict(saved.tensors["random"]))
    try:
        lap.data.loader.load_state(LoaderState(**saved.state["loader"]))
        progress = TrainingProgress(**saved.state["progress"])
        if progress.evaluation is not None:
            progress.evaluation = Evaluation(**saved.state["progress"]["evaluation"])
        # Older checkpoints have none.
        progress.trend = Trend(**saved.state["progress"].get("trend", {}))
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            expected="the progress of a run in its checkpoint",
            found=f"{type(error).__name__}: {error}",
            do="resume from another checkpoint, written by this version of Hotlap",
        ) from error
    return progress


def check_same_data(lap: Lap, saved: store.Checkpoint) -> None:
    """Refuse other data than the run's: its losses would be of two training or two validation sets."""
    # Older checkpoints have no fingerprint of the validation split.
    for split, key, stream in (
        ("training", "data", lap.data.train),
        ("validation", "validation_data", lap.data.val),
    ):
        if saved.state.get(key, fingerprint_of(stream)) != fingerprint_of(stream):
            raise CheckpointError(
                expected="the data that the run was started with",
                found=f"other {split} shards in {lap.data.directory}",
                do="prepare the same data again, or start a new run",
            )


def fingerprint_of(stream: TokenStream | None) -> str | None:
    return None if stream is None else stream.fingerprint


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
