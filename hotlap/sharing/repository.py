"""A repository that `transformers` loads: configuration, weights, tokenizer, and for most recipes code.

`adamw` becomes the GPT-2 that `transformers` has. The other recipes bring `modeling_hotlap.py`, which runs
only where the reader trusts it (`trust_remote_code=True`).

Shapes: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hotlap.corpus.tokenizer import TOKENIZER_FILE
from hotlap.errors import CheckpointError, ConfigError
from hotlap.inference.card import CARD_FILE, model_card, training_to_share
from hotlap.inference.export import CHECKED_TOKENS, Form, made_up_tokens
from hotlap.inference.load import CONFIG_FILE, MODEL_FILE, LoadedModel, read_trusted_ideas
from hotlap.model import GPT2
from hotlap.recipes.idea import combined
from hotlap.sharing import gpt2, speedrun
from hotlap.sharing.tokenizer import check_tokenizer, write_tokenizer

GENERATION_FILE = "generation_config.json"
# Of logits in float32, relative to the largest: the same sums are added up in another order.
TOLERANCE = 1e-5
STEPS_WITH_CACHE = 4


def write_repository(loaded: LoadedModel, directory: Path) -> None:
    check_own_modules(loaded)
    tokenizer = loaded.tokenizer
    if isinstance(loaded.model, GPT2):
        gpt2.check_is_gpt2(loaded)
        config, weights = gpt2.config_values(loaded), gpt2.weights(loaded)
    else:
        config, weights = speedrun.config_values(loaded), speedrun.weights(loaded)
        code = Path(__file__).with_name(speedrun.MODELING_FILE)
        shutil.copyfile(code, directory / speedrun.MODELING_FILE)
    specials = {f"{name}_token_id": tokenizer.end_of_text for name in ("bos", "eos", "pad")}
    write_json(directory / CONFIG_FILE, {**config, **specials, "dtype": "float32"})
    write_json(directory / GENERATION_FILE, specials)
    save_file(weights, directory / MODEL_FILE, metadata={"format": "pt"})
    write_tokenizer(tokenizer, directory, config.get("n_positions"))
    # safetensors makes files for the owner alone, whatever the umask
    shutil.copymode(directory / TOKENIZER_FILE, directory / MODEL_FILE)
    training = training_to_share(loaded)
    card = model_card(loaded, training, "transformers", use(needs_code="auto_map" in config))
    (directory / CARD_FILE).write_text(card, encoding="utf-8")


def check_own_modules(loaded: LoadedModel) -> None:
    """Refuse a model with modules of an idea, which no other program has."""
    ideas = read_trusted_ideas(loaded.stored, trust_code=True)  # as the model was loaded with them
    modules = combined([file.idea for file in ideas]).modules
    if modules:
        raise ConfigError(
            expected="a model whose modules are all Hotlap's own",
            found=f"another {' and another '.join(sorted(modules))}, from {', '.join(loaded.config.ideas)}",
            do="export without --to: Hotlap's own form takes the idea's code along",
        )


def write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_repository(loaded: LoadedModel, directory: Path) -> None:
    """Load what was written with `transformers`, and compare its logits with the run's.

    Of one sequence, of a batch with padding on either side, and of the last tokens with a cache.
    """
    check_tokenizer(loaded.tokenizer, directory)
    known = loaded.tokenizer.vocab_size
    rows = rows_to_check(loaded)
    expected = [loaded.logits(row)[:, :known] for row in rows]
    with quiet_transformers():
        model = read_repository(directory).to(loaded.device)
    differences = []
    for side in ("right", "left"):
        logits = padded_logits(model, rows, side, loaded.device)
        differences += [relative_difference(*pair) for pair in zip(logits, expected, strict=True)]
    for row, of_row in zip(rows[:2], expected, strict=False):
        cached = logits_with_cache(model, torch.tensor([row], device=loaded.device))
        differences.append(relative_difference(cached, of_row[-STEPS_WITH_CACHE:]))
    too_large = [one for one in differences if not one <= TOLERANCE]  # NaN, too
    if too_large:
        raise CheckpointError(
            expected=f"logits of the exported model equal to the run's, to {TOLERANCE} of the largest",
            found=f"a difference of {too_large[0]:.1e}",
            do="report it, with the version of transformers; nothing was written",
        )


def rows_to_check(loaded: LoadedModel) -> list[list[int]]:
    """A document longer than the window, several documents, and one token.

    The lengths of the first two differ by no multiple of a block, so that blocks with padding would differ.
    """
    end, visibility = loaded.tokenizer.end_of_text, loaded.visibility
    length = max(CHECKED_TOKENS, visibility.window_tokens + 2 * visibility.block_size)
    if isinstance(loaded.model, GPT2):
        length = min(CHECKED_TOKENS, loaded.model.max_tokens)
    other = (end + 1) % loaded.tokenizer.vocab_size
    document = [end, *(other if token == end else token for token in made_up_tokens(loaded, length - 1))]
    documents = document[: length - 37]
    # One of them is longer than the window, too. The last is short: what is read with a cache sees only it.
    for start in (length // 8, length // 4, len(documents) - 20):
        documents[start] = end
    return [document, documents, [end]]


def read_repository(directory: Path) -> Any:
    """The model in `directory`. It may bring code: the file beside this one is run in its place."""
    from transformers import GPT2LMHeadModel

    from hotlap.sharing.modeling_hotlap import HotlapForCausalLM

    kind: Any = HotlapForCausalLM if (directory / speedrun.MODELING_FILE).exists() else GPT2LMHeadModel
    model, report = kind.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    left = {name: names for name, names in report.items() if names}
    if left:
        raise CheckpointError(
            expected="a weight for every parameter", found=str(left), do="report it; nothing was written"
        )
    return model.eval()


@torch.no_grad()
def padded_logits(model: Any, rows: list[list[int]], side: str, device: torch.device) -> list[Tensor]:
    """Per row (T, V), computed in one batch with padding on one side."""
    tensors = [torch.tensor(row, device=device) for row in rows]
    ids = pad_sequence(tensors, batch_first=True, padding_side=side)
    mask = pad_sequence([torch.ones_like(row) for row in tensors], batch_first=True, padding_side=side)
    positions: dict[str, Tensor] = {}
    if model.config.model_type == "gpt2":  # which takes them from the mask only in `generate`
        positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    logits = model(input_ids=ids, attention_mask=mask, **positions).logits
    return [row[real.bool()] for row, real in zip(logits, mask, strict=True)]


@torch.no_grad()
def logits_with_cache(model: Any, ids_1T: Tensor) -> Tensor:
    """(steps, V): of the last tokens, each read alone, after all before them."""
    logits, cache, start = [], None, 0
    for end in range(ids_1T.size(1) - STEPS_WITH_CACHE, ids_1T.size(1) + 1):
        output = model(
            input_ids=ids_1T[:, start:end],
            attention_mask=torch.ones_like(ids_1T[:, :end]),
            past_key_values=cache,
            use_cache=True,
        )
        cache, start = output.past_key_values, end
        logits.append(output.logits[0, -1:])
    return torch.cat(logits[1:])


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest logit, if that is more than 1. NaN if one has NaN."""
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without a progress bar for a file that is on the disk."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def use(*, needs_code: bool) -> str:
    trust = ", trust_remote_code=True" if needs_code else ""
    code = "This is a GPT-2 as `transformers` has it; no code comes with it.\n"
    if needs_code:
        code = (
            f"The model's code is `{speedrun.MODELING_FILE}`. It needs `transformers` and no Hotlap, and runs"
            " only with `trust_remote_code=True`: read it first.\n"
        )
    return f"""```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "path/to/this/directory"
tokenizer = AutoTokenizer.from_pretrained(path)
model = AutoModelForCausalLM.from_pretrained(path{trust})
inputs = tokenizer(["Once", "There was a"], padding=True, return_tensors="pt")
outputs = model.generate(**inputs, max_new_tokens=100, do_sample=True, temperature=0.8)
print(tokenizer.batch_decode(outputs, skip_special_tokens=True))
```

{code}The tokenizer puts `<|endoftext|>` before a text: the model was trained on documents that start with it.
"""


TRANSFORMERS_FORM = Form(
    write_repository,
    check_repository,
    "loaded with transformers, its logits equal the run's to 1e-5 of the largest, also with padding and with"
    " a cache",
)
