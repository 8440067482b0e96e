import json
import re
import time

import pytest

from hotlap import __version__, kernels
from hotlap.commands import doctor
from hotlap.recipes import RECIPES
from tests.command import complaint, hotlap, hotlap_here


def test_version():
    assert hotlap("--version").stdout == f"hotlap {__version__}\n"


def test_help_names_every_command_and_answers_at_once():
    from hotlap.cli import COMMANDS

    start = time.monotonic()
    result = hotlap("--help")
    assert time.monotonic() - start < 1
    assert result.returncode == 0
    assert all(command in result.stdout for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["trian", "softcap"], "did you mean `train`"),
        ([], "`hotlap train --minutes 2` trains a model"),
        (
            ["train"],
            "a RECIPE, or --minutes M, which chooses the rest; found neither",
        ),
        (["train", "softcp"], "did you mean `softcap`"),
        (["train", "softcap", "--size", "nanoo"], "did you mean `nano`"),
        (["train", "softcap", "--optim.muon.lrr", "1"], "did you mean `--optim.muon.lr`"),
        (["train", "softcap", "--model.width", "100", "--model.num-heads", "3"], "width 100 and 3 heads"),
        (["train", "softcap", "--num-heads", "4", "--num-kv-heads", "3"], "4 heads and 3 kv heads"),
        (["train", "softcap", "--batch.sequence-tokens", "1000"], "multiple"),
        (["train", "softcap", "--optim.muon.lr", "-0.1"], "-0.1"),
        (["train", "softcap", "--steps", "5", "--steps", "6"], "twice"),
        (["train", "softcap", "--steps", "--size", "nano"], "found no value"),
        (["train", "softcap", "--source="], "found no value"),
        (["train", "softcap", "--steps", "5", "--schedule.steps", "6"], "`schedule.steps` twice"),
        (["train", "softcap", "--recipe", "adamw"], "without --recipe"),
        (["train", "adamw", "--lr", "0.001", "--dry-run"], "AdamW updates the matrices"),
        (["train", "--resume", "runs/lap", "--name", "other"], "--resume runs/lap and --name other"),
        (["train", "--resume", "runs/lap", "--size", "small"], "--size small alone"),
        (["train", "--resume", "--size", "small"], "--size small alone"),
        (["train", "softcap", "--json"], "--json together with --dry-run"),
        (["train", "softcap", "--allow-change"], "--allow-change together with --resume"),
        (["train", "softcap", "--name", "../lap", "--dry-run"], "a run name"),
        (["recipes", "show", "nope"], "a recipe"),
        (["recipes", "diff", "softcap"], "B"),
        (["recipes", "shwo", "softcap"], "show"),
        (["doctor", "--nope"], "--nope"),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(arguments, part):
    assert part in complaint(hotlap_here(*arguments))


def test_recipes_prints_the_lineage_with_date_and_minutes():
    out = hotlap_here("recipes").stdout
    for recipe in RECIPES.values():
        (line,) = (line for line in out.splitlines() if f" {recipe.name} " in line)
        assert recipe.summary in line
        if recipe.record:
            assert f"{recipe.record.date}, {recipe.record.minutes:.2f} min" in line


def test_recipes_json_has_parents():
    listed = json.loads(hotlap_here("recipes", "--json").stdout)
    assert {item["name"]: item["parent"] for item in listed}["softcap"] == "sparse-value-embeds"


def test_recipes_diff_as_json():
    changes = json.loads(hotlap_here("recipes", "diff", "sparse-value-embeds", "softcap", "--json").stdout)
    assert {"name": "model.softcap", "before": 30.0, "after": 15.0} in changes


def test_a_switch_needs_no_value():
    shown = hotlap_here("train", "softcap", "--dry-run", "--coordinate-descent", "--size", "nano").stdout
    assert "runtime.coordinate_descent = true" in shown


def test_dry_run_shows_the_resolved_configuration_wherever_the_settings_stand():
    after = hotlap_here(
        "train", "softcap", "--size", "pico", "--optim.muon.lr", "0.03", "--dry-run", "--json"
    )
    before = hotlap_here("train", "--optim.muon.lr=0.03", "--dry-run", "--json", "--size", "pico", "softcap")
    assert after.stdout == before.stdout
    config = json.loads(after.stdout)
    assert (config["recipe"], config["size"], config["optim"]["muon"]["lr"]) == ("softcap", "pico", 0.03)


def test_dry_run_estimates_time_memory_and_epochs(tiny_data):
    words = (
        "train",
        "softcap",
        "--size",
        "pico",
        "--data.source",
        str(tiny_data),
        "--dry-run",
        "--device",
        "cpu",
    )
    lines = {line.split()[0]: line for line in hotlap_here(*words).stdout.splitlines()}
    fastest, slowest = re.search(r"([\d,]+) to ([\d,]+) s of training", lines["time"]).groups()
    assert int(fastest.replace(",", "")) <= int(slowest.replace(",", ""))
    assert re.search(r"about [\d,]+ MiB of tensors", lines["memory"])
    assert re.search(r"100 steps, \d+\.\d\d epochs of [\d,]+ tokens", lines["epochs"])
    unprepared = hotlap_here("train", "softcap", "--source", "no-such-corpus", "--dry-run", "--device", "cpu")
    assert "of unknown data" in unprepared.stdout


def test_doctor_says_what_a_run_would_use(monkeypatch):
    facts = json.loads(hotlap_here("doctor", "--json").stdout)
    assert facts["cpu_sgemm_gflops"] > 0
    if facts["device"] == "cpu":
        assert facts["attention_backend"] == ("blocked" if kernels.unavailable() else "native")
        assert facts["precision"] == ("bfloat16" if facts["native_bf16"] else "float32")
        in_float32 = facts["kernels"].splitlines()[-1]
        expected = kernels.unavailable() or "QKV of layers 0, 1, 3, MLP of layers 0-3, loss in C"
        assert in_float32.startswith("float32: ")
        assert expected in in_float32
    shown = hotlap_here("doctor").stdout
    assert f"runs will use {facts['precision']}" in shown
    assert ("faults on it" in shown) is facts["amx_faults"]


@pytest.mark.parametrize(
    "faults, said",
    [
        (
            True,
            "bfloat16 is not supported by the hardware (the processor lists AMX but faults on it):"
            " runs will use float32",
        ),
        (False, "bfloat16 is not supported by the hardware: runs will use float32"),
    ],
)
def test_doctor_says_why_bfloat16_is_not_native(faults, said):
    facts = {"native_bf16": False, "precision": "float32", "attention_backend": "native", "device": "cpu"}
    assert said in doctor.verdict({**facts, "amx_faults": faults})
