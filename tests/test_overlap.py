"""Gradients are reduced while the backward still computes others, unless all are of one compiled graph."""

import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch

from hotlap.acceptance.overlap import traced
from hotlap.attention.dense import DenseBackend
from hotlap.kernels import choose_backend, install
from hotlap.model import build_model
from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.compile import apply_compile
from hotlap.train.lap import bucket_size_mib, wrap_ddp
from tests.command import hotlap
from tests.kernels_here import needs_kernels
from tests.ranks import run_ranks
from tests.test_compile import make_batch_loss
from tests.tiny import made_up_tokens
from tests.training import assert_one_curve, command, losses

CPU = torch.device("cpu")
TOKENS = 512
BACKWARDS = 5


def reductions_of_a_backward(_rank, _world_size, mode, kernels):
    """How many reductions a backward has, and how much of their time it hides: the most of several."""
    warnings.simplefilter("ignore")  # torch's own, when it compiles
    config = updated(
        resolve("unet-value-embeds", "pico"),
        # Blocks of 0.75 MiB: five buckets.
        {"model.width": 128, "model.num_heads": 2, "model.num_layers": 6, "batch.sequence_tokens": TOKENS},
    )
    batch_loss = make_batch_loss(config, choose_backend("native", CPU) if kernels else DenseBackend())
    model = batch_loss.model
    if kernels:
        assert install(model, backend=batch_loss.masking.backend, tokens=TOKENS).fuses_blocks
    # The order of events does not depend on what compiles the graphs.
    with patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        apply_compile(batch_loss, mode, coordinate_descent=False)
    tokens, targets = made_up_tokens(TOKENS, config.model.vocab_size)
    batch_loss(tokens, targets, None).backward()  # compiles, before DDP as in a lap
    batch_loss.zero_grad()
    module = wrap_ddp(batch_loss, CPU, bucket_size_mib(model.blocks))
    module(tokens, targets, None).backward()  # after this one DDP orders its buckets
    # A busy machine may let the thread that reduces wait until a whole backward is over.
    found = [traced(module(tokens, targets, None).backward, CPU) for _ in range(BACKWARDS)]
    return max(found, key=lambda reductions: reductions.hidden_share)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode, kernels, overlaps",
    [
        ("parts", False, True),
        ("model", False, False),
        ("off", False, True),
        pytest.param("off", True, True, marks=needs_kernels),
    ],
    ids=["parts", "one-graph", "uncompiled", "kernels"],
)
def test_reductions_start_before_the_last_gradient_is_computed(mode, kernels, overlaps):
    for number, hidden_share in run_ranks(reductions_of_a_backward, 2, mode, kernels):
        print(f"{mode}: {number} reductions, {hidden_share:.0%} of their time hidden")
        assert number > 3
        assert (hidden_share > 0.1) == overlaps


@pytest.mark.slow
def test_two_ranks_compiled_in_parts_have_the_losses_of_an_uncompiled_run(tiny_data, tmp_path):
    for mode in ("off", "parts"):
        words = command(tiny_data, 4, "--name", mode, "--procs", "2", "--attention.backend", "dense")
        words[words.index("--compile") + 1] = mode
        result = hotlap(*words, cwd=tmp_path, env={"OMP_NUM_THREADS": "1"})
        assert result.returncode == 0, result.stderr
        assert f"compile {mode} (as configured)" in result.stdout
        assert "Warning" not in result.stderr
    assert_one_curve(losses(tmp_path / "runs" / "parts"), losses(tmp_path / "runs" / "off"))


@pytest.mark.parametrize("layers, width, mib", [(4, 64, 1), (8, 256, 3), (12, 768, 25)])
def test_a_bucket_holds_about_one_block_within_limits(layers, width, mib):
    config = updated(
        resolve("softcap", "pico"),
        {"model.num_layers": layers, "model.width": width, "model.num_heads": width // 32},
    )
    with torch.device("meta"):
        blocks = build_model(config.model, TOKENS).blocks
    assert bucket_size_mib(blocks) == mib
