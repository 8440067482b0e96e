"""`hotlap doctor`: show the installed versions, the hardware, and what a run would use on this machine."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from hotlap import __version__
from hotlap.cli import Parser
from hotlap.extras import Extra, extras
from hotlap.terminal import make_console

if TYPE_CHECKING:
    import torch

    from hotlap.attention import Backend


def configure(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gpu", action="store_true", help="run the acceptance test of the GPU, in minutes")
    parser.add_argument("--size", default="small", help="with --gpu: size of the runs (default: small)")
    parser.add_argument("--device", default="cuda", help="with --gpu: another device to test (default: cuda)")
    parser.add_argument("--page", type=Path, help="with --gpu: also write the findings to this HTML file")


def run(args: argparse.Namespace) -> int:
    if args.gpu:
        return accept(args)
    console = make_console()
    facts = examine()
    if args.json:
        named = {extra.name: extra.command if extra.missing else None for extra in extras()}
        console.print_json(json.dumps({**facts, "extras": named}))
        return 0
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(name.replace("_", " "), _shown(value))
    console.print(table)
    console.print(verdict(facts), soft_wrap=True)
    for line in extras_lines(extras()):
        console.print(line, markup=False, soft_wrap=True, highlight=False)
    return 0


def extras_lines(found: Sequence[Extra]) -> list[str]:
    """The extras that are there, and for each that is missing the command that adds it."""
    there = [extra.name for extra in found if not extra.missing]
    missing = [extra for extra in found if extra.missing]
    lines = [f"\nextras that are installed: {', '.join(there) or 'none'}"]
    if missing:
        lines.append("missing, each with the command that adds it:")
    for extra in missing:
        lines += [f"  {extra.name}: {extra.purpose}", f"    {extra.command}"]
    return lines


def accept(args: argparse.Namespace) -> int:
    """Run the acceptance test. A check that fails is a bug, ours or the driver's."""
    from dataclasses import asdict

    from hotlap.acceptance.checks import run_checks
    from hotlap.acceptance.page import render, verdict
    from hotlap.errors import BUG
    from hotlap.hardware import select_device
    from hotlap.progress import silent
    from hotlap.recipes import resolve
    from hotlap.report.page import write_file

    console = make_console()
    resolve("softcap", args.size)  # an unknown size is an error before anything runs
    device = select_device(args.device)
    facts = examine(args.device)
    findings = run_checks(device, args.size, silent if args.json else console.print)
    if args.page is not None:
        write_file(args.page, render(facts, findings).encode())
    if args.json:
        console.print_json(json.dumps({"machine": facts, "checks": [asdict(f) for f in findings]}))
    else:
        table = Table("check", "outcome", "finding", "seconds", box=None, padding=(0, 2, 0, 0))
        for finding in findings:
            table.add_row(finding.name, finding.outcome, finding.detail, f"{finding.seconds:.0f}")
        console.print(table)
        console.print(verdict_line(verdict(findings), args.page), markup=False, soft_wrap=True)
    return BUG if any(finding.outcome == "failed" for finding in findings) else 0


def verdict_line(verdict: str, page: Path | None) -> str:
    return verdict if page is None else f"{verdict}; page at {page}"


def examine(device_name: str = "auto") -> dict[str, Any]:
    import psutil
    import torch

    from hotlap import hardware, kernels

    device = hardware.select_device(device_name)
    threads = hardware.usable_cores()
    torch.set_num_threads(threads)
    precision = hardware.select_precision("auto", device)
    backend = kernels.choose_backend("auto", device)
    return {
        "hotlap": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": device.type,
        "device_name": hardware.device_name(device),
        "devices": torch.cuda.device_count() if device.type == "cuda" else 1,
        "cores": threads,
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "native_bf16": hardware.has_native_bf16(device),
        "amx_faults": hardware.amx_faults(device),
        "precision": str(precision).removeprefix("torch."),
        "attention_backend": backend.name,
        "kernels": kernels_at_nano(backend, precision, device),
        "cpu_sgemm_gflops": round(hardware.measure_matmul_gflops()),
    }


def kernels_at_nano(backend: Backend, precision: torch.dtype, device: torch.device) -> str:
    """What `kernels.install` would do for `softcap` at `nano`; in float32 too, if that is not the default."""
    import torch

    from hotlap.kernels import install
    from hotlap.model import build_model
    from hotlap.recipes import resolve
    from hotlap.train.compile import max_micro_batch_tokens

    config = resolve("softcap", "nano")
    tokens = max_micro_batch_tokens(config, world_size=1)
    lines = []
    for dtype in dict.fromkeys((precision, torch.float32)):
        with device:
            model = build_model(config.model, tokens, dtype)
        installed = install(model, backend=backend, tokens=tokens)
        lines.append(f"{str(dtype).removeprefix('torch.')}: {installed}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def verdict(facts: dict[str, Any]) -> str:
    from hotlap.hardware import AMX_FAULTS

    bf16 = "supported by the hardware" if facts["native_bf16"] else "not supported by the hardware"
    if facts["amx_faults"]:
        bf16 += f" (the processor {AMX_FAULTS})"
    return (
        f"bfloat16 is {bf16}: runs will use {facts['precision']} and the {facts['attention_backend']}"
        f" attention backend on {facts['device']}."
    )
