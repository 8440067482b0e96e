"""What is compiled before the clock starts: the shapes of the run, and the same on every rank."""

import inspect
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.utils import counters

from hotlap.attention.dense import DenseBackend
from hotlap.attention.flex import FlexBackend
from hotlap.distributed.process_group import Distributed, process_group
from hotlap.distributed.signals import StopRequest
from hotlap.errors import CompileError
from hotlap.kernels import Installed, Part, choose_backend
from hotlap.model import GPT
from hotlap.recipes import RECIPES, resolve
from hotlap.runs.recorder import Recorder
from hotlap.settings import updated
from hotlap.train.batch_loss import BatchLoss
from hotlap.train.clock import Clock
from hotlap.train.compile import CompileChoice, apply_compile, choose_mode, tunes_kernels, warm_up
from hotlap.train.lap import build_lap
from hotlap.train.loop import Trainer
from hotlap.train.masking import Masking
from hotlap.train.snapshot import Snapshots, TrainingProgress
from tests.kernels_here import without_kernels
from tests.ranks import run_ranks
from tests.tiny import END_OF_TEXT, made_up_tokens, make_masking, make_model
from tests.training import pico


# Five sequences a step: fewer than a micro-batch may hold, and not a multiple of one.
@pytest.mark.parametrize("micro_sequences", [16, 3])
@pytest.mark.parametrize("validation_tokens", [None, 256, 1024])
def test_the_warm_up_sees_the_shapes_of_training_and_validation_and_no_others(
    tiny_data, monkeypatch, micro_sequences, validation_tokens
):
    monkeypatch.setattr(Trainer, "_sample", lambda _: None)
    config = pico(
        tiny_data,
        1,
        batch__tokens_per_step=5 * 512,
        batch__micro_sequences=micro_sequences,
        evaluation__validation_sequence_tokens=validation_tokens,
    )
    clock, calls = Clock(), set()
    with process_group("cpu") as distributed:
        lap = build_lap(config, tiny_data, distributed, clock)
    lap.model.register_forward_pre_hook(
        lambda _, arguments: calls.add((len(arguments[0]), torch.is_grad_enabled()))
    )
    warm_up(lap.batch_loss, config, distributed)
    assert all(parameter.grad is None for parameter in lap.model.parameters())
    warmed_up = calls.copy()
    calls.clear()
    snapshots = Snapshots(None, config.checkpoint, TrainingProgress())
    Trainer(lap, TrainingProgress(), clock, Recorder(), snapshots, StopRequest()).run()
    lap.data.loader.close()
    assert warmed_up == calls
    assert (validation_tokens or 512, False) in calls


@pytest.mark.parametrize(("steps", "mode"), [(10, "off"), (10**7, "block")])
def test_only_a_long_run_is_compiled_however_fast_the_machine_seems(steps, mode, tiny_data, monkeypatch):
    without_kernels(monkeypatch)
    config = pico(tiny_data, steps, runtime__compile="auto")
    for peak in (1e-6, 1e6):
        with (
            process_group("cpu") as alone,
            patch("hotlap.train.lap.peak_gflops", lambda *_, peak=peak: peak),
            patch("hotlap.train.lap.apply_compile"),
            patch("hotlap.train.lap.warm_up"),
        ):
            lap = build_lap(config, tiny_data, alone, Clock())
        lap.data.loader.close()
        assert lap.compiled.mode == mode


@pytest.mark.parametrize(("kernel", "mode"), [("C", "off"), ("", "block")])
def test_blocks_with_kernels_are_not_compiled(kernel, mode):
    config = updated(resolve("softcap", "pico"), {"schedule.steps": 10**7, "runtime.compile": "auto"})
    installed = Installed((Part("MLP of layers 0-3", kernel, ""), Part("loss", "C")))
    choice = choose_mode(config, torch.device("cpu"), torch.float32, num_threads=2, installed=installed)
    assert choice.mode == mode


