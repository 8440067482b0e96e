"""Decides, once per lap, which parts run as fused kernels, swaps them, and reports it.

`install` gives blocks, loss and optimizers fused versions that share the parameters; without the call
they run as the plain PyTorch that they are. Attention's kernel comes with its backend (`choose_backend`).
Names, state dicts and checkpoints are the same either way. What `install` returns says of every part what
runs it, and why a part was left plain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from hotlap.attention import Backend
from hotlap.attention.blocked import DEFAULT_SAVED_BYTES, BlockedBackend
from hotlap.attention.dense import DenseBackend
from hotlap.errors import ConfigError, DeviceError
from hotlap.hardware import memory_bytes
from hotlap.kernels.chunked_loss import Passes, chunked_cross_entropy, is_unshifted
from hotlap.kernels.cpu import head, mlp, row_rms
from hotlap.kernels.cpu.attention_backend import NativeBackend
from hotlap.kernels.cpu.block import FusedBlock
from hotlap.kernels.cpu.library import unavailable
from hotlap.kernels.cpu.muon_math import KernelMath
from hotlap.kernels.cpu.muon_math import pays as newton_schulz_pays
from hotlap.kernels.cpu.shares import least_tokens
from hotlap.kernels.cuda import head_choice
from hotlap.kernels.cuda.flex_limits import check_flex_fits
from hotlap.kernels.cuda.muon_math import CompiledMath
from hotlap.model import GPT, GPT2
from hotlap.model.attention import Attention
from hotlap.model.block import Block
from hotlap.model.head import Head, cross_entropy
from hotlap.model.layers import Matrix
from hotlap.model.mlp import MLP
from hotlap.optim.muon import Muon
from hotlap.optim.muon_math import PlainMath
from hotlap.optim.row_rms import RowRms
from hotlap.optim.row_rms import step_rows as plain_step_rows

SWITCHED_OFF = "switched off"
BACKENDS = ("auto", "dense", "flex", "native", "blocked")


class Part(NamedTuple):
    name: str
    kernel: str  # what runs it: "C", "Triton, chunks of …"; empty where it was left plain
    reason: str = ""  # why it was left plain


@dataclass(frozen=True)
class Installed:
    parts: tuple[Part, ...]

    def as_json(self) -> dict[str, str]:
        """{part: what runs it, or "plain: " and the reason}, for environment.json and the report."""
        return {part.name: part.kernel or f"plain: {part.reason}" for part in self.parts}

    def __str__(self) -> str:
        """One line: what was swapped, and what was left plain and why."""
        names: dict[str, list[str]] = {}
        for part in self.parts:
            names.setdefault(f"in {part.kernel}" if part.kernel else f"plain ({part.reason})", []).append(
                part.name
            )
        return "; ".join(f"{', '.join(parts)} {how}" for how, parts in names.items())

    @property
    def fuses_blocks(self) -> bool:
        return any(part.kernel for part in self.parts if part.name.startswith(("QKV", "MLP")))


def choose_backend(
    name: str, device: torch.device | str, *, saved_bytes: int = DEFAULT_SAVED_BYTES
) -> Backend:
    """The attention backend of a run on `device`. A backend that cannot work there is an error.

    `auto` is flex on CUDA, native on a CPU where the C kernels compile, and blocked elsewhere. `saved_bytes`
    bounds what one layer of `blocked` keeps for its backward pass.
    """
    kind = torch.device(device).type
    if name not in BACKENDS:
        raise ConfigError(
            expected=f"an attention backend out of {', '.join(BACKENDS)}",
            found=repr(name),
            do="name one of them, or leave it at auto",
        )
    if name == "auto":
        name = "flex" if kind == "cuda" else "native" if kind == "cpu" and not unavailable() else "blocked"
    if name == "dense":
        return DenseBackend()
    if name == "blocked":
        return BlockedBackend(saved_bytes)
    if name == "native":
        reason = unavailable() if kind == "cpu" else f"device {kind}"
        if reason:
            raise DeviceError(
                expected="a CPU and gcc for the native attention backend",
                found=reason,
                do="choose blocked or auto there",
            )
        return NativeBackend()
    if kind != "cuda":
        raise DeviceError(
            expected="a CUDA device for the flex attention backend",
            found=f"device {kind}, where flex_attention has no backward",
            do="choose blocked or auto there",
        )
    from hotlap.attention.flex import FlexBackend

    return FlexBackend()


def install(
    model: GPT | GPT2,
    optimizers: Iterable[torch.optim.Optimizer] = (),
    *,
    backend: Backend,
    tokens: int,
    compiled: bool = False,
    compiles_loss: bool = False,
    compiles_optimizers: bool = False,
    switched_off: bool = False,
) -> Installed:
    """Swap the parts of a lap that a kernel computes faster here.

    `tokens` go through the model at once. `compiled`: torch.compile will fuse the blocks, so that they are
    left to it; `compiles_loss`: the loss will be part of a compiled graph; `compiles_optimizers`: Muon's math
    may be compiled; `switched_off`: leave everything plain. Attention's own kernel comes
    with the backend, and is only reported here.
    """
    assert not any(isinstance(block, FusedBlock) for block in model.blocks), "kernels are installed already"
    device = model.device
    no_kernels = unavailable() if device.type == "cpu" else f"no kernels on {device.type}"
    if switched_off:
        no_kernels = SWITCHED_OFF
    parts = [
        _attention_part(model, backend),
        *_install_blocks(model, no_kernels, tokens, compiled),
        _install_loss(model, device, no_kernels, tokens, compiles_loss),
        *(_install_math(opt, no_kernels, compiles_optimizers and not switched_off) for opt in optimizers),
    ]
    return Installed(tuple(parts))


def _attention_part(model: GPT | GPT2, backend: Backend) -> Part:
    if isinstance(model, GPT2):
        return Part("attention", "", "GPT-2 attends by scaled_dot_product_attention")
    device = model.device
    if backend.name == "flex" and device.type == "cuda":
        check_flex_fits(torch.cuda.get_device_capability(device), model.dtype, model.config.head_dim)
    kernel = {"native": "C", "flex": "FlexAttention"}.get(backend.name, "")
    return Part("attention", kernel, "" if kernel else f"{backend.name} backend")


def _install_blocks(model: GPT | GPT2, no_kernels: str | None, tokens: int, compiled: bool) -> list[Part]:
    reason = no_kernels or _why_no_fused_blocks(model, tokens, compiled)
    if reason:
        return [Part("blocks", "", reason)]
    layers: dict[Part, list[int]] = {}
    for layer, block in enumerate(model.blocks):
        for part in _fuse(block):
            layers.setdefault(part, []).append(layer)
    return [part._replace(name=f"{part.name} of {_listed(numbers)}") for part, numbers in layers.items()]


def _why_no_fused_blocks(model: GPT | GPT2, tokens: int, compiled: bool) -> str | None:
    if isinstance(model, GPT2):
        return "GPT-2's have no kernels"
    if model.dtype != torch.float32:
        return f"{str(model.dtype).removeprefix('torch.')} activations"
    if compiled:
        return "compiled"
    least = least_tokens(model.config.width, model.config.width)
    return None if tokens >= least else f"{tokens} tokens at once, kernels pay from {least}"


def _fuse(block: nn.Module) -> list[Part]:
    """Make a plain block a fused one, as far as its parts are those that the kernels know."""
    if type(block) is not Block:
        return [Part("block", "", f"{type(block).__name__} has no kernel")]
    parts = []
    fuses_attention = False
    if block.attention is not None:
        reason = _why_unknown(block.attention, Attention)
        fuses_attention = not reason
        parts.append(Part("QKV", "" if reason else "C", reason))
    reason = _why_unknown(block.mlp, MLP)
    if not reason and block.mlp.expand.weight.numel() > mlp.MOST_WEIGHTS:
        reason = "too wide for a cache"
    parts.append(Part("MLP", "" if reason else "C", reason))
    if fuses_attention or not reason:
        FusedBlock.adopt(block, fuses_attention=fuses_attention, fuses_mlp=not reason)
    return parts


def _why_unknown(module: nn.Module, known: type[nn.Module]) -> str:
    """Kernels read the weights themselves: module and matrices must be exactly ours, without hooks."""
    if type(module) is not known:
        return f"{type(module).__name__} has no kernel"
    for part in module.modules():
        if part is not module and (type(part) is not Matrix or "weight" not in part._parameters):
            return f"{type(part).__name__} has no kernel"
        hooks = (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks)
        if any(hooks) or "forward" in vars(part):
            return f"{type(part).__name__} has hooks"
    return ""


def _listed(layers: Sequence[int]) -> str:
    """As `layer 3`, `layers 0-3` or `layers 0, 2`."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    runs = list(layers) == list(range(layers[0], layers[-1] + 1))
    return "layers " + (f"{layers[0]}-{layers[-1]}" if runs else ", ".join(map(str, layers)))


