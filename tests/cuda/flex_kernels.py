"""flex_attention's CUDA kernels, interpreted, against the dense oracle. A program for the emulated device:

    python -m tests.cuda.flex_kernels '[{"num_tokens": 640, "dtype": "bfloat16", …}, …]'

prints one line per case: the relative errors of the output and of the gradients of q, k and v.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch

from hotlap.attention import flex
from hotlap.attention.dense import DenseBackend
from hotlap.attention.flex import FlexBackend, visible
from hotlap.attention.mask import BlockLists, Mask, block_lists
from tests.attention_cases import Case, output_and_gradients, relative_error


def errors(case: Case, dtype: torch.dtype) -> list[float]:
    """Of the output and of the gradients with respect to q, k and v, against the oracle in float64."""
    tensors = [x.to(dtype) for x in case.tensors()]
    cpu = case.mask()
    mask = Mask(cpu.documents.cuda(), cpu.window.cuda(), cpu.unit)
    found = output_and_gradients(FlexBackend(), mask, *(x.cuda() for x in tensors))
    expected = output_and_gradients(DenseBackend(), cpu, *(x.double() for x in tensors))
    return [relative_error(ours.cpu(), oracle) for ours, oracle in zip(found, expected, strict=True)]


def partial_blocks_as_full(mask: Mask) -> BlockLists:
    """A mistake to be found: in every block before the diagonal every query sees every key."""
    lists = block_lists(mask)
    counts, indices = lists.partial_counts + lists.full_counts - 1, lists.partial_indices.clone()
    for row, (partial, full) in enumerate(zip(lists.partial_counts, lists.full_counts, strict=True)):
        before = [*lists.full_indices[row, :full], *lists.partial_indices[row, : partial - 1]]
        indices[row, : len(before)] = torch.tensor(before, dtype=torch.int32)
    diagonal = torch.arange(len(counts), dtype=torch.int32, device=counts.device)[:, None]
    return BlockLists(torch.ones_like(counts), diagonal.expand_as(indices).contiguous(), counts, indices)


def other_documents_seen(mask: Mask) -> Any:
    """A mistake to be found: keys of earlier documents are visible."""
    return visible(Mask(torch.zeros_like(mask.documents), mask.window, mask.unit))


MISTAKES = {"block_lists": partial_blocks_as_full, "visible": other_documents_seen}


def main(cases: list[dict[str, Any]]) -> None:
    for settings in cases:
        dtype = getattr(torch, settings.pop("dtype"))
        mistake = settings.pop("mistake")
        case = Case(**settings)
        with patch.object(flex, mistake, MISTAKES[mistake]) if mistake else nullcontext():
            print(json.dumps(errors(case, dtype)), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
