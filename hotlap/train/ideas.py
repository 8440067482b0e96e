"""Ideas in a lap: their modules, roles, optimizers and functions, and the trial that precedes training.

`build_lap` asks here at the few places where a model is built, routed, scheduled and fed. Whatever goes wrong
in the code of an idea becomes one line that names its file and line.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor, nn

from hotlap.config import Config
from hotlap.data.loader import Batch
from hotlap.data.stream import TokenStream
from hotlap.errors import HotlapError, IdeaError
from hotlap.model import GPT, GPT2, Parts, build_model
from hotlap.model.roles import Role, find_roles
from hotlap.recipes.idea import NO_IDEA, Idea, combined
from hotlap.recipes.idea_files import IdeaFile, blamed
from hotlap.train.batch_loss import BatchLoss


class Ideas:
    """The idea files of a lap, as one idea. Without files it changes nothing."""

    def __init__(self, files: Sequence[IdeaFile] = ()) -> None:
        self.files = tuple(files)
        self.idea: Idea = combined([file.idea for file in files]) if files else NO_IDEA

    @property
    def identities(self) -> tuple[str, ...]:
        return tuple(file.identity for file in self.files)

    @contextmanager
    def blamed(self) -> Iterator[None]:
        """Turn an exception from the code of an idea, or from what it returned, into an `IdeaError`."""
        if not self.files:
            yield
            return
        try:
            yield
        except (HotlapError, KeyboardInterrupt):
            raise
        except Exception as error:
            on_stack = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
            file = next((file for file in self.files if file.place in on_stack), self.files[0])
            raise blamed(error, file.place, otherwise=self.idea.place) from error

    def build_model(
        self, config: Config, max_tokens: int, dtype: torch.dtype, *, initializes: bool = True
    ) -> GPT | GPT2:
        with self.blamed():
            model = build_model(config.model, max_tokens, dtype, Parts(**self.idea.modules))
            if initializes and self.idea.initialize is not None:
                with torch.no_grad():
                    self.idea.initialize(model)
        return model

    @property
    def roles(self) -> Mapping[str, Role]:
        return cast(Mapping[str, Role], self.idea.roles)

    def check_roles(self, model: nn.Module) -> None:
        """Refuse a parameter without a role, and a pattern that matches no parameter."""
        if not self.files:
            return
        roles = find_roles(model, self.roles)
        for pattern in (*self.idea.roles, *self.idea.optimizers):
            if not any(fnmatchcase(name, pattern) for name in roles):
                raise IdeaError(
                    expected=f"patterns of parameter names in {self.idea.place}",
                    found=f"`{pattern}`, which matches none of {', '.join(list(roles)[:3])}, …",
                    do="correct it",
                )
        for name, role in roles.items():
            if role not in get_args(Role):
                raise IdeaError(
                    expected=f"a role ({', '.join(get_args(Role))}) of `{name}`, {self._owner(model, name)}",
                    found="none" if role is None else f"`{role}`",
                    do="declare it in `roles` of its class, as in roles = {'gate.weight': 'matrix'}",
                )

    def _owner(self, model: nn.Module, name: str) -> str:
        """Where the innermost class of an idea that has this parameter is written."""
        words = name.split(".")
        for depth in reversed(range(len(words))):
            kind = type(model.get_submodule(".".join(words[:depth])))
            code = getattr(kind.__init__, "__code__", None)
            if code is not None and code.co_filename in {file.place for file in self.files}:
                return f"{code.co_filename}:{code.co_firstlineno}"
        return self.idea.place

    def optimizers(self, parameters: Mapping[str, Tensor]) -> list[torch.optim.Optimizer]:
        """The optimizers that the idea makes of its parameters, in groups that know their names."""
        made = []
        taken: set[str] = set()
        for pattern, make in self.idea.optimizers.items():
            named = [(n, p) for n, p in parameters.items() if fnmatchcase(n, pattern) and n not in taken]
            taken |= {name for name, _ in named}
            with self.blamed():
                optimizer = make(cast(Any, named))
            name_of = {id(parameter): name for name, parameter in named}
            groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else []
            if sorted(id(p) for group in groups for p in group["params"]) != sorted(name_of):
                raise IdeaError(
                    expected=f"an optimizer of exactly the parameters `{pattern}` in {self.idea.place}",
                    found=type(optimizer).__name__,
                    do="make a torch.optim.Optimizer of all parameters that the function is given",
                )
            for group in groups:
                group["param_names"] = [name_of[id(parameter)] for parameter in group["params"]]
            made.append(optimizer)
        return made

    def set_training_loss(self, model: GPT | GPT2) -> None:
        """Train on the idea's loss. Without gradients, as in validation, the loss stays what it is."""
        own = self.idea.loss
        if own is None:
            return
        plain = model.loss_of

        def loss_of(x_TC: Tensor, targets_T: Tensor, reduction: Literal["mean", "sum"]) -> Tensor:
            if not torch.is_grad_enabled():
                return plain(x_TC, targets_T, reduction)
            return own(x_TC, targets_T, partial(plain, reduction="mean"))

        model.loss_of = loss_of  # type: ignore[method-assign]

    def change(self, batch: Batch, step: int) -> Batch:
        """The batch of the update at `step`, as the idea changes it."""
        if self.idea.batch is None:
            return batch
        inputs, targets = self.idea.batch(batch.inputs, batch.targets, step)
        for before, after in ((batch.inputs, inputs), (batch.targets, targets)):
            if (before.shape, before.dtype, before.device) != (after.shape, after.dtype, after.device):
                raise IdeaError(
                    expected=f"{tuple(before.shape)} {before.dtype} from the batch hook in {self.idea.place}",
                    found=f"{tuple(after.shape)} {after.dtype}",
                    do="return tensors of the same shape, dtype and device",
                )
        return replace(batch, inputs=inputs, targets=targets)

    def try_out(self, batch_loss: BatchLoss, config: Config, data: TokenStream) -> None:
        """One loss and its gradients before training, so that what cannot train is refused at once.

        Neither random numbers nor gradients are left changed.
        """
        if not self.files:
            return
        self._try_schedule(config.schedule.steps)
        device = batch_loss.model.device
        count = config.batch.sequence_tokens
        tokens = torch.from_numpy(data.read(0, count + 1).astype("int64")).to(device)[None]
        cuda = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda), self.blamed():
            batch = self.change(Batch(tokens[:, :-1].int(), tokens[:, 1:], None), step=0)
            loss = batch_loss(batch.inputs.flatten(), batch.targets.flatten(), count)
            if loss.shape != ():
                raise ValueError(f"a loss of shape {tuple(loss.shape)}, not a number")
            loss.backward()
        if not math.isfinite(loss.item()):
            raise IdeaError(
                expected=f"a finite first loss of {self.idea.place}",
                found=f"{loss.item()}",
                do="correct the idea",
            )
        for name, parameter in batch_loss.model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                raise IdeaError(
                    expected=f"a gradient of every parameter, {self._owner(batch_loss.model, name)}",
                    found=f"none of `{name}`, which does not affect the loss",
                    do="use it in `forward`, or leave it out",
                )
        batch_loss.zero_grad(set_to_none=True)

    def _try_schedule(self, steps: int) -> None:
        if self.idea.schedule is None:
            return
        for step in range(steps):
            with self.blamed():
                factor = float(self.idea.schedule(step, steps))
            if not (math.isfinite(factor) and factor >= 0):
                code = getattr(self.idea.schedule, "__code__", None)
                place = f"{code.co_filename}:{code.co_firstlineno}" if code else self.idea.place
                raise IdeaError(
                    expected=f"a factor of at least 0 from the schedule in {place}",
                    found=f"{factor:g} at step {step} of {steps}",
                    do="correct the schedule",
                )


NO_IDEAS = Ideas()
