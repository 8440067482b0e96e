"""Exports a run as a directory to share: weights, configuration, tokenizer and a model card.

The directory is written atomically, and before it gets its name it is loaded again and its logits are
compared with those of the run, bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hotlap.corpus.tokenizer import TOKENIZER_FILE
from hotlap.data.manifest import read_manifest
from hotlap.errors import CheckpointError
from hotlap.files import atomic_directory, file_sha256, locked_beside, without_folders, writing
from hotlap.inference.load import CONFIG_FILE, EXPORT_FORMAT, EXPORT_VERSION, MODEL_FILE, LoadedModel, load
from hotlap.json_files import seal
from hotlap.recipes.idea_files import SUFFIX
from hotlap.runs.reader import IDEAS_DIRECTORY
from hotlap.runs.recorded import recorded_directory
from hotlap.settings import to_json, updated

CARD_FILE = "README.md"
# Long enough to exceed the attention window of a small model; which tokens they are does not matter.
CHECKED_TOKENS = 512


def export(loaded: LoadedModel, target: Path) -> None:
    """Write `target`, which must not exist."""

    def refuse(owner: str) -> NoReturn:
        raise CheckpointError(
            expected=f"no other process that writes {target}",
            found=f"process {owner}" if owner else "one",
            do="wait for it, or choose another directory",
        )

    with writing(target, CheckpointError, also=(SafetensorError,)), locked_beside(target, refuse):
        refuse_existing(target)
        with atomic_directory(target) as work:
            write_files(loaded, work)
            check_equal(loaded, work)


def refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            expected=f"a new directory {target}", found="one that exists", do="remove it or choose another"
        )


def write_files(loaded: LoadedModel, directory: Path) -> None:
    tokenizer, training = loaded.tokenizer, shareable(loaded)
    weights = {name: tensor.contiguous() for name, tensor in loaded.stored.weights.items()}
    save_file(weights, directory / MODEL_FILE, metadata={"format": "pt"})
    tokenizer.save(directory)
    # safetensors makes files for the owner alone, whatever the umask
    shutil.copymode(directory / TOKENIZER_FILE, directory / MODEL_FILE)
    for identity in loaded.config.ideas:
        copy = f"{identity}{SUFFIX}"
        (directory / IDEAS_DIRECTORY).mkdir(exist_ok=True)
        shutil.copyfile(loaded.stored.ideas / copy, directory / IDEAS_DIRECTORY / copy)
    (directory / CARD_FILE).write_text(model_card(loaded, training), encoding="utf-8")
    content = {
        "format": EXPORT_FORMAT,
        "version": EXPORT_VERSION,
        "step": loaded.step,
        "tokenizer": tokenizer.name,
        "training": training,
        "sha256": {name: file_sha256(directory / name) for name in (MODEL_FILE, TOKENIZER_FILE)},
        "config": to_json(
            updated(loaded.config, {"data.source": without_folders(loaded.config.data.source)})
        ),
    }
    (directory / CONFIG_FILE).write_bytes(seal(content))


def shareable(loaded: LoadedModel) -> dict[str, Any]:
    """What is known about the training, with the license of the text and without paths of this machine."""
    training = loaded.stored.training
    data = dict(training["data"])
    directory = recorded_directory(data)
    data.pop("directory", None)
    if directory is not None:
        manifest = read_manifest(directory) if directory.is_dir() else None
        data["licence"] = manifest.licence if manifest else None
        data["source"] = without_folders(manifest.source if manifest else loaded.config.data.source)
    return {**training, "data": data}


def check_equal(loaded: LoadedModel, directory: Path) -> None:
    """Load what was written and compare its logits with the run's, bit for bit."""
    precision = str(loaded.model.dtype).removeprefix("torch.")
    again = load(directory, device=loaded.device.type, precision=precision, trust_code=True)
    length = min(CHECKED_TOKENS, loaded.config.batch.sequence_tokens)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.tokenizer.vocab_size, (length,), generator=generator).tolist()
    if not torch.equal(loaded.logits(ids), again.logits(ids)):
        raise CheckpointError(
            expected="logits of the exported model equal to the run's",
            found="different logits",
            do="check the disk and the memory of this machine, and export again",
        )


def model_card(loaded: LoadedModel, training: dict[str, Any]) -> str:
    config, model, data = loaded.config, loaded.config.model, training["data"]
    facts = {
        "parameters": f"{sum(parameter.numel() for parameter in loaded.model.parameters()):,}",
        "architecture": f"{model.num_layers} layers, width {model.width}, {model.num_heads} heads,"
        f" vocabulary {model.vocab_size:,}",
        "tokenizer": loaded.tokenizer.name,
        **({"ideas": f"`{', '.join(config.ideas)}`, whose code is in `ideas/`"} if config.ideas else {}),
        "recipe": f"`{config.recipe}` at size `{config.size}`, seed {config.seed}",
        "training": f"{loaded.step:,} steps, {training['tokens']:,} tokens,"
        f" {training['training_s']:,.0f} s on {training['world_size']} × {training['device']}",
        "validation loss": figure(training["val_loss"], "nats per token"),
        "bits per byte": figure(training["val_bpb"], "on the validation split of the data"),
        "training data": data.get("source") or "unknown",
        "license of the data": data.get("licence") or "unknown",
        "written by": f"Hotlap {training['hotlap']}, run `{training['run']}`",
    }
    trust = ", trust_code=True" if config.ideas else ""
    rows = "\n".join(f"| {name} | {cell(value)} |" for name, value in facts.items())
    return f"""---
library_name: hotlap
pipeline_tag: text-generation
---

# {training["run"]}

A small GPT language model, trained with Hotlap.

| | |
|---|---|
{rows}

## Use

```python
import hotlap

model = hotlap.load("path/to/this/directory"{trust})
print(model.generate("Once", max_tokens=100)[0])
model.logits("Once")  # (tokens, vocabulary)
```

or `hotlap sample path/to/this/directory --prompt "Once"`.

The model continues text like its training data. It was not tuned to follow instructions or to be truthful.
"""


def figure(value: float | None, unit: str) -> str:
    return "not measured at this step" if value is None else f"{value:.4f} {unit}"


def cell(value: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    return " ".join(value.split()).replace("|", "\\|")