@pytest.mark.parametrize("recipe", RECIPES)
def test_on_cuda_model_and_masks_are_one_graph_unless_told_otherwise(recipe):
    cuda = torch.device("cuda")
    choice = choose_mode(resolve(recipe, "small"), cuda, torch.bfloat16, 1, Installed(()))
    assert choice.mode == "model"
    batch_loss = BatchLoss(make_model(resolve(recipe, "pico")), make_masking(resolve(recipe, "pico")))
    batch_loss.masking.backend = choose_backend("auto", cuda)
    with patch.object(torch.nn.Module, "compile", autospec=True) as compiled:
        apply_compile(batch_loss, choice.mode, coordinate_descent=False)
    compiled.assert_called_once_with(batch_loss, dynamic=False, fullgraph=True)


def test_kernels_are_tuned_on_cuda_only_and_if_the_recipe_says_so(tiny_data):
    tuned, plain = resolve("softcap", "small"), resolve("sparse-value-embeds", "small")
    assert tunes_kernels(tuned, torch.device("cuda"))
    assert not tunes_kernels(plain, torch.device("cuda"))
    assert not tunes_kernels(tuned, torch.device("cpu"))
    with (
        process_group("cpu") as alone,
        patch("hotlap.train.lap.apply_compile") as applied,
        patch("hotlap.train.lap.warm_up"),
    ):
        lap = build_lap(pico(tiny_data, 1, runtime__compile="block"), tiny_data, alone, Clock())
    lap.data.loader.close()
    assert lap.config.runtime.coordinate_descent
    applied.assert_called_once_with(lap.batch_loss, "block", coordinate_descent=False)


def test_tuning_is_switched_on_in_the_compiler():
    settings = torch._inductor.config
    config = resolve("softcap", "pico")
    batch_loss = BatchLoss(make_model(config), make_masking(config))
    with settings.patch(coordinate_descent_tuning=False):  # restores it; monkeypatch would delete it
        apply_compile(batch_loss, "block", coordinate_descent=False)
        assert not settings.coordinate_descent_tuning
        apply_compile(batch_loss, "block", coordinate_descent=True)
        assert settings.coordinate_descent_tuning
        assert not settings.max_autotune


@pytest.mark.parametrize(("world_size", "mode"), [(1, "model"), (2, "parts")])
def test_on_cuda_one_rank_has_one_graph_and_several_have_parts_to_overlap(world_size, mode):
    choice = choose_mode(
        resolve("softcap", "small"), torch.device("cuda"), torch.bfloat16, 1, Installed(()), world_size
    )
    assert choice.mode == mode
    assert choice.reason.startswith("auto: ")


def mode_chosen(rank, world_size, data):
    """Where the ranks would choose differently, as with other numbers of threads."""
    distributed = Distributed(rank, rank, world_size, world_size, torch.device("cpu"), has_group=True)
    with (
        patch("hotlap.train.lap.choose_mode", lambda *_: CompileChoice("block" if rank else "off", "")),
        patch("hotlap.train.lap.apply_compile"),
        patch("hotlap.train.lap.warm_up"),
    ):
        lap = build_lap(pico(data, 2, runtime__compile="auto"), data, distributed, Clock())
    lap.data.loader.close()
    return lap.compiled


def test_all_ranks_compile_as_the_first_does(tiny_data):
    first, second = run_ranks(mode_chosen, 2, tiny_data)
    assert first == second
    assert first.mode == "off"


def make_batch_loss(config, backend):
    """No matrix is zero, so that the loss depends on what attention sees."""
    masking = Masking(config, backend, END_OF_TEXT, torch.device("cpu"))
    batch_loss = BatchLoss(make_model(config), masking)
    for parameter in batch_loss.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return batch_loss


def compile_with(compiler, batch_loss, mode):
    """`apply_compile`, with another compiler than Inductor."""
    torch.compiler.reset()
    counters.clear()
    with patch.object(torch, "compile", partial(torch.compile, backend=compiler)):
        apply_compile(batch_loss, mode, coordinate_descent=False)


