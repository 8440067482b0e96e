"""Load a trained model with its tokenizer and configuration, from a checkpoint or an exported directory.

`load` uses the run's precision and its attention window at the checkpoint's step. Every file is verified
against its checksum before use. The caller's random state is not changed.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotlap.attention.visibility import Visibility
from hotlap.config import Config
from hotlap.corpus.tokenizer import TOKENIZER_FILE, Tokenizer, load_tokenizer, read_tokenizer
from hotlap.data.stream import open_split
from hotlap.errors import CheckpointError, ConfigError, DataError
from hotlap.files import file_sha256, reading
from hotlap.hardware import select_device, select_precision
from hotlap.inference.decode import uncached_logits
from hotlap.inference.generate import TextStream, encode_prompt, generate, samples
from hotlap.inference.options import SampleOptions
from hotlap.json_files import unseal
from hotlap.model import GPT, GPT2, Parts, build_model
from hotlap.recipes import IdeaFile
from hotlap.recipes.idea import combined
from hotlap.recipes.idea_files import read_copies
from hotlap.runs import checkpoint as store
from hotlap.runs.directory import RunDirectory
from hotlap.runs.reader import IDEAS_DIRECTORY
from hotlap.runs.recorded import recorded_directory
from hotlap.settings import from_json

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
EXPORT_FORMAT = "hotlap-model"
EXPORT_VERSION = 1
PRECISIONS = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class Stored:
    """The verified content of a checkpoint or an export, before the model is built."""

    path: Path
    config: Config
    step: int
    weights: Mapping[str, Tensor]
    training: Mapping[str, Any]  # tokens, validation results and data of the run; see `training_facts`
    read_tokenizer: Callable[[], Tokenizer]
    is_best: bool = False  # whether it was chosen because its validation is the best of its run

    @property
    def ideas(self) -> Path:
        """Where the copies of its idea files are."""
        return self.path / IDEAS_DIRECTORY


class LoadedModel:
    """A model for sampling and for computing logits. Text is treated as the start of a document."""

    def __init__(self, stored: Stored, model: GPT | GPT2, device: torch.device) -> None:
        self.stored = stored
        self.config = stored.config
        self.step = stored.step
        self.model = model
        self.device = device

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.stored.read_tokenizer()
        if tokenizer.vocab_size > self.config.model.vocab_size:
            raise DataError(
                expected=f"a tokenizer that fits the model's vocabulary of {self.config.model.vocab_size}",
                found=f"{tokenizer.name} with {tokenizer.vocab_size} tokens",
                do="restore the tokenizer that the model was trained with",
            )
        return tokenizer

    @property
    def visibility(self) -> Visibility:
        return Visibility.at_step(self.config, self.step, self.tokenizer.end_of_text)

    def logits(self, text_or_ids: str | Sequence[int]) -> Tensor:
        """Next-token logits (T, V) float32 for each token of a text, encoded as a prompt, or of given ids."""
        if isinstance(text_or_ids, str):
            ids = encode_prompt(self.tokenizer, text_or_ids)
        else:
            ids = [int(token) for token in text_or_ids]
        self._check_ids(ids)
        tokens_T = torch.tensor(ids, device=self.device)
        return uncached_logits(self.model, self.visibility, tokens_T).contiguous()

    def generate(self, prompt: str = "", **options: Any) -> list[str]:
        """The prompt with its continuation, once per sample. `options` are the fields of `SampleOptions`."""
        sample_options = SampleOptions(**options)
        generated = samples(self.generate_steps(prompt, sample_options), sample_options)
        return [prompt + self.tokenizer.decode(sample.tokens) for sample in generated]

    def generate_steps(self, prompt: str, options: SampleOptions) -> Iterator[list[int | None]]:
        """Yield the next token of each sample, step by step; None for samples that have ended."""
        ids = encode_prompt(self.tokenizer, prompt)
        known = self.tokenizer.vocab_size
        return generate(self.model, self.visibility, ids, options, known_tokens=known)

    def stream(self, prompt: str, options: SampleOptions) -> Iterator[str]:
        """Yield the continuation of a single sample as it is drawn: a piece of text per token."""
        assert options.num_samples == 1, "a stream is of one sample"
        stream = TextStream(self.tokenizer)
        for (token,) in self.generate_steps(prompt, options):
            assert token is not None, "generation ends with its only sample"
            yield stream.add(token)
        if rest := stream.close():
            yield rest

    def _check_ids(self, ids: Sequence[int]) -> None:
        vocabulary = self.config.model.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if not ids or wrong is not None:
            raise ConfigError(
                expected=f"token ids from 0 to {vocabulary - 1}",
                found="none" if wrong is None else str(wrong),
                do="encode the text with this model's tokenizer",
            )
        if isinstance(self.model, GPT2) and len(ids) > self.model.max_tokens:
            raise ConfigError(
                expected=f"at most {self.model.max_tokens} tokens, the number of learned positions",
                found=str(len(ids)),
                do="shorten the text",
            )


def load(
    path: Path | str,
    *,
    checkpoint: str = "auto",
    device: str = "auto",
    precision: str | None = None,
    trust_code: bool = False,
) -> LoadedModel:
    """Load the model of a run (`runs/<name>`) or of an exported directory.

    checkpoint: `best` (lowest validation loss), `latest`, `auto` (the best, or the latest if none was
    validated), or the name or path of a checkpoint of the run.
    precision: dtype of activations, `auto`, `float32` or `bfloat16`; None uses the run's setting.
    trust_code: run the idea files that the model was trained with, which come with it; refused otherwise.
    """
    path = Path(path)
    if precision is not None and precision not in PRECISIONS:
        raise ConfigError(
            expected=f"a precision ({', '.join(PRECISIONS)})", found=precision, do="choose one of these"
        )
    chosen_device = select_device(device)
    exported = (path / MODEL_FILE).is_file()
    stored = read_exported(path, checkpoint) if exported else read_run(path, checkpoint)
    config = stored.config
    ideas = read_trusted_ideas(stored, trust_code=trust_code)
    dtype = select_precision(precision or config.runtime.precision, chosen_device)
    max_tokens = max(config.batch.sequence_tokens, config.validation_sequence_tokens)
    parts = Parts(**combined([file.idea for file in ideas]).modules)
    try:
        check_shapes(stored, max_tokens, parts)
        with torch.random.fork_rng(devices=[]):
            model = build_model(config.model, max_tokens, dtype, parts)
        model.load_state_dict(dict(stored.weights))
    except RuntimeError as error:
        raise misfit(path, " ".join(str(error).split())) from error
    model.requires_grad_(False)
    return LoadedModel(stored, model.to(chosen_device), chosen_device)


def read_trusted_ideas(stored: Stored, *, trust_code: bool) -> tuple[IdeaFile, ...]:
    """The ideas that come with a model. Reading them runs their code."""
    identities = stored.config.ideas
    if identities and not trust_code:
        raise CheckpointError(
            expected=f"leave to run the code of {', '.join(identities)}, which comes with {stored.path}",
            found="none",
            do=f"read {stored.ideas}, and if you trust it add --trust-code, in Python trust_code=True",
        )
    return read_copies(stored.ideas, identities)


def check_shapes(stored: Stored, max_tokens: int, parts: Parts) -> None:
    """Refuse weights of other shapes than the configuration's, before memory is taken for those."""
    config = stored.config
    if config.model.num_layers > len(stored.weights):  # every layer has weights
        raise misfit(stored.path, f"{len(stored.weights)} weights for {config.model.num_layers} layers")
    with torch.device("meta"):
        model = build_model(config.model, max_tokens, parts=parts)
    for name, expected in model.state_dict().items():
        found = stored.weights.get(name)
        if found is not None and found.shape != expected.shape:
            shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
            raise misfit(stored.path, f"{name} of shape {shapes}")


