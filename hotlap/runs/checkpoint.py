"""The checkpoint store: plain tensors and plain JSON in, the same bits out, whatever happens in between.

A checkpoint is a directory `step-000125` with one safetensors file for each group of tensors, `state.json`,
and `manifest.json` with the size and SHA-256 of each. It is filled under a hidden name, synced and renamed,
so a killed process or a full disk leaves the earlier ones as they were. Nothing is ever unpickled. One
process at a time may save into a directory: the run's lock sees to that.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotlap.errors import CheckpointError
from hotlap.files import sync
from hotlap.runs.durable import make_directory, writing

FORMAT = "hotlap-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
TENSOR_SUFFIX = ".safetensors"

# Hidden names are work in progress: never read, and removed by the next save.
WRITING_PREFIX = ".writing-"
REMOVING_PREFIX = ".removing-"
# A complete checkpoint that a new one of the same step is about to replace. It stands for its step while the
# new one is not there yet, so that no moment is without a checkpoint.
REPLACED_SUFFIX = ".replaced"
STEP_NAME = re.compile(rf"step-(\d{{6,}})({re.escape(REPLACED_SUFFIX)})?")


@dataclass(frozen=True)
class Checkpoint:
    step: int
    tensors: Mapping[str, Mapping[str, Tensor]]  # group ("model", "optimizer", …) → name → tensor
    state: Mapping[str, Any]  # JSON; tuples come back as lists


def save(
    directory: Path, checkpoint: Checkpoint, *, keep: int, keep_best: bool = True, metric: str = "val_loss"
) -> Path:
    """Save, then remove all but the newest `keep` and, with `keep_best`, the one of lowest `state[metric]`.

    Afterwards this one is the newest: those of later steps belong to a history that the run has left by
    resuming from before them, and are removed too. A checkpoint whose `state` has no finite `metric` is never
    the best, so `metric` should be there only when it was measured at that very step.
    """
    assert keep >= 1, f"a store keeps at least the checkpoint it just saved, not {keep}"
    path = directory / f"step-{checkpoint.step:06d}"
    work = directory / f"{WRITING_PREFIX}{path.name}"
    with writing(path, also=(SafetensorError,)):
        make_directory(directory)
        _remove_leftovers(directory)
        try:
            _fill(work, checkpoint)
            if path.exists():
                path.rename(path.with_name(path.name + REPLACED_SUFFIX))
            work.rename(path)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
        sync(directory)
    with writing(directory):
        found = {step: place for step, place in stored(directory).items() if step <= checkpoint.step}
        kept = set(list(found.values())[-keep:])
        if keep_best and (lowest := _best(found, metric)):
            kept.add(lowest)
        _remove(directory, [place for _, place in _places(directory) if place not in kept])
    return path


def discard_after(directory: Path, step: int) -> list[Path]:
    """Remove the checkpoints of later steps, as a run does that resumes from `step`; returns what went."""
    if not directory.is_dir():
        return []
    with writing(directory):
        _remove_leftovers(directory)
        later = [place for number, place in _places(directory) if number > step]
        _remove(directory, later)
    return later


def stored(directory: Path) -> dict[int, Path]:
    """{step: path} of the complete checkpoints, in order of steps. Their content is not verified."""
    return dict(_places(directory)) if directory.is_dir() else {}


def latest(directory: Path) -> Path:
    """The checkpoint of the last step."""
    found = stored(directory)
    if not found:
        raise CheckpointError(
            expected=f"a checkpoint in {directory}",
            found="none",
            do="start the run anew, or give the path of a checkpoint directory such as step-000125",
        )
    return list(found.values())[-1]


def best(directory: Path, metric: str = "val_loss") -> Path | None:
    """The checkpoint with the lowest `state[metric]`, the later one of equals; none if none was measured."""
    return _best(stored(directory), metric)


def load(path: Path, groups: Collection[str] | None = None) -> Checkpoint:
    """A checkpoint with every byte verified; only the named `groups` of tensors, or all."""
    manifest = _read_manifest(path)
    for name in manifest["files"]:
        if groups is None or name == STATE_NAME or name.removesuffix(TENSOR_SUFFIX) in groups:
            _verify(path / name, manifest)
    found = [name.removesuffix(TENSOR_SUFFIX) for name in manifest["files"] if name != STATE_NAME]
    missing = sorted(set(groups or ()) - set(found))
    if missing:
        raise CheckpointError(
            expected=f"{', '.join(missing)} in {path}", found=", ".join(found), do="use another checkpoint"
        )
    return Checkpoint(
        step=manifest["step"],
        tensors={
            group: load_file(path / f"{group}{TENSOR_SUFFIX}")
            for group in found
            if groups is None or group in groups
        },
        state=json.loads((path / STATE_NAME).read_bytes()),
    )


def load_latest(directory: Path, *, fallback: bool = False) -> tuple[Checkpoint, list[CheckpointError]]:
    """The newest checkpoint. A damaged one is an error, or with `fallback` passed over for the next older.

    Returns the checkpoint and what was wrong with each newer one; nothing is passed over unmentioned.
    """
    latest(directory)
    passed_over: list[CheckpointError] = []
    for path in reversed(stored(directory).values()):
        try:
            return load(path), passed_over
        except CheckpointError as damage:
            if not fallback:
                raise
            passed_over.append(damage)
    raise CheckpointError(
        expected=f"an undamaged checkpoint in {directory}",
        found=f"{len(passed_over)} damaged, the newest by {passed_over[0].found}",
        do="restore one from a backup or start the run anew",
    )


def _fill(work: Path, checkpoint: Checkpoint) -> None:
    """Write every file of a checkpoint into a new directory `work`, the manifest last, all of it synced."""
    work.mkdir()
    # JSON's own extension for NaN and infinity is wanted here: state comes back as it was.
    state_path = work / STATE_NAME
    state_path.write_text(json.dumps(checkpoint.state, indent=1))
    paths = [state_path]
    for group, tensors in checkpoint.tensors.items():
        assert re.fullmatch(r"\w+", group), f"a group names a file: letters and digits only, not {group!r}"
        path = work / f"{group}{TENSOR_SUFFIX}"
        save_file(_separate(tensors), path)
        shutil.copymode(state_path, path)  # safetensors writes for the owner alone, whatever the umask says
        paths.append(path)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
    content = {"format": FORMAT, "version": VERSION, "step": checkpoint.step, "files": files}
    manifest_path = work / MANIFEST_NAME
    manifest_path.write_bytes(_seal(content))
    for path in (*paths, manifest_path, work):
        sync(path)


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, no two in one storage: safetensors refuses anything else."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone(memory_format=torch.contiguous_format)
        seen.add(plain.untyped_storage().data_ptr())
        separate[name] = plain
    return separate


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _seal(content: Mapping[str, Any]) -> bytes:
    """The manifest's bytes: JSON with the checksum of the rest of it."""
    checksum = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return (json.dumps({**content, "checksum": checksum}, indent=1) + "\n").encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    place = path / MANIFEST_NAME
    try:
        sealed = place.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(
            expected=f"a checkpoint at {path}",
            found=f"no {MANIFEST_NAME} there" if path.is_dir() else "no such directory",
            do="give the path of a complete checkpoint such as checkpoints/step-000125",
        ) from None
    except OSError as error:
        raise _damage(place, error.strerror or str(error)) from error
    try:
        content = json.loads(sealed)
        del content["checksum"]
        whole = _seal(content) == sealed  # every byte: what was written is what this writes again
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise _damage(place, "content that does not match its own checksum")
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            expected=f"{FORMAT} version {VERSION} in {place}",
            found=f"{content.get('format')} version {content.get('version')}",
            do="read it with the version of Hotlap that wrote it",
        )
    return content


