"""The Triton kernels that Inductor writes for flex_attention on an H100, forward and backward, interpreted.

Windows are no multiple of a block where they are in tokens, and one document is longer than the window: only
then does a partial block that is taken for a full one show.
"""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.attention_cases import Case
from tests.cuda.emulated import needs_emulation, run_on_cuda

pytestmark = [needs_emulation, pytest.mark.timeout(600)]

# Largest difference over largest magnitude. Dense attention in bfloat16 is itself off by up to 9e-3.
TOLERANCES = {"bfloat16": 2e-2, "float32": 2e-6}
TOKENS = Case(384, (100, 130), window=150, unit="tokens", heads=(1, 1), head_dim=128)
BLOCKS = Case(384, (130,), window=2, unit="blocks", heads=(1, 1), head_dim=128)
BOTH = Case(384, (130,), window=150, unit="tokens-and-blocks", heads=(1, 1), head_dim=128)


def errors(case: Case, dtype: str, cwd: Path, mistake: str | None = None) -> list[float]:
    """Relative errors of the output and of the gradients of q, k and v."""
    settings = json.dumps([{**asdict(case), "dtype": dtype, "mistake": mistake}])
    done = run_on_cuda("-m", "tests.cuda.flex_kernels", settings, cwd=cwd, interpreted=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_kernels_of_head_dim_128_in_bfloat16_agree_with_dense(tmp_path):
    assert max(errors(TOKENS, "bfloat16", tmp_path)) < TOLERANCES["bfloat16"]


@pytest.mark.parametrize("mistake", ["block_lists", "visible"])
@pytest.mark.slow
def test_a_wrong_mask_is_found(tmp_path, mistake):
    assert max(errors(TOKENS, "bfloat16", tmp_path, mistake)) > 10 * TOLERANCES["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [BLOCKS, BOTH], ids=lambda case: case.unit)
def test_windows_in_other_units_agree_with_dense(tmp_path, case):
    assert max(errors(case, "bfloat16", tmp_path)) < TOLERANCES["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("case", [TOKENS, BLOCKS, BOTH], ids=lambda case: case.unit)
def test_kernels_of_head_dim_64_in_float32_agree_with_dense(tmp_path, case):
    smaller = Case(**{**asdict(case), "head_dim": 64})
    assert max(errors(smaller, "float32", tmp_path)) < TOLERANCES["float32"]
