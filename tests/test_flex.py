"""flex_attention's forward on the CPU against the oracle, which proves its mask; its backward on CUDA."""

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from hotlap.attention.dense import DenseBackend
from hotlap.attention.flex import FlexBackend
from tests.attention_cases import CASES, Case, make_mask, output_and_gradients, relative_error

SMALL = [case for case in CASES if case.num_tokens <= 1024]


@pytest.mark.parametrize("case", SMALL, ids=str)
# Uncompiled it says that it is slow, which is why the cases are small.
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
def test_forward_agrees_with_dense(case: Case) -> None:
    q, k, v, _ = case.tensors()
    outs = [
        backend.attend(q, k, v, backend.plan(case.mask()), case.head_dim**-0.5)
        for backend in (FlexBackend(), DenseBackend())
    ]
    assert relative_error(*outs) < 2e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "unit, windows",
    [
        ("blocks", range(1, 11)),
        ("tokens", range(64, 1264, 120)),
        ("tokens-and-blocks", range(64, 1264, 120)),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiled_forward_follows_the_block_lists_and_never_recompiles(unit, windows) -> None:
    # Only the compiled kernel skips the blocks that are not listed; the plain one looks at the mask alone.
    case, flex, dense = Case(1000, heads=(4, 2)), FlexBackend(), DenseBackend()
    q, k, v, _ = case.tensors()

    # The CPU kernel of torch 2.13 cannot take the transposed views that the backend passes on CUDA.
    q_1HTD, k_1GTD, v_1GTD = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))

    @torch.compile(dynamic=False, fullgraph=True)
    def compiled(plan: BlockMask) -> Tensor:
        return flex_attention(q_1HTD, k_1GTD, v_1GTD, block_mask=plan, scale=0.2, enable_gqa=True)[0]

    compiled(flex.plan(make_mask(1000, (), 1, unit)))
    with torch.compiler.set_stance("fail_on_recompile"):
        for index, window in enumerate(windows):
            mask = make_mask(1000, tuple(range(30, 100 * index, 90)), window, unit)
            expected = dense.attend(q, k, v, dense.plan(mask), 0.2)
            assert relative_error(compiled(flex.plan(mask)).transpose(0, 1), expected) < 2e-6


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [case for case in SMALL if case.head_dim >= 32], ids=str)
def test_backward_agrees_with_dense_on_cuda(case: Case) -> None:
    with torch.device("cuda"):
        mask = make_mask(case.num_tokens, case.document_starts, case.window, case.unit)
    tensors = [x.cuda() for x in case.tensors()]
    found = output_and_gradients(FlexBackend(), mask, *tensors)
    expected = output_and_gradients(DenseBackend(), mask, *(x.double() for x in tensors))
    for ours, oracle in zip(found, expected, strict=True):
        assert relative_error(ours, oracle) < 5e-3  # tensor cores round float32 operands
