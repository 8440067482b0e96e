"""The sweeps: what they tune on, that every variant can be built, and their table."""

import pytest

from bench import sweep
from bench.sweeps import SWEEPS, Sweep
from hotlap.recipes import resolve
from tests.made_up_engine import MadeUpEngine
from tests.synthetic_runs import make_run


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


def test_only_runs_that_have_not_ended_are_trained(monkeypatch, tmp_path, capsys):
    swept = Sweep("?", "softcap", "pico", seeds=2, by_time=False, variants={"base": {}})
    monkeypatch.setattr(sweep, "tuning_data", lambda _corpus, _vocabulary: tmp_path)
    tasks = [sweep.task_of(swept, "base", 20, seed, tmp_path) for seed in range(2)]
    make_run(tasks[0].path, steps=20, final_loss=3.0)
    engine = MadeUpEngine()
    monkeypatch.setattr(sweep, "open_engine", lambda *_arguments, **_options: engine)
    sweep.train(tasks, "local", tmp_path)
    assert engine.order == ["base-seed1"]
    assert "base, seed 1: 1.1585 after 10,240 tokens" in capsys.readouterr().out
    engine.ends = {"base-seed1": None}
    (tasks[1].path / "summary.json").unlink()
    with pytest.raises(SystemExit, match="base, seed 1: exit code 2, see"):
        sweep.train(tasks, "local", tmp_path)
