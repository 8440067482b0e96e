"""Every setting of a run, each declared once: its type, its default and one line about it.

The defaults are what the published records have in common; a recipe changes what it must. Whatever can be
known to be wrong without a machine or data is refused here, when the dataclass is built. Names of settings,
JSON and diffs are derived from these declarations by `hotlap.settings`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Literal

from hotlap.errors import ConfigError
from hotlap.settings import section, setting


def _require(condition: bool, expected: str, found: str, do: str) -> None:
    if not condition:
        raise ConfigError(expected=expected, found=found, do=do)


def _require_positive(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(math.isfinite(value) and value > 0, f"`{name}` above 0", str(value), "give a positive value")


def _require_not_negative(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(
            math.isfinite(value) and value >= 0, f"`{name}` of 0 or more", str(value), "give such a number"
        )


def _require_fraction(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(0 <= value <= 1, f"`{name}` between 0 and 1", str(value), "give a fraction")


def _require_decay(settings: Any, *names: str) -> None:
    for name in names:
        value = getattr(settings, name)
        _require(0 <= value < 1, f"`{name}` of 0 or more and below 1", str(value), "give a smaller fraction")


@dataclass(frozen=True)
class ModelConfig:
    architecture: Literal["speedrun", "gpt2"] = setting("speedrun", "the records' model, or plain GPT-2")
    num_layers: int = setting(12, "transformer blocks; the first half is the U-Net's encoder")
    width: int = setting(768, "features of the residual stream")
    num_heads: int = setting(6, "query heads")
    num_kv_heads: int | None = setting(
        None, "key and value heads (grouped-query attention); none: as many as heads"
    )
    mlp_ratio: int = setting(4, "hidden width of the MLP over the model's")
    vocab_size: int = setting(50257, "token ids of the tokenizer")
    vocab_multiple: int = setting(128, "embedding and head rows are padded up to a multiple of this")
    rotary: Literal["full", "half"] = setting("full", "rotate all dimensions of q and k, or half of them")
    rotary_base: float = setting(10000.0, "wavelength base of the rotary positions")
    softcap: float = setting(30.0, "logits are softcap·tanh(logits/softcap); 0 leaves them as they are")
    values: Literal["plain", "first-layer", "per-layer", "mirrored", "outer"] = setting(
        "first-layer",
        "what is mixed into v: nothing, the first layer's v, or value embeddings: one table a layer, one an"
        " encoder layer and mirrored, or tables on the outer quarters only",
    )
    value_mix: Literal["one", "pair"] = setting("one", "v = (1−λ)v + λu with one λ, or λ₀v + λ₁u with two")
    value_tables: Literal["joined", "separate"] = setting(
        "joined", "value tables side by side in one, or apart"
    )
    bigram_rows: int = setting(
        0, "rows of a table of hashed pairs of neighbouring tokens, added to the embedding; 0: none"
    )
    drop_attention: bool = setting(False, "leave attention out of layer ⌊7·layers/12⌋")
    bf16_embeddings: bool = setting(
        False, "keep embedding tables in bfloat16 where the run computes in bfloat16"
    )

    def __post_init__(self) -> None:
        _require_positive(
            self,
            "num_layers",
            "width",
            "num_heads",
            "mlp_ratio",
            "vocab_size",
            "vocab_multiple",
            "rotary_base",
        )
        _require_not_negative(self, "softcap", "bigram_rows")
        _require(
            self.width % self.num_heads == 0,
            "a width that the heads divide",
            f"width {self.width} and {self.num_heads} heads",
            f"use a width of {self.num_heads * max(1, round(self.width / self.num_heads))}",
        )
        _require(
            self.kv_heads > 0 and self.num_heads % self.kv_heads == 0,
            "kv heads that divide the heads",
            f"{self.num_kv_heads} kv heads and {self.num_heads} heads",
            f"use one of {[n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]}",
        )
        _require(
            self.head_dim % (4 if self.rotary == "half" else 2) == 0 or self.architecture == "gpt2",
            f"a head dimension that rotary={self.rotary} can pair up",
            f"{self.head_dim}",
            "change width or num_heads so that width / num_heads is a multiple of 4",
        )
        _require(
            self.values != "mirrored" or self.num_layers % 2 == 0,
            "an even number of layers for values=mirrored",
            f"{self.num_layers}",
            f"use {self.num_layers + 1} layers or other values",
        )
        if self.architecture == "gpt2":
            _require(
                self.num_kv_heads is None and not self.bigram_rows,
                "num_kv_heads none and bigram_rows 0 for gpt2, which has neither",
                f"num_kv_heads {self.num_kv_heads}, bigram_rows {self.bigram_rows}",
                "leave them out, or use another recipe",
            )
        else:
            _require(
                self.num_layers > 1,
                "two layers or more, for an encoder and a decoder",
                "1",
                "add a layer, or use the recipe adamw",
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def padded_vocab_size(self) -> int:
        return math.ceil(self.vocab_size / self.vocab_multiple) * self.vocab_multiple

    @property
    def attention_free_layers(self) -> tuple[int, ...]:
        return (7 * self.num_layers // 12,) if self.drop_attention else ()

    @property
    def value_table_of_layer(self) -> tuple[int | None, ...]:
        """The value-embedding table that each layer mixes in, or None."""
        layers = self.num_layers
        if self.values == "per-layer":
            tables = itertools.count()
            return tuple(
                None if layer in self.attention_free_layers else next(tables) for layer in range(layers)
            )
        if self.values == "mirrored":
            return (*range(layers // 2), *reversed(range(layers // 2)))
        if self.values == "outer":
            outer = tuple(range(layers // 4))
            return (*outer, *[None] * (layers - 2 * len(outer)), *outer)
        return (None,) * layers


@dataclass(frozen=True)
class AttentionConfig:
    backend: Literal["auto", "dense", "flex", "native", "blocked"] = setting(
        "auto", "flex on CUDA, native on a CPU with gcc, else blocked; dense is the slow reference"
    )
    window_unit: Literal["tokens", "blocks", "unlimited"] = setting(
        "tokens", "what the window counts: tokens, blocks, or nothing (all earlier tokens are seen)"
    )
    block_size: int = setting(128, "tokens of a mask block")
    document_mask: bool = setting(True, "tokens see only their own document")
    saved_probabilities_mb: int = setting(
        1024, "blocked backend: memory for probabilities kept for the backward"
    )

    def __post_init__(self) -> None:
        _require_positive(self, "block_size")
        _require_not_negative(self, "saved_probabilities_mb")


@dataclass(frozen=True)
class MuonConfig:
    lr: float = setting(0.05, "learning rate of the matrices inside the blocks")
    momentum_start: float = setting(0.85, "momentum at step 0")
    momentum_end: float = setting(0.95, "momentum after its warm-up")
    momentum_warmup_steps: int = setting(300, "steps from the first momentum to the last")
    momentum_form: Literal["sum", "lerp"] = setting(
        "sum", "buffer = μ·buffer + g, or buffer lerps towards g by 1−μ"
    )
    nesterov: bool = setting(True, "look ahead along the momentum")
    newton_schulz_steps: int = setting(5, "iterations of the orthogonalisation")
    coefficients: Literal["quintic", "polar-express"] = setting(
        "quintic", "fixed (3.4445, −4.7750, 2.0315), or one triple a step"
    )
    update_scale: Literal["aspect", "match-rms"] = setting(
        "aspect", "update × max(1, rows/cols)^0.5, or × 0.2·max(rows, cols)^0.5 to match Adam's RMS"
    )
    weight_decay: float = setting(0.0, "decoupled weight decay, times the learning rate")
    cautious_weight_decay: bool = setting(False, "decay only where update and weight have the same sign")
    communication: Literal["overlapped", "flat"] = setting(
        "flat", "async all-gather a chunk at a time, or one all-reduce of all updates"
    )
    lr_factors: dict[str, float] = setting(
        {}, "factor on the learning rate of parameters whose name contains a key"
    )

    def __post_init__(self) -> None:
        _require_positive(self, "lr", "newton_schulz_steps")
        _require_decay(self, "momentum_start", "momentum_end")
        _require_not_negative(self, "momentum_warmup_steps", "weight_decay")


@dataclass(frozen=True)
class AdamConfig:
    embed_lr: float = setting(0.6, "learning rate of token, pair and value embeddings")
    head_lr: float = setting(0.008, "learning rate of the output layer")
    scalar_lr: float = setting(0.04, "learning rate of mixing weights and norm gains")
    matrix_lr: float = setting(0.0006, "learning rate of matrices when optim.matrices is adamw")
    beta1: float = setting(0.8, "decay of the first moment")
    beta2: float = setting(0.95, "decay of the second moment")
    eps: float = setting(1e-8, "added to the root of the second moment")
    weight_decay: float = setting(0.0, "decoupled weight decay on tensors of two or more dimensions")

    def __post_init__(self) -> None:
        _require_positive(self, "embed_lr", "head_lr", "scalar_lr", "matrix_lr", "eps")
        _require_decay(self, "beta1", "beta2")
        _require_not_negative(self, "weight_decay")


@dataclass(frozen=True)
class OptimConfig:
    matrices: Literal["muon", "adamw"] = setting(
        "muon", "which optimizer takes the matrices inside the blocks"
    )
    pairs: Literal["adam", "row-rms"] = setting(
        "adam", "which optimizer takes the table of token pairs; row-rms leaves rows without a gradient alone"
    )
    clip_norm: float = setting(0.0, "global gradient norm is clipped to this; 0 does not clip")
    muon: MuonConfig = section(MuonConfig, "Muon")
    adam: AdamConfig = section(AdamConfig, "Adam")

    def __post_init__(self) -> None:
        _require_not_negative(self, "clip_norm")


@dataclass(frozen=True)
class ScheduleConfig:
    steps: int = setting(1750, "optimizer steps of the run")
    kind: Literal["trapezoid", "triangular", "cosine"] = setting(
        "trapezoid", "learning rate: constant then linear to 0; up and straight down; or cosine"
    )
    warmup_steps: int = setting(0, "steps over which the learning rate rises")
    cooldown_steps: int = setting(0, "steps over which it falls at the end (trapezoid), as a number")
    cooldown_fraction: float = setting(0.0, "steps over which it falls at the end (trapezoid), as a share")
    final_lr_fraction: float = setting(0.0, "learning rate at the end of a cosine, over the peak")
    window_start_tokens: int = setting(64, "attention window at step 0, before rounding")
    window_end_tokens: int = setting(1792, "attention window at the last step, before rounding")
    window_offset_tokens: int = setting(0, "added before the window is rounded down")
    window_multiple_tokens: int = setting(64, "the window is rounded down to a multiple of this")

    def __post_init__(self) -> None:
        _require_positive(self, "steps", "window_start_tokens", "window_end_tokens", "window_multiple_tokens")
        _require_not_negative(self, "warmup_steps", "cooldown_steps", "window_offset_tokens")
        _require_fraction(self, "cooldown_fraction", "final_lr_fraction")
        _require(
            not (self.cooldown_steps and self.cooldown_fraction),
            "the cooldown in steps or as a fraction",
            f"both ({self.cooldown_steps} steps, {self.cooldown_fraction})",
            "set one of them to 0",
        )
        _require(
            self.warmup_steps + self.cooldown_steps <= self.steps,
            "warm-up and cooldown within the steps",
            f"{self.warmup_steps} + {self.cooldown_steps} of {self.steps} steps",
            "shorten them or train for more steps",
        )
        smallest = min(self.window_start_tokens, self.window_end_tokens) + self.window_offset_tokens
        _require(
            smallest >= self.window_multiple_tokens,
            f"a window of at least window_multiple_tokens = {self.window_multiple_tokens}",
            f"{smallest}",
            "widen the window or round it to a smaller multiple",
        )


@dataclass(frozen=True)
class BatchConfig:
    tokens_per_step: int = setting(524_288, "tokens of one optimizer step, over all devices")
    sequence_tokens: int = setting(65_536, "tokens of one packed sequence")
    micro_sequences: int = setting(1, "sequences that a device takes through the model at once")

    def __post_init__(self) -> None:
        _require_positive(self, "tokens_per_step", "sequence_tokens", "micro_sequences")
        sequences = max(1, self.tokens_per_step // self.sequence_tokens)
        _require(
            self.tokens_per_step % self.sequence_tokens == 0,
            "tokens_per_step as a multiple of sequence_tokens",
            f"{self.tokens_per_step} and {self.sequence_tokens}",
            f"use {sequences * self.sequence_tokens} tokens a step",
        )


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
        _require(bool(self.source), "a data source", "an empty name", "give a corpus or a directory")
        _require_positive(self, "chunk_tokens", "num_shards")
        if self.bytes_per_token is not None:
            _require_positive(self, "bytes_per_token")


@dataclass(frozen=True)
class EvaluationConfig:
    every_steps: int = setting(125, "steps between validations; 0 validates at the end only")
    tokens: int | None = setting(
        10_485_760, "validation tokens, from the start of the split; none: all of it"
    )
    target_loss: float | None = setting(None, "stop when the validation loss is this low")
    target_bpb: float | None = setting(None, "stop when validation bits per byte are this low")

    def __post_init__(self) -> None:
        _require_not_negative(self, "every_steps")
        for name in ("tokens", "target_loss", "target_bpb"):
            if getattr(self, name) is not None:
                _require_positive(self, name)
        _require(
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
        _require_not_negative(self, "every_steps", "every_minutes")
        _require_positive(self, "keep")


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
        _require_not_negative(self, "threads")


@dataclass(frozen=True)
class Config:
    recipe: str = setting("", "name of the recipe")
    size: str = setting("small", "name of the size")
    seed: int = setting(0, "of initialisation and data order")
    model: ModelConfig = section(ModelConfig, "the model")
    attention: AttentionConfig = section(AttentionConfig, "attention")
    optim: OptimConfig = section(OptimConfig, "optimizers")
    schedule: ScheduleConfig = section(ScheduleConfig, "schedules")
    batch: BatchConfig = section(BatchConfig, "batches")
    data: DataConfig = section(DataConfig, "data")
    evaluation: EvaluationConfig = section(EvaluationConfig, "validation")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "checkpoints")
    runtime: RuntimeConfig = section(RuntimeConfig, "machine")

    def __post_init__(self) -> None:
        _require(
            0 <= self.seed < 2**63, "`seed` of 0 or more and below 2**63", str(self.seed), "choose another"
        )
        block, sequence = self.attention.block_size, self.batch.sequence_tokens
        _require(
            sequence % block == 0,
            f"sequence_tokens as a multiple of the block of {block}",
            str(sequence),
            f"use {max(1, sequence // block) * block}",
        )
        if self.data.order == "shuffled":
            _require(
                sequence % self.data.chunk_tokens == 0,
                "sequence_tokens as a multiple of chunk_tokens",
                f"{sequence} and {self.data.chunk_tokens}",
                "change data.chunk_tokens",
            )
        is_gpt2, unlimited = self.model.architecture == "gpt2", self.attention.window_unit == "unlimited"
        _require(
            is_gpt2 == unlimited and not (is_gpt2 and self.attention.document_mask),
            "an unlimited window without a document mask for gpt2, and a limited one for speedrun",
            f"{self.model.architecture}, window_unit {self.attention.window_unit},"
            f" document_mask {str(self.attention.document_mask).lower()}",
            "change model.architecture or the attention settings",
        )
        if self.attention.window_unit == "blocks":
            _require(
                self.schedule.window_multiple_tokens == block,
                f"window_multiple_tokens equal to the block of {block} when the window counts blocks",
                str(self.schedule.window_multiple_tokens),
                "change schedule.window_multiple_tokens or attention.window_unit",
            )
