"""A running lap as a checkpoint, and a checkpoint put back into a lap, on any number of ranks.

What is kept: parameters, optimizer state and random-number state by name, the loader's position, and how far
the run is. The file format and its safety are `checkpoint.py`'s business.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hotlap.config import CheckpointConfig
from hotlap.data.order import LoaderState
from hotlap.errors import CheckpointError
from hotlap.optim.state import gather_state, restore_state
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.settings import to_json
from hotlap.train.evaluation import Evaluation

if TYPE_CHECKING:
    from hotlap.train.lap import Lap


@dataclass
class Progress:
    """Where a run stands."""

    step: int = 0  # updates done, skipped ones included
    tokens: int = 0
    training_s: float = 0.0
    other_s: dict[str, float] = field(default_factory=dict)  # by phase; older checkpoints have none
    nan_steps: int = 0
    evaluation: Evaluation | None = None  # the newest
    evaluated_step: int = -1


class Snapshots:
    """Saves a lap when it is due; the main rank writes, all ranks take part."""

    def __init__(self, run: RunDirectory | None, config: CheckpointConfig, start: Progress) -> None:
        self.run = run  # None on ranks that do not write
        self.config = config
        # With its validation: a step that was saved without is saved again with it.
        self._saved: tuple[int, int] | None = (start.step, start.evaluated_step) if start.step else None
        self._saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        every = self.config.every_steps
        return every > 0 and step > 0 and step % every == 0

    def overdue(self) -> bool:
        """By this rank's clock, so that ranks have to agree on it."""
        minutes = (time.monotonic() - self._saved_at) / 60
        return bool(self.config.every_minutes) and minutes >= self.config.every_minutes

    def newest(self) -> Path | None:
        return next(reversed(store.stored(self.run.checkpoints).values()), None) if self.run else None

    def save(self, lap: Lap, progress: Progress) -> None:
        if (progress.step, progress.evaluated_step) == self._saved:
            return
        # Every rank takes part: a matrix's momentum is only on the rank that owns it.
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


def describe(lap: Lap, progress: Progress) -> dict[str, Any]:
    position = lap.data.loader.state
    return {
        "config": to_json(lap.config),
        "progress": asdict(progress),
        "loader": {"position": position.position, "epoch": position.epoch},
        "data": lap.data.train.fingerprint,
        "world_size": lap.distributed.world_size,
        "val_loss": val_loss_now(progress),
    }


def val_loss_now(progress: Progress) -> float | None:
    """The validation loss of these very parameters, which decides which checkpoint is the best."""
    if progress.evaluation is None or progress.evaluated_step != progress.step:
        return None
    return progress.evaluation.loss


def restore(lap: Lap, saved: store.Checkpoint) -> Progress:
    """Put a checkpoint into a freshly built lap."""
    if saved.state["data"] != lap.data.train.fingerprint:
        raise CheckpointError(
            expected="the data that the run was started with",
            found=f"other training shards in {lap.data.directory}",
            do="prepare the same data again, or start a new run",
        )
    try:
        lap.model.load_state_dict(dict(saved.tensors["model"]))
    except RuntimeError as error:
        raise CheckpointError(
            expected="a checkpoint whose weights fit the configuration",
            found=" ".join(str(error).split()),
            do="leave the model's settings as they were, or start a new run",
        ) from error
    restore_state(lap.optimizers, saved.tensors["optimizer"])
    set_random_state(lap.distributed.device, dict(saved.tensors["random"]))
    lap.data.loader.load_state(LoaderState(**saved.state["loader"]))
    progress = Progress(**saved.state["progress"])
    if saved.state["progress"]["evaluation"] is not None:
        progress.evaluation = Evaluation(**saved.state["progress"]["evaluation"])
    return progress


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