# In parts: plans, embeddings, loss, and blocks with and without a skip connection and a value embedding.
# On a CPU the compiler has no kernel for flex, which is why its graphs are traced only.
@pytest.mark.parametrize(
    ("backend", "compiler", "mode", "graphs"),
    [
        (DenseBackend(), "inductor", "model", 1),
        (FlexBackend(), "aot_eager", "model", 1),
        (FlexBackend(), "aot_eager", "parts", 7),
    ],
    ids=["dense", "flex", "flex in parts"],
)
def test_masks_and_model_are_graphs_that_no_window_recompiles(backend, compiler, mode, graphs):
    config = resolve("unet-value-embeds", "pico")
    batch_loss, plain = make_batch_loss(config, backend), make_batch_loss(config, DenseBackend())
    compile_with(compiler, batch_loss, mode)
    tokens, targets = made_up_tokens(512, config.model.vocab_size)
    tokens[tokens == END_OF_TEXT] += 1  # one document, longer than any window
    losses = set()
    with torch.no_grad():
        batch_loss(tokens, targets, None)
        with torch.compiler.set_stance("fail_on_recompile"):
            for step in range(0, config.schedule.steps + 1, 20):
                for loss in (batch_loss, plain):
                    loss.masking.set_step(step)
                compiled = batch_loss(tokens, targets, None).item()
                assert compiled == pytest.approx(plain(tokens, targets, None).item(), rel=1e-6)
                losses.add(compiled)
    assert len(losses) > 2, "the loss does not depend on the window"
    assert counters["stats"]["unique_graphs"] == graphs


# Values of the first layer reach all others, and bigrams need the plans: both are of the embeddings.
@pytest.mark.parametrize("changes", [{"model.values": "first-layer"}, {"model.bigram_rows": 64}])
def test_parts_compute_the_gradients_of_the_plain_model(changes):
    config = updated(resolve("softcap", "pico"), changes)
    batch_loss, plain = make_batch_loss(config, DenseBackend()), make_batch_loss(config, DenseBackend())
    compile_with("aot_eager", batch_loss, "parts")
    tokens, targets = made_up_tokens(512, config.model.vocab_size)
    for loss in (batch_loss, plain):
        loss(tokens, targets, None).backward()
    for part, reference in zip(batch_loss.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(part.grad, reference.grad)


def test_no_part_of_a_forward_is_left_uncompiled():
    config = resolve("unet-value-embeds", "pico")
    batch_loss = make_batch_loss(config, FlexBackend())
    compile_with("eager", batch_loss, "parts")
    tokens, targets = made_up_tokens(512, config.model.vocab_size)
    with torch.no_grad():
        batch_loss(tokens, targets, None)
        with torch.profiler.profile() as profiled:
            batch_loss(tokens, targets, None)
    # What runs a graph is marked in the trace, and its operators are inside.
    outermost = [event.name for event in profiled.events() if event.cpu_parent is None]
    num_parts = 3 + config.model.num_layers
    assert sum(name.startswith("Torch-Compiled Region") for name in outermost) == num_parts
    operators = {name for name in outermost if name.startswith("aten::")}
    assert operators <= {"aten::unbind"}  # of the skip weights: a view


@pytest.mark.parametrize("mode", ["parts", "model"])
def test_a_graph_break_is_an_error_that_names_its_line(tiny_data, mode):
    config = pico(tiny_data, 2, attention__backend="dense", runtime__compile=mode)
    torch.compiler.reset()
    batch_loss = make_batch_loss(config, DenseBackend())
    apply_compile(batch_loss, mode, coordinate_descent=False)
    batch_loss.model.blocks[1].mlp = BreakingMLP()
    with process_group("cpu") as alone, pytest.raises(CompileError) as caught:
        warm_up(batch_loss, config, alone)
    line = inspect.getsourcelines(BreakingMLP.forward)[1] + 1
    assert f"tests/test_compile.py:{line}" in str(caught.value)
    assert "--compile block" in str(caught.value)


class BreakingMLP(torch.nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x


def test_a_backend_that_plans_on_the_host_keeps_its_plan_out_of_the_graph():
    config = resolve("softcap", "pico")
    batch_loss = BatchLoss(make_model(config), make_masking(config, backend="blocked"))
    with patch.object(GPT, "compile") as model_alone, patch.object(BatchLoss, "compile") as with_plans:
        apply_compile(batch_loss, "model", coordinate_descent=False)
        model_alone.assert_called_once_with(dynamic=False, fullgraph=False)
        with_plans.assert_not_called()
        batch_loss.masking = make_masking(config, backend="dense")
        apply_compile(batch_loss, "model", coordinate_descent=False)
        with_plans.assert_called_once_with(dynamic=False, fullgraph=True)
        model_alone.assert_called_once()
