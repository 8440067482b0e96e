"""An engine whose runs appear in milliseconds, for tests of whatever is made of runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping

from hotlap.race.engine import Ended, Engine, Task, Training
from hotlap.runs.reader import RunFiles
from hotlap.settings import flatten
from tests.synthetic_runs import make_run

EXIT_CODE = 2
LAST_LINE = "hotlap: expected luck"


class MadeUpEngine(Engine):
    """`ends[name]` is how a run ends, `losses[name]` where; runs end in the order in which they started."""

    def __init__(
        self,
        slots: int = 1,
        ends: Mapping[str, str | None] | None = None,
        losses: Mapping[str, float] | None = None,
    ) -> None:
        self.order: list[str] = []  # names of runs as they started
        self.most = 0  # runs at once
        self.ends = ends or {}
        self.losses = losses or {}
        self.seconds = 0.02  # of each run
        self._slots = slots
        self._training: list[Task] = []

    @property
    def slots(self) -> int:
        return self._slots

    def start(self, task: Task) -> None:
        self.order.append(task.path.name)
        self._training.append(task)
        self.most = max(self.most, len(self._training))

    def training(self) -> list[Training]:
        return [Training(task, 0.5) for task in self._training]

    def wait(self, seconds: float) -> list[Ended]:
        del seconds
        task = self._training.pop(0)
        name = task.path.name
        shutil.rmtree(task.path, ignore_errors=True)
        given = flatten(task.config)
        make_run(
            task.path,
            recipe=task.config.recipe,
            seed=task.config.seed,
            steps=task.config.schedule.steps,
            changes={key: value for key, value in given.items() if key not in NOT_CHANGED},
            final_loss=self.losses.get(name, 3.3 + 0.01 * (task.config.seed % 5)),
            status=self.ends.get(name, "finished"),
        )
        assert RunFiles(task.path).read_config() == task.config, "the run that was asked for"
        task.log.parent.mkdir(parents=True, exist_ok=True)
        task.log.write_text(f"{LAST_LINE}\n")
        return [Ended(task, EXIT_CODE, self.seconds)]

    def stop(self) -> None:
        self._training.clear()


NOT_CHANGED = ("recipe", "size", "seed", "schedule.steps")
