"""Peak memory of one device in a training step, as a sum of terms with a reason each.

There are three candidates for the peak: the loss, when all activations are alive; the end of the backward
pass, when the gradients of the compiled graph appear at once; and the optimizer. Terms are bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from hotlap.config import Config
from hotlap.kernels.cuda.head_choice import HeadChoice
from hotlap.plan.activations import (
    Graphs,
    Kept,
    compiled_activations,
    compiled_gpt2_activations,
    cpu_activations,
    mask_bytes,
)
from hotlap.plan.state import ModelState

MOMENTUM_BYTES = 4
PROCESS_BYTES = 380 * 2**20  # resident after the imports of a run, measured; counts on a CPU
# Arrays of the size of a stack of matrices that Newton-Schulz has at once: the iterate, the next one, and
# for square matrices as large as these the Gram matrix and its polynomial.
NEWTON_SCHULZ_ARRAYS = 4


class Term(NamedTuple):
    name: str
    bytes: int
    reason: str = ""


@dataclass(frozen=True)
class Memory:
    terms: tuple[Term, ...]  # alive at the peak
    peak_at: str
    kept: tuple[Kept, ...]  # the activations, tensor by tensor

    @property
    def peak_bytes(self) -> int:
        return sum(term.bytes for term in self.terms)


@dataclass(frozen=True)
class StepShape:
    """How a device goes through its part of a step."""

    tokens: int  # of the largest micro-batch
    micro_batches: int
    element_bytes: int  # of activations
    world_size: int
    graphs: Graphs | None  # how the compiler sees the model; None on a CPU, where the kernels are in C


def step_memory(
    config: Config,
    state: ModelState,
    gradient_bytes: int,
    shape: StepShape,
    head: HeadChoice,
    stack_entries: int,
) -> Memory:
    """`stack_entries`: of the largest stack of matrices that Muon orthogonalizes at once, 0 without Muon."""
    always = [
        Term("weights", state.weights + state.buffers, "and rotary tables" if state.buffers else ""),
        Term("optimizer state", state.optimizer, optimizer_reason(state, shape.world_size)),
    ]
    if shape.graphs is None:
        always.append(Term("Python and torch", PROCESS_BYTES))
    gradients = Term("gradients", gradient_bytes)
    if shape.world_size > 1:
        always.append(gradients._replace(reason="DDP's buckets, kept between steps"))
    accumulated = [gradients._replace(reason="of earlier micro-batches")] if _accumulates(shape) else []
    kept = kept_activations(config, shape)
    activations = Term("activations", sum(tensor.bytes for tensor in kept), f"of {shape.tokens:,} tokens")
    newton_schulz = Term(
        "Newton-Schulz", newton_schulz_bytes(stack_entries, shape.element_bytes), "one stack of matrices"
    )
    fresh = gradients._replace(reason="of the last backward")
    phases = {
        "the loss": [*always, *accumulated, activations, *head_terms(config, shape, head)],
        "the end of the backward": [*always, *accumulated, fresh],
        "the optimizer": [*always, *([] if shape.world_size > 1 else [fresh]), newton_schulz],
    }
    peak_at = max(phases, key=lambda phase: total(phases[phase]))
    return Memory(tuple(term for term in phases[peak_at] if term.bytes), peak_at, tuple(kept))


def kept_activations(config: Config, shape: StepShape) -> list[Kept]:
    model = config.model
    if shape.graphs is None:
        return cpu_activations(model, shape.tokens, shape.element_bytes)
    if model.architecture == "gpt2":
        kept = compiled_gpt2_activations(model, shape.tokens, shape.element_bytes)
    else:
        kept = compiled_activations(model, shape.tokens, shape.element_bytes, shape.graphs)
        kept.append(Kept("block lists of the mask", mask_bytes(shape.tokens, config.attention.block_size)))
    if shape.element_bytes < 4:
        kept.append(Kept("weights as multiplied", matrix_entries(config) * shape.element_bytes))
    return kept


def head_terms(config: Config, shape: StepShape, head: HeadChoice) -> list[Term]:
    """Logits and the gradients that the loss computes.

    Full logits are kept by the forward pass, and the compiler writes their gradient over them. In chunks,
    the loss computes its gradients with respect to its input and to the weight right away.
    """
    model, element = config.model, shape.element_bytes
    weight_entries = model.padded_vocab_size * model.width
    cast = weight_entries * element if element < 4 else 0
    if head.how == "full":
        logits = shape.tokens * model.padded_vocab_size * element
        return [
            Term("logits", logits, "full; their gradient overwrites them"),
            Term("head's weight and gradient", cast + weight_entries * element, "as multiplied"),
        ]
    buffers = head.logits_bytes
    gradients = shape.tokens * model.width * element + weight_entries * 4
    product = cast  # of a chunk, before it is added to the gradient of the weight
    return [
        Term("logits", buffers, f"in chunks of {head.chunk_tokens:,} tokens"),
        Term("gradients of the loss", gradients, "for its input and the head's weight"),
        Term("head's weight and gradient", cast + product, "as multiplied"),
    ]


def matrix_entries(config: Config) -> int:
    """Of all matrices inside the blocks."""
    model = config.model
    with_attention = model.num_layers - len(model.attention_free_layers)
    attention = 2 * model.width * (model.width + model.kv_heads * model.head_dim)
    return with_attention * attention + model.num_layers * 2 * model.mlp_ratio * model.width**2


def newton_schulz_bytes(stack_entries: int, element_bytes: int) -> int:
    """The update of the momentum in float32, and the iteration in the precision of the run."""
    return stack_entries * (MOMENTUM_BYTES + NEWTON_SCHULZ_ARRAYS * element_bytes)


def optimizer_reason(state: ModelState, world_size: int) -> str:
    mib = {"Adam": state.adam, "Muon": state.muon, "RowRms": state.row_rms}
    parts = [f"{name} {size / 2**20:,.0f}" for name, size in mib.items() if size]
    return ", ".join(parts) + (f" (1/{world_size})" if state.muon and world_size > 1 else "")


def total(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


def _accumulates(shape: StepShape) -> bool:
    """Whether gradients of earlier micro-batches are alive; DDP's buckets hold them anyway."""
    return shape.micro_batches > 1 and shape.world_size == 1
