"""Settings of data, evaluation, checkpoints and the machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotlap.config.checks import require, require_not_negative, require_positive
from hotlap.files import without_home
from hotlap.settings import setting


@dataclass(frozen=True)
class DataConfig:
    source: str = setting("fineweb", "the name of a corpus, prepared shards, or text: a file or a folder")
    tokenizer: Literal["gpt2", "bpe"] = setting(
        "gpt2", "GPT-2's tokenizer, or byte-level BPE trained on the corpus"
    )
    order: Literal["stream", "shuffled"] = setting("stream", "tokens in order, or shuffled chunks")
    chunk_tokens: int = setting(256, "tokens per shuffled chunk; each chunk is masked as its own document")
    tail: Literal["carry", "drop"] = setting(
        "carry", "at the end of a shard: continue the batch in the next shard, or drop the rest"
    )
    num_shards: int = setting(10, "training shards to download, for corpora published as shards")
    bytes_per_token: float | None = setting(
        None, "bytes per token, to report bits per byte for data without a manifest"
    )

    def __post_init__(self) -> None:
        require(bool(self.source), "a data source", "an empty name", "give a corpus or a directory")
        # `~/…` in all files of a run, which may be shared; whoever opens the directory expands it.
        object.__setattr__(self, "source", without_home(self.source))
        require_positive(self, "chunk_tokens", "num_shards")
        if self.bytes_per_token is not None:
            require_positive(self, "bytes_per_token")


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int = setting(125, "steps between validations; 0: validate at the end only")
    tokens: int | None = setting(
        10_485_760, "validation tokens, from the start of the split; none: the whole split"
    )
    share: float | None = setting(
        None,
        "tokens of all validations before the last, as a fraction of those trained on; none: all, each time",
    )
    validation_sequence_tokens: int | None = setting(
        None, "tokens per packed validation sequence; none: as in training"
    )
    target_loss: float | None = setting(None, "target validation loss")
    target_bpb: float | None = setting(None, "target validation bits per byte")
    stop_at_target: bool = setting(True, "end the run when the target is reached; false: run all steps")
    patience: int = setting(0, "end the run after this many validations in a row above the best; 0: never")

    def __post_init__(self) -> None:
        require_not_negative(self, "every_steps", "patience")
        for name in ("tokens", "share", "validation_sequence_tokens", "target_loss", "target_bpb"):
            if getattr(self, name) is not None:
                require_positive(self, name)
        require(
            self.target_loss is None or self.target_bpb is None,
            "a target either as a loss or in bits per byte",
            f"both ({self.target_loss} nats, {self.target_bpb} bits/byte)",
            "set one of them to none",
        )


@dataclass(frozen=True)
class CheckpointConfig:
    every_steps: int = setting(0, "steps between checkpoints; 0: by time and at the end only")
    every_minutes: float = setting(10.0, "minutes between checkpoints; 0: by step and at the end only")
    end_only_from_ranks: int = setting(
        0, "with at least this many ranks, ignore every_minutes; 0: whatever the number of ranks, do not"
    )
    keep: int = setting(2, "number of newest checkpoints to keep")
    keep_best: bool = setting(True, "save when validation improves, and keep that checkpoint")

    def __post_init__(self) -> None:
        require_not_negative(self, "every_steps", "every_minutes", "end_only_from_ranks")
        require_positive(self, "keep")

    def minutes_between(self, world_size: int) -> float:
        """Minutes between the checkpoints of a run with this many ranks; 0: none by the clock."""
        return 0.0 if self.is_end_only(world_size) else self.every_minutes

    def is_end_only(self, world_size: int) -> bool:
        """Whether a run with this many ranks saves nothing by the clock or by its validations."""
        return 0 < self.end_only_from_ranks <= world_size

    def saves_improvements(self, world_size: int) -> bool:
        return self.keep_best and not self.is_end_only(world_size)

    def describe(self, world_size: int) -> str:
        """When a run with this many ranks saves a checkpoint, in words."""
        minutes = self.minutes_between(world_size)
        during_run = [
            *([f"every {self.every_steps} steps"] if self.every_steps else []),
            *([f"every {minutes:g} minutes"] if minutes else []),
            *(["when validation improves"] if self.saves_improvements(world_size) else []),
        ]
        if during_run:
            return ", ".join(during_run) + " and at the end"
        as_record = f", as the record, with {self.end_only_from_ranks} ranks or more"
        return "at the end only" + (as_record if self.is_end_only(world_size) else "")


@dataclass(frozen=True)
class RuntimeConfig:
    device: Literal["auto", "cpu", "cuda", "mps"] = setting("auto", "device to train on")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "auto", "dtype of activations; auto: bfloat16 where the hardware supports it, else float32"
    )
    compile: Literal["auto", "off", "block", "parts", "model"] = setting(
        "auto", "what torch.compile makes one graph: each block and nothing else, each part, or the model"
    )
    kernels: Literal["auto", "off"] = setting(
        "auto",
        "fused kernels; off: everything in plain PyTorch, for a fair race against parts without a kernel",
    )
    coordinate_descent: bool = setting(False, "CUDA: coordinate-descent tuning of compiled kernels")
    threads: int = setting(0, "CPU threads per process; 0: divide the cores among the processes")
    reduction: Literal["averaged", "fixed"] = setting(
        "averaged",
        "gradients: averaged as they come; fixed: the same bits on any number of ranks and threads",
    )
    on_nan: Literal["stop", "skip"] = setting("stop", "what to do when the loss is not finite")
    timeout_minutes: float = setting(10.0, "minutes that a rank waits for the others before the run ends")

    def __post_init__(self) -> None:
        require_not_negative(self, "threads")
        require_positive(self, "timeout_minutes")
        require(
            self.reduction != "fixed" or self.compile in ("auto", "off"),
            "runtime.compile off with runtime.reduction fixed",
            self.compile,
            "leave out --compile",
        )
