"""The training loop: validate if due, save if due, one update, record it.

A step has the same tokens for any number of ranks and micro-batches; gradients are averaged over
all of them. Decisions depend only on values that are reduced over the ranks (loss, stop requests),
so all ranks decide alike. Only the main rank writes.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from hotlap.config import EvaluationConfig
from hotlap.distributed.process_group import broadcast_from_main
from hotlap.distributed.signals import StopRequest
from hotlap.errors import DivergenceError
from hotlap.inference.generate import sample_text
from hotlap.optim.gradients import clip_global_norm
from hotlap.optim.routing import apply_schedule
from hotlap.optim.schedules import lr_multiplier, momentum
from hotlap.runs.recorder import Recorder
from hotlap.train.clock import Clock
from hotlap.train.evaluation import Evaluation, evaluate, reaches_target
from hotlap.train.flops import peak_memory_mib
from hotlap.train.lap import Lap
from hotlap.train.snapshot import Snapshots, TrainingProgress


class Trainer:
    def __init__(
        self,
        lap: Lap,
        progress: TrainingProgress,
        clock: Clock,
        recorder: Recorder,
        snapshots: Snapshots,
        stop: StopRequest,
    ) -> None:
        self.lap = lap
        self.progress = progress
        self.clock = clock
        self.recorder = recorder
        self.snapshots = snapshots
        self.stop = stop
        self.parameters = [p for p in lap.model.parameters() if p.requires_grad]
        # A checkpoint is saved after its validation, which a resumed run does not repeat.
        validated = progress.evaluation if progress.evaluated_step == progress.step else None
        self._ends_at_target = validated is not None and ends_at_target(validated, lap.config.evaluation)
        self._quarters_sampled = 4 * max(0, progress.evaluated_step) // lap.config.schedule.steps
        self._updated = True  # False if the last step was skipped
        self._save_overdue = False  # by the main rank's clock

    def run(self) -> str:
        """Train until the run is "finished", has reached its "target" or is "interrupted"."""
        steps = self.lap.config.schedule.steps
        self.clock.switch("training")
        while True:
            self.lap.masking.set_step(self.progress.step)
            if self._validation_due():
                self._validate()
            if self._ends_at_target or self.progress.step == steps:
                self._save()
                return "target" if self._ends_at_target else "finished"
            # Do not save after a skipped step: the weights have not changed since the step before,
            # and the new checkpoint could evict an older one.
            save_due = self._save_overdue or self.snapshots.due(self.progress.step)
            if save_due and self._updated:
                self._save()
            stop_requested = self._update()
            if stop_requested:
                self._save()
                return "interrupted"

    def _update(self) -> bool:
        """One optimizer step. Returns whether any rank was asked to stop."""
        lap, config, progress = self.lap, self.lap.config, self.progress
        started = time.perf_counter()
        loss, stop_requested = self._reduce_loss_and_flags(self._accumulate_gradients())
        norm = (
            clip_global_norm(self.parameters, config.optim.clip_norm).item()
            if config.optim.clip_norm
            else None
        )
        multiplier = lr_multiplier(progress.step, config.schedule)
        muon_momentum = momentum(progress.step, config.optim.muon)
        # Clipping by a non-finite norm leaves every gradient zero or NaN.
        self._updated = math.isfinite(loss) and (norm is None or math.isfinite(norm))
        if self._updated:
            apply_schedule(lap.optimizers, multiplier, muon_momentum)
            for optimizer in lap.optimizers:
                optimizer.step()
        else:
            self._handle_nan(loss, norm)
        lap.module.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += config.batch.tokens_per_step
        progress.training_s = self.clock.training_s
        self.recorder.trained(
            {
                "kind": "train",
                "step": progress.step,
                "loss": loss,
                "lr": multiplier,
                "momentum": muon_momentum,
                "window": lap.masking.window_tokens,
                "tokens": progress.tokens,
                "train_s": progress.training_s,
                "tokens_per_s": config.batch.tokens_per_step / (time.perf_counter() - started),
                "grad_norm": norm,
                "memory_mib": peak_memory_mib(lap.distributed.device),
            }
        )
        return stop_requested

    def _accumulate_gradients(self) -> Tensor:
        """Backpropagate the mean loss over this rank's tokens. Returns that loss, detached."""
        lap = self.lap
        batch = lap.data.loader.next()
        micro = lap.config.batch.micro_sequences
        starts = range(0, len(batch.inputs), micro)
        total = torch.zeros((), device=lap.distributed.device)
        for start in starts:
            inputs, targets = batch.inputs[start : start + micro], batch.targets[start : start + micro]
            plans = lap.masking.plans(inputs.flatten(), batch.chunk_tokens or inputs.size(1))
            last = start == starts[-1]
            with contextlib.nullcontext() if last else self._no_sync():
                share = len(inputs) / len(batch.inputs)
                loss = share * lap.module(inputs.flatten(), targets.flatten(), plans)
                loss.backward()
            total += loss.detach()
        return total

    def _no_sync(self) -> contextlib.AbstractContextManager[Any]:
        module = self.lap.module
        return module.no_sync() if isinstance(module, DistributedDataParallel) else contextlib.nullcontext()

    def _reduce_loss_and_flags(self, loss: Tensor) -> tuple[float, bool]:
        """Mean loss over all ranks, and whether any rank was asked to stop, in one all-reduce."""
        overdue = self.lap.distributed.is_main and self.snapshots.overdue()
        flags = loss.new_tensor([self.stop.requested, overdue], dtype=torch.float32)
        figures = torch.cat([loss.float()[None], flags])
        if dist.is_initialized():
            dist.all_reduce(figures)
            figures[0] /= dist.get_world_size()
        loss_value, stops, overdues = figures.tolist()
        self._save_overdue = overdues > 0
        return loss_value, stops > 0

    def _handle_nan(self, loss: float, norm: float | None) -> None:
        self.progress.nan_steps += 1
        if self.lap.config.runtime.on_nan == "skip":
            return
        newest = broadcast_from_main(self.snapshots.newest())
        is_norm = math.isfinite(loss)
        raise DivergenceError(
            expected="a finite gradient norm" if is_norm else "a finite loss",
            found=f"{norm if is_norm else loss} at step {self.progress.step + 1}",
            do="lower the learning rates, clip gradients (--clip-norm 1) or use --on-nan skip; "
            + (f"the last checkpoint is {newest}" if newest else "there is no checkpoint yet"),
        )

    def _validation_due(self) -> bool:
        every = self.lap.config.evaluation.every_steps
        step = self.progress.step
        if step == self.progress.evaluated_step:
            return False
        return step == self.lap.config.schedule.steps or (every > 0 and step % every == 0)

    def _validate(self) -> None:
        lap, progress = self.lap, self.progress
        with self.clock.phase("validation"):
            evaluation = evaluate(lap.model, lap.masking, lap.data.validation, lap.data.bytes_per_token)
        progress.evaluation, progress.evaluated_step = evaluation, progress.step
        self._ends_at_target = ends_at_target(evaluation, lap.config.evaluation)
        self.recorder.validated(
            {
                "kind": "validation",
                "step": progress.step,
                "val_loss": evaluation.loss,
                "val_bpb": evaluation.bpb,
                "tokens": progress.tokens,
                "train_s": progress.training_s,
                "window": lap.masking.window_tokens,
            }
        )
        self._sample()

    def _sample(self) -> None:
        """Sample text after each quarter of the run and at its target, unless it has diverged."""
        progress, tokenizer = self.progress, self.lap.data.tokenizer
        quarter = 4 * progress.step // self.lap.config.schedule.steps
        if tokenizer is None or not (quarter > self._quarters_sampled or self._ends_at_target):
            return
        assert progress.evaluation is not None, "samples follow a validation"
        if not math.isfinite(progress.evaluation.loss):
            return
        self._quarters_sampled = quarter
        if self.lap.distributed.is_main:
            with self.clock.phase("validation"):
                text = sample_text(self.lap.model, self.lap.config, tokenizer, progress.step)
            self.recorder.sampled(progress.step, text)

    def _save(self) -> None:
        with self.clock.phase("saving"):
            self.progress.other_s = self.clock.other_s
            self.snapshots.save(self.lap, self.progress)


def ends_at_target(evaluation: Evaluation, settings: EvaluationConfig) -> bool:
    return settings.stop_at_target and reaches_target(evaluation.loss, evaluation.bpb, settings)
