"""How fast is masked attention, forward and backward, and what would the alternatives cost?

    python -m bench.attention [--threads 2] [--repeats 2]

Prints milliseconds forward / forward + backward, and the fraction of the sgemm peak, counting six matrix
products over the visible block pairs. The methods of a shape are timed in turn, and all of them against the
highest peak in between. Everything is float32 on the CPU.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.peak import best_seconds, sgemm_peak_flops
from hotlap import kernels
from hotlap.attention import Backend
from hotlap.attention.blocked import BlockedBackend
from hotlap.attention.dense import visible_pairs
from hotlap.attention.mask import BLOCK_TOKENS, Mask, block_lists, first_visible_keys
from hotlap.attention.tiles import TILE, plan_runs
from hotlap.hardware import tune_malloc
from hotlap.kernels.cpu.attention_backend import NativeBackend

SAVE_ALL = 2**40


@dataclass(frozen=True)
class Row:
    num_tokens: int
    heads: int
    head_dim: int
    window_blocks: int
    documents: str  # "one", "mean N" or "each N"
    # Also time the methods that do not know the window: for them every window costs the same.
    alternatives: bool = False

    def mask(self) -> Mask:
        ids = torch.zeros(self.num_tokens, dtype=torch.int32)
        kind, _, tokens = self.documents.partition(" ")
        if kind == "mean":
            starts = torch.rand(self.num_tokens, generator=torch.Generator().manual_seed(0)) < 1 / int(tokens)
            ids = starts.cumsum(0, dtype=torch.int32)
        elif kind == "each":
            ids = (torch.arange(self.num_tokens) // int(tokens)).int()
        return Mask(ids, torch.tensor(self.window_blocks, dtype=torch.int32), "blocks")

    def flops(self) -> int:
        lists = block_lists(self.mask())
        pairs = int(lists.partial_counts.sum() + lists.full_counts.sum())
        return 6 * 2 * pairs * BLOCK_TOKENS**2 * self.head_dim * self.heads


ROWS = [
    Row(8192, 4, 64, 4, "one", alternatives=True),
    Row(8192, 6, 128, 14, "one"),
    Row(8192, 6, 128, 14, "mean 300"),
    Row(2048, 2, 64, 2, "each 256", alternatives=True),
    Row(8192, 2, 64, 4, "mean 300"),
]


def through(backend: Backend) -> Callable[[Row, list[Tensor]], Callable[[bool], object]]:
    def prepare(row: Row, tensors: list[Tensor]) -> Callable[[bool], object]:
        *qkv, grad = tensors
        plan = backend.plan(row.mask())

        def call(backward: bool) -> object:
            leaves = [x.detach().requires_grad_() for x in qkv]
            out = backend.attend(*leaves, plan, row.head_dim**-0.5)
            return torch.autograd.grad(out, leaves, grad) if backward else out

        return call

    return prepare


def sdpa_per_tile(row: Row, tensors: list[Tensor]) -> Callable[[bool], object]:
    q, k, v, grad = (x.transpose(0, 1) for x in tensors)
    runs = plan_runs(first_visible_keys(row.mask()), torch.float32, torch.device("cpu"))
    tiles = []
    for run in runs:
        bias = F.pad(run.bias, (run.num_keys - run.bias.shape[1], 0))
        for tile in range(run.num_tiles):
            start = run.first_query + tile * run.stride
            tiles.append((slice(start, start + TILE), slice(start + TILE - run.num_keys, start + TILE), bias))

    def call(backward: bool) -> object:
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for queries, keys, bias in tiles:
            leaves = [x.detach()[None].requires_grad_() for x in (q[:, queries], k[:, keys], v[:, keys])]
            out = F.scaled_dot_product_attention(*leaves, attn_mask=bias)
            if backward:
                for total, where, part in zip(
                    (grad_q, grad_k, grad_v),
                    (queries, keys, keys),
                    torch.autograd.grad(out, leaves, grad[None, :, queries]),
                    strict=True,
                ):
                    if total is grad_q:
                        total[:, where] = part[0]
                    else:
                        total[:, where] += part[0]
        return grad_q

    return call


def sdpa_whole(causal_only: bool) -> Callable[[Row, list[Tensor]], Callable[[bool], object]]:
    def prepare(row: Row, tensors: list[Tensor]) -> Callable[[bool], object]:
        *qkv, grad = (x.transpose(0, 1)[None] for x in tensors)
        mask = None if causal_only else visible_pairs(row.mask())

        def call(backward: bool) -> object:
            leaves = [x.detach().requires_grad_() for x in qkv]
            out = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=causal_only)
            return torch.autograd.grad(out, leaves, grad) if backward else out

        return call

    return prepare


def tensors_for(row: Row) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(row.num_tokens, row.heads, row.head_dim, generator=generator) for _ in range(4)]


def print_rows(rows: list[Row], repeats: int) -> None:
    print("| tokens | heads, dim | window | documents | method | ms forward | ms both | of peak |")
    print("|---|---|---|---|---|---|---|---|")
    methods = {
        **({"native": through(NativeBackend())} if not kernels.unavailable() else {}),
        "blocked, saved": through(BlockedBackend(SAVE_ALL)),
        "blocked, recomputed": through(BlockedBackend(0)),
        "SDPA per tile": sdpa_per_tile,
    }
    # Neither of these knows the window: the one reads a T×T mask, the other computes all earlier keys.
    whole = {"SDPA, dense mask": sdpa_whole(False), "SDPA, causal": sdpa_whole(True)}
    for row in rows:
        tensors = tensors_for(row)
        calls = {
            name: prepare(row, tensors)
            for name, prepare in {**methods, **(whole if row.alternatives else {})}.items()
        }
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        peak = 0.0
        for round_number in range(repeats):
            for name, call in calls.items():
                if round_number and name in whole:
                    continue  # slow, and far behind
                forward, both = (best_seconds(lambda b=b, call=call: call(b), 1) for b in (False, True))
                seconds[name].append((forward, both))
            peak = max(peak, sgemm_peak_flops())
        for name, taken in seconds.items():
            forward, both = map(min, zip(*taken, strict=True))
            print(
                f"| {row.num_tokens} | {row.heads}, {row.head_dim} | {row.window_blocks} | {row.documents} "
                f"| {name} | {forward * 1e3:.1f} | {both * 1e3:.1f} | {row.flops() / both / peak:.2f} |",
                flush=True,
            )


def print_scaling(repeats: int) -> None:
    backend = kernels.choose_backend("auto", "cpu")
    print(f"\n{backend.name}, four times the tokens, same window (a cost linear in them is 4.0):")
    for heads, head_dim, window in ((4, 64, 4), (2, 64, 4)):
        seconds = []
        for num_tokens in (8192, 32768):
            row = Row(num_tokens, heads, head_dim, window, "one")
            call = through(backend)(row, tensors_for(row))
            seconds.append(best_seconds(lambda call=call: call(True), repeats))
        print(f"{heads} heads × {head_dim}, window {window}: × {seconds[1] / seconds[0]:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    tune_malloc()
    torch.set_num_threads(arguments.threads)
    print_rows(ROWS, arguments.repeats)
    print_scaling(arguments.repeats)


if __name__ == "__main__":
    main()
