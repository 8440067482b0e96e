"""EleutherAI's harness with the model `hotlap`: its figures equal a direct computation, on local files."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

import pytest

from hotlap.inference.load import load
from tests.command import complaint
from tests.trained_run import in_process, trained_run

NEEDED = "lm_eval is not installed: pip install lm_eval"

CHOICES = """\
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
target_delimiter: ""
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
PERPLEXITY = """\
task: local_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list:
  - {{metric: word_perplexity}}
  - {{metric: byte_perplexity}}
  - {{metric: bits_per_byte}}
"""
CONTINUATIONS = """\
task: local_continuations
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["{stop}"], max_gen_toks: 12}}
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""

QUESTIONS = [
    {"question": "The people of", "choices": [" peace", " war and labor", " 日本"], "answer": number % 3}
    for number in range(3)
] + [{"question": "Congress", "choices": [" power.", "s", " café naïve"], "answer": 1}]
TEXTS = [{"text": "The people of peace, 日本. " * 30}, {"text": "war"}, {"text": "time people\n\nstate law"}]
PROMPTS = ["The people", "war and", "Grüße"]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    loaded = load(trained_run(), device="cpu")
    stop = "e"
    continued = [
        loaded.generate(prompt, temperature=0, max_tokens=12)[0][len(prompt) :] for prompt in PROMPTS
    ]
    targets = [text.partition(stop)[0] for text in continued]
    rows = {
        "choices": (CHOICES, QUESTIONS),
        "perplexity": (PERPLEXITY, TEXTS),
        "continuations": (
            CONTINUATIONS,
            # The last one is wrong, so that two of three are right.
            [
                {"prompt": prompt, "target": target if number < 2 else f"{target}not this"}
                for number, (prompt, target) in enumerate(zip(PROMPTS, targets, strict=True))
            ],
        ),
    }
    for name, (task, lines) in rows.items():
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        (folder / f"{name}.yaml").write_text(task.format(file=file, stop=stop), encoding="utf-8")
    return folder


def log_likelihood(loaded, context: str, continuation: str) -> float:
    """Of the tokens that a context does not have."""
    ids = [loaded.tokenizer.end_of_text, *loaded.tokenizer.encode(context + continuation).tolist()]
    first = 1 + len(loaded.tokenizer.encode(context))
    found = loaded.logits(ids)[:, : loaded.tokenizer.vocab_size].log_softmax(-1)
    return sum(float(found[place - 1, ids[place]]) for place in range(first, len(ids)))


def direct_figures() -> dict[str, float]:
    loaded = load(trained_run(), device="cpu")
    right = right_by_length = 0
    for asked in QUESTIONS:
        scores = [log_likelihood(loaded, asked["question"], choice) for choice in asked["choices"]]
        by_length = [one / len(choice) for one, choice in zip(scores, asked["choices"], strict=True)]
        right += scores.index(max(scores)) == asked["answer"]
        right_by_length += by_length.index(max(by_length)) == asked["answer"]
    total = sum(log_likelihood(loaded, "", row["text"]) for row in TEXTS)
    words = sum(len(re.split(r"\s+", row["text"])) for row in TEXTS)  # as the harness counts them
    text_bytes = sum(len(row["text"].encode()) for row in TEXTS)
    return {
        "acc": right / len(QUESTIONS),
        "acc_norm": right_by_length / len(QUESTIONS),
        "byte_perplexity": math.exp(-total / text_bytes),
        "bits_per_byte": -total / text_bytes / math.log(2),
        "word_perplexity": math.exp(-total / words),
        "exact_match": 2 / 3,
    }


NAMES = "local_choices,local_perplexity,local_continuations"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason=NEEDED)
class TestWithTheHarness:
    @pytest.fixture(autouse=True)
    def no_network(self, monkeypatch, tmp_path_factory):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HOME", str(tmp_path_factory.getbasetemp() / "home"))

    def run(self, *words: str, module: str = "hotlap"):
        return subprocess.run(
            [sys.executable, "-m", module, *words],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        )

    def test_its_figures_equal_a_direct_computation(self, tasks):
        words = [
            "eval",
            str(trained_run()),
            "--device",
            "cpu",
            "--tasks",
            NAMES,
            "--include-path",
            str(tasks),
        ]
        result = self.run(*words, "--json")
        assert result.returncode == 0, result.stderr
        answer = json.loads(result.stdout)
        assert answer["step"] == 3
        found = {entry["metric"]: entry["value"] for entry in answer["tasks"]}
        assert found == pytest.approx(direct_figures(), rel=1e-5)
        assert {entry["examples"] for entry in answer["tasks"]} == {len(QUESTIONS), len(TEXTS)}

    def test_the_harnesss_own_command_finds_the_model(self, tasks, tmp_path):
        words = ["--model", "hotlap", "--model_args", f"path={trained_run()}", "--include_path", str(tasks)]
        options = ["--tasks", NAMES, "--output_path", str(tmp_path / "found.json"), "--batch_size", "2"]
        result = self.run(*words, *options, module="hotlap.harness")
        assert result.returncode == 0, result.stderr
        (written,) = tmp_path.rglob("*.json")
        figures = json.loads(written.read_text())["results"]
        found = {
            key.partition(",")[0]: value
            for of_task in figures.values()
            for key, value in of_task.items()
            if "," in key and "_stderr" not in key
        }
        assert found == pytest.approx(direct_figures(), rel=1e-5)

    def test_a_wrong_argument_of_its_command_is_one_line(self, tasks, tmp_path):
        words = ["--model", "hotlap", "--tasks", "local_choices", "--include_path", str(tasks)]
        for arguments, part in (([], "path=RUN"), (["--model_args", f"path={tmp_path}"], str(tmp_path))):
            result = self.run(*words, *arguments, module="hotlap.harness")
            assert result.returncode == 2, result.stderr
            assert "Traceback" not in result.stderr
            (line,) = (line for line in result.stderr.splitlines() if line.startswith("hotlap: expected "))
            assert part in line

    def test_its_registry_takes_the_entry_point(self):
        from lm_eval.api.model import LM

        (entry,) = entry_points(group="lm_eval.models", name="hotlap")
        assert issubclass(entry.load(), LM)

    def test_few_examples_are_a_table(self, tasks):
        words = ["eval", str(trained_run()), "--device", "cpu", "--tasks", "local_choices", "--limit", "2"]
        result = self.run(*words, "--include-path", str(tasks), "--num-fewshot", "1")
        assert result.returncode == 0, result.stderr
        assert "acc_norm" in result.stdout
        assert "Traceback" not in result.stderr

    def test_data_that_cannot_be_had_is_one_line(self, tasks, tmp_path):
        text = (tasks / "choices.yaml").read_text().replace("choices.jsonl", "gone.jsonl")
        (tmp_path / "gone.yaml").write_text(text)
        words = ["eval", str(trained_run()), "--tasks", "local_choices", "--include-path", str(tmp_path)]
        line = complaint(self.run(*words))
        assert "the data of local_choices" in line
        assert "gone.jsonl" in line

    def test_an_unknown_task_is_one_line(self):
        line = complaint(self.run("eval", str(trained_run()), "--tasks", "hellaswagg"))
        assert "did you mean `hellaswag`" in line

    def test_an_unknown_folder_of_tasks_is_one_line(self, tmp_path):
        words = ["eval", str(trained_run()), "--tasks", "x", "--include-path", str(tmp_path / "none")]
        assert "--include-path with a directory" in complaint(self.run(*words))


def test_tasks_need_the_harness(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install lm_eval" in complaint(in_process(capsys, "eval", str(trained_run()), "--tasks", "x"))


@pytest.mark.parametrize(
    "words, part",
    [
        (["--tasks", ""], "names of tasks"),
        (["--tasks", "x", "--data", "here"], "found --tasks and --data"),
        (["--limit", "3"], "--tasks with --limit"),
        (["--tasks", "x", "--limit", "0"], "0 is not a number of at least 1"),
        (["--tasks", "x", "--num-fewshot", "-1"], "-1 is not a number of at least 0"),
        (["--tasks", "x", "--batch-size", "many"], "many is not a number of at least 1"),
    ],
)
def test_a_wrong_option_gets_one_line(capsys, words, part):
    assert part in complaint(in_process(capsys, "eval", str(trained_run()), *words))
