"""`hotlap sample RUN`: prints text while a trained model generates it, and the speed to standard error."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from hotlap.cli import Parser
from hotlap.commands.model_arguments import add_model_arguments, described_step, load_model
from hotlap.errors import INTERRUPTED
from hotlap.inference.options import SampleOptions
from hotlap.progress import to_stderr
from hotlap.terminal import printable

if TYPE_CHECKING:
    from hotlap.inference.load import LoadedModel


def configure(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        help="the start of the text; may be given several times (default: empty)",
    )
    add_sampling_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_sampling_arguments(parser: Parser) -> None:
    default = SampleOptions()
    add = parser.add_argument
    add("--tokens", type=int, default=default.max_tokens, metavar="N", help="at most N tokens (%(default)s)")
    add("--temperature", type=float, default=default.temperature, help="0: most likely token (%(default)s)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="sample from the most likely tokens of total probability P")
    add("--seed", type=int, default=default.seed, help="the same seed gives the same text (%(default)s)")
    add("--samples", type=int, default=default.num_samples, metavar="N", help="per prompt (%(default)s)")


def sample_options(args: argparse.Namespace) -> SampleOptions:
    return SampleOptions(args.tokens, args.samples, args.temperature, args.top_k, args.top_p, args.seed)


def run(args: argparse.Namespace) -> int:
    options = sample_options(args)
    loaded = load_model(args)
    prompts: list[str] = args.prompt or [""]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal cannot show
    started = time.perf_counter()
    results = []
    try:
        for number, prompt in enumerate(prompts):
            if not args.json and number:
                sys.stdout.write("\n")
            results.append(sample_prompt(loaded, prompt, options, as_json=args.json))
    except KeyboardInterrupt:
        sys.stdout.write("\n")
        return INTERRUPTED
    seconds = time.perf_counter() - started
    made = sum(len(sample["tokens"]) for result in results for sample in result["samples"])
    if args.json:
        answer = {
            "run": str(args.run),
            "step": loaded.step,
            "window_tokens": loaded.visibility.window_tokens,
            "results": results,
            "tokens_per_s": made / seconds,
        }
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
    to_stderr(
        f"{described_step(loaded)}: {made} tokens in {seconds:.1f} s, {made / seconds:,.0f} tokens per second"
    )
    return 0


def sample_prompt(
    loaded: LoadedModel, prompt: str, options: SampleOptions, *, as_json: bool
) -> dict[str, Any]:
    """All samples of one prompt. One sample is printed token by token; several are printed at the end."""
    from hotlap.inference.generate import TextStream, samples

    tokenizer = loaded.tokenizer
    steps = loaded.generate_steps(prompt, options)
    if options.num_samples == 1 and not as_json:
        stream = TextStream(tokenizer)
        write(prompt)
        tokens = []
        for (token,) in steps:
            assert token is not None, "generation ends with its only sample"
            tokens.append(token)
            write(stream.add(token))
        write(stream.close() + "\n")
        return {"prompt": prompt, "samples": [{"tokens": tokens}]}
    described = []
    for number, sample in enumerate(samples(steps, options), start=1):
        text = prompt + tokenizer.decode(sample.tokens)
        described.append({"text": text, "tokens": sample.tokens, "ended": sample.ended})
        if not as_json:
            write(f"── sample {number} of {options.num_samples}\n{text}\n")
    return {"prompt": prompt, "samples": described}


def write(text: str) -> None:
    sys.stdout.write(printable(text, lines=True))
    sys.stdout.flush()
