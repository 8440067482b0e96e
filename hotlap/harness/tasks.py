"""Evaluates tasks of the harness for `hotlap eval --tasks`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotlap.errors import ConfigError, DataError
from hotlap.inference.load import LoadedModel
from hotlap.settings import nearest


@dataclass(frozen=True)
class TaskOptions:
    names: Sequence[str]
    include_path: Path | None = None  # a directory with tasks as YAML files
    limit: int | None = None  # examples per task
    num_fewshot: int | None = None  # None: the task's
    batch_size: int | None = None


class Tasks:
    """The tasks of the given names. Refused if there are none, or their data cannot be had."""

    def __init__(self, options: TaskOptions) -> None:
        require_harness()
        from lm_eval.tasks import TaskManager

        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        self.options = options
        if options.include_path is not None and not options.include_path.is_dir():
            raise ConfigError(
                expected="--include-path with a directory of tasks as YAML files",
                found=str(options.include_path),
                do="check the path",
            )
        include = None if options.include_path is None else str(options.include_path)
        self._manager: Any = TaskManager(include_path=include)
        known = self._manager.all_tasks
        for name in options.names:
            if not self._manager.match_tasks([name]):
                raise ConfigError(
                    expected="tasks of the harness (`lm_eval ls tasks` lists them) or of --include-path",
                    found=f"`{name}`",
                    do=nearest(name, known),
                )

    def evaluate(self, loaded: LoadedModel) -> list[dict[str, Any]]:
        """One entry per task and metric: task, metric, filter, value, stderr and the number of examples."""
        from lm_eval import simple_evaluate

        from hotlap.harness.backend import HotlapLM

        options = self.options
        names = self._manager.match_tasks(list(options.names))
        self._fetch(names)
        found: Any = simple_evaluate(
            model=HotlapLM(loaded=loaded, batch_size=options.batch_size),
            tasks=names,
            task_manager=self._manager,
            limit=options.limit,
            num_fewshot=options.num_fewshot,
            log_samples=False,
        )
        return [
            entry
            for task, figures in found["results"].items()
            for entry in measured(task, figures, found["n-samples"].get(task, {}).get("effective"))
        ]

    def _fetch(self, names: list[str]) -> None:
        """Load the tasks once, so that data that cannot be had is one line."""
        try:
            self._manager.load(names)
        except Exception as error:  # which ones depends on the libraries below the harness
            said = " ".join(str(error).split())[:200]
            raise DataError(
                expected=f"the data of {', '.join(names)}",
                found=f"{type(error).__name__}: {said}",
                do="check the network and HF_HUB_OFFLINE, or the files that the task names",
            ) from error


def measured(task: str, figures: dict[str, Any], examples: int | None) -> list[dict[str, Any]]:
    """The harness has `metric,filter` and `metric_stderr,filter` as keys."""
    entries = []
    for key, value in figures.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr"):
            continue
        stderr = figures.get(f"{metric}_stderr,{chosen}")
        entries.append(
            {
                "task": task,
                "metric": metric,
                "filter": chosen,
                "value": value,
                "stderr": stderr if isinstance(stderr, float) else None,
                "examples": examples,
            }
        )
    return entries


def require_harness() -> None:
    try:
        import lm_eval  # noqa: F401
    except ImportError:
        raise ConfigError(
            expected="the package lm_eval for --tasks",
            found="it is not installed",
            do="pip install lm_eval",
        ) from None
