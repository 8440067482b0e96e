"""Masks and tensors that several attention tests share, and the one measure of error they all use."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from hotlap.attention import Backend
from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import WINDOW_UNITS, Mask, WindowUnit


@dataclass(frozen=True)
class Case:
    num_tokens: int
    document_starts: tuple[int, ...] = ()  # besides token 0
    window: int = 4
    unit: WindowUnit = "blocks"
    heads: tuple[int, int] = (2, 2)  # query heads, key/value heads
    head_dim: int = 32

    def mask(self) -> Mask:
        return make_mask(self.num_tokens, self.document_starts, self.window, self.unit)

    def tensors(self, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and a gradient for the output."""
        generator = torch.Generator().manual_seed(seed)
        heads = (self.heads[0], self.heads[1], self.heads[1], self.heads[0])
        q, k, v, grad = (
            torch.randn(self.num_tokens, count, self.head_dim, generator=generator) for count in heads
        )
        return q, k, v, grad


CASES = [
    Case(128, window=1),
    Case(128, (1, 2, 127), window=2),
    Case(1),
    Case(77, (5,), window=3),
    Case(129, window=1, heads=(3, 1)),
    Case(1000, (301, 640), window=3, heads=(6, 2)),
    Case(1024, tuple(range(128, 1024, 128)), window=1, head_dim=64),
    Case(1024, tuple(range(256, 1024, 256)), window=2, head_dim=64),
    Case(1024, tuple(range(256, 1024, 256)), window=1, heads=(6, 2)),
    Case(1024, tuple(range(192, 1024, 192)), window=4),
    Case(1280, tuple(range(17, 1280, 17)), window=2),
    Case(1536, window=3, heads=(6, 1), head_dim=64),
    Case(2048, (1500,), window=14, heads=(1, 1), head_dim=128),
    Case(1024, window=64, unit="tokens"),
    Case(1024, window=128, unit="tokens", heads=(3, 1)),
    Case(1111, (200, 530, 531), window=300, unit="tokens", head_dim=64),
    Case(700, (128, 256), window=1792, unit="tokens", heads=(6, 1)),
    Case(512, window=1, unit="tokens"),
    Case(384, (383,), window=100, unit="tokens"),
    Case(1024, window=64, unit="tokens-and-blocks"),
    Case(1000, (301, 640), window=192, unit="tokens-and-blocks", heads=(6, 2)),
    Case(700, window=256, unit="tokens-and-blocks", head_dim=64),
    Case(384, (130,), window=1, unit="tokens-and-blocks"),
]


MANY = tuple(range(37, 4096, 300))
LONG_CASES = [
    Case(4096, window=14, head_dim=128),
    Case(4096, (512, 3000), window=14, heads=(3, 1), head_dim=64),
    Case(4096, MANY, window=14, heads=(6, 1), head_dim=64),
    Case(4096, MANY, window=8, heads=(1, 1), head_dim=128),
    Case(4096, tuple(range(128, 4096, 128)), window=1, head_dim=64),
    Case(3333, tuple(range(256, 3333, 256)), window=2, heads=(3, 1), head_dim=64),
    Case(4096, window=64, unit="tokens", head_dim=64),
    Case(4096, window=1792, unit="tokens", heads=(1, 1), head_dim=128),
    Case(4001, MANY[:-1], window=1792, unit="tokens", heads=(3, 1)),
    Case(4096, (512, 3000), window=448, unit="tokens", heads=(6, 1)),
    Case(4096, (512, 3000), window=448, unit="tokens-and-blocks", heads=(6, 1)),
]


@st.composite
def random_cases(draw: st.DrawFn) -> Case:
    num_tokens = draw(st.integers(1, 500))
    starts = draw(st.sets(st.integers(0, num_tokens - 1), max_size=draw(st.sampled_from([0, 3, 60]))))
    unit = draw(st.sampled_from(WINDOW_UNITS))
    window = draw(st.integers(1, 6 if unit == "blocks" else 800))
    heads = draw(st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2)]))
    return Case(num_tokens, tuple(sorted(starts)), window, unit, heads, head_dim=8)


def make_mask(num_tokens: int, document_starts: tuple[int, ...], window: int, unit: WindowUnit) -> Mask:
    documents = torch.zeros(num_tokens, dtype=torch.int32)
    documents[list(document_starts)] = 1
    return Mask(documents.cumsum(0, dtype=torch.int32), torch.tensor(window, dtype=torch.int32), unit)


def output_and_gradients(
    backend: object, mask: Mask, q: Tensor, k: Tensor, v: Tensor, grad: Tensor
) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = backend.attend(q, k, v, backend.plan(mask), q.shape[-1] ** -0.5)
    out.backward(grad)
    return out.detach(), q.grad, k.grad, v.grad


def exact(case: Case) -> tuple[Tensor, ...]:
    """The oracle in float64, so that a tolerance near float32's own noise measures one side only."""
    tensors = (x.double() for x in case.tensors())
    return output_and_gradients(DenseBackend(), case.mask(), *tensors)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over largest magnitude."""
    difference = (found.double() - expected.double()).abs().max().item()
    return difference / max(expected.abs().max().item(), 1e-30)


class TinyBlock(nn.Module):
    """Attention between two products, the shape of what gets compiled in a model."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.qkv = nn.Linear(16, 4 * 16, bias=False)
        self.out = nn.Linear(32, 16, bias=False)

    def forward(self, x: Tensor, plan: object) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 4, 16).split((2, 1, 1), dim=1)
        return x + self.out(self.backend.attend(q, k, v, plan, 0.25).flatten(1)).relu()


def check_compiled_block(backend: Backend, compiler: str, tolerance: float) -> None:
    """Twenty windows and documents, compiled once, against the same block uncompiled."""
    torch.manual_seed(0)
    block = TinyBlock(backend)
    compiled = torch.compile(block, backend=compiler, dynamic=False, fullgraph=True)
    x = torch.randn(520, 16)

    def losses_and_gradients(call, mask) -> list[Tensor]:
        block.zero_grad()
        loss = call(x, backend.plan(mask)).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in block.parameters())]

    losses_and_gradients(compiled, make_mask(520, (), 1, "blocks"))
    with torch.compiler.set_stance("fail_on_recompile"):
        for window in range(1, 21):
            mask = make_mask(520, tuple(range(1, 25 * window, 50)), 20 * window, "tokens")
            for ours, eager in zip(
                losses_and_gradients(compiled, mask), losses_and_gradients(block, mask), strict=True
            ):
                assert relative_error(ours, eager) < tolerance
    with torch.no_grad():
        plan = backend.plan(make_mask(520, (), 2, "blocks"))
        assert relative_error(compiled(x, plan), block(x, plan)) < tolerance
