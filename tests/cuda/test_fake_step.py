"""Every recipe takes a step at `small` on fake CUDA tensors: real operators and shapes, no values.

What would make a GPU slow or stop it (a matmul in float32, a tensor on the CPU, a wait) is found by a census
of all operators. That the census finds it is shown by mistakes that are made on purpose.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from hotlap.emulation import call
from hotlap.emulation.child import EmulationError
from hotlap.recipes import RECIPES

STEP = "tests.cuda.fake_step:take_step"
QUICK = "softcap"


@pytest.mark.parametrize(
    "recipe", [name if name == QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RECIPES]
)
def test_a_step_is_in_bfloat16_on_the_device_without_a_wait(recipe: str) -> None:
    seen = call(STEP, recipe=recipe)
    print(f"{recipe}: {seen['operators']} operators, {seen['matmuls']}")
    assert seen["findings"] == []
    assert any("attention" in matmul for matmul in seen["matmuls"])
    assert any(matmul.startswith("aten::bmm") for matmul in seen["matmuls"]) == (recipe != "adamw")
    assert {place for place in seen["wide"] if place.startswith("model/")} <= FLOAT32_PER_TOKEN


# Functions of the model that may make float32 tensors with a row per token: they compute in float32.
FLOAT32_PER_TOKEN = {
    "model/rotary.py:Rotary.forward",
    "model/layers.py:norm",
    "model/gpt2.py:LayerNorm.forward",
    # Rows of float32 tables, which are cast right away.
    "model/gpt.py:GPT.embed_tokens",
    "model/gpt2.py:GPT2.embed_tokens",
    "model/embeddings.py:ValueEmbeddings.forward",
    "model/head.py:softcapped",
    "model/head.py:cross_entropy",
}


class Mistake(NamedTuple):
    name: str
    module: str
    old: str
    new: str
    recipe: str = QUICK
    gpu: str = "H100"


MISTAKES = [
    Mistake(
        "rotary stays float32",
        "hotlap.model.rotary",
        "return Rotation(self.cos[:count].to(dtype), self.sin[:count].to(dtype))",
        "return Rotation(self.cos[:count], self.sin[:count])",
    ),
    Mistake(
        "a weight is not cast",
        "hotlap.model.layers",
        "return F.linear(x, self.weight.to(x.dtype))",
        "return F.linear(x, self.weight)",
    ),
    Mistake(
        "value embeddings are not cast",
        "hotlap.model.attention",
        "value_embedding_TGD = value_embedding_TGD.to(v_TGD.dtype)",
        "pass",
        recipe="block-window",  # its tables are float32
    ),
    Mistake(
        "the embedding is not cast",
        "hotlap.model.gpt",
        "x = self.embed(tokens_T).to(self.dtype)",
        "x = self.embed(tokens_T).float()",
    ),
    Mistake(
        "the loss promises a gradient in another dtype",
        "hotlap.kernels.chunked_loss",
        "return loss, torch.empty_like(x), torch.empty_like(weight)",
        "return loss, torch.empty_like(x), torch.empty_like(weight, dtype=torch.bfloat16)",
        gpu="4090",  # computes the loss in chunks
    ),
    Mistake(
        "the logits of a chunk are float32",
        "hotlap.kernels.chunked_loss",
        'buffer_dtype = x.dtype if passes == "triton" else dtype',
        "buffer_dtype = dtype",
        gpu="4090",
    ),
    Mistake(
        "Newton-Schulz in float32",
        "hotlap.optim.newton_schulz",
        "_unit_norm((stacked.mT if is_tall else stacked).to(dtype))",
        "_unit_norm((stacked.mT if is_tall else stacked))",
    ),
    Mistake(
        "momentum on the CPU",
        "hotlap.optim.muon",
        "dtype=dtype, device=spec.device)",
        "dtype=dtype)",
    ),
    Mistake(
        "document ids in int64",
        "hotlap.attention.mask",
        "return starts.cumsum(0, dtype=torch.int32)",
        "return starts.cumsum(0)",
    ),
    Mistake(
        "a scalar in float64",
        "hotlap.model.block",
        "torch.tensor([1.0, 0.0])",
        "torch.tensor([1.0, 0.0], dtype=torch.float64)",
    ),
    Mistake(
        "gradients are read before a step",
        "hotlap.optim.gradients",
        "    if check_finite:",
        "    if True:",
    ),
    Mistake(
        "Adam counts its steps on the CPU",
        "hotlap.optim.routing",
        "eps=adam.eps, fused=True",
        "eps=adam.eps, foreach=True",
    ),
    Mistake(
        "the window is on the CPU",
        "hotlap.train.masking",
        "torch.tensor(self.visibility.window, dtype=torch.int32, device=device)",
        "torch.tensor(self.visibility.window, dtype=torch.int32, device='cpu')",
    ),
    Mistake(
        "clipping branches on the norm",
        "hotlap.optim.gradients",
        "    if max_norm is not None:",
        "    if max_norm is not None and norm > max_norm:",
        recipe="window-warmup",  # the last recipe that clips
    ),
]


@pytest.mark.slow
def test_a_step_with_the_loss_in_chunks_is_in_bfloat16_too() -> None:
    seen = call(STEP, recipe=QUICK, gpu="4090")
    assert "chunks" in seen["loss"]
    assert seen["findings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name.replace(" ", "-"))
def test_a_mistake_in_dtype_or_device_is_found(mistake: Mistake) -> None:
    arguments = {"module": mistake.module, "old": mistake.old, "new": mistake.new}
    try:
        seen = call(
            "tests.cuda.mutated:with_mistake",
            function=STEP,
            arguments={"recipe": mistake.recipe, "gpu": mistake.gpu},
            **arguments,
        )
    except EmulationError as error:
        if "NO LONGER FITS" in str(error) or not str(error).startswith("Traceback"):
            raise
        print(f"{mistake.name}: raised {str(error).strip().splitlines()[-1]}")
    else:
        print(f"{mistake.name}: {seen['findings'][:2]}")
        assert seen["findings"]