def _install_loss(
    model: GPT | GPT2, device: torch.device, no_kernels: str | None, tokens: int, compiles_loss: bool
) -> Part:
    if model.loss is not cross_entropy:
        return Part("loss", "", "a loss of its own")
    if isinstance(model, GPT) and type(model.head) is not Head:
        return Part("loss", "", f"{type(model.head).__name__} has no kernel")
    if no_kernels == SWITCHED_OFF:
        if not compiles_loss:
            model.loss = chunked_cross_entropy
        return Part("loss", "", SWITCHED_OFF)
    weight = model.head.weight if isinstance(model, GPT) else model.embed.weight
    if device.type == "cuda":
        return _install_loss_on_cuda(model, device, len(weight), tokens, compiles_loss)
    passes: Passes = "torch"
    if no_kernels is None and is_unshifted(model.config.softcap) and model.dtype != torch.float64:
        fits = model.dtype == torch.float32 and weight.numel() <= head.MOST_WEIGHTS
        passes = "all" if fits and tokens >= least_tokens(*weight.shape) else "rows"
    model.loss = partial(chunked_cross_entropy, passes=passes)
    kernel = {"torch": "chunked PyTorch", "rows": "chunked PyTorch and C", "all": "C"}[passes]
    return Part("loss", kernel)


