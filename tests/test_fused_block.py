"""A fused block against the plain block that it replaces, in float64: output and every gradient."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from hotlap.attention import plan_batch
from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import Mask
from hotlap.config import ModelConfig
from hotlap.kernels.cpu import qkv
from hotlap.kernels.cpu.attention_backend import NativeBackend
from hotlap.kernels.cpu.block import FusedBlock
from hotlap.model.block import Block, SkipConnection
from hotlap.model.rotary import Rotary, Rotation
from tests.attention_cases import relative_error
from tests.kernels_here import needs_kernels

pytestmark = needs_kernels

WIDTH, HEADS, KV_HEADS = 48, 4, 2
# Of float32: gradients of the mixing weights sum thousands of terms that nearly cancel, and with shorter
# vectors the plain block itself is off by 9e-6.
TOLERANCE = 2e-5


class SwiGLU(nn.Module):
    """An MLP that no kernel knows."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class Case:
    num_tokens: int = 300
    skips: bool = True
    values: str = "outer"  # of ModelConfig
    value_mix: str = "pair"
    has_value_embedding: bool = True
    has_attention: bool = True
    foreign_mlp: bool = False
    plain_attention: bool = False

    def block(self) -> Block:
        torch.manual_seed(0)
        config = ModelConfig(
            num_layers=4,
            width=WIDTH,
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            values=self.values,
            value_mix=self.value_mix,
            drop_attention=not self.has_attention,
        )
        block = Block(config, layer=2)
        assert (block.attention is None) == (not self.has_attention)
        if self.foreign_mlp:
            block.mlp = SwiGLU()
        for parameter in block.parameters():
            nn.init.normal_(parameter, std=0.3)
        return block

    def streams(self) -> list[Tensor]:
        """x, x0, the skip connection and its weight, and the value embedding."""
        generator = torch.Generator().manual_seed(1)
        stream = (self.num_tokens, WIDTH)
        shapes = [stream, stream, stream, (), (self.num_tokens, KV_HEADS, WIDTH // HEADS)]
        return [torch.randn(shape, generator=generator) for shape in shapes]


def output_and_gradients(case: Case, block: Block, dtype: torch.dtype) -> dict[str, Tensor]:
    backend = NativeBackend() if dtype == torch.float32 else DenseBackend()
    documents = (torch.arange(case.num_tokens) // 77).int()
    plan = plan_batch(backend, Mask(documents, torch.tensor(50, dtype=torch.int32), "tokens"))
    given = [operand.to(dtype).requires_grad_() for operand in case.streams()]
    x, x0, skip, weight, value_embedding = given
    out = block(
        x,
        x0,
        SkipConnection(skip, weight) if case.skips else None,
        value_embedding if case.has_value_embedding else None,
        rotation(case.num_tokens, dtype),
        plan,
    )
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    parameters = dict(block.named_parameters())
    names = ["x", "x0", "skip", "skip weight", "value embedding", *parameters]
    gradients = torch.autograd.grad(
        out, [*given, *parameters.values()], cotangent, allow_unused=True, materialize_grads=True
    )
    return {"output": out.detach(), **dict(zip(names, gradients, strict=True))}


def rotation(num_tokens: int, dtype: torch.dtype) -> Rotation:
    # cos² + sin² = 1 in the working precision, which a table in float32 would spoil.
    rotary = Rotary(WIDTH // HEADS, "half", 1024.0, num_tokens).double()
    return Rotation(*(angle.to(dtype) for angle in rotary.at(torch.arange(num_tokens), torch.float64)))


def fused(case: Case) -> Block:
    block = case.block()
    FusedBlock.adopt(
        block,
        fuses_attention=case.has_attention and not case.plain_attention,
        fuses_mlp=not case.foreign_mlp,
    )
    return block


CASES = {
    "all parts": Case(),
    "no skip connection": Case(skips=False),
    "no value embedding": Case(has_value_embedding=False),
    "plain values": Case(values="plain", has_value_embedding=False),
    "one λ": Case(values="first-layer", value_mix="one"),
    "one λ and no value embedding": Case(values="first-layer", value_mix="one", has_value_embedding=False),
    "no attention": Case(has_attention=False),
    "no attention and no skip connection": Case(has_attention=False, skips=False),
    "foreign MLP": Case(foreign_mlp=True),
    "attention left plain": Case(plain_attention=True),
}


@pytest.fixture
def short_chunks(monkeypatch) -> None:
    """Several chunks per thread, although there are few tokens."""
    monkeypatch.setattr(qkv, "MOST_CHUNK_TOKENS", 32)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_a_fused_block_computes_what_the_plain_one_does(case, threads, short_chunks) -> None:
    torch.set_num_threads(threads)
    check(CASES[case])


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_a_few_tokens_are_enough(num_tokens, threads, short_chunks) -> None:
    torch.set_num_threads(threads)
    check(Case(num_tokens=num_tokens))


def check(case: Case) -> None:
    found = output_and_gradients(case, fused(case), torch.float32)
    expected = output_and_gradients(case, case.block().double(), torch.float64)
    for name, oracle in expected.items():
        assert found[name].dtype == torch.float32
        if oracle.norm() < 1e-9:  # the weight of values that are mixed with themselves
            assert found[name].norm() < 1e-4, name
        else:
            assert relative_error(found[name], oracle) < TOLERANCE, name


def test_the_same_call_gives_the_same_bits(short_chunks) -> None:
    torch.set_num_threads(3)
    once, twice = (output_and_gradients(Case(), fused(Case()), torch.float32) for _ in range(2))
    assert all(torch.equal(once[name], twice[name]) for name in once)


def test_names_and_parameters_are_those_of_the_plain_block() -> None:
    block = Case().block()
    before = dict(block.named_parameters())
    FusedBlock.adopt(block, fuses_attention=True, fuses_mlp=True)
    assert all(tensor is before[name] for name, tensor in block.named_parameters())
    assert list(block.state_dict()) == list(Case().block().state_dict())


def test_a_second_derivative_is_refused() -> None:
    case = Case()
    block, (x, x0, *_) = fused(case), case.streams()
    plan = plan_batch(
        NativeBackend(),
        Mask(torch.zeros(300, dtype=torch.int32), torch.tensor(9, dtype=torch.int32), "tokens"),
    )
    x.requires_grad_()
    y = block(x, x0, None, None, rotation(300, torch.float32), plan)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_one_token_that_is_not_a_number_spoils_no_other_before_attention() -> None:
    case = Case()
    block, (x, x0, *_) = fused(case), case.streams()
    x[130, 0] = float("nan")
    others = [token for token in range(len(x)) if token != 130]
    for result in block.attention_inputs(x, x0, None, None, rotation(len(x), torch.float32)):
        assert result[130].isnan().any()
        assert result[others].isfinite().all()
