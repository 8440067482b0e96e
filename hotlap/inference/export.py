"""Exports a run as a directory to share: weights, configuration, tokenizer and a model card.

The directory is written atomically, and before it gets its name it is read again and its logits are compared
with those of the run. In Hotlap's own form they are equal bit for bit; `hotlap.sharing` has other forms.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hotlap.corpus.tokenizer import TOKENIZER_FILE
from hotlap.errors import CheckpointError
from hotlap.files import atomic_directory, file_sha256, locked_beside, without_folders, writing
from hotlap.inference.card import CARD_FILE, model_card, training_to_share
from hotlap.inference.load import CONFIG_FILE, EXPORT_FORMAT, EXPORT_VERSION, MODEL_FILE, LoadedModel, load
from hotlap.json_files import seal
from hotlap.recipes.idea_files import SUFFIX
from hotlap.runs.reader import IDEAS_DIRECTORY
from hotlap.settings import to_json, updated

# Long enough to exceed the attention window of a small model; which tokens they are does not matter.
CHECKED_TOKENS = 512


@dataclass(frozen=True)
class Form:
    """A layout of the directory."""

    write: Callable[[LoadedModel, Path], None]
    check: Callable[[LoadedModel, Path], None]  # raises if what was written is not the model
    checked: str  # what that has shown, in words


def export(loaded: LoadedModel, target: Path, form: Form | None = None) -> None:
    """Write `target`, which must not exist. `form` defaults to Hotlap's own, which `load` reads."""
    form = form or OWN_FORM

    def refuse(owner: str) -> NoReturn:
        raise CheckpointError(
            expected=f"no other process that writes {target}",
            found=f"process {owner}" if owner else "one",
            do="wait for it, or choose another directory",
        )

    with writing(target, CheckpointError, also=(SafetensorError,)), locked_beside(target, refuse):
        refuse_existing(target)
        with atomic_directory(target) as work:
            form.write(loaded, work)
            form.check(loaded, work)


def refuse_existing(target: Path) -> None:
    if target.exists() or target.is_symlink():
        raise CheckpointError(
            expected=f"a new directory {target}", found="one that exists", do="remove it or choose another"
        )


def write_files(loaded: LoadedModel, directory: Path) -> None:
    tokenizer, training = loaded.tokenizer, training_to_share(loaded)
    weights = {name: tensor.contiguous() for name, tensor in loaded.stored.weights.items()}
    save_file(weights, directory / MODEL_FILE, metadata={"format": "pt"})
    tokenizer.save(directory)
    # safetensors makes files for the owner alone, whatever the umask
    shutil.copymode(directory / TOKENIZER_FILE, directory / MODEL_FILE)
    for identity in loaded.config.ideas:
        copy = f"{identity}{SUFFIX}"
        (directory / IDEAS_DIRECTORY).mkdir(exist_ok=True)
        shutil.copyfile(loaded.stored.ideas / copy, directory / IDEAS_DIRECTORY / copy)
    card = model_card(loaded, training, "hotlap", own_use(loaded))
    (directory / CARD_FILE).write_text(card, encoding="utf-8")
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


def check_equal(loaded: LoadedModel, directory: Path) -> None:
    """Load what was written and compare its logits with the run's, bit for bit."""
    precision = str(loaded.model.dtype).removeprefix("torch.")
    again = load(directory, device=loaded.device.type, precision=precision, trust_code=True)
    length = min(CHECKED_TOKENS, loaded.config.batch.sequence_tokens)
    ids = made_up_tokens(loaded, length)
    if not torch.equal(loaded.logits(ids), again.logits(ids)):
        raise CheckpointError(
            expected="logits of the exported model equal to the run's",
            found="different logits",
            do="check the disk and the memory of this machine, and export again",
        )


def made_up_tokens(loaded: LoadedModel, count: int) -> list[int]:
    """Tokens to compare logits on, the same each time."""
    generator = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(loaded.tokenizer.vocab_size, (count,), generator=generator).tolist()
    return ids


def own_use(loaded: LoadedModel) -> str:
    trust = ", trust_code=True" if loaded.config.ideas else ""
    return f"""```python
import hotlap

model = hotlap.load("path/to/this/directory"{trust})
print(model.generate("Once", max_tokens=100)[0])
model.logits("Once")  # (tokens, vocabulary)
```

or `hotlap sample path/to/this/directory --prompt "Once"`.
"""


OWN_FORM = Form(write_files, check_equal, "loaded again, its logits equal the run's bit for bit")