def _install_loss_on_cuda(
    model: GPT | GPT2, device: torch.device, vocabulary: int, tokens: int, compiles_loss: bool
) -> Part:
    choice = head_choice.choose_head(
        memory_bytes=memory_bytes(device),
        tokens=tokens,
        vocabulary=vocabulary,
        element_bytes=model.dtype.itemsize,
        compiled=compiles_loss,
        no_triton="float64" if model.dtype == torch.float64 else head_choice.no_triton(),
    )
    if choice.how != "full":  # full logits are the plain loss, which the compiler fuses
        model.loss = partial(chunked_cross_entropy, passes=choice.how, chunk_tokens=choice.chunk_tokens)
    return Part("loss", choice.description)


def _install_math(optimizer: torch.optim.Optimizer, no_kernels: str | None, compiles: bool = False) -> Part:
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    if no_kernels is None and not all(x.dtype == torch.float32 and x.is_contiguous() for x in tensors):
        no_kernels = "weights in other precisions than float32"
    if isinstance(optimizer, Muon):
        return _install_newton_schulz(optimizer, no_kernels, compiles)
    if isinstance(optimizer, RowRms):
        if no_kernels is None and optimizer.step_rows is not plain_step_rows:
            no_kernels = "a step of its own"
        if no_kernels is None:
            optimizer.step_rows = row_rms.step_rows
        return Part("RowRms", "" if no_kernels else "C", no_kernels or "")
    kind = type(optimizer)
    known = kind.__module__.startswith("torch.optim")
    reason = "torch's fused one is as fast" if known else f"{kind.__name__} has no kernel"
    return Part(kind.__name__, "", no_kernels or reason)


def _install_newton_schulz(muon: Muon, no_kernels: str | None, compiles: bool) -> Part:
    stacks = muon.newton_schulz_stacks()
    total = sum(shape[0] for shape, _ in stacks)
    in_c = sum(shape[0] for shape, dtype in stacks if newton_schulz_pays(shape, dtype))
    if type(muon.math) is not PlainMath:
        no_kernels = no_kernels or "math of its own"
    elif compiles:
        muon.math = CompiledMath()
        return Part("Muon", "compiled PyTorch")
    elif no_kernels is None and not in_c:
        dtypes = {str(dtype).removeprefix("torch.") for _, dtype in stacks} - {"float32"}
        no_kernels = f"in {', '.join(dtypes)}" if dtypes else "too few or too large matrices"
    if no_kernels is not None:
        return Part("Newton-Schulz", "", no_kernels)
    muon.math = KernelMath()
    return Part("Newton-Schulz" if in_c == total else f"Newton-Schulz of {in_c} of {total} matrices", "C")
