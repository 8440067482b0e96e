"""Optional destinations of the metrics: TensorBoard and W&B, each in its own extra."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from hotlap.errors import ConfigError
from hotlap.runs.recorder import Sink

SINKS = ("tensorboard", "wandb")


class TensorBoardSink:
    def __init__(self, directory: Path) -> None:
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(str(directory / "tensorboard"))

    def write(self, record: dict[str, Any]) -> None:
        for name, value in numbers(record).items():
            self._writer.add_scalar(f"{record['kind']}/{name}", value, record["step"])

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    def __init__(self, directory: Path, config: dict[str, Any]) -> None:
        wandb = _require("wandb")
        self._run = wandb.init(project="hotlap", name=directory.name, dir=str(directory), config=config)

    def write(self, record: dict[str, Any]) -> None:
        values = {f"{record['kind']}/{name}": value for name, value in numbers(record).items()}
        self._run.log(values, step=record["step"])

    def close(self) -> None:
        self._run.finish()


def check_sinks(names: list[str]) -> None:
    """Refuse unknown names and packages that are not installed."""
    for name in names:
        if name not in SINKS:
            raise ConfigError(expected=f"--log {' or '.join(SINKS)}", found=name, do="choose one of those")
        _require(name)


def open_sinks(names: list[str], directory: Path, config: dict[str, Any]) -> list[Sink]:
    return [
        TensorBoardSink(directory) if name == "tensorboard" else WandbSink(directory, config)
        for name in names
    ]


def numbers(record: dict[str, Any]) -> dict[str, float]:
    return {
        name: value for name, value in record.items() if isinstance(value, (int, float)) and name != "step"
    }


def _require(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ConfigError(
            expected=f"the package {package} for --log {package}",
            found="it is not installed",
            do=f"pip install {package}",
        ) from None