def misfit(path: Path, found: str) -> CheckpointError:
    return CheckpointError(
        expected=f"weights in {path} that match its configuration",
        found=found,
        do="use a checkpoint of this run, written by this version of Hotlap",
    )


def read_run(path: Path, checkpoint: str = "auto") -> Stored:
    run = RunDirectory.open(path)
    saved = store.load(checkpoint_path(run, checkpoint), groups=("model",))
    is_best = checkpoint in ("auto", "best") and saved.state.get("val_loss") is not None
    try:
        training = training_facts(run, saved)
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            expected=f"the progress of the run in a checkpoint of {path}",
            found=f"{type(error).__name__}: {error}",
            do="use another checkpoint, written by this version of Hotlap",
        ) from error
    return Stored(
        path=path,
        config=from_json(Config, saved.state.get("config")),
        step=saved.step,
        weights=saved.tensors["model"],
        training=training,
        read_tokenizer=lambda: run_tokenizer(run, saved),
        is_best=is_best,
    )


def checkpoint_path(run: RunDirectory, name: str = "auto") -> Path:
    if name == "latest":
        return store.latest(run.checkpoints)
    if name in ("auto", "best"):
        latest = store.latest(run.checkpoints)  # raises if there is no checkpoint at all
        best = store.best(run.checkpoints)
        if best is None and name == "auto":
            return latest
        if best is None:
            raise CheckpointError(
                expected=f"a checkpoint with a validation loss in {run.checkpoints}",
                found="none",
                do="use --checkpoint latest",
            )
        return best
    inside = run.checkpoints / name
    return inside if inside.is_dir() else Path(name)


