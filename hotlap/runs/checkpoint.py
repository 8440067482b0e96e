"""The checkpoint store: tensors and JSON are saved, and come back bit for bit.

A checkpoint is a directory `step-000125` with one safetensors file per group of tensors, `state.json`, and
`manifest.json` with the size and SHA-256 of each file. It is written atomically: a killed process or a full
disk leaves the earlier checkpoints as they were. Pickle is never used. Only one process may save into a
directory at a time, which the lock of the run ensures.
"""

from __future__ import annotations

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
from hotlap.files import atomic_directory, file_sha256, make_directory, sync, writing
from hotlap.json_files import read_object, seal, unseal

FORMAT = "hotlap-checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
STATE_NAME = "state.json"
TENSOR_SUFFIX = ".safetensors"

# Directories that a killed process may leave: an incomplete checkpoint (`.writing-` in earlier versions), or
# one that was being removed. They are never read, and the next save removes them.
REMOVING_PREFIX = ".removing-"
LEFTOVER_PREFIXES = (".step-", ".writing-", REMOVING_PREFIX)
# A complete checkpoint that is about to be replaced by a new one of the same step. It counts as the
# checkpoint of its step until the new one is in place, so that there is always a complete one.
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
    """Save a checkpoint, then remove all but the newest `keep` and, with `keep_best`, the best one.

    The best one has the lowest finite `state[metric]`, so `metric` should be there only if it was measured at
    that very step. With `keep_best`, damaged ones stay too: any of them may have been the best, and may be
    restored. Checkpoints of later steps are removed: they belong to a history that the run left by resuming
    from an earlier step.
    """
    assert keep >= 1, f"the checkpoint that was just saved is kept, so keep must be at least 1, not {keep}"
    path = directory / f"step-{checkpoint.step:06d}"
    with writing(path, CheckpointError, also=(SafetensorError,)):
        make_directory(directory)
        _remove_leftovers(directory)
        with atomic_directory(path, keep_replaced_as=path.with_name(path.name + REPLACED_SUFFIX)) as work:
            _write_files(work, checkpoint)
    with writing(directory, CheckpointError):
        found = {step: place for step, place in stored(directory).items() if step <= checkpoint.step}
        kept = set(list(found.values())[-keep:])
        if keep_best:
            measured, damaged = _measured(found, metric)
            kept |= {*measured[:1], *damaged}
        _remove(directory, [place for _, place in _complete(directory) if place not in kept])
    return path


def discard_after(directory: Path, step: int) -> list[Path]:
    """Remove the checkpoints of steps after `step`, from which a run is resumed; returns their paths."""
    if not directory.is_dir():
        return []
    with writing(directory, CheckpointError):
        _remove_leftovers(directory)
        later = [place for number, place in _complete(directory) if number > step]
        _remove(directory, later)
    return later


def stored(directory: Path) -> dict[int, Path]:
    """{step: path} of the complete checkpoints by step. Their content is not verified."""
    return dict(_complete(directory)) if directory.is_dir() else {}


def latest(directory: Path) -> Path:
    """The checkpoint of the last step."""
    found = stored(directory)
    if not found:
        raise CheckpointError(
            expected=f"a checkpoint in {directory}",
            found="none",
            do="start the run again, or give the path of a checkpoint directory such as step-000125",
        )
    return list(found.values())[-1]


def best(directory: Path, metric: str = "val_loss") -> Path | None:
    """The checkpoint with the lowest `state[metric]`, the latest of equals; None if none was measured.

    Raises if one is damaged, because it may have been the best.
    """
    measured, damaged = _measured(stored(directory), metric)
    for path, damage in damaged.items():
        raise CheckpointError(
            expected=f"undamaged checkpoints in {directory}, to know which is the best",
            found=f"{path.name} with {damage.found}",
            do="restore it from a backup, or choose a checkpoint by its name",
        )
    return measured[0] if measured else None


def load(path: Path, groups: Collection[str] | None = None) -> Checkpoint:
    """A checkpoint with the checksums of its files verified; all groups of tensors, or those named."""
    manifest = _read_manifest(path)
    named = STEP_NAME.fullmatch(path.name)
    if named and int(named[1]) != manifest["step"]:
        raise _damage(path, f"the checkpoint of step {manifest['step']} under that name")
    for name in manifest["files"]:
        if groups is None or name == STATE_NAME or name.removesuffix(TENSOR_SUFFIX) in groups:
            _verify(path / name, manifest)
    found = [name.removesuffix(TENSOR_SUFFIX) for name in manifest["files"] if name != STATE_NAME]
    missing = sorted(set(groups or ()) - set(found))
    if missing:
        raise CheckpointError(
            expected=f"{', '.join(missing)} in {path}", found=", ".join(found), do="use another checkpoint"
        )
    tensors = {
        group: _read_tensors(path / f"{group}{TENSOR_SUFFIX}")
        for group in found
        if groups is None or group in groups
    }
    return Checkpoint(manifest["step"], tensors, read_object(path / STATE_NAME, CheckpointError))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise _damage(path, " ".join(str(error).split())) from error


