"""Routing parameters to optimizers, the optimizers built from it, their state, and clipping."""

import json

import pytest
import torch
from rich.console import Console

from hotlap.config import AdamConfig, MuonConfig, OptimConfig
from hotlap.errors import CheckpointError, OptimizerError
from hotlap.optim import Muon, clip_global_norm
from hotlap.optim.routing import RoutedParameter, apply_schedule, build_optimizers, route
from hotlap.optim.state import gather_state, restore_state
from tests.ranks import run_ranks


def make_parameters() -> list[RoutedParameter]:
    generator = torch.Generator().manual_seed(0)

    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.randn(shape, generator=generator))

    return [
        RoutedParameter("embed", parameter(32, 8), "embedding"),
        RoutedParameter("blocks.0.qkv", parameter(24, 8), "matrix", parts=3),
        RoutedParameter("blocks.0.up", parameter(32, 8), "matrix"),
        RoutedParameter("blocks.1.up", parameter(32, 8), "matrix"),
        RoutedParameter("blocks.1.down", parameter(8, 32), "matrix"),
        RoutedParameter("lambdas", parameter(2), "scalar"),
        RoutedParameter("head", parameter(32, 8), "head"),
    ]


def train(parameters, optimizers, steps) -> dict[str, torch.Tensor]:
    for step in steps:
        apply_schedule(optimizers, lr_multiplier=1 / (step + 1), muon_momentum=0.85 + step / 100)
        generator = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.tensor.grad = torch.randn(parameter.tensor.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
    return {parameter.name: parameter.tensor.detach().clone() for parameter in parameters}


def test_each_role_goes_to_its_optimizer_with_its_learning_rate():
    config = OptimConfig(muon=MuonConfig(lr_factors={"blocks.1": 0.5, "up": 4.0}))
    routing = route(make_parameters(), config, world_size=2)
    rows = {row["parameter"]: row for row in routing.rows()}
    assert [(name, row["optimizer"], row["lr"], row["owner"]) for name, row in rows.items()] == [
        ("embed", "adam", 0.6, None),
        ("blocks.0.qkv", "muon", 0.05, 1),
        ("blocks.0.up", "muon", 0.2, 0),
        ("blocks.1.up", "muon", 0.1, 1),
        ("blocks.1.down", "muon", 0.025, 0),
        ("lambdas", "adam", 0.04, None),
        ("head", "adam", 0.008, None),
    ]
    assert rows["blocks.0.qkv"]["shape"] == [24, 8]
    assert json.loads(json.dumps(routing.rows())) == routing.rows()


def test_the_table_prints_every_parameter():
    routing = route(make_parameters(), OptimConfig(), world_size=2)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(routing.table())
    printed = capture.get()
    for row in routing.rows():
        assert row["parameter"] in printed
    assert "32×8" in printed
    assert "rank 1" in printed
    assert "all ranks" in printed


def test_the_baseline_decays_matrices_and_embeddings_only():
    config = OptimConfig(matrices="adamw", adam=AdamConfig(weight_decay=0.1, matrix_lr=1e-3))
    routing = route(make_parameters(), config, world_size=1)
    assert {row["optimizer"] for row in routing.rows()} == {"adamw"}
    (optimizer,) = build_optimizers(routing)
    assert isinstance(optimizer, torch.optim.AdamW)
    settings = {group["role"]: (group["lr"], group["weight_decay"]) for group in optimizer.param_groups}
    assert settings == {
        "embedding": (0.6, 0.1),
        "matrix": (1e-3, 0.1),
        "scalar": (0.04, 0.0),
        "head": (0.008, 0.1),
    }


def test_optimizers_are_built_as_the_table_says_and_follow_the_schedule():
    routing = route(make_parameters(), OptimConfig(), world_size=1)
    muon, adam = build_optimizers(routing)
    assert isinstance(muon, Muon)
    assert isinstance(adam, torch.optim.Adam)
    built = {
        name: optimizer_name
        for optimizer_name, optimizer in {"muon": muon, "adam": adam}.items()
        for group in optimizer.param_groups
        for name in group["param_names"]
    }
    assert built == {row["parameter"]: row["optimizer"] for row in routing.rows()}
    assert all((group["betas"], group["weight_decay"]) == ((0.8, 0.95), 0) for group in adam.param_groups)
    apply_schedule([muon, adam], lr_multiplier=0.5, muon_momentum=0.9)
    apply_schedule([muon, adam], lr_multiplier=0.5, muon_momentum=0.91)
    assert muon.param_groups[0]["lr"] == 0.025
    assert muon.param_groups[0]["momentum"] == 0.91
    assert [group["lr"] for group in adam.param_groups] == [0.3, 0.02, 0.004]


def test_what_cannot_be_routed_is_refused_by_name():
    parameters = make_parameters()
    config = OptimConfig()
    with pytest.raises(OptimizerError, match="`embed` twice"):
        route([*parameters, parameters[0]], config, 1)
    with pytest.raises(OptimizerError, match=r"`embed` twice \(also as `tied`\)"):
        route([*parameters, RoutedParameter("tied", parameters[0].tensor, "head")], config, 1)
    everything = [(parameter.name, parameter.tensor) for parameter in parameters]
    without = [parameter for parameter in parameters if parameter.name != "lambdas"]
    with pytest.raises(OptimizerError, match="none for `lambdas`"):
        route(without, config, 1, model_parameters=everything)
    with pytest.raises(OptimizerError, match=r"`gain` with shape \(3,\)"):
        route([RoutedParameter("gain", torch.nn.Parameter(torch.ones(3)), "matrix")], config, 1)
    with pytest.raises(OptimizerError, match="for `odd`; found `bias`"):
        route([RoutedParameter("odd", torch.nn.Parameter(torch.ones(3)), "bias")], config, 1)
    with pytest.raises(OptimizerError, match="contains `attention`"):
        route(parameters, OptimConfig(muon=MuonConfig(lr_factors={"attention": 2.0})), 1)
    assert len(route(parameters, config, 1, model_parameters=everything).routes) == len(parameters)


@pytest.mark.parametrize("name", ["blocks.0.up", "head"])
def test_every_optimizer_refuses_a_missing_or_broken_gradient_by_name(name):
    parameters, optimizers = routed()
    train(parameters, optimizers, range(1))
    chosen = next(parameter.tensor for parameter in parameters if parameter.name == name)
    chosen.grad[0, 0] = float("nan")
    with pytest.raises(OptimizerError, match=f"infinity in the gradient of `{name}`"):
        [optimizer.step() for optimizer in optimizers]
    chosen.grad = None
    with pytest.raises(OptimizerError, match=f"none for `{name}`"):
        [optimizer.step() for optimizer in optimizers]


def test_the_header_says_what_clipping_means_for_muon():
    parameters = make_parameters()
    (note,) = route(parameters, OptimConfig(clip_norm=1.0), 1).notes()
    assert "only changes how much a step contributes to the momentum" in note
    assert route(parameters, OptimConfig(), 1).notes() == []
    assert route(parameters, OptimConfig(matrices="adamw", clip_norm=1.0), 1).notes() == []


def routed(matrices: str = "muon"):
    parameters = make_parameters()
    optimizers = build_optimizers(route(parameters, OptimConfig(matrices=matrices), world_size=1))
    return parameters, optimizers


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_saved_state_continues_bit_for_bit(matrices, steps_before):
    parameters, optimizers = routed(matrices)
    train(parameters, optimizers, range(steps_before))
    saved = gather_state(optimizers)
    again, resumed = routed(matrices)
    for parameter, other in zip(parameters, again, strict=True):
        other.tensor.data.copy_(parameter.tensor.data)
    restore_state(resumed, saved)
    kept = {key: value.clone() for key, value in saved.items()}
    expected = train(parameters, optimizers, range(steps_before, 6))
    continued = train(again, resumed, range(steps_before, 6))
    assert all(torch.equal(expected[name], continued[name]) for name in expected)
    assert all(torch.equal(saved[key], kept[key]) for key in saved), "what was saved is a copy"


def test_state_that_does_not_fit_is_refused_by_name():
    parameters, optimizers = routed()
    train(parameters, optimizers, range(1))
    saved = gather_state(optimizers)
    for damaged, message in (
        ({k: v for k, v in saved.items() if k != "blocks.0.up/momentum"}, "`blocks.0.up`"),
        ({k: v for k, v in saved.items() if k != "head/exp_avg_sq"}, "`head`"),
        ({**saved, "head/exp_avg": torch.zeros(2, 2)}, r"`head`.*exp_avg of shape \(2, 2\)"),
        ({**saved, "ghost/momentum": torch.zeros(2, 2)}, "`ghost`, which the model does not have"),
    ):
        with pytest.raises(CheckpointError, match=message):
            restore_state(optimizers, damaged)
    with pytest.raises(CheckpointError, match="`blocks"):
        restore_state(routed("adamw")[1], saved)


def gathered_on_ranks(rank, world_size):
    parameters = make_parameters()
    optimizers = build_optimizers(route(parameters, OptimConfig(), world_size))
    train(parameters, optimizers, range(3))
    owners = {row["parameter"]: row["owner"] for row in route(parameters, OptimConfig(), world_size).rows()}
    return gather_state(optimizers), optimizers[0].owners(), owners


def test_ranks_gather_the_state_of_one_and_the_table_names_the_true_owners():
    parameters, optimizers = routed()
    train(parameters, optimizers, range(3))
    alone = gather_state(optimizers)
    for state, owners, table in run_ranks(gathered_on_ranks, 2):
        assert state.keys() == alone.keys()
        for key in alone:
            torch.testing.assert_close(state[key], alone[key], atol=1e-6, rtol=0)
        assert owners == {name: owner for name, owner in table.items() if owner is not None}


def test_clipping_scales_all_gradients_to_the_norm_and_measures_it():
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, 2))]
    weights[0].grad, weights[1].grad = torch.tensor([3.0, 0.0, 0.0]), torch.full((2, 2), 2.0)
    assert clip_global_norm(weights, None).item() == 5
    assert clip_global_norm(weights, 10.0).item() == 5
    assert weights[0].grad[0] == 3
    assert clip_global_norm(weights, 1.0).item() == 5
    torch.testing.assert_close(weights[0].grad, torch.tensor([0.6, 0.0, 0.0]))
    torch.testing.assert_close(weights[1].grad, torch.full((2, 2), 0.4))
