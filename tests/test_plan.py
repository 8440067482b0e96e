"""What `hotlap plan` says, against the public logs, the compiler, a FLOP counter and a fake process group."""

import json
import re
from dataclasses import replace
from unittest.mock import MagicMock, patch

import psutil
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bench.plan import PAGE, PUBLIC_LOGS, with_tables
from hotlap import kernels
from hotlap.attention import plan_batch
from hotlap.attention.dense import DenseBackend
from hotlap.attention.mask import Mask
from hotlap.config import ModelConfig
from hotlap.emulation import CompiledStep, Launches
from hotlap.errors import DeviceError
from hotlap.gpus import GPUS
from hotlap.model import build_model
from hotlap.optim.routing import build_optimizers
from hotlap.plan.activations import compiled_activations, cpu_activations, mask_bytes
from hotlap.plan.estimate import estimate
from hotlap.plan.fit import Demand
from hotlap.plan.machine import gpu_machine
from hotlap.plan.memory import matrix_entries
from hotlap.plan.state import total_bytes
from hotlap.plan.wire import step_traffic
from hotlap.recipes import RECIPES, resolve
from hotlap.train.flops import attention_flops_per_token, matmul_flops_per_token
from hotlap.train.lap import route_parameters
from tests.command import complaint, hotlap_here
from tests.kernels_here import needs_kernels

MIB = 2**20
WORLD_SIZE = 8


def plan_of(recipe, gpu="H100", gpus=8, *, size="small", nodes=1, price=None, **changes):
    config = resolve(recipe, size, {name.replace("__", "."): value for name, value in changes.items()})
    return estimate(config, gpu_machine(gpu, gpus, nodes, precision=config.runtime.precision), price)


# Memory


@pytest.mark.parametrize("recipe", [recipe for recipe, log in PUBLIC_LOGS.items() if log.peak_mib])
def test_peak_memory_is_within_five_percent_of_the_public_log(recipe):
    assert plan_of(recipe).memory.peak_bytes / MIB == pytest.approx(PUBLIC_LOGS[recipe].peak_mib, rel=0.05)


@pytest.mark.parametrize(
    ("recipe", "graphs", "compiler_mib"),
    [
        # MiB that torch 2.13's compiler keeps of the graphs of a forward pass at 65,536 tokens, full
        # logits and block lists included, for an H100.
        ("softcap", "model", 29_140.0),
        ("softcap", "parts", 28_196.0),
        ("block-window", "model", 30_301.3),
        ("window-warmup", "model", 29_725.3),
    ],
)
def test_activations_are_those_that_the_compiler_keeps(recipe, graphs, compiler_mib):
    config = resolve(recipe, "small")
    model, tokens = config.model, config.batch.sequence_tokens
    kept = sum(tensor.bytes for tensor in compiled_activations(model, tokens, 2, graphs))
    casts = 2 * (matrix_entries(config) + model.padded_vocab_size * model.width)
    logits = 2 * tokens * model.padded_vocab_size
    assert (kept + mask_bytes(tokens, 128) + casts + logits) / MIB == pytest.approx(compiler_mib, rel=1e-4)


@needs_kernels
@pytest.mark.parametrize("recipe", ["window-warmup", "block-window", "softcap"])
def test_activations_on_a_cpu_are_those_that_autograd_saves(recipe):
    config = resolve(recipe, "pico")
    tokens = config.batch.sequence_tokens
    model = build_model(config.model, tokens)
    backend = kernels.choose_backend("native", "cpu")
    kernels.install(model, backend=backend, tokens=tokens)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.ones(tokens, dtype=torch.int32)
    mask = Mask(torch.zeros(tokens, dtype=torch.int32), torch.tensor(2, dtype=torch.int32), "blocks")
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, ids.long(), [plan_batch(backend, mask)] * config.model.num_layers)
    assert loss.requires_grad
    expected = sum(kept.bytes for kept in cpu_activations(config.model, tokens, 4))
    # The gradients that the loss computes at once are terms of their own.
    expected += 4 * config.model.width * (tokens + config.model.padded_vocab_size)
    assert sum(size for at, size in saved.items() if at not in own) == pytest.approx(expected, rel=0.01)


