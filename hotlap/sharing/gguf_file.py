"""A GGUF file of a GPT-2, for llama.cpp and what is built on it.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) has architectures by name, and each
program computes those that it knows. GPT-2 is one of them; the records' model is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from hotlap.errors import CheckpointError, ConfigError
from hotlap.inference.card import CARD_FILE, model_card, training_to_share
from hotlap.inference.export import Form
from hotlap.inference.load import LoadedModel
from hotlap.model import GPT2
from hotlap.sharing import gpt2

GGUF_FILE = "model.gguf"
ALL_FLOAT32 = 0  # `general.file_type`


def write_gguf(loaded: LoadedModel, directory: Path) -> None:
    import gguf

    if not isinstance(loaded.model, GPT2):
        raise ConfigError(
            expected="a model of the architecture gpt2 (recipe adamw) for --to gguf: programs that read GGUF"
            " compute only architectures that they know",
            found=f"the recipe {loaded.config.recipe}, whose architecture is the speedrun's",
            do="use --to transformers, or serve it with Hotlap",
        )
    gpt2.check_is_gpt2(loaded)
    config, tokenizer = gpt2.config_values(loaded), loaded.tokenizer
    writer = gguf.GGUFWriter(directory / GGUF_FILE, "gpt2")
    writer.add_name(str(loaded.stored.training["run"]))
    writer.add_file_type(ALL_FLOAT32)
    writer.add_context_length(config["n_positions"])
    writer.add_embedding_length(config["n_embd"])
    writer.add_feed_forward_length(config["n_inner"])
    writer.add_block_count(config["n_layer"])
    writer.add_head_count(config["n_head"])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    vocabulary = json.loads(tokenizer.content)["model"]
    words = sorted(vocabulary["vocab"], key=vocabulary["vocab"].__getitem__)
    kinds = [gguf.TokenType.NORMAL] * len(words)
    kinds[tokenizer.end_of_text] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(vocabulary["merges"])
    writer.add_bos_token_id(tokenizer.end_of_text)
    writer.add_eos_token_id(tokenizer.end_of_text)
    writer.add_add_bos_token(True)  # as Hotlap starts a prompt
    for name, tensor in tensors(loaded).items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    card = model_card(loaded, training_to_share(loaded), "gguf", USE)
    (directory / CARD_FILE).write_text(card, encoding="utf-8")


def tensors(loaded: LoadedModel) -> dict[str, Any]:
    """{GGUF's name: float32 array}. Matrices are (out, in), as torch has them and GPT-2 has not."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT2, loaded.config.model.num_layers)
    found = {}
    for name, tensor in gpt2.weights(loaded).items():
        in_gguf = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert in_gguf is not None, f"GGUF has no name for {name}"
        found[in_gguf] = np.ascontiguousarray(out_in(name, tensor).numpy())
    return found


def out_in(name: str, tensor: Tensor) -> Tensor:
    is_matrix = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return tensor.t() if is_matrix else tensor


def check_gguf(loaded: LoadedModel, directory: Path) -> None:
    """Read the file back with `gguf`, and compare every tensor and the words of the vocabulary."""
    import gguf

    reader = gguf.GGUFReader(directory / GGUF_FILE)
    found = {tensor.name: tensor.data for tensor in reader.tensors}
    expected = tensors(loaded)
    wrong = [
        name for name in expected if name not in found or not np.array_equal(found[name], expected[name])
    ]
    words = reader.fields["tokenizer.ggml.tokens"].contents()
    if wrong or len(found) != len(expected) or len(words) != loaded.tokenizer.vocab_size:
        raise CheckpointError(
            expected=f"{len(expected)} tensors and {loaded.tokenizer.vocab_size} words in {GGUF_FILE},"
            " as the run has them",
            found=f"{len(found)} and {len(words)}; different: {', '.join(wrong[:3]) or 'none'}",
            do="check the disk and the version of gguf; nothing was written",
        )


USE = f"""```
llama-completion -m path/to/this/directory/{GGUF_FILE} -p "Once"
```

The model was trained with the exact GELU. llama.cpp computes GPT-2's approximation by tanh, so its logits
differ a little from those that Hotlap and `transformers` compute.
"""

GGUF_FORM = Form(write_gguf, check_gguf, "read again with gguf, its tensors equal the run's")
