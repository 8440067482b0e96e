import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hotlap.errors import CheckpointError
from hotlap.runs import checkpoint as store
from hotlap.runs.checkpoint import Checkpoint

ROOT = Path(__file__).parents[1]


def small(step, val_loss=None, fill=0.0):
    """A checkpoint of a few bytes; `val_loss=None` stands for a step without validation."""
    tensors = {"model": {"weight": torch.full((3, 5), step + fill)}, "rng": {"cpu": torch.get_rng_state()}}
    return Checkpoint(step, tensors, {"position": step * 1024, "val_loss": val_loss})


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def assert_same_bits(found, expected):
    assert found.keys() == expected.keys()
    for group in expected:
        assert found[group].keys() == expected[group].keys()
        for name, tensor in expected[group].items():
            other = found[group][name]
            assert other.dtype == tensor.dtype
            assert other.shape == tensor.shape
            # As bytes, so that NaN equals itself and -0 differs from 0.
            assert torch.equal(
                other.contiguous().reshape(-1).view(torch.uint8),
                tensor.detach().contiguous().reshape(-1).view(torch.uint8),
            )


def test_every_bit_comes_back(tmp_path):
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 1 / 3])
    shared = torch.randn(4, 6)
    tensors = {
        "model": {
            "float32": odd,
            "bfloat16": torch.cat([odd, torch.randn(100)]).bfloat16(),
            "parameter": nn.Parameter(torch.randn(2, 3)),
            "transposed": torch.randn(4, 7).t(),
            "expanded": torch.randn(1, 3).expand(5, 3),
            "whole": shared,
            "row": shared[1],
            "column": shared[:, 2],
            "same": shared,
            "slice of a large one": torch.randn(1000)[5:9],
            "empty": torch.empty(0, 3),
        },
        "optimizer": {"step": torch.tensor(17.0), "count": torch.tensor(2**40), "flag": torch.tensor(True)},
        "rng": {"cpu": torch.get_rng_state()},
        "nothing": {},
    }
    state = {
        "position": 2**53 + 1,
        "loss": 0.1 + 0.2,
        "text": "é\n\u2028",
        "none": None,
        "nested": {"a": [1]},
    }
    path = store.save(tmp_path / "deep" / "checkpoints", Checkpoint(125, tensors, state), keep=2)
    assert path.name == "step-000125"
    loaded = store.load(path)
    assert loaded.step == 125
    assert loaded.state == state
    assert_same_bits(loaded.tensors, tensors)
    assert (path / "model.safetensors").stat().st_size < 4000  # a view does not drag its storage along


def test_only_the_wanted_groups_are_read(tmp_path):
    path = store.save(tmp_path, small(1), keep=1)
    (path / "rng.safetensors").unlink()
    assert store.load(path, groups=["model"]).tensors.keys() == {"model"}
    with pytest.raises(CheckpointError, match=r"expected optimizer in .*; found model, rng"):
        store.load(path, groups=["optimizer", "model"])


def test_files_are_as_readable_as_the_umask_says(tmp_path):
    path = store.save(tmp_path, small(1), keep=1)
    assert len({stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()}) == 1