def test_one_rank_keeps_all_of_muon_s_momentum_and_eight_keep_an_eighth():
    alone, of_eight = (plan_of("softcap", gpus=gpus).memory for gpus in (1, 8))
    state = {
        gpus: {term.name: term.bytes for term in memory.terms}["optimizer state"]
        for gpus, memory in ((1, alone), (8, of_eight))
    }
    matrices = 4 * matrix_entries(resolve("softcap", "small"))
    assert state[1] - state[8] == pytest.approx(matrices * 7 / 8, rel=0.02)


def test_most_tokens_fit_and_one_block_more_does_not():
    config = resolve("softcap", "small")
    demand = Demand.of(config, gpu_machine("4090", 1, 1))
    most = demand.most_tokens()
    assert demand.fits(tokens=most)
    assert not demand.fits(tokens=most + config.attention.block_size)


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.record])
@pytest.mark.parametrize("gpu", ["3090", "4090"])
def test_small_fits_a_card_of_24_gb_in_the_split_that_is_proposed(recipe, gpu):
    plan = plan_of(recipe, gpu, 1)
    assert not plan.fits
    assert plan.split.tokens_per_step == plan.config.batch.tokens_per_step
    proposed = estimate(replace(plan.config, batch=plan.split), plan.machine)
    assert proposed.fits
    assert proposed.warnings == ()
    assert f"--batch.sequence-tokens {plan.split.sequence_tokens}" in plan.warnings[0]


# FLOPs


def test_flops_are_what_a_counter_finds():
    """A whole context of dense attention, forward and backward."""
    config = resolve("softcap", "pico")
    tokens = config.batch.sequence_tokens
    model = build_model(config.model, tokens)
    mask = Mask(torch.zeros(tokens, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int32), "tokens")
    plans = [plan_batch(DenseBackend(), mask)] * config.model.num_layers
    ids = torch.zeros(tokens, dtype=torch.int32)
    with FlopCounterMode(display=False) as counter:
        model(ids, ids.long(), plans).backward()
    per_token = matmul_flops_per_token(config) + attention_flops_per_token(config, tokens)
    assert counter.get_total_flops() == tokens * per_token


def test_flops_of_softcap_at_small_by_hand():
    """12 MLPs of 768 × 3072 twice, 11 attentions of four 768 × 768, and the head: six FLOPs per weight."""
    weights = 12 * 2 * 768 * 3072 + 11 * 4 * 768**2 + 50_304 * 768
    assert matmul_flops_per_token(resolve("softcap", "small")) == 6 * weights
    # 11 layers, 12 FLOPs per channel and key: q·k and p·v, forward and twice that backward.
    assert attention_flops_per_token(resolve("softcap", "small"), 1000) == 11 * 12 * 768 * 1000


@pytest.mark.parametrize("recipe", PUBLIC_LOGS)
def test_the_public_time_per_step_is_within_the_range(recipe):
    low, high = plan_of(recipe).speed.step_s
    assert low <= PUBLIC_LOGS[recipe].step_ms / 1e3 <= high


# The wire


class Collectives(TorchDispatchMode):
    """Bytes of the tensors that every rank has after a collective, by kind."""

    def __init__(self):
        super().__init__()
        self.bytes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            kind = {"allreduce_": "all-reduce", "_allgather_base_": "all-gather", "broadcast_": "broadcast"}
            name = kind[func.name().split("::")[1].split(".")[0]]
            first = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            self.bytes[name] = self.bytes.get(name, 0) + first.nbytes
        return func(*args, **(kwargs or {}))


