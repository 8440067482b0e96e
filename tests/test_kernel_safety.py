"""What is refused before C is entered, and functions that the kernels must not call."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotlap.kernels.cpu import attention, head, library, mlp, newton_schulz, operands, qkv, row_rms
from tests.kernels_here import needs_kernels

REPOSITORY = Path(__file__).parents[1]
T, H, G, D, C, F, V = 6, 4, 2, 8, 12, 20, 9
COEFFICIENTS = [(3.4445, -4.775, 2.0315)] * 2

pytestmark = needs_kernels

Operands = dict[str, Tensor]
# Another vocabulary is as good.
FITS = {("head", "weight", "one row more"), ("head rows", "logits", "one column more")}


def heads(count: int) -> Tensor:
    return torch.randn(T, count, D)


def for_attention() -> Operands:
    return {"q": heads(H), "k": heads(G), "v": heads(G), "first_key": torch.zeros(T).int()}


def for_attention_backward() -> Operands:
    return {"grad": heads(H), **for_attention(), "out": heads(H), "log_sums": torch.zeros(H, T)}


def for_qkv() -> Operands:
    streams = dict(zip(("x", "x0", "skip"), torch.randn(3, T, C), strict=True))
    weights = {name: torch.randn(count * D, C) for name, count in (("q", H), ("k", G), ("v", G))}
    angles = dict(zip(("cos", "sin"), torch.randn(2, T, 1, D // 2), strict=True))
    mixes = {"residual_mix": torch.randn(3), "value_mix": torch.randn(2), "value_embedding": heads(G)}
    return {**streams, **weights, **angles, **mixes}


def for_qkv_backward() -> Operands:
    made = qkv.forward(qkv.Given(**for_qkv()))._asdict()
    received = {"mixed": torch.randn(T, C), "q": heads(H), "k": heads(G), "v": heads(G)}
    return {
        **for_qkv(),
        **{f"made {name}": x for name, x in made.items()},
        **{f"received {name}": x for name, x in received.items()},
    }


def call_qkv_backward(**given: Tensor) -> None:
    def fields(prefix: str) -> Operands:
        return {name.removeprefix(prefix): x for name, x in given.items() if name.startswith(prefix)}

    plain = {name: x for name, x in given.items() if " " not in name}
    made, received = qkv.Made(**fields("made ")), qkv.Received(**fields("received "))
    qkv.backward(qkv.Given(**plain), made, received)


def for_mlp() -> Operands:
    shapes = {"x": (T, C), "attended": (T, H * D), "project": (C, H * D), "expand": (F, C), "out": (C, F)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def for_mlp_backward() -> Operands:
    return {**for_mlp(), "grad": torch.randn(T, C), "inverse_rms": torch.ones(T), "hidden": torch.ones(T, F)}


def call_mlp_backward(grad: Tensor, inverse_rms: Tensor, hidden: Tensor, **given: Tensor) -> None:
    mlp.backward(grad, mlp.Given(**given), inverse_rms, hidden)


def for_head() -> Operands:
    return {"x": torch.randn(T, C), "weight": torch.randn(V, C), "targets": torch.arange(T)}


def tables(*names: str) -> Operands:
    return {name: torch.rand(T, C) for name in names}


# name: (a call of the kernel with operands by name, the operands, those that may be empty, those that are
# written in place and so have to be contiguous)
KERNELS: dict[str, tuple[Callable[..., Any], Callable[[], Operands], tuple[str, ...], tuple[str, ...]]] = {
    "attention": (lambda **x: attention.forward(**x, scale=0.3), for_attention, (), ()),
    "attention backward": (
        lambda **x: attention.backward(**x, scale=0.3),
        for_attention_backward,
        (),
        (),
    ),
    "qkv": (lambda **x: qkv.forward(qkv.Given(**x)), for_qkv, ("value_embedding",), ()),
    "qkv backward": (
        call_qkv_backward,
        for_qkv_backward,
        ("value_embedding", "made mixed", "made v"),
        (),
    ),
    "mlp": (lambda **x: mlp.forward(mlp.Given(**x)), for_mlp, (), ()),
    "mlp backward": (call_mlp_backward, for_mlp_backward, (), ()),
    "head": (
        lambda x, weight, targets: head.loss_and_gradients(x, weight, targets, 15.0, 1.0, needs_grad=True),
        for_head,
        (),
        (),
    ),
    "head rows": (
        lambda logits, targets: head.rows(logits, targets, 15.0),
        lambda: {"logits": torch.randn(T, V), "targets": torch.arange(T)},
        (),
        ("logits",),
    ),
    "newton schulz": (
        lambda matrices: newton_schulz.orthogonalize(matrices, COEFFICIENTS, 1, 1, 1e-7),
        lambda: {"matrices": torch.randn(2, T, C)},
        (),
        (),
    ),
    "row step": (
        lambda **x: row_rms.step_rows(*x.values(), 0.1, 0.9, 0.5, 1e-8),
        lambda: tables("table", "grad", "squares"),
        (),
        ("table", "squares"),
    ),
}  # fmt: skip


def apart(x: Tensor) -> Tensor:
    """The same numbers, not contiguous."""
    return torch.stack((x, x), dim=-1)[..., 0]


def wrong(kernel: str) -> Iterator[tuple[str, str, Tensor, type[Exception]]]:
    """What is wrong with which operand, and what it raises."""
    _, make, may_be_empty, written = KERNELS[kernel]
    given = make()
    for name, x in given.items():
        yield "dtype", name, x.double() if x.dtype != torch.float64 else x.float(), TypeError
        yield "dimensions", name, x[None], ValueError
        yield "device", name, x.to("meta"), ValueError
        if len(given) > 1:
            yield "one row more", name, torch.cat((x, x[:1])), ValueError
        if x.ndim > 1 and len(given) > 1:
            yield "one column more", name, torch.cat((x, x[..., :1]), dim=-1), ValueError
        if name not in may_be_empty:
            yield "no rows", name, x[:0], ValueError
        if x.ndim > 1 and name not in may_be_empty:
            yield "no columns", name, x[..., :0], ValueError
        if name in written:
            yield "strides", name, apart(x), ValueError


def refuses_all(kernel: str) -> int:
    call, make, _, _ = KERNELS[kernel]
    count = 0
    for what, name, value, error in wrong(kernel):
        if (kernel, name, what) in FITS:
            continue
        try:
            call(**{**make(), name: value})
        except error as raised:
            if type(raised) is not error:
                raise
        else:
            raise LookupError(f"{kernel}: {name} with {what} was taken: {tuple(value.shape)} {value.dtype}")
        count += 1
    return count


@pytest.mark.parametrize("kernel", KERNELS)
def test_operands_that_do_not_fit_are_refused(kernel) -> None:
    assert refuses_all(kernel) >= 4
    call, make, _, _ = KERNELS[kernel]
    call(**make())  # nothing was wrong but what `wrong` made so


@pytest.mark.parametrize("kernel", KERNELS)
def test_operands_need_be_contiguous_only_where_they_are_written(kernel) -> None:
    call, make, _, written = KERNELS[kernel]
    torch.manual_seed(0)
    given = make()
    copies = {name: x.clone() if name in written else apart(x) for name, x in given.items()}
    expected, found = call(**given), call(**copies)
    for ours, others in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True):
        assert ours is others is None or torch.equal(ours, others)
    assert all(torch.equal(given[name], copies[name]) for name in written)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_negated_view_is_read_with_its_sign_and_never_written(kernel) -> None:
    call, make, _, written = KERNELS[kernel]
    torch.manual_seed(0)
    given = make()
    # -x in memory, which torch shows as x.
    views = {
        name: torch._neg_view(-x) if x.is_floating_point() and name not in written else x.clone()
        for name, x in given.items()
    }
    expected, found = call(**given), call(**views)
    for ours, others in zip(*(x if isinstance(x, tuple) else (x,) for x in (expected, found)), strict=True):
        assert ours is others is None or torch.equal(ours, others)
    for name in written:
        with pytest.raises(ValueError, match=f"{name}: expected a tensor of its own, found a negated view"):
            call(**{**make(), name: torch._neg_view(-given[name])})
    with pytest.raises(ValueError, match="negated view"):
        operands.pointer(torch._neg_view(torch.ones(3)))


def test_operands_are_refused_under_python_with_optimization() -> None:
    script = (
        "from tests.test_kernel_safety import KERNELS, refuses_all\n"
        "import sys; print(sys.flags.optimize, sum(map(refuses_all, KERNELS)))"
    )
    command = [sys.executable, "-O", "-c", script]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1", str(sum(map(refuses_all, KERNELS)))]


@pytest.mark.parametrize("target", [-1, V])
def test_targets_out_of_range_are_an_index_error(target) -> None:
    given = for_head()
    given["targets"][2] = target
    for kernel, operands_of in (("head", given), ("head rows", {"targets": given["targets"]})):
        call, make, _, _ = KERNELS[kernel]
        with pytest.raises(IndexError, match=f"vocabulary of {V}"):
            call(**{**make(), **operands_of})


@pytest.mark.parametrize("first_key", [[1, 1, 2], [0, 2, 2], [-1, 0, 0], [0, 1, 0]])
def test_a_mask_that_points_elsewhere_is_refused(first_key) -> None:
    given = {name: x[:3] for name, x in for_attention().items()}
    given["first_key"] = torch.tensor(first_key).int()
    with pytest.raises(ValueError, match="first_key"):
        attention.forward(**given, scale=0.3)


def test_numbers_that_do_not_fit_are_refused() -> None:
    matrices = torch.randn(2, T, C)
    for segments in ((0, 1), (1, 0)):  # for ever
        with pytest.raises(ValueError, match="segments"):
            newton_schulz.orthogonalize(matrices, COEFFICIENTS, *segments, 1e-7)
    with pytest.raises(ValueError, match="coefficients"):
        newton_schulz.orthogonalize(matrices, [(1.0, 2.0)], 1, 1, 1e-7)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="heads"):
        attention.forward(heads(3), heads(2), heads(2), torch.zeros(T).int(), 0.3)
    with pytest.raises(OverflowError):
        library.needed_library().hotlap_attention_mask_is_valid(library.ffi.NULL, 2**31)


def test_a_pointer_has_the_type_of_its_tensor() -> None:
    kernels, numbers = library.needed_library(), torch.zeros(3)
    with pytest.raises(TypeError, match="int32_t"):
        kernels.hotlap_attention_mask_is_valid(operands.pointer(numbers), 3)
    with pytest.raises(TypeError, match="float64"):
        operands.pointer(numbers.double())
    with pytest.raises(ValueError, match="contiguous"):
        operands.pointer(torch.zeros(3, 2).T)


def declared_functions() -> set[str]:
    header = (library.CSRC / "kernels.h").read_text()
    return set(re.findall(r"^(?:void|int|int64_t) (\w+)\(", header, re.MULTILINE))


def test_nothing_is_exported_but_what_the_header_declares() -> None:
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(library._compiled())], capture_output=True, text=True
    )
    exported = {line.split()[-1] for line in listed.stdout.splitlines()} - {"_init", "_fini"}
    assert exported == declared_functions()
    assert all(name.startswith("hotlap_") for name in exported)


RUN = """
import ctypes, sys
if sys.argv[2] == "before torch": ctypes.CDLL(sys.argv[3], ctypes.RTLD_GLOBAL)
import torch
if sys.argv[2] == "after torch": ctypes.CDLL(sys.argv[3], ctypes.RTLD_GLOBAL)
from tests import kernel_calls
kernel_calls.NUM_TOKENS, kernel_calls.THREADS = (65,), (2,)
torch.save(kernel_calls.results(), sys.argv[1])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="loads a library for all others to see, as on Linux")
def test_functions_of_the_same_names_in_another_library_are_not_called(tmp_path) -> None:
    """As with an MKL loaded RTLD_GLOBAL, which exports `sgemm` and all that library.py looks up."""
    internal = {"sgemm", "hotlap_blas", "matmul", "part", "pack", "small_matmul", "head_row", "add_shares"}
    names = {*declared_functions(), *library.BLAS_FUNCTIONS, *internal}
    source, other = tmp_path / "other.c", tmp_path / "other.so"
    calls = "".join(f'void {name}(void) {{ called("{name}"); }}\n' for name in sorted(names))
    source.write_text(
        "#include <stdio.h>\n#include <stdlib.h>\n"
        'static void called(const char *name) { fprintf(stderr, "called: %s\\n", name); abort(); }\n' + calls
    )
    subprocess.run([*library._compiler(), "-shared", "-fPIC", str(source), "-o", str(other)], check=True)
    results = []
    for order in ("before torch", "after torch", "never"):
        path = tmp_path / f"{order}.pt"
        command = [sys.executable, "-c", RUN, str(path), order, str(other)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        results.append(torch.load(path))
    *beside_it, alone = results
    for result in beside_it:
        assert result.keys() == alone.keys()
        for name, expected in alone.items():
            assert all(map(torch.equal, result[name], expected)), name