FILES = ["manifest.json", "model.safetensors", "rng.safetensors", "state.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_anywhere_is_refused_with_the_file_named(tmp_path, name):
    path = store.save(tmp_path, small(125), keep=1)
    assert names(path) == FILES
    original = (path / name).read_bytes()
    offsets = range(0, len(original), max(1, len(original) // 150))
    for offset in [*offsets, len(original) - 1]:
        for change in (0x01, 0x80, 0xFF):
            damaged = bytearray(original)
            damaged[offset] ^= change
            (path / name).write_bytes(damaged)
            with pytest.raises(CheckpointError) as caught:
                store.load(path)
            assert str(path / name) in str(caught.value)
    (path / name).write_bytes(original)
    store.load(path)


def test_a_manifest_with_other_white_space_is_refused_too(tmp_path):
    manifest = store.save(tmp_path, small(125), keep=1) / "manifest.json"
    manifest.write_text(manifest.read_text().replace("\n", " \n", 1))
    with pytest.raises(CheckpointError, match=r"manifest\.json as it was saved"):
        store.load(manifest.parent)


@pytest.mark.parametrize("name", FILES)
def test_truncated_and_missing_files_are_named(tmp_path, name):
    path = store.save(tmp_path, small(125), keep=1)
    whole = (path / name).read_bytes()
    for size in (0, 1, len(whole) // 2, len(whole) - 1):
        (path / name).write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=name):
            store.load(path)
    (path / name).unlink()
    with pytest.raises(CheckpointError, match=name):
        store.load(path)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(tmp_path):
    store.save(tmp_path, small(1), keep=2)
    newest = store.save(tmp_path, small(2), keep=2)
    renamed = newest.rename(tmp_path / "step-000009")
    with pytest.raises(CheckpointError, match=r"step-000009 as it was saved; found the checkpoint of step 2"):
        store.load_latest(tmp_path)
    assert store.load_latest(tmp_path, fallback=True)[0].step == 1
    assert store.load(renamed.rename(tmp_path / "a-copy")).step == 2  # by its path


def test_a_negated_view_comes_back_with_its_sign(tmp_path):
    path = store.save(tmp_path, Checkpoint(1, {"model": {"w": torch._neg_view(torch.ones(3))}}, {}), keep=1)
    assert store.load(path).tensors["model"]["w"].tolist() == [-1.0] * 3


def test_a_format_of_the_future_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "VERSION", 2)
    path = store.save(tmp_path, small(1), keep=1)
    monkeypatch.setattr(store, "VERSION", 1)
    with pytest.raises(CheckpointError, match="found hotlap-checkpoint version 2"):
        store.load(path)


def test_a_damaged_newest_one_is_passed_over_only_when_told(tmp_path):
    for step in (1, 2, 3):
        store.save(tmp_path, small(step), keep=3)
    for step in (2, 3):
        (tmp_path / f"step-{step:06d}" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"step-000003/state\.json"):
        store.load_latest(tmp_path)
    loaded, passed_over = store.load_latest(tmp_path, fallback=True)
    assert loaded.step == 1
    assert [("step-000003" in str(e), "step-000002" in str(e)) for e in passed_over] == [
        (True, False),
        (False, True),
    ]
    (tmp_path / "step-000001" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="found 3 damaged"):
        store.load_latest(tmp_path, fallback=True)


@pytest.mark.parametrize("place", ["", "not there"])
def test_no_checkpoint_is_an_error_that_says_what_to_do(tmp_path, place):
    with pytest.raises(CheckpointError, match="found none; start the run again"):
        store.latest(tmp_path / place)
    with pytest.raises(CheckpointError, match="found none; start the run again"):
        store.load_latest(tmp_path / place, fallback=True)
    with pytest.raises(CheckpointError, match="such as checkpoints/step-000125"):
        store.load(tmp_path / place)
    assert store.stored(tmp_path / place) == {}
    assert store.best(tmp_path / place) is None
    assert store.discard_after(tmp_path / place, 0) == []


def test_the_newest_and_the_best_are_kept(tmp_path):
    losses = {1: 5.0, 2: 3.0, 3: 4.0, 4: None, 5: float("nan"), 6: 3.5, 7: 3.0}
    kept_after = {
        1: [1],
        2: [1, 2],
        3: [2, 3],
        4: [2, 3, 4],
        5: [2, 4, 5],
        6: [2, 5, 6],
        7: [6, 7],  # as good as step 2, and later
    }
    for step, loss in losses.items():
        store.save(tmp_path, small(step, loss), keep=2)
        assert list(store.stored(tmp_path)) == kept_after[step]
    assert store.best(tmp_path) == store.latest(tmp_path) == tmp_path / "step-000007"


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), None, "low"])
def test_what_is_no_finite_number_is_never_the_best(tmp_path, value):
    for step, loss in ((1, value), (2, 3.0), (3, 4.0)):
        store.save(tmp_path, small(step, loss), keep=3)
    assert store.best(tmp_path) == tmp_path / "step-000002"


def test_without_keep_best_only_the_newest_stay(tmp_path):
    for step in (1, 2, 3):
        store.save(tmp_path, small(step, float(step)), keep=1, keep_best=False)
    assert names(tmp_path) == ["step-000003"]


def test_steps_are_ordered_as_numbers(tmp_path):
    for step in (999_998, 999_999, 1_000_000, 10_000_000):
        store.save(tmp_path, small(step), keep=2)
    assert list(store.stored(tmp_path)) == [1_000_000, 10_000_000]


def test_leftovers_are_never_taken_for_complete_and_go_with_the_next_save(tmp_path):
    complete = store.save(tmp_path, small(1), keep=2)
    for name in (".step-000010.unfinished", ".writing-step-000009", ".removing-step-000008"):
        shutil.copytree(complete, tmp_path / name)
    assert store.latest(tmp_path) == complete
    store.save(tmp_path, small(2), keep=2)
    assert names(tmp_path) == ["step-000001", "step-000002"]


def test_a_step_saved_again_takes_the_place_of_the_first(tmp_path):
    store.save(tmp_path, small(5, fill=0.0), keep=2)
    path = store.save(tmp_path, small(5, fill=0.5), keep=2)
    assert names(tmp_path) == ["step-000005"]
    assert store.load(path).tensors["model"]["weight"][0, 0] == 5.5