@pytest.fixture
def fake_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", ["window-warmup", "softcap", "adamw"])
def test_bytes_on_the_wire_are_those_of_a_step_of_eight_fake_ranks(fake_ranks, recipe):
    config = resolve(recipe, "pico")
    model = build_model(config.model, config.batch.sequence_tokens)
    optimizers = build_optimizers(route_parameters(model, config, WORLD_SIZE), check_finite=False)
    reduced = []

    def reduce(_, bucket):
        reduced.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    module = DistributedDataParallel(model, gradient_as_bucket_view=True)
    module.register_comm_hook(None, reduce)
    module.logger = MagicMock()  # torch's asks for times that the fake group does not have
    ids = torch.ones(config.batch.sequence_tokens, dtype=torch.int32)
    mask = Mask(torch.zeros_like(ids), torch.tensor(256, dtype=torch.int32), "tokens")
    plans = [plan_batch(DenseBackend(), mask)] * config.model.num_layers
    module(ids, ids.long(), None if recipe == "adamw" else plans).backward()
    with Collectives() as collectives:
        for optimizer in optimizers:
            optimizer.step()
    planned = step_traffic(model, config, WORLD_SIZE, torch.float32)
    gradients, *muon, figures = planned
    assert sum(reduced) == gradients.payload_bytes == total_bytes(model.parameters())
    assert collectives.bytes == {each.collective: each.payload_bytes for each in muon}
    assert figures.payload_bytes == 12
    assert gradients.sent_bytes == 2 * 7 / 8 * gradients.payload_bytes


def test_one_rank_sends_nothing():
    assert plan_of("softcap", gpus=1).traffic == ()


# Warnings and refusals


@pytest.mark.parametrize(
    ("gpus", "advice"),
    [(16, "use --batch.sequence-tokens 32768, the same"), (3, "use --batch.tokens-per-step 589824")],
)
def test_ranks_that_do_not_divide_a_step_are_warned_of(gpus, advice):
    (warning,) = plan_of("softcap", gpus=gpus).warnings
    assert warning.startswith(f"{gpus} processes do not divide")
    assert advice in warning


def test_attention_in_float32_does_not_fit_a_4090():
    plan = plan_of("softcap", "4090", 1, runtime__precision="float32", batch__sequence_tokens=8192)
    assert plan.kernels.fits is False
    assert any("--precision bfloat16" in warning for warning in plan.warnings)


@pytest.mark.parametrize("gpu", ["T4", "V100"])
def test_a_gpu_with_float16_only_is_refused_unless_float32_is_asked_for(gpu):
    with pytest.raises(DeviceError, match="float16 only"):
        gpu_machine(gpu, 1, 1)
    assert gpu_machine(gpu, 1, 1, precision="float32").name == gpu


def test_a_price_and_a_slow_link_count():
    plan = plan_of("softcap", nodes=2, batch__sequence_tokens=32_768, price=2.0)
    hours = plan.speed.billed_s.high / 3600
    assert plan.cost.high == pytest.approx(16 * hours * 2.0)
    slow = estimate(plan.config, gpu_machine("H100", 8, 2, 0.1))
    assert slow.speed.step_s.low == pytest.approx(slow.speed.wire_s)  # the wire is the bottleneck
    assert slow.speed.step_s.low > 10 * plan.speed.step_s.low


# The page and the command


def test_the_tables_of_the_page_are_those_that_the_code_writes():
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run `python -m bench.plan --write`"


def test_the_table_fits_80_columns():
    for gpu, gpus in (("H100", "8"), ("4090", "1")):
        result = hotlap_here("plan", "softcap", "--gpu", gpu, "--gpus", gpus, "--price", "2.5")
        assert result.returncode == 0, result.stderr
        table = [line for line in result.stdout.splitlines() if not line.startswith(("warning", "run"))]
        assert max(map(len, table)) <= 80
        assert "peak memory per device" in result.stdout


def test_settings_are_overridden_as_in_train():
    arguments = ("plan", "softcap", "--gpu", "4090", "--batch.sequence-tokens", "32768", "--json")
    found = json.loads(hotlap_here(*arguments).stdout)
    assert found["tokens_at_once"] == 32_768
    assert found["micro_batches"] == 16
    assert found["memory"]["fits"] is True
    assert found["memory"]["peak_bytes"] == sum(found["memory"]["terms"].values())
    assert found["warnings"] == []
    assert found["command"] == "hotlap train softcap --size small --batch.sequence-tokens 32768"


