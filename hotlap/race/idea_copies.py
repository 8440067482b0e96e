"""The idea files of a race: copied into it when it begins, so that all its runs train with the same."""

from __future__ import annotations

from pathlib import Path

from hotlap.errors import RaceError
from hotlap.files import make_directory, write_atomically, writing
from hotlap.race.plan import Entry, Plan, Start, spec_recipe
from hotlap.recipes import IdeaFile
from hotlap.recipes.idea_files import SUFFIX, read_copies, read_ideas


def ideas_of(entry: Entry, directory: Path) -> tuple[IdeaFile, ...]:
    """From the copies in `directory`; from the user's files as long as there are none."""
    files: list[IdeaFile] = []
    for identity in entry.ideas:
        if (directory / f"{identity}{SUFFIX}").exists():
            files += read_copies(directory, [identity])
            continue
        now = {file.identity: file for file in read_ideas(spec_recipe(entry.spec))}
        if identity not in now:
            raise RaceError(
                expected=f"{entry.spec} as the race was planned with it, {identity}",
                found=", ".join(now),
                do="restore the file, or race under another --name",
            )
        files.append(now[identity])
    return tuple(files)


def check_ideas(plan: Plan, directory: Path) -> None:
    """Build each model once, so that what is wrong with an idea is said before the first run."""
    import torch

    from hotlap.train.ideas import Ideas
    from hotlap.train.lap import packed_tokens

    for entry in plan.entries:
        ideas = Ideas(ideas_of(entry, directory))
        if ideas.files:
            config = plan.config(Start(entry, entry.first_seed))
            with torch.random.fork_rng(devices=[]):
                ideas.check_roles(ideas.build_model(config, packed_tokens(config), torch.float32))


def keep_ideas(plan: Plan, directory: Path) -> None:
    """Write the copies that are not there yet."""
    with writing(directory, RaceError):
        for file in (file for entry in plan.entries for file in ideas_of(entry, directory)):
            if not (directory / file.copy_name).exists():
                make_directory(directory)
                write_atomically(directory / file.copy_name, file.source.encode())
