"""Other versions of this package, as commits of its own git repository: `softcap@my-branch`.

Each commit gets a worktree of its own in the cache, and a run of that version is a process that imports the
package from there. What is not committed is in no version.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import hotlap
from hotlap.errors import ConfigError
from hotlap.files import atomic_directory, cache_directory, locked_beside
from hotlap.recipes.idea_files import SUFFIX

ROOT = Path(hotlap.__file__).parents[1]


def split_version(recipe: str) -> tuple[str, str | None]:
    """(recipe, version) of `recipe@version`; the names of copies of idea files have an @ too."""
    if recipe.endswith(SUFFIX) or "@" not in recipe:
        return recipe, None
    name, _, version = recipe.partition("@")
    if name.endswith(SUFFIX) or not version:
        raise ConfigError(
            expected="RECIPE@VERSION with a recipe of the lineage and a commit, branch or tag",
            found=f"`{recipe}`",
            do="leave out the version, or name a recipe",
        )
    return name, version


def commit_of(version: str) -> str:
    """The hash of the commit that a branch, tag or hash names."""
    if not (ROOT / ".git").exists():
        raise ConfigError(
            expected=f"hotlap in a git checkout, to compare its versions by @{version}",
            found=f"an installed package in {ROOT}",
            do="install it from a checkout with `pip install --editable .`",
        )
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{version}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        raise ConfigError(
            expected=f"a commit, branch or tag of {ROOT}", found=f"`{version}`", do="see `git branch --all`"
        ) from None


def worktree_of(commit: str) -> Path:
    """The directory of a commit's own worktree, which is made if need be."""
    path = cache_directory() / "versions" / commit
    if path.is_dir():
        return path
    with locked_beside(path, lambda _: None):
        if not path.is_dir():
            try:
                _git("worktree", "prune")
                # A checkout that was killed halfway has another name, and is never imported.
                with atomic_directory(path) as work:
                    _git("worktree", "add", "--force", "--detach", str(work), commit)
                _git("worktree", "repair", str(path))
            except subprocess.CalledProcessError as error:
                raise ConfigError(
                    expected=f"a worktree of {commit[:12]} at {path}",
                    found=" ".join(str(error.stderr).split()),
                    do="see `git worktree list`",
                ) from None
    return path


def replace_process(commit: str, words: Sequence[str]) -> NoReturn:
    """Go on as `hotlap WORDS` of another version."""
    path = str(worktree_of(commit))
    # Not the working directory, which may be a checkout of another version.
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    os.execve(sys.executable, [sys.executable, "-m", "hotlap", *words], environment)


def _git(*words: str) -> str:
    """Without what a repository may configure git to run, and without variables that lead elsewhere."""
    configured = ("-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        ["git", *configured, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout
