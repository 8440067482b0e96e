"""A plan as a table of at most 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hotlap.emulation import CompiledStep
from hotlap.plan.estimate import Estimate
from hotlap.plan.fit import MIB, divides, options
from hotlap.plan.machine import Machine
from hotlap.plan.speed import Range
from hotlap.recipes import resolve
from hotlap.settings import as_text, diff

WIDTH = 80


class Row(NamedTuple):
    label: str
    value: str = ""
    note: str = ""


def print_table(console: Console, plan: Estimate, exact: CompiledStep | None) -> None:
    console.print(title(plan), markup=False, soft_wrap=True)
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", no_wrap=True)
    table.add_column()
    for row in rows(plan, exact):
        table.add_row(*row)
    console.print(table, markup=False, width=WIDTH)
    for warning in plan.warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    if command(plan):
        console.print(f"run: {command(plan)}", markup=False, soft_wrap=True)


def title(plan: Estimate) -> str:
    return f"{plan.config.recipe} at {plan.config.size} on {described(plan.machine)}, {plan.precision}"


def described(machine: Machine) -> str:
    nodes = f"{machine.nodes} nodes of " if machine.nodes > 1 else ""
    return f"{nodes}{machine.devices_per_node} × {machine.name}"


def rows(plan: Estimate, exact: CompiledStep | None) -> Iterator[Row]:
    yield Row("parameters", f"{sum(plan.parameters.values()):,}")
    for role, count in plan.parameters.items():
        yield Row(f"  {role}", f"{count:,}")
    yield from memory_rows(plan, exact)
    yield from compute_rows(plan)
    if exact is not None:
        yield from exact_rows(exact)
    if plan.traffic:
        sent = sum(each.sent_bytes for each in plan.traffic)
        yield Row(
            "sent per device and step", f"{sent / MIB:,.1f} MiB", f"in {plan.speed.wire_s * 1e3:,.1f} ms"
        )
    for each in plan.traffic:
        yield Row(f"  {each.what}", f"{each.sent_bytes / MIB:,.1f} MiB", each.collective)
    yield from time_rows(plan)


def memory_rows(plan: Estimate, exact: CompiledStep | None) -> Iterator[Row]:
    memory, machine = plan.memory, plan.machine
    share = memory.peak_bytes / machine.usable_bytes
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield Row(
        "peak memory per device", f"{memory.peak_bytes / MIB:,.0f} MiB", f"{verdict}, at {memory.peak_at}"
    )
    for term in memory.terms:
        yield Row(f"  {term.name}", f"{term.bytes / MIB:,.0f} MiB", term.reason)
    usable = f"{share:.0%} used; of {machine.memory_bytes / 2**30:.0f} GiB"
    yield Row("  usable", f"{machine.usable_bytes / MIB:,.0f} MiB", usable)
    if exact is not None:
        yield Row("  compiled exactly", f"{exact.peak_mib:,.0f} MiB", "one rank, no DDP")
    yield Row("  most that fits", f"{plan.most_tokens:,}", "tokens at once")
    if plan.kernels is not None:
        yield Row("attention's kernels", *kernel_cells(plan))
    yield Row("loss", plan.loss.how, plan.loss.description)


def kernel_cells(plan: Estimate) -> tuple[str, str]:
    kernels = plan.kernels
    assert kernels is not None, "the caller has checked"
    if kernels.fits is None:
        return "unknown", "never compiled for this GPU"
    answer = "fit" if kernels.fits else "DO NOT FIT"
    return answer, f"head dim {kernels.head_dim}, at most {kernels.largest_head_dim} in shared memory"


def compute_rows(plan: Estimate) -> Iterator[Row]:
    speed = plan.speed
    yield Row("FLOPs per token", _prefixed(speed.flops_per_token), "forward and backward")
    yield Row("FLOPs per step", _prefixed(speed.flops_per_step), "of all devices")
    if plan.newton_schulz_flops:
        yield Row("  Newton-Schulz", _prefixed(plan.newton_schulz_flops), "beside them")


def exact_rows(step: CompiledStep) -> Iterator[Row]:
    """Of one micro-batch and an update of all matrices."""
    forward, backward, optimizer = (phase.total for phase in step.phases)
    both = f"{forward:,} forward, {backward:,} backward"
    yield Row("launches per micro-batch", f"{forward + backward:,}", both)
    yield Row("launches of an update", f"{optimizer:,}", "of all optimizers, on one rank")
    yield Row("  outside matmuls", f"{step.launches_outside_matmuls:,}", "of both together")
    yield Row("  moved there", f"{step.bytes_outside_matmuls / 1e9:,.1f} GB", "read and written")
    yield Row("  kernels", f"{step.kernels:,}", f"in {step.graphs} graphs, {step.graph_breaks} graph breaks")


def time_rows(plan: Estimate) -> Iterator[Row]:
    speed, batch = plan.speed, plan.config.batch
    low, high = speed.fraction_of_peak
    steps = plan.config.schedule.steps
    length = f"{steps:,} steps of {batch.tokens_per_step:,} tokens"
    micro = f"{plan.shape.micro_batches} × {plan.shape.tokens:,} tokens per device"
    yield Row("time per step", _milliseconds(speed.step_s), micro)
    yield Row("time of the run", _minutes(speed.training_s), length)
    if plan.cost is not None:
        yield Row("cost", f"{plan.cost.low:,.2f}–{plan.cost.high:,.2f}", "with validation, without set-up")
    yield Row("  assumed", "", f"{low:.0%} to {high:.0%} of {_prefixed(speed.peak_tflops * 1e12)}FLOP/s")
    if plan.traffic:
        link = f"{plan.machine.link_gb_per_s:,.4g} GB/s per direction ({plan.machine.link_name})"
        yield Row("", "", f"{link}: all hidden, or half of the rate and none")


def command(plan: Estimate) -> str | None:
    """With which the run starts, in a split that fits; None if there is none."""
    config, machine = plan.config, plan.machine
    if not (plan.fits and divides(config, machine.world_size)):
        if plan.split is None:
            return None
        config = replace(config, batch=plan.split)
    changed = diff(resolve(config.recipe, config.size), config)
    settings = options({change.name: as_text(change.after) for change in changed})
    words = " ".join(filter(None, (f"train {config.recipe} --size {config.size}", settings)))
    if machine.nodes > 1:
        return f"{words} on each node, by torchrun: see docs/gpus.md"
    if machine.devices_per_node > 1:
        words += f" --procs {machine.devices_per_node}"
    return f"hotlap {words}"


def _prefixed(value: float) -> str:
    """Four digits and a prefix: 430.2 T."""
    prefix, unit = next(((p, u) for p, u in (("T", 1e12), ("G", 1e9)) if value >= u), ("M", 1e6))
    return f"{value / unit:,.4g} {prefix}"


def _milliseconds(seconds: Range) -> str:
    return f"{seconds.low * 1e3:,.0f}–{seconds.high * 1e3:,.0f} ms"


def _minutes(seconds: Range) -> str:
    if seconds.high >= 3 * 3600:
        return f"{seconds.low / 3600:,.1f}–{seconds.high / 3600:,.1f} h"
    return f"{seconds.low / 60:,.1f}–{seconds.high / 60:,.1f} min"


def as_json(plan: Estimate, exact: CompiledStep | None) -> dict[str, Any]:
    machine, memory, speed, kernels = plan.machine, plan.memory, plan.speed, plan.kernels
    return {
        "recipe": plan.config.recipe,
        "size": plan.config.size,
        "machine": {
            "device": machine.name,
            "devices_per_node": machine.devices_per_node,
            "nodes": machine.nodes,
            "memory_bytes": machine.memory_bytes,
            "usable_bytes": machine.usable_bytes,
            "link_gb_per_s": machine.link_gb_per_s,
            "link": machine.link_name,
        },
        "precision": plan.precision,
        "parameters": plan.parameters,
        "memory": {
            "peak_bytes": memory.peak_bytes,
            "peak_at": memory.peak_at,
            "fits": plan.fits,
            "terms": {term.name: term.bytes for term in memory.terms},
            "activations": {kept.name: kept.bytes for kept in memory.kept},
            "exact_peak_mib": None if exact is None else exact.peak_mib,
        },
        "exact": None if exact is None else exact_as_json(exact),
        "most_tokens_at_once": plan.most_tokens,
        "largest_split": None if plan.split is None else asdict(plan.split),
        "tokens_at_once": plan.shape.tokens,
        "micro_batches": plan.shape.micro_batches,
        "loss": plan.loss.description,
        "flops": {
            "per_token": speed.flops_per_token,
            "per_step": speed.flops_per_step,
            "newton_schulz_per_step": plan.newton_schulz_flops,
        },
        "traffic": [each._asdict() for each in plan.traffic],
        "kernels": None
        if kernels is None
        else {
            "head_dim": kernels.head_dim,
            "largest_head_dim": kernels.largest_head_dim,
            "fit": kernels.fits,
        },
        "time": {
            "fraction_of_peak": speed.fraction_of_peak,
            "peak_tflops": speed.peak_tflops,
            "wire_s": speed.wire_s,
            "step_s": speed.step_s,
            "training_s": speed.training_s,
            "with_validation_s": speed.billed_s,
        },
        "cost": plan.cost,
        "warnings": plan.warnings,
        "command": command(plan),
    }


def exact_as_json(step: CompiledStep) -> dict[str, Any]:
    facts = {name: value for name, value in asdict(step).items() if name != "sources"}
    outside = {
        "launches_outside_matmuls": step.launches_outside_matmuls,
        "bytes_outside_matmuls": step.bytes_outside_matmuls,
    }
    return facts | outside
