"""What a run reads, measures, keeps and runs on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotlap.config.checks import require, require_not_negative, require_positive
from hotlap.settings import setting


@dataclass(frozen=True)
class DataConfig:
    source: str = setting("fineweb", "a corpus by name, or a directory of prepared shards")
    tokenizer: Literal["gpt2", "bpe"] = setting("gpt2", "GPT-2's, or byte-level BPE trained on the corpus")
    order: Literal["stream", "shuffled"] = setting("stream", "tokens in order, or chunks of them shuffled")
    chunk_tokens: int = setting(256, "tokens of a chunk when order is shuffled; each is its own document")
    tail: Literal["carry", "drop"] = setting(
        "carry", "at a shard's end: go on in the next one, or drop the rest"
    )
    num_shards: int = setting(10, "training shards to fetch of a corpus that comes in shards")
    bytes_per_token: float | None = setting(None, "for bits per byte where the data has no manifest")

    def __post_init__(self) -> None:
        require(bool(self.source), "a data source", "an empty name", "give a corpus or a directory")
        require_positive(self, "chunk_tokens", "num_shards")
        if self.bytes_per_token is not None:
            require_positive(self, "bytes_per_token")


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int = setting(125, "steps between validations; 0 validates at the end only")
    tokens: int | None = setting(
        10_485_760, "validation tokens, from the start of the split; none: all of it"
    )
    target_loss: float | None = setting(None, "the validation loss to reach")
    target_bpb: float | None = setting(None, "the validation bits per byte to reach")
    stop_at_target: bool = setting(True, "end the run there; false trains to the end all the same")

    def __post_init__(self) -> None:
        require_not_negative(self, "every_steps")
        for name in ("tokens", "target_loss", "target_bpb"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        require(
            self.target_loss is None or self.target_bpb is None,
            "the target as a loss or in bits per byte",
            f"both ({self.target_loss} nats, {self.target_bpb} bits/byte)",
            "set one of them to none",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = setting(0, "steps between checkpoints; 0 saves at the end only")
    every_minutes: float = setting(10.0, "minutes between checkpoints; 0 goes by steps only")
    keep: int = setting(2, "newest checkpoints kept")
    keep_best: bool = setting(True, "also keep the one with the lowest validation loss")

    def __post_init__(self) -> None:
        require_not_negative(self, "every_steps", "every_minutes")
        require_positive(self, "keep")


@dataclass(frozen=True)
class RuntimeConfig:
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "where to train")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "of activations: bfloat16 where the hardware has it, else float32"
    )
    compile: Literal["auto", "off", "block", "model"] = setting("auto", "what torch.compile is applied to")
    coordinate_descent: bool = setting(False, "CUDA: let the compiler search for faster kernels")
    threads: int = setting(0, "CPU threads a process; 0 shares the cores among the processes")
    on_nan: Literal["stop", "skip"] = setting("stop", "what to do when the loss is not finite")

    def __post_init__(self) -> None:
        require_not_negative(self, "threads")
