"""The check that all ranks start a run from the same state."""

from __future__ import annotations

from typing import Any

from hotlap.distributed.same_start import check_same
from hotlap.train.lap import Lap
from hotlap.train.snapshot import TrainingProgress, fingerprint_of


def check_same_start(lap: Lap, progress: TrainingProgress) -> None:
    """Raise on every rank if one of them differs. A collective: every rank must call it."""
    check_same(facts_of(lap, progress))


def facts_of(lap: Lap, progress: TrainingProgress) -> dict[str, Any]:
    loader = lap.data.loader.state
    return {
        "step": progress.step,
        "position in the data": f"{loader.position} of epoch {loader.epoch}",
        "training shards": lap.data.train.fingerprint,
        "validation shards": fingerprint_of(lap.data.val),
        "precision": str(lap.dtype).removeprefix("torch."),
        "attention backend": lap.backend.name,
        "kernels": str(lap.installed),
        "ideas": ", ".join(lap.ideas.identities) or "none",
    }
