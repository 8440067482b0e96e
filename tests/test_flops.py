import pytest
import torch

from hotlap.recipes import resolve
from hotlap.settings import updated
from hotlap.train.flops import (
    attention_flops_per_token,
    flops_per_token,
    matmul_flops_per_token,
    mean_keys,
    peak_gflops,
)


def window(start, end):
    """A window over five steps, rounded down to blocks of 128."""
    return {
        "schedule.steps": 5,
        "schedule.cooldown_steps": 0,
        "optim.muon.momentum_warmup_steps": 0,
        "schedule.window_start_tokens": start,
        "schedule.window_end_tokens": end,
        "schedule.window_offset_tokens": 0,
    }


@pytest.mark.parametrize("window, context", [(1, 8), (3, 8), (8, 8), (1792, 65_536)])
def test_mean_keys_are_those_that_a_window_leaves(window, context):
    seen = [min(place + 1, window) for place in range(context)]
    assert mean_keys(window, context) == pytest.approx(sum(seen) / context, rel=1e-12)


@pytest.mark.parametrize(
    "recipe, changes, keys",
    [
        ("adamw", {"batch.sequence_tokens": 512}, mean_keys(512, 512)),
        ("softcap", {**window(256, 256), "data.order": "stream"}, mean_keys(256, 512)),
        ("softcap", {"data.order": "shuffled", "data.chunk_tokens": 128}, mean_keys(128, 128)),
        # 128 tokens for three steps of five, 256 for two.
        (
            "softcap",
            {**window(128, 384), "data.order": "stream"},
            (3 * mean_keys(128, 512) + 2 * mean_keys(256, 512)) / 5,
        ),
    ],
)
def test_attention_is_counted_with_the_keys_that_it_reads(recipe, changes, keys):
    config = updated(resolve(recipe, "pico"), changes)
    expected = matmul_flops_per_token(config) + attention_flops_per_token(config, keys)
    assert flops_per_token(config, 5) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "name, gflops",
    [
        ("NVIDIA GeForce RTX 4090", 165_200),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-80GB", 312_000),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
    ],
)
def test_a_gpu_that_is_not_in_the_table_has_no_known_peak(monkeypatch, name, gflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: name)
    assert peak_gflops(torch.device("cuda"), torch.bfloat16) == gflops
    assert peak_gflops(torch.device("cuda"), torch.float32) is None
