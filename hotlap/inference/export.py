"""A run as a directory to give away: weights, configuration, tokenizer and a model card.

It is filled under a hidden name, loaded again, compared with the run bit for bit, and only then renamed; what
stands under the name that was asked for is complete and checked.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hotlap.corpus.tokenizer import TOKENIZER_FILE
from hotlap.data.files import file_sha256, seal
from hotlap.data.manifest import read_manifest
from hotlap.errors import CheckpointError
from hotlap.files import sync
from hotlap.inference.load import CONFIG_FILE, EXPORT_FORMAT, EXPORT_VERSION, MODEL_FILE, LoadedModel, load
from hotlap.runs.durable import make_directory, writing
from hotlap.settings import to_json, updated

CARD_FILE = "README.md"
# Long enough to leave the window of a small model; the text does not matter.
CHECKED_TOKENS = 512


def export(loaded: LoadedModel, target: Path) -> None:
    """Write `target`, which must not exist."""
    refuse_existing(target)
    work = target.with_name(f".{target.name}.partial")
    with writing(target, also=(SafetensorError,)):
        make_directory(target.absolute().parent)
        shutil.rmtree(work, ignore_errors=True)  # of an export that was killed
        try:
            work.mkdir()
            write_files(loaded, work)
            check_equal(loaded, work)
            for path in (*work.iterdir(), work):
                sync(path)
            work.rename(target)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        sync(target.absolute().parent)


def refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            expected=f"no {target} yet", found="one that exists", do="remove it or name another directory"
        )


def write_files(loaded: LoadedModel, directory: Path) -> None:
    tokenizer, training = loaded.tokenizer, shareable(loaded)
    weights = {name: tensor.contiguous() for name, tensor in loaded.stored.weights.items()}
    save_file(weights, directory / MODEL_FILE, metadata={"format": "pt"})
    tokenizer.save(directory)
    shutil.copymode(
        directory / TOKENIZER_FILE, directory / MODEL_FILE
    )  # safetensors writes for the owner only
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
    """The facts of the training without paths of the machine, and with the licence of the text."""
    training = loaded.stored.training
    data = dict(training["data"])
    directory = data.pop("directory", None)
    if directory is not None:
        manifest = read_manifest(Path(directory)) if Path(directory).is_dir() else None
        data["licence"] = manifest.licence if manifest else None
        data["source"] = without_folders(manifest.source if manifest else loaded.config.data.source)
    return {**training, "data": data}


def without_folders(text: str) -> str:
    """Absolute paths cut down to their last part: a model that is given away tells nothing of its machine."""
    return re.sub(r"(?<![\w:/])/(?:[^\s/]+/)*([^\s/]+)", r"\1", text)


def check_equal(loaded: LoadedModel, directory: Path) -> None:
    """Load what was written and compare logits, bit for bit."""
    precision = str(loaded.model.dtype).removeprefix("torch.")
    again = load(directory, device=loaded.device.type, precision=precision)
    length = min(CHECKED_TOKENS, loaded.config.batch.sequence_tokens)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.tokenizer.vocab_size, (length,), generator=generator).tolist()
    if not torch.equal(loaded.logits(ids), again.logits(ids)):
        raise CheckpointError(
            expected="logits of the exported model equal to the run's",
            found="different ones",
            do="check the disk and the memory of this machine, and export again",
        )


def model_card(loaded: LoadedModel, training: dict[str, Any]) -> str:
    config, model, data = loaded.config, loaded.config.model, training["data"]
    facts = {
        "parameters": f"{sum(parameter.numel() for parameter in loaded.model.parameters()):,}",
        "architecture": f"{model.num_layers} layers, width {model.width}, {model.num_heads} heads,"
        f" vocabulary {model.vocab_size:,}",
        "tokenizer": loaded.tokenizer.name,
        "recipe": f"`{config.recipe}` at size `{config.size}`, seed {config.seed}",
        "training": f"{loaded.step:,} steps, {training['tokens']:,} tokens,"
        f" {training['training_s']:,.0f} s on {training['world_size']} × {training['device']}",
        "validation loss": figure(training["val_loss"], "nats per token"),
        "bits per byte": figure(training["val_bpb"], "on the validation split of the data"),
        "training data": data.get("source") or "unknown",
        "licence of the data": data.get("licence") or "unknown",
        "written by": f"Hotlap {training['hotlap']}, run `{training['run']}`",
    }
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

model = hotlap.load("path/to/this/directory")
print(model.generate("Once", max_tokens=100)[0])
model.logits("Once")  # (tokens, vocabulary)
```

or `hotlap sample path/to/this/directory --prompt "Once"`.

The model continues text like its training data. It was not tuned to follow instructions or to be truthful.
"""


def figure(value: float | None, unit: str) -> str:
    return "not measured at this step" if value is None else f"{value:.4f} {unit}"


def cell(value: str) -> str:
    """Text that fits a cell of a table, whatever a manifest says."""
    return " ".join(value.split()).replace("|", "\\|")