def load_latest(directory: Path, *, fallback: bool = False) -> tuple[Checkpoint, list[CheckpointError]]:
    """The newest checkpoint. If it is damaged, raise, or with `fallback` load the newest undamaged one.

    Returns the checkpoint and the damage of each newer one.
    """
    latest(directory)
    skipped: list[CheckpointError] = []
    for path in reversed(stored(directory).values()):
        try:
            return load(path), skipped
        except CheckpointError as damage:
            if not fallback:
                raise
            skipped.append(damage)
    raise CheckpointError(
        expected=f"an undamaged checkpoint in {directory}",
        found=f"{len(skipped)} damaged, the newest by {skipped[0].found}",
        do="restore one from a backup or start the run again",
    )


def _write_files(work: Path, checkpoint: Checkpoint) -> None:
    state_path = work / STATE_NAME
    # With JSON's extension for NaN and infinity, so that every number comes back.
    state_path.write_text(json.dumps(checkpoint.state, indent=1))
    paths = [state_path]
    for group, tensors in checkpoint.tensors.items():
        assert re.fullmatch(r"\w+", group), f"a group is a file name of letters and digits, not {group!r}"
        path = work / f"{group}{TENSOR_SUFFIX}"
        save_file(_separate(tensors), path)
        shutil.copymode(state_path, path)  # safetensors makes files for the owner alone, whatever the umask
        paths.append(path)
    files = {path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)} for path in paths}
    content = {"format": FORMAT, "version": VERSION, "step": checkpoint.step, "files": files}
    (work / MANIFEST_NAME).write_bytes(seal(content, json.dumps))


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous and each with its own storage, as safetensors requires."""
    separate: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().to("cpu").resolve_neg().contiguous()
        if plain.untyped_storage().data_ptr() in seen:
            plain = plain.clone(memory_format=torch.contiguous_format)
        seen.add(plain.untyped_storage().data_ptr())
        separate[name] = plain
    return separate


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
        content = unseal(sealed, json.dumps)
        if seal(content, json.dumps) != sealed:
            raise ValueError("other white space")
    except ValueError as error:
        raise _damage(place, str(error)) from error
    if (content.get("format"), content.get("version")) != (FORMAT, VERSION):
        raise CheckpointError(
            expected=f"{FORMAT} version {VERSION} in {place}",
            found=f"{content.get('format')} version {content.get('version')}",
            do="read it with the version of Hotlap that wrote it",
        )
    files = content.get("files")
    if type(content.get("step")) is not int or not isinstance(files, dict) or STATE_NAME not in files:
        raise _damage(place, "a manifest without a step, or without its files")
    for name, recorded in files.items():
        is_plain = name == STATE_NAME or re.fullmatch(rf"\w+{re.escape(TENSOR_SUFFIX)}", name)
        if not is_plain or not isinstance(recorded, dict) or recorded.keys() != {"bytes", "sha256"}:
            raise _damage(place, f"an entry for {name!r} that Hotlap does not write")
    return content


def _verify(path: Path, manifest: Mapping[str, Any]) -> None:
    recorded = manifest["files"][path.name]
    try:
        size = path.stat().st_size
    except OSError as error:
        raise _damage(path, error.strerror or str(error)) from error
    if size != recorded["bytes"]:
        raise _damage(path, f"{size} bytes instead of {recorded['bytes']}")
    if file_sha256(path, CheckpointError) != recorded["sha256"]:
        raise _damage(path, "content that does not match its checksum")


def _damage(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        expected=f"{path} as it was saved",
        found=what,
        do="resume from an older checkpoint, or restore this one from a backup",
    )


def _complete(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of every complete checkpoint by step; of the same step, the replaced one comes first."""
    places = []
    for path in directory.iterdir():
        match = STEP_NAME.fullmatch(path.name)
        if match:
            places.append((int(match[1]), match[2] is None, path))
    return [(step, path) for step, _, path in sorted(places)]


def _measured(found: Mapping[int, Path], metric: str) -> tuple[list[Path], dict[Path, CheckpointError]]:
    """Checkpoints with a finite `state[metric]`, the best first, and those that are too damaged to tell."""
    measured, damaged = [], {}
    for step, path in found.items():
        try:
            value = load(path, groups=()).state.get(metric)
        except CheckpointError as damage:
            damaged[path] = damage
            continue
        if isinstance(value, (int, float)) and math.isfinite(value):
            measured.append((value, -step, path))
    return [path for _, _, path in sorted(measured)], damaged


def _remove(directory: Path, paths: Collection[Path]) -> None:
    """Remove checkpoints, each renamed first, so that an incomplete one never has a checkpoint's name."""
    doomed = [path.rename(path.with_name(f"{REMOVING_PREFIX}{path.name}")) for path in paths]
    if doomed:
        sync(directory)
    for path in doomed:
        shutil.rmtree(path)


def _remove_leftovers(directory: Path) -> None:
    """Remove what killed processes left: incomplete checkpoints, and replaced ones with a successor."""
    for path in directory.iterdir():
        if path.name.startswith(LEFTOVER_PREFIXES):
            shutil.rmtree(path)
    current = set(stored(directory).values())
    _remove(directory, [place for _, place in _complete(directory) if place not in current])
