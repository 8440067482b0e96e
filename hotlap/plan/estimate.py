"""Everything that is planned of a run, from its configuration and a machine."""

from __future__ import annotations

from dataclasses import dataclass

from hotlap.config import BatchConfig, Config
from hotlap.kernels.cuda.head_choice import HeadChoice
from hotlap.optim.newton_schulz import flops_per_step
from hotlap.plan.fit import Demand, loss_of, step_shape, warnings_of
from hotlap.plan.kernels import KernelFit, attention_kernels
from hotlap.plan.machine import Machine
from hotlap.plan.memory import Memory, StepShape
from hotlap.plan.speed import Range, Speed, cost, estimate_speed
from hotlap.plan.state import count_by_role, matrix_specs, meta_model
from hotlap.plan.wire import Traffic, step_traffic
from hotlap.train.lap import route_parameters


@dataclass(frozen=True)
class Estimate:
    config: Config
    machine: Machine
    precision: str
    parameters: dict[str, int]  # by role
    shape: StepShape
    memory: Memory
    loss: HeadChoice
    most_tokens: int  # at once, that fit into memory
    split: BatchConfig | None  # the largest split of the step that fits; None: none does
    speed: Speed
    newton_schulz_flops: float  # per step, of all devices together; beside the model's
    traffic: tuple[Traffic, ...]
    kernels: KernelFit | None  # None: attention has no kernel of its own to fit
    cost: Range | None  # None without a price
    warnings: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.memory.peak_bytes <= self.machine.usable_bytes


def estimate(config: Config, machine: Machine, price_per_hour: float | None = None) -> Estimate:
    demand = Demand.of(config, machine)
    model = meta_model(config, demand.dtype)
    traffic = step_traffic(model, config, machine.world_size, demand.dtype)
    speed = estimate_speed(config, machine, sum(each.sent_bytes for each in traffic))
    shape, split = step_shape(config, machine), demand.largest_split()
    kernels = attention_kernels(config, machine, demand.dtype)
    specs = matrix_specs(model, config)
    return Estimate(
        config=config,
        machine=machine,
        precision=str(demand.dtype).removeprefix("torch."),
        parameters=count_by_role(route_parameters(model, config, machine.world_size)),
        shape=shape,
        memory=demand.memory(),
        loss=loss_of(config, machine, shape.tokens, demand.dtype),
        most_tokens=demand.most_tokens(),
        split=split,
        speed=speed,
        newton_schulz_flops=config.optim.muon.newton_schulz_steps
        * sum(spec.parts * flops_per_step(spec.rows // spec.parts, spec.cols) for spec in specs),
        traffic=tuple(traffic),
        kernels=kernels,
        cost=None if price_per_hour is None else cost(speed, machine, price_per_hour),
        warnings=tuple(warnings_of(demand, split, kernels)),
    )