def _verify(path: Path, manifest: Mapping[str, Any]) -> None:
    recorded = manifest["files"][path.name]
    try:
        size = path.stat().st_size
        if size != recorded["bytes"]:
            raise _damage(path, f"{size} bytes instead of {recorded['bytes']}")
        if _sha256(path) != recorded["sha256"]:
            raise _damage(path, "content that does not match its checksum")
    except OSError as error:
        raise _damage(path, error.strerror or str(error)) from error


def _damage(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        expected=f"{path} as it was saved",
        found=what,
        do="resume from an older checkpoint, or restore this one from a backup",
    )


def _places(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint in order of steps; of one step, the replaced one first."""
    places = []
    for path in directory.iterdir():
        match = STEP_NAME.fullmatch(path.name)
        if match:
            places.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(places)]


def _best(found: Mapping[int, Path], metric: str) -> Path | None:
    measured = []
    for step, path in found.items():
        try:
            value = load(path, groups=()).state.get(metric)
        except CheckpointError:
            continue  # damaged: it says so to whoever loads it, and is not worth keeping as the best
        if isinstance(value, (int, float)) and math.isfinite(value):
            measured.append((value, -step, path))
    return min(measured)[2] if measured else None


def _remove(directory: Path, paths: Collection[Path]) -> None:
    """Remove checkpoints so that none of them is ever there in part under its own name."""
    doomed = [path.rename(path.with_name(f"{REMOVING_PREFIX}{path.name}")) for path in paths]
    if doomed:
        sync(directory)
    for path in doomed:
        shutil.rmtree(path)


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed saves left: work in progress, and replaced checkpoints whose successor is there."""
    for path in directory.iterdir():
        if path.name.startswith((WRITING_PREFIX, REMOVING_PREFIX)):
            shutil.rmtree(path)
    current = set(stored(directory).values())
    _remove(directory, [place for _, place in _places(directory) if place not in current])
