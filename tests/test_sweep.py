"""The sweeps: what they tune on, that every variant can be built, and their table."""

import pytest

from bench import sweep
from bench.sweeps import SWEEPS, Sweep
from hotlap.recipes import resolve


class FortyTexts:
    def texts(self):
        return (f"text {index}" for index in range(40))


def test_no_validation_document_is_tuned_on(monkeypatch):
    monkeypatch.setattr(sweep, "find_corpus", lambda _name: FortyTexts())
    found = list(sweep.training_documents("any"))
    assert found == [f"text {index}" for index in range(40) if index not in (10, 30)]


@pytest.mark.parametrize("name", SWEEPS)
def test_every_variant_resolves(name):
    for changes in SWEEPS[name].variants.values():
        resolve(SWEEPS[name].recipe, SWEEPS[name].size, changes)


def test_the_table_compares_with_the_first_variant():
    swept = Sweep("?", "softcap", "pico", seeds=2, by_time=False, variants={"base": {}, "other": {}})
    line = {"step": 3, "tokens": 3000}
    results = {
        "base": [{**line, "val_bpb": 1.50}, {**line, "val_bpb": 1.60}],
        "other": [{**line, "val_bpb": 1.49}, {**line, "val_bpb": 1.58}],
    }
    *_, base, other = sweep.rows(swept, results).splitlines()
    assert base == "| base | 3 | 3,000 | 1.5500 ± 0.0707 |  |  |"
    # Welch: the difference's standard error is 0.0673, Student's t for 1.98 degrees of freedom 4.35.
    assert other == "| other | 3 | 3,000 | 1.5350 ± 0.0636 | -0.0150 | -0.3075 to +0.2775 |"


def test_a_run_that_was_stopped_is_trained_anew(monkeypatch, tmp_path):
    swept = Sweep("?", "softcap", "pico", seeds=1, by_time=False, variants={"base": {}})
    (tmp_path / "base-seed0").mkdir()
    (tmp_path / "base-seed0" / "metrics.jsonl").write_text('{"kind": "validation", "val_bpb": 9}\n')
    monkeypatch.setattr(sweep, "tuning_data", lambda _corpus, _vocabulary: tmp_path)

    def train(command, **_options):
        run = tmp_path / command[command.index("--name") + 1]
        run.mkdir()  # as `hotlap train` does, which refuses a name that exists
        (run / "metrics.jsonl").write_text('{"kind": "validation", "val_bpb": 1.5}\n')
        (run / "report.html").touch()

    monkeypatch.setattr(sweep.subprocess, "run", train)
    assert sweep.run_once(swept, "base", 3, 0, tmp_path)["val_bpb"] == 1.5
    monkeypatch.setattr(sweep.subprocess, "run", None)
    assert sweep.run_once(swept, "base", 3, 0, tmp_path)["val_bpb"] == 1.5