def test_a_replaced_checkpoint_stands_in_until_its_successor_is_there(tmp_path):
    first = store.save(tmp_path, small(5, fill=0.0), keep=2)
    first.rename(tmp_path / "step-000005.replaced")
    assert store.load_latest(tmp_path)[0].step == 5
    second = store.save(tmp_path, small(5, fill=0.5), keep=2)
    assert names(tmp_path) == ["step-000005"]
    assert store.latest(tmp_path) == second


def test_resuming_from_before_leaves_no_later_history_to_resume_from(tmp_path):
    for step in (10, 20, 30):
        store.save(tmp_path, small(step, 1.0 / step), keep=3)
    store.save(tmp_path, small(15), keep=2)
    assert list(store.stored(tmp_path)) == [10, 15]
    assert [path.name for path in store.discard_after(tmp_path, 10)] == ["step-000015"]
    assert names(tmp_path) == ["step-000010"]


@pytest.mark.parametrize("name", ["state.json", "manifest.json"])
def test_a_damaged_one_that_may_be_the_best_stays_and_is_not_passed_over(tmp_path, name):
    store.save(tmp_path, small(1, 0.1), keep=1)
    file = tmp_path / "step-000001" / name
    whole = file.read_bytes()
    file.write_text("{")
    store.save(tmp_path, small(2, 0.2), keep=1)
    store.save(tmp_path, small(3, 0.3), keep=1)
    assert names(tmp_path) == ["step-000001", "step-000002", "step-000003"]
    with pytest.raises(CheckpointError, match="to know which is the best; found step-000001 with"):
        store.best(tmp_path)
    file.write_bytes(whole)
    assert store.best(tmp_path) == tmp_path / "step-000001"
    store.save(tmp_path, small(4, 0.4), keep=1)
    assert names(tmp_path) == ["step-000001", "step-000004"]


@pytest.mark.parametrize("failing", ["hotlap.runs.checkpoint.save_file", "hotlap.files.sync"])
def test_what_the_system_refuses_is_one_line_and_leaves_the_earlier_ones(tmp_path, monkeypatch, failing):
    store.save(tmp_path, small(1), keep=1)

    def refuse(*args):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(failing, refuse)
    with pytest.raises(CheckpointError, match=r"expected to write .*step-000002; found Input/output error"):
        store.save(tmp_path, small(2), keep=1)
    assert names(tmp_path) == ["step-000001"]
    assert store.load_latest(tmp_path)[0].step == 1


def test_an_interrupt_while_saving_leaves_no_trace(tmp_path, monkeypatch):
    store.save(tmp_path, small(1), keep=1)

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(store, "save_file", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(tmp_path, small(2), keep=1)
    assert names(tmp_path) == ["step-000001"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of one megabyte."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root and mount")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this system does not let us mount a small file system")
    yield place
    subprocess.run(["umount", place], check=True)


@pytest.mark.parametrize("spare_bytes", [0, 2**12, 2**16])
def test_a_full_disk_is_one_line_and_leaves_the_earlier_ones(small_disk, spare_bytes):
    directory = small_disk / "checkpoints"
    store.save(directory, small(1), keep=3)
    store.save(directory, small(2), keep=3)
    before = {path: path.read_bytes() for path in directory.rglob("*.*") if path.is_file()}
    free = shutil.disk_usage(small_disk).free
    (small_disk / "ballast").write_bytes(bytes(free - spare_bytes))
    large = Checkpoint(3, {"model": {"weight": torch.ones(2**15)}}, {})
    with pytest.raises(CheckpointError, match="No space left on device") as caught:
        store.save(directory, large, keep=3)
    assert "\n" not in str(caught.value)
    assert names(directory) == ["step-000001", "step-000002"]
    assert {path: path.read_bytes() for path in directory.rglob("*.*") if path.is_file()} == before
    (small_disk / "ballast").unlink()
    store.save(directory, large, keep=3)
    assert store.load_latest(directory)[0].step == 3


def killed_saves(*arguments):
    result = subprocess.run(
        [sys.executable, "-m", "tests.killed_saves", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, result.stderr
    return dict(part.split("=") for part in result.stdout.split())


def test_killed_before_any_request_to_the_disk_a_complete_one_is_there(tmp_path):
    outcome = killed_saves(tmp_path / "checkpoints", "everywhere")
    assert int(outcome["points"]) > 25


def test_killed_at_random_a_complete_one_is_there(tmp_path):
    outcome = killed_saves(tmp_path / "checkpoints", "steadily", 12, 0)
    assert int(outcome["interrupted"]) >= 1


@pytest.mark.slow
def test_killed_at_random_fifty_times_a_complete_one_is_there(tmp_path):
    outcome = killed_saves(tmp_path / "checkpoints", "steadily", 50, 1)
    assert int(outcome["interrupted"]) >= 10
