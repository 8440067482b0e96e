"""Run as a script: loads exported repositories with `transformers`, in a process that cannot import hotlap.

Reads a JSON task from its standard input: {"models": [paths], "rows": [lists of token ids],
"prompts": [texts], "max_new_tokens": N}. Writes logits and tokens with safetensors to the path in its only
argument.
"""

from __future__ import annotations

import json
import sys
from itertools import chain
from pathlib import Path


class NoHotlap:
    def find_spec(self, name, *_places):
        if name.partition(".")[0] == "hotlap":
            raise ImportError(f"{name} is not to be had here")


sys.meta_path.insert(0, NoHotlap())

import torch  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402


def padded(rows: list[list[int]], side: str) -> dict[str, torch.Tensor]:
    """In the middle: as where a text goes on after padding."""
    if side == "middle":
        longest = max(map(len, rows))
        halves = [(len(row) // 2, len(row) - len(row) // 2) for row in rows]
        mask = torch.tensor([[1] * a + [0] * (longest + 5 - a - b) + [1] * b for a, b in halves])
        ids = torch.zeros_like(mask).masked_scatter(mask.bool(), torch.tensor(list(chain(*rows))))
        return {"input_ids": ids, "attention_mask": mask}
    tensors = [torch.tensor(row) for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad(tensors, batch_first=True, padding_side=side)
    mask = pad([torch.ones_like(row) for row in tensors], batch_first=True, padding_side=side)
    return {"input_ids": ids, "attention_mask": mask}


def main() -> None:
    task = json.load(sys.stdin)
    found: dict[str, torch.Tensor] = {}
    for path in task["models"]:
        tokenizer = AutoTokenizer.from_pretrained(path)
        needs_code = "auto_map" in json.loads(Path(path, "config.json").read_text())
        code = {"trust_remote_code": True} if needs_code else {}
        model = AutoModelForCausalLM.from_pretrained(path, **code).eval()
        with torch.no_grad():
            for side in ("left", "right", "middle"):
                inputs = padded(task["rows"], side)
                positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
                extra = {} if code else {"position_ids": positions}
                logits = model(**inputs, **extra).logits
                for number, (row, mask) in enumerate(zip(logits, inputs["attention_mask"], strict=True)):
                    found[f"{path}:{side}:{number}"] = row[mask.bool()].contiguous()
        options = {"max_new_tokens": task["max_new_tokens"], "do_sample": False}
        inputs = tokenizer(task["prompts"], padding=True, return_tensors="pt")
        found[f"{path}:prompts"] = inputs["input_ids"]
        for name, changed in {
            "greedy": {},
            "beams": {"num_beams": 3},
            "beams without cache": {"num_beams": 3, "use_cache": False},
        }.items():
            whole = model.generate(**inputs, **options, **changed)
            found[f"{path}:{name}"] = whole[:, inputs["input_ids"].size(1) :].contiguous()
    assert "hotlap" not in sys.modules
    save_file(found, sys.argv[1])


main()
