"""`hotlap sample` as a user calls it, with right and with wrong arguments."""

from __future__ import annotations

import json
import shutil

import pytest

from hotlap.terminal import printable
from tests.command import complaint, hotlap
from tests.trained_run import copied_run, in_process, trained_run


def sample(capsys, *arguments: str, run=None):
    return in_process(capsys, "sample", str(run or trained_run()), "--device", "cpu", *arguments)


def as_json(capsys, *arguments: str):
    result = sample(capsys, "--json", "--tokens", "40", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_one_sample_is_the_prompt_and_how_it_goes_on_with_the_speed_apart():
    result = hotlap("sample", str(trained_run()), "--prompt", "The people", "--tokens", "30")
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("The people")
    assert len(result.stdout) > len("The people\n")
    assert result.stdout.endswith("\n")
    (line,) = result.stderr.splitlines()
    assert "tokens per second" in line


def test_streamed_text_is_the_text_made_at_once(capsys):
    (made,) = as_json(capsys, "--prompt", "Grüße")["results"][0]["samples"]
    assert (
        sample(capsys, "--prompt", "Grüße", "--tokens", "40").stdout
        == printable(made["text"], lines=True) + "\n"
    )


def test_the_seed_decides(capsys):
    first = as_json(capsys, "--seed", "3")["results"]
    assert as_json(capsys, "--seed", "3")["results"] == first
    assert as_json(capsys, "--seed", "4")["results"] != first
    greedy = as_json(capsys, "--temperature", "0", "--seed", "3")["results"]
    assert as_json(capsys, "--temperature", "0", "--seed", "4")["results"] == greedy
    assert as_json(capsys, "--top-k", "1", "--seed", "5")["results"] == greedy
    assert as_json(capsys, "--top-p", "1e-9", "--seed", "6")["results"] == greedy


def test_several_prompts_an_empty_one_and_one_longer_than_the_window(capsys):
    long = "people of peace " * 100
    answer = as_json(capsys, "--prompt", "The law", "--prompt", "", "--prompt", long)
    assert [result["prompt"] for result in answer["results"]] == ["The law", "", long]
    assert answer["step"] == 3
    assert answer["window_tokens"] == 256
    for result in answer["results"]:
        (made,) = result["samples"]
        assert made["text"].startswith(result["prompt"])
        assert 0 < len(made["tokens"]) <= 40
        assert made["ended"] == (len(made["tokens"]) < 40)


def test_several_samples_are_labelled_and_the_first_is_the_one_made_alone(capsys):
    result = sample(capsys, "--prompt", "The law", "--samples", "3", "--tokens", "20")
    for number in (1, 2, 3):
        assert f"sample {number} of 3\nThe law" in result.stdout
    alone = sample(capsys, "--prompt", "The law", "--tokens", "20").stdout
    assert f"sample 1 of 3\n{alone}" in result.stdout


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "nan"], "temperature"),
        (["--temperature", "hot"], "hot"),
        (["--top-p", "0"], "top-p"),
        (["--top-p", "1.5"], "top-p"),
        (["--top-k", "0"], "top-k"),
        (["--tokens", "0"], "at least 1 token"),
        (["--samples", "0"], "at least 1 sample"),
        (["--seed", "-1"], "seed"),
        (["--device", "abacus"], "abacus"),
        (["--precision", "float8"], "float8"),
        (["--checkpoint", "nowhere"], "nowhere"),
        (["--prompts", "typo"], "--prompts"),
    ],
)
def test_a_wrong_argument_gets_one_line(capsys, arguments, part):
    assert part in complaint(sample(capsys, *arguments))


def test_a_wrong_or_damaged_run_gets_one_line(capsys, tmp_path):
    assert "no such directory" in complaint(sample(capsys, run=tmp_path / "none"))
    run = copied_run(tmp_path)
    (weights,) = run.glob("checkpoints/*/model.safetensors")
    damaged = bytearray(weights.read_bytes())
    damaged[-5] ^= 1
    weights.write_bytes(damaged)
    assert str(weights) in complaint(sample(capsys, run=run))
    (run / "config.json").write_text("{")
    assert "config.json" in complaint(sample(capsys, run=run))
    shutil.rmtree(run / "checkpoints")
    (run / "config.json").write_bytes((trained_run() / "config.json").read_bytes())
    assert "a checkpoint in" in complaint(sample(capsys, run=run))
