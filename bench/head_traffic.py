"""How many launches and bytes does a step of the head take on CUDA? Counted without a GPU.

    python -m bench.head_traffic [--tokens 65536] [--width 768] [--vocabulary 50304]

Chunks are counted on meta tensors; those of 512 tokens in PyTorch are what runs where Triton is missing. Full
logits are compiled for an H100 by the real compiler, which needs g++ and Triton, and each load and store in
its kernels counts. The lower bound of the time is for an H100, whose memory moves 3.35 TB/s.
"""

import argparse

from hotlap.emulation import call, unavailable
from hotlap.kernels.chunked_loss import DEFAULT_CHUNK_TOKENS
from hotlap.kernels.cuda.head_choice import triton_chunk_tokens
from hotlap.kernels.cuda.head_traffic import Traffic, head_traffic

H100_BYTES_PER_SECOND = 3.35e12
MEMORY_GIB = (80, 24, 8)  # of the devices whose chunks are shown
SOFTCAP = 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=65_536)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    arguments = parser.parse_args()
    triton_chunks = (triton_chunk_tokens(gib * 2**30, arguments.vocabulary, 2) for gib in MEMORY_GIB)
    chunked = [
        ("torch", DEFAULT_CHUNK_TOKENS),
        *(("triton", chunk) for chunk in dict.fromkeys(triton_chunks)),
    ]
    sizes = {**vars(arguments), "softcap": SOFTCAP}
    rows = [
        (passes, chunk_tokens, head_traffic(**sizes, chunk_tokens=chunk_tokens, passes=passes))
        for passes, chunk_tokens in chunked
    ]
    missing = unavailable()
    if missing is None:
        full = call("hotlap.emulation.head:full_logits_traffic", **sizes, gpu="H100")
        rows.append(("full logits, compiled", arguments.tokens, Traffic(**full)))
    print("| passes | tokens per chunk | launches | outside matmuls | GB | outside matmuls | ms at least |")
    print("|---|---|---|---|---|---|---|")
    for passes, chunk_tokens, found in rows:
        outside = found.bytes_outside_matmuls
        total = outside + found.bytes_of_matmuls
        print(
            f"| {passes} | {chunk_tokens:,} | {found.launches:,} | {found.launches - found.matmuls:,} |"
            f" {total / 1e9:.1f} | {outside / 1e9:.1f} | {outside / H100_BYTES_PER_SECOND * 1e3:.1f} |"
        )
    if missing is not None:
        print(f"full logits, compiled: not counted, {missing}")


if __name__ == "__main__":
    main()