def training_facts(run: RunDirectory, saved: store.Checkpoint) -> dict[str, Any]:
    """Facts about the training run. Validation results are None unless measured at exactly this step."""
    progress = saved.state["progress"]
    evaluation = progress["evaluation"] if progress["evaluated_step"] == saved.step else None
    environment = run.read_environment()
    return {
        "run": run.path.name,
        "tokens": progress["tokens"],
        "training_s": progress["training_s"],
        "val_loss": evaluation and evaluation["loss"],
        "val_bpb": evaluation and evaluation["bpb"],
        "hotlap": environment.get("hotlap"),
        "device": environment.get("device_name"),
        "world_size": environment.get("world_size"),
        "data": environment.get("data") or {},
    }


def run_tokenizer(run: RunDirectory, saved: store.Checkpoint) -> Tokenizer:
    """The tokenizer that the run was trained with; not verified in checkpoints without its fingerprint."""
    tokenizer = find_tokenizer(run, saved)
    if saved.state.get("tokenizer") not in (None, tokenizer.fingerprint):
        raise DataError(
            expected=f"the tokenizer that the run in {run.path} was trained with",
            found=f"another one, {tokenizer.name}",
            do=f"copy the {TOKENIZER_FILE} of the run's data to the run directory",
        )
    return tokenizer


def find_tokenizer(run: RunDirectory, saved: store.Checkpoint) -> Tokenizer:
    """The run's own copy of the tokenizer, or the one of its training data."""
    data = run.read_environment().get("data") or {}
    own = run.path / TOKENIZER_FILE
    if own.is_file():
        return read_tokenizer(own, data.get("tokenizer") or own.name)
    directory = recorded_directory(data)
    if directory is None or not directory.is_dir():
        raise DataError(
            expected=f"a tokenizer: {own}, or the run's data at {directory or 'a recorded directory'}",
            found="neither",
            do=f"copy the {TOKENIZER_FILE} of its data to the run directory",
        )
    if open_split(directory, "train").fingerprint != saved.state.get("data"):
        raise DataError(
            expected=f"the run's training data in {directory}, to get its tokenizer",
            found="different shards",
            do=f"copy the {TOKENIZER_FILE} of the run's data to the run directory",
        )
    return load_tokenizer(directory)


def read_exported(path: Path, checkpoint: str = "auto") -> Stored:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if checkpoint not in ("auto", "latest"):
        raise ConfigError(
            expected="a run directory for --checkpoint",
            found=f"{path}, an exported model without checkpoints",
            do="omit --checkpoint",
        )
    config_path = path / CONFIG_FILE
    with reading(config_path):
        sealed = config_path.read_bytes()
    try:
        content = unseal(sealed)
    except ValueError as error:
        refuse_repository(config_path, sealed)
        raise damaged_export(config_path, str(error)) from error
    if (content.get("format"), content.get("version")) != (EXPORT_FORMAT, EXPORT_VERSION):
        raise CheckpointError(
            expected=f"{EXPORT_FORMAT} version {EXPORT_VERSION} in {config_path}",
            found=f"{content.get('format')} version {content.get('version')}",
            do="load it with the version of Hotlap that wrote it",
        )
    try:
        sha256 = {name: str(content["sha256"][name]) for name in (MODEL_FILE, TOKENIZER_FILE)}
        step, training, tokenizer = int(content["step"]), dict(content["training"]), str(content["tokenizer"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise damaged_export(config_path, f"{type(error).__name__}: {error}") from error
    for name, recorded in sha256.items():
        if file_sha256(path / name) != recorded:
            raise damaged_export(path / name, "a different checksum")
    try:
        weights = load_file(path / MODEL_FILE)
    except (SafetensorError, OSError) as error:
        raise damaged_export(path / MODEL_FILE, " ".join(str(error).split())) from error
    return Stored(
        path=path,
        config=from_json(Config, content.get("config")),
        step=step,
        weights=weights,
        training=training,
        read_tokenizer=lambda: read_tokenizer(path / TOKENIZER_FILE, tokenizer),
    )


def refuse_repository(config_path: Path, content: bytes) -> None:
    """Say what it is if it is a model for `transformers`, whose code Hotlap never runs."""
    try:
        kind = json.loads(content)["model_type"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return
    raise CheckpointError(
        expected=f"a run, or a model in Hotlap's own form, in {config_path.parent}",
        found=f"a repository for transformers, of a model of type {kind}",
        do="load it with transformers, or export the run without --to",
    )


def damaged_export(path: Path, found: str) -> CheckpointError:
    return CheckpointError(expected=f"an unmodified {path}", found=found, do="export or copy it again")
