"""The model card of an export: what the model is, how it was trained, on what, and how it is used."""

from __future__ import annotations

from typing import Any

from hotlap.data.manifest import read_manifest
from hotlap.files import without_folders
from hotlap.inference.load import LoadedModel
from hotlap.runs.recorded import recorded_directory

CARD_FILE = "README.md"


def training_to_share(loaded: LoadedModel) -> dict[str, Any]:
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


def model_card(loaded: LoadedModel, training: dict[str, Any], library: str, use: str) -> str:
    """`library`: the one that loads it, by the hub's name. `use`: Markdown that shows how."""
    config, model, data = loaded.config, loaded.config.model, training["data"]
    ideas = ", ".join(f"`{identity}`" for identity in config.ideas)
    if ideas and library == "hotlap":
        ideas += ", whose code is in `ideas/`"
    facts = {
        "parameters": f"{sum(parameter.numel() for parameter in loaded.model.parameters()):,}",
        "architecture": f"{model.num_layers} layers, width {model.width}, {model.num_heads} heads,"
        f" vocabulary {model.vocab_size:,}",
        "tokenizer": loaded.tokenizer.name,
        **({"ideas": ideas} if ideas else {}),
        "recipe": f"`{config.recipe}` at size `{config.size}`, seed {config.seed}",
        "training": f"{loaded.step:,} steps, {training['tokens']:,} tokens,"
        f" {training['training_s']:,.0f} s on {training['world_size']} × {training['device']}",
        "validation loss": figure(training["val_loss"], "nats per token"),
        "bits per byte": figure(training["val_bpb"], "on the validation split of the data"),
        "training data": data.get("source") or "unknown",
        "license of the data": data.get("licence") or "unknown",
        "written by": f"Hotlap {training['hotlap']}, run `{training['run']}`",
    }
    rows = "\n".join(f"| {name} | {cell(value)} |" for name, value in facts.items())
    return f"""---
library_name: {library}
pipeline_tag: text-generation
---

# {training["run"]}

A small GPT language model, trained with Hotlap.

| | |
|---|---|
{rows}

## Use

{use}
The model continues text like its training data. It was not tuned to follow instructions or to be truthful.

The license of the weights is for whoever shares them to state; that of the data may say something about it.
"""


def figure(value: float | None, unit: str) -> str:
    return "not measured at this step" if value is None else f"{value:.4f} {unit}"


def cell(value: str) -> str:
    """Text escaped for a cell of a Markdown table."""
    return " ".join(value.split()).replace("|", "\\|")
