"""The training loop: validate if due, save if due, one update, record it.

A step has the same tokens for any number of ranks and micro-batches; gradients are averaged over
all of them. Decisions depend only on values that are reduced over the ranks (loss, stop requests),
so all ranks decide alike. Only the main rank writes.

On CUDA nothing inside a step waits for the device: the loss, the gradient norm and stop requests of
a step are read after the next one has been queued, on all ranks alike. Before a validation or a
checkpoint all steps have been read, so that neither follows from a loss that is not finite.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hotlap.distributed.process_group import broadcast_from_main
from hotlap.distributed.signals import StopRequest
from hotlap.errors import DivergenceError
from hotlap.inference.generate import sample_text
from hotlap.optim.gradients import clip_global_norm
from hotlap.optim.routing import apply_schedule
from hotlap.optim.schedules import momentum
from hotlap.runs.recorder import Recorder
from hotlap.train.clock import Clock
from hotlap.train.evaluation import Evaluation, may_reach_target, validate
from hotlap.train.flops import peak_memory_mib
from hotlap.train.gradients import averaged, summed_in_order
from hotlap.train.lap import Lap
from hotlap.train.pace import Pace, with_steps
from hotlap.train.readback import Readback
from hotlap.train.snapshot import Snapshots, TrainingProgress
from hotlap.train.trend import Trend, end_after, out_of_patience, rise_line


@dataclass(frozen=True)
class QueuedStep:
    """A step whose figures have not been read yet."""

    figures: Readback  # of `Trainer._reduced_figures`
    record: dict[str, Any]  # what is known of it without its figures


class Trainer:
    def __init__(
        self,
        lap: Lap,
        progress: TrainingProgress,
        clock: Clock,
        recorder: Recorder,
        snapshots: Snapshots,
        stop: StopRequest,
        pace: Pace | None = None,
    ) -> None:
        self.lap = lap
        self.progress = progress
        self.clock = clock
        self.recorder = recorder
        self.snapshots = snapshots
        self.stop = stop
        self.pace = pace  # None: the number of steps stays as it is
        self.parameters = [p for p in lap.model.parameters() if p.requires_grad]
        # A checkpoint is saved after its validation, which a resumed run does not repeat.
        validated = progress.evaluation if progress.evaluated_step == progress.step else None
        # How the run ends: at its "target", by "patience"; empty while it goes on.
        self._end = end_after(validated, progress.trend, lap.config.evaluation) if validated else ""
        self._improved = False  # at the validation of this step
        self._quarters_sampled = 4 * max(0, progress.evaluated_step) // lap.config.schedule.steps
        self._updated = True  # False if the last step was skipped
        self._save_overdue = False  # by the main rank's clock
        self._stop_requested = False  # on any rank
        self._planned_steps = 0  # another number of steps for the run; 0: none
        self._reads_late = reads_late(lap)
        self._unread: QueuedStep | None = None
        self._since = time.perf_counter()  # when the step before the unread one was read

    def run(self) -> str:
        """Train until the run is "finished" or "interrupted", or ends at its "target" or by "patience"."""
        self.clock.switch("training")
        while True:
            steps = self.lap.config.schedule.steps
            self.lap.masking.set_step(self.progress.step)
            if self._validation_due():
                self._read_last_step()
                self._validate()
            if self._end or self.progress.step == steps:
                self._save()
                return self._end or "finished"
            # Do not save after a skipped step: the weights have not changed since the step before,
            # and the new checkpoint could evict an older one.
            save_due = self._save_overdue or self.snapshots.due(self.progress.step)
            if self._updated and (save_due or self._saves_improvement()):
                self._save()
            self._improved = False
            self.update()
            if self._planned_steps:
                self._change_steps()
            if self._stop_requested:
                self._save()
                return "interrupted"

    def update(self) -> None:
        """One optimizer step."""
        lap, config, progress = self.lap, self.lap.config, self.progress
        if self._unread is None:
            self._since = time.perf_counter()
        loss = self._accumulate_gradients()
        clip_norm = config.optim.clip_norm
        norm = clip_global_norm(self.parameters, clip_norm) if clip_norm else None
        multiplier = lap.lr_multiplier(progress.step)
        muon_momentum = momentum(progress.step, config.optim.muon)
        progress.step += 1
        progress.tokens += config.batch.tokens_per_step
        step = QueuedStep(
            Readback(self._reduced_figures(loss, norm)),
            {
                "kind": "train",
                "step": progress.step,
                "lr": multiplier,
                "momentum": muon_momentum,
                "window": lap.masking.window_tokens,
                "tokens": progress.tokens,
            },
        )
        if not self._reads_late:
            self._decide(step)
        if self._updated:
            apply_schedule(lap.optimizers, multiplier, muon_momentum)
            for optimizer in lap.optimizers:
                optimizer.step()
        lap.module.zero_grad(set_to_none=True)
        if self._reads_late:
            self._read_last_step()
            self._unread = step
        else:
            self._record(step)

    def _plan_steps(self) -> int:
        """By the clock of this rank, how many steps end the run in time; 0 if the present number does."""
        assert self.pace is not None, "the run has a pace"
        config, step, parts = self.lap.config, self.progress.step, self.lap.data.validation_parts
        steps, every = config.schedule.steps, config.evaluation.every_steps
        tokens = 0  # that are left to validate
        if parts is not None:
            before_the_last = (steps - 1) // every - step // every if every else 0
            tokens = (before_the_last + 1) * parts.common.tokens + parts.rest.tokens
        return self.pace.new_steps(step, steps, tokens, samples=4 - self._quarters_sampled) or 0

    def _change_steps(self) -> None:
        """Go on with another number of steps, from a checkpoint: a resumed run goes on with the same."""
        lap, steps = self.lap, max(self._planned_steps, self.progress.step)
        before, self._planned_steps = lap.config.schedule.steps, 0
        lap.config = with_steps(lap.config, steps)
        lap.masking.config = lap.config
        self._read_last_step()
        line = f"pace: {steps:,} steps instead of {before:,}, to end in time"
        self.recorder.replanned(self.progress.step, steps, line)
        self._save()
        self.snapshots.write_config(lap.config)

    def _read_last_step(self) -> None:
        """Read the step that was queued last, unless it has been read."""
        step, self._unread = self._unread, None
        if step is not None:
            self._decide(step)
            self._record(step)

    def _accumulate_gradients(self) -> Tensor:
        """The loss, detached: of this rank's tokens, or of all ranks' if the reduction is fixed."""
        lap = self.lap
        batch = lap.ideas.change(lap.data.loader.next(), self.progress.step)
        return averaged(lap, batch) if lap.workers is None else summed_in_order(lap, lap.workers, batch)

    def _reduced_figures(self, loss: Tensor, norm: Tensor | None) -> Tensor:
        """(5,) float32: the mean loss over all ranks, how many ranks were asked to stop, whether the
        main rank's checkpoint is overdue, another number of steps that it plans for the run, 0 for none,
        and the gradient norm, 0 without clipping.
        """
        world, loss = self.lap.distributed, loss.float()
        overdue = world.is_main and self.snapshots.overdue(world.world_size)
        planned = self._plan_steps() if world.is_main and self.pace else 0
        # Filled on the device: a copy of Python's values would wait for it.
        flags = [torch.full_like(loss, float(flag)) for flag in (self.stop.requested, overdue, planned)]
        figures = torch.stack([loss, *flags])
        if dist.is_initialized():
            dist.all_reduce(figures)
            figures[0] = figures[0] / dist.get_world_size() if self.lap.workers is None else loss
        last = torch.zeros_like(loss) if norm is None else norm
        return torch.cat([figures, last.float()[None]])

    def _decide(self, step: QueuedStep) -> None:
        """Decide by the figures of a step, the same on all ranks, whether and how to go on."""
        loss, stops, overdues, planned, norm = step.figures.values()
        self._stop_requested = stops > 0
        self._save_overdue = overdues > 0
        self._planned_steps = int(planned)
        # Clipping by a non-finite norm leaves every gradient zero or NaN.
        self._updated = math.isfinite(loss) and math.isfinite(norm)
        if not self._updated:
            self._handle_nan(step.record["step"], loss, norm)

    def _record(self, step: QueuedStep) -> None:
        lap, progress = self.lap, self.progress
        loss, *_, norm = step.figures.values()
        progress.training_s = self.clock.training_s
        now = time.perf_counter()
        self.recorder.trained(
            {
                **step.record,
                "loss": loss,
                "train_s": progress.training_s,
                "tokens_per_s": lap.config.batch.tokens_per_step / (now - self._since),
                "grad_norm": norm if lap.config.optim.clip_norm else None,
                "memory_mib": peak_memory_mib(lap.distributed.device),
            }
        )
        self._since = now

    def _handle_nan(self, step: int, loss: float, norm: float) -> None:
        progress, config = self.progress, self.lap.config
        progress.nan_steps += 1
        if config.runtime.on_nan == "skip":
            return
        # What was queued after the last good step does not count.
        progress.tokens -= (progress.step - (step - 1)) * config.batch.tokens_per_step
        progress.step = step - 1
        newest = broadcast_from_main(self.snapshots.newest())
        is_norm = math.isfinite(loss)
        raise DivergenceError(
            expected="a finite gradient norm" if is_norm else "a finite loss",
            found=f"{norm if is_norm else loss} at step {step}",
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
        lap, progress, settings = self.lap, self.progress, self.lap.config.evaluation
        parts = lap.data.validation_parts
        if parts is None:
            progress.evaluated_step = progress.step
            self._sample()
            return
        began = time.perf_counter()
        with self.clock.phase("validation"):
            map_batches = lap.workers.map if lap.workers else map
            evaluation = validate(
                lap.batch_loss, parts, lap.data.bytes_per_token, self._needs_all_tokens, map_batches
            )
        if self.pace is not None:
            self.pace.validated(evaluation.tokens or 0, time.perf_counter() - began)
        trend, before = self._trend_with(evaluation), progress.trend
        progress.evaluation, progress.evaluated_step, progress.trend = evaluation, progress.step, trend
        self._improved = trend.best_step == progress.step
        self._end = end_after(evaluation, trend, settings)
        self.recorder.validated(
            {
                "kind": "validation",
                "step": progress.step,
                "val_loss": evaluation.loss,
                "val_bpb": evaluation.bpb,
                "val_tokens": evaluation.tokens,
                "comparable_loss": evaluation.comparable_loss,
                "tokens": progress.tokens,
                "train_s": progress.training_s,
                "window": lap.masking.window_tokens,
            }
        )
        if trend.warned and not before.warned:
            self.recorder.warned(progress.step, rise_line(evaluation, trend, lap.epochs(progress.step)))
        self._sample()

    def _needs_all_tokens(self, common: Evaluation) -> bool:
        """Whether this validation is, or may be, the result of the run."""
        settings = self.lap.config.evaluation
        return (
            self.progress.step == self.lap.config.schedule.steps
            or may_reach_target(common, settings)
            or out_of_patience(self._trend_with(common), settings)
        )

    def _trend_with(self, evaluation: Evaluation) -> Trend:
        """The trend of all validations including this one."""
        loss, bpb = evaluation.comparable_loss, evaluation.comparable_bpb
        return self.progress.trend.after(self.progress.step, loss, bpb)

    def _saves_improvement(self) -> bool:
        """Whether the weights that have just been validated are the best so far, and to be kept."""
        world = self.lap.distributed.world_size
        return (
            self._improved
            and self.progress.step > 0
            and self.snapshots.config.saves_improvements(world)
            and self.snapshots.affordable(self.lap)
        )

    def _sample(self) -> None:
        """Sample text after each quarter of the run and at its target, unless it has diverged."""
        progress, tokenizer = self.progress, self.lap.data.tokenizer
        quarter = 4 * progress.step // self.lap.config.schedule.steps
        if tokenizer is None or not (quarter > self._quarters_sampled or self._end):
            return
        if progress.evaluation is not None and not math.isfinite(progress.evaluation.loss):
            return
        self._quarters_sampled = quarter
        if self.lap.distributed.is_main:
            began = time.perf_counter()
            with self.clock.phase("validation"):
                text = sample_text(self.lap.model, self.lap.config, tokenizer, progress.step)
            self.recorder.sampled(progress.step, text)
            if self.pace is not None:
                self.pace.sampled(time.perf_counter() - began)

    def _save(self) -> None:
        self._read_last_step()
        with self.clock.phase("saving"):
            self.progress.other_s = self.clock.other_s
            self.snapshots.save(self.lap, self.progress)


def reads_late(lap: Lap) -> bool:
    """Whether a step's figures are read after the next one is queued.

    Not if a step is to be skipped for its loss, which then has to be known before the update.
    """
    return lap.distributed.device.type == "cuda" and lap.config.runtime.on_nan != "skip"