def test_this_machine_can_be_planned_for():
    with patch("hotlap.plan.machine.measure_matmul_gflops", lambda **_: 100.0):
        found = json.loads(hotlap_here("plan", "sprint", "--gpu", "cpu", "--json").stdout)
    assert found["size"] == "nano"
    assert found["machine"]["memory_bytes"] == psutil.virtual_memory().total
    assert found["time"]["peak_tflops"] == 0.1
    assert found["kernels"] is None


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["softcup"], "found `softcup`"),
        (["softcap", "--gpu", "H1000"], "found `H1000`"),
        (["softcap", "--gpu", "T4"], "float16 only"),
        (["softcap", "--gpus", "0"], "--gpus of 1 or more"),
        (["softcap", "--nodes", "-1"], "--nodes of 1 or more"),
        (["softcap", "--price", "-2"], "--price above 0"),
        (["softcap", "--link", "0"], "--link above 0"),
        (["softcap", "--size", "huge"], "found `huge`"),
        (["softcap", "--batch.sequence-tokens", "1000"], "multiple"),
        (["softcap", "--gpu", "cpu", "--exact"], "a GPU for --exact"),
    ],
)
def test_a_wrong_input_is_answered_in_one_line(arguments, found):
    with patch("hotlap.plan.machine.measure_matmul_gflops", lambda **_: 100.0):
        assert found in complaint(hotlap_here("plan", *arguments))


def test_what_is_missing_for_an_exact_plan_is_said_in_one_line():
    with patch("hotlap.emulation.device.shutil.which", lambda _: None):
        assert "found no g++" in complaint(hotlap_here("plan", "softcap", "--exact"))


def compiled_step_of_softcap() -> CompiledStep:
    return CompiledStep(
        gpu="H100",
        tokens=65_536,
        mode="parts",
        loss="full logits",
        graphs=19,
        optimizer_graphs=4,
        kernels=64,
        graph_breaks=0,
        recompilations=0,
        windows=(),
        forward=Launches(kernels=60, operators=80, matmuls=70, bytes_outside_matmuls=11 * 10**9),
        backward=Launches(kernels=100, operators=150, matmuls=140, bytes_outside_matmuls=22 * 10**9),
        optimizer=Launches(kernels=50, operators=140, matmuls=120, bytes_outside_matmuls=3 * 10**9),
        peak_mib=31_234.0,
        resident_mib=3_000.0,
        operators={},
        seconds=70.0,
        sources={"triton_": "def triton_(): pass"},
    )


def test_the_counts_of_a_compiled_step_are_shown_beside_the_plan():
    with patch("hotlap.plan.exact.compiled_step", return_value=compiled_step_of_softcap()) as compiled:
        table = hotlap_here("plan", "softcap", "--gpus", "8", "--exact").stdout
        found = json.loads(hotlap_here("plan", "softcap", "--gpus", "8", "--exact", "--json").stdout)
    assert compiled.call_args.kwargs == {"gpu": "H100", "world_size": 8}
    lines = [" ".join(line.split()) for line in table.splitlines()]
    for line in (
        "compiled exactly 31,234 MiB one rank, no DDP",
        "launches per micro-batch 390 140 forward, 250 backward",
        "launches of an update 190 of all optimizers, on one rank",
        "outside matmuls 250 of both together",
        "moved there 36.0 GB read and written",
        "kernels 64 in 19 graphs, 0 graph breaks",
    ):
        assert line in lines
    assert found["memory"]["exact_peak_mib"] == 31_234
    assert found["exact"]["backward"]["kernels"] == 100
    assert found["exact"]["launches_outside_matmuls"] == 250
    assert found["exact"]["bytes_outside_matmuls"] == 36 * 10**9
    assert "sources" not in found["exact"]


def test_every_gpu_of_the_table_can_be_planned_for():
    for name, gpu in GPUS.items():
        if gpu.bf16_tflops:
            assert plan_of("softcap", name, 1).split is not None, name


def test_help_names_the_gpus():
    helped = hotlap_here("plan", "--help").stdout
    assert all(re.search(rf"\b{name}\b", helped) for name in GPUS)


def test_grouped_queries_keep_fewer_keys():
    models = (ModelConfig(num_kv_heads=heads) for heads in (6, 2))
    kept = [sum(tensor.bytes for tensor in compiled_activations(model, 1024, 2, "model")) for model in models]
    # k as projected and attended to, v before and after it is mixed: 4 of 4 heads less, and two norms.
    assert kept[0] - kept[1] == 1024 * 12 * (4 * 4 * 128 * 2 + 4 * 4)
