"""What an idea file says: `idea = hotlap.idea(parent, …)`, and the checks that need no model.

An idea changes one thing of a recipe, in code: settings, modules, roles and optimizers of parameters, the
loss, the schedule, the batch. docs/ideas.md has the contract of each argument. Nothing here needs torch.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import TYPE_CHECKING, Any

from hotlap.config import Config
from hotlap.errors import ConfigError, IdeaError
from hotlap.settings import checked

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    CrossEntropy = Callable[[Tensor, Tensor], Tensor]
    NamedParameters = Sequence[tuple[str, nn.Parameter]]

MODULES = ("block", "attention", "mlp", "embedding", "value_embeddings", "head")
FUNCTIONS = ("loss", "initialize", "schedule", "batch")
# The arguments of each part when it is built or called, and of a module's `forward`.
CALLED_WITH: dict[str, tuple[str, ...]] = {
    "block": ("config", "layer", "attention", "mlp"),
    "attention": ("config",),
    "mlp": ("config",),
    "embedding": ("vocabulary", "width"),
    "value_embeddings": ("config",),
    "head": ("width", "vocabulary", "softcap"),
    "loss": ("x", "targets", "cross_entropy"),
    "initialize": ("model",),
    "schedule": ("step", "steps"),
    "batch": ("inputs", "targets", "step"),
    "optimizers": ("named_parameters",),
}
FORWARD: dict[str, tuple[str, ...]] = {
    "block": ("x", "x0", "skip", "value_embedding", "rotation", "plan"),
    "attention": ("x", "value_embedding", "rotation", "plan"),
    "mlp": ("x",),
    "embedding": ("tokens",),
    "value_embeddings": ("tokens",),
    "head": ("x",),
}
NOT_OF_AN_IDEA = ("recipe", "size", "seed", "ideas")


@dataclass(frozen=True)
class Idea:
    """What `idea` was called with. `place` is the file and the line of the call."""

    parent: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    block: Callable[..., nn.Module] | None = None
    attention: Callable[..., nn.Module] | None = None
    mlp: Callable[..., nn.Module] | None = None
    embedding: Callable[..., nn.Module] | None = None
    value_embeddings: Callable[..., nn.Module] | None = None
    head: Callable[..., nn.Module] | None = None
    loss: Callable[[Tensor, Tensor, CrossEntropy], Tensor] | None = None
    initialize: Callable[[Any], None] | None = None
    schedule: Callable[[int, int], float] | None = None
    batch: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None
    roles: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Mapping[str, Callable[[NamedParameters], Optimizer]] = field(default_factory=dict)
    place: str = ""

    @property
    def replaced(self) -> dict[str, Callable[..., Any]]:
        """The modules and functions that it gives, by argument."""
        given = {name: getattr(self, name) for name in (*MODULES, *FUNCTIONS)}
        return {name: part for name, part in given.items() if part is not None}

    @property
    def modules(self) -> dict[str, Callable[..., Any]]:
        return {name: part for name, part in self.replaced.items() if name in MODULES}


NO_IDEA = Idea(parent="")


def idea(
    parent: str,
    *,
    settings: Mapping[str, Any] | None = None,
    block: Callable[..., nn.Module] | None = None,
    attention: Callable[..., nn.Module] | None = None,
    mlp: Callable[..., nn.Module] | None = None,
    embedding: Callable[..., nn.Module] | None = None,
    value_embeddings: Callable[..., nn.Module] | None = None,
    head: Callable[..., nn.Module] | None = None,
    loss: Callable[[Tensor, Tensor, CrossEntropy], Tensor] | None = None,
    initialize: Callable[[Any], None] | None = None,
    schedule: Callable[[int, int], float] | None = None,
    batch: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]] | None = None,
    roles: Mapping[str, str] | None = None,
    optimizers: Mapping[str, Callable[[NamedParameters], Optimizer]] | None = None,
) -> Idea:
    """A change of the recipe `parent`, to be assigned to a name at the top level of an idea file.

    settings: {setting: value}, at every size.
    block, attention, mlp, embedding, value_embeddings, head: modules in place of the model's own, with their
        arguments and their `forward` (hotlap/model/parts.py); subclasses or any `nn.Module`.
    loss: (x, targets, cross_entropy) → the training loss, from the end of the residual stream (T, C) and the
        targets (T,). `cross_entropy(x, targets)` is the loss it replaces. Validation keeps that one.
    initialize: (model) → None, changes the initial weights in place.
    schedule: (step, steps) → the factor on every learning rate for the update at `step`.
    batch: (inputs, targets, step) → both, changed, of the same shapes (sequences, tokens). Training only.
    roles: {pattern of parameter names: role}, before what the modules declare.
    optimizers: {pattern of parameter names: function that makes the optimizer of these named parameters}.
    """
    caller = sys._getframe(1)
    place = f"{caller.f_code.co_filename}:{caller.f_lineno}"
    try:
        changes = checked(Config, settings or {})
    except ConfigError as mistake:
        raise IdeaError(
            expected=f"{mistake.expected} in {place}", found=mistake.found, do=mistake.do
        ) from None
    for name in NOT_OF_AN_IDEA:
        if name in changes:
            raise IdeaError(expected=f"settings of a recipe in {place}", found=f"`{name}`", do="leave it out")
    made = Idea(
        parent, changes, block, attention, mlp, embedding, value_embeddings, head,
        loss, initialize, schedule, batch, roles or {}, optimizers or {}, place,
    )  # fmt: skip
    for name, part in made.replaced.items():
        _check_part(name, part, caller)
    for pattern, make in made.optimizers.items():
        _check_call(f"optimizers[{pattern!r}]", make, CALLED_WITH["optimizers"], caller)
    return made


def combined(ideas: Sequence[Idea]) -> Idea:
    """One idea of several with the same parent. Initializations and batch hooks follow one another."""
    if len(ideas) < 2:
        return ideas[0] if ideas else NO_IDEA
    values: dict[str, Any] = {}
    for one in ideas:
        for name in (item.name for item in fields(Idea)):
            value = getattr(one, name)
            if value is None or value == {}:
                continue
            if name not in values or values[name] == value:
                values[name] = value
            elif name == "parent":
                raise _conflict(ideas, "one parent", f"{values[name]} and {value}")
            elif isinstance(value, Mapping):
                twice = [key for key in value if key in values[name] and values[name][key] != value[key]]
                if twice:
                    raise _conflict(ideas, f"`{twice[0]}` from one of them", "two values")
                values[name] = {**values[name], **value}
            elif name in ("initialize", "batch"):
                values[name] = _one_after_the_other(name, values[name], value)
            elif name == "place":
                values[name] = f"{values[name]} and {value}"
            else:
                raise _conflict(ideas, f"one `{name}`", "two")
    return Idea(**values)


def _conflict(ideas: Sequence[Idea], expected: str, found: str) -> IdeaError:
    places = " and ".join(one.place for one in ideas)
    return IdeaError(
        expected=f"ideas that fit together, {expected}", found=f"{found} in {places}", do="race them apart"
    )


def _one_after_the_other(
    name: str, first: Callable[..., Any], second: Callable[..., Any]
) -> Callable[..., Any]:
    if name == "initialize":

        def initialize(model: Any) -> None:
            first(model)
            second(model)

        return initialize

    def batch(inputs: Tensor, targets: Tensor, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = first(inputs, targets, step)
        changed: tuple[Tensor, Tensor] = second(inputs, targets, step)
        return changed

    return batch


def _check_part(name: str, part: Any, caller: FrameType) -> None:
    _check_call(name, part, CALLED_WITH[name], caller)
    if isinstance(part, type) and name in FORWARD:
        forward = getattr(part, "forward", None)
        if not callable(forward):
            raise IdeaError(
                expected=f"an nn.Module as `{name}` in {_place_of(part, caller)}",
                found=f"{part.__name__} without a `forward`",
                do="make it a subclass of torch.nn.Module",
            )
        _check_call(f"{part.__name__}.forward", forward, ("self", *FORWARD[name]), caller)


def _check_call(name: str, called: Any, arguments: tuple[str, ...], caller: FrameType) -> None:
    """Refuse what cannot be called with these arguments in this order."""
    wanted = f"{name}({', '.join(argument for argument in arguments if argument != 'self')})"
    if not callable(called):
        raise IdeaError(
            expected=f"{wanted} in {_place_of(called, caller)}", found=repr(called)[:80], do="give a callable"
        )
    try:
        inspect.signature(called).bind(*arguments)
    except TypeError as error:
        raise IdeaError(
            expected=f"{wanted} in {_place_of(called, caller)}",
            found=f"({', '.join(p for p in inspect.signature(called).parameters if p != 'self')}): {error}",
            do="give it these arguments",
        ) from None
    except ValueError:
        return  # a built-in without a signature


def _place_of(part: Any, caller: FrameType) -> str:
    """The file and line where `part` is written; of the call of `idea` if it is not in that file."""
    written = vars(part).get("__init__", part) if isinstance(part, type) else part
    code = getattr(inspect.unwrap(written), "__code__", None)
    if code is not None and code.co_filename == caller.f_code.co_filename:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return f"{caller.f_code.co_filename}:{caller.f_lineno}"
