"""Idea files: read, checked and executed, and made into a recipe. Several are composed: `a.py+b.py`.

What was read is what counts from then on: a run keeps the content, and its settings the hash. A copy is named
`NAME@HASH.py`. Whatever is wrong with a file is one line that names the file and the line.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import sys
import traceback
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hotlap.errors import ConfigError, HotlapError, IdeaError
from hotlap.files import reading
from hotlap.recipes.idea import Idea, combined
from hotlap.recipes.lineage import RECIPES, Recipe
from hotlap.settings import nearest, updated

SUFFIX = ".py"
HASH_DIGITS = 16
INSTALLED_IN = {"site-packages", "dist-packages"}
BETWEEN_FILES = re.compile(r"(?<=\.py)\+")


@dataclass(frozen=True)
class IdeaFile:
    name: str
    place: str  # the path that it was read from, for messages
    source: str
    sentence: str  # the first paragraph of its docstring
    idea: Idea

    @property
    def identity(self) -> str:
        """As in the setting `ideas`."""
        return f"{self.name}@{content_hash(self.source)}"

    @property
    def copy_name(self) -> str:
        return f"{self.identity}{SUFFIX}"

    def class_source(self, name: str) -> str | None:
        """The text of a class or function at the top level of the file."""
        for node in ast.parse(self.source).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name == name:
                return ast.get_source_segment(self.source, node)
        return None


def content_hash(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:HASH_DIGITS]


def is_idea(recipe: str) -> bool:
    """Whether the name of a recipe names idea files."""
    return recipe.endswith(SUFFIX)


def read_ideas(recipe: str) -> tuple[IdeaFile, ...]:
    """The ideas of `a.py` or `a.py+b.py`."""
    words = BETWEEN_FILES.split(recipe)
    wrong = next((word for word in words if not word.endswith(SUFFIX)), None)
    if wrong is not None:
        raise ConfigError(
            expected="idea files joined by +", found=f"`{wrong}`", do="give files that end in .py"
        )
    return tuple(read_idea(Path(word)) for word in words)


def read_idea(path: Path) -> IdeaFile:
    with reading(path, IdeaError):
        content = path.read_bytes()
    try:
        source = content.decode()
    except UnicodeDecodeError as error:
        raise IdeaError(
            expected=f"Python in {path}",
            found=f"bytes that are not UTF-8 at offset {error.start}",
            do="correct it",
        ) from None
    return idea_of(path.stem.partition("@")[0], source, str(path))


def read_copies(directory: Path, identities: Sequence[str]) -> tuple[IdeaFile, ...]:
    """The ideas of a run, from the copies that it keeps. A copy that was changed is refused by name."""
    files = []
    for identity in identities:
        file = read_idea(directory / f"{identity}{SUFFIX}")
        if file.identity != identity:
            raise IdeaError(
                expected=f"{file.place} as the run was started with",
                found=f"another content, {file.identity}",
                do="restore the copy; the run cannot be rebuilt without it",
            )
        files.append(file)
    return tuple(files)


@functools.lru_cache(maxsize=64)
def idea_of(name: str, source: str, place: str) -> IdeaFile:
    """Check and execute an idea file."""
    if not re.fullmatch(r"[A-Za-z]\w*(-\w+)*", name) or name in RECIPES:
        raise IdeaError(
            expected=f"a name of letters, digits, _ and - that is no recipe's, for {place}",
            found=f"`{name}`",
            do="rename the file",
        )
    tree = _parsed(source, place)
    sentence = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    if not sentence:
        raise IdeaError(
            expected=f"a docstring that says the idea in one sentence in {place}:1",
            found="none",
            do="begin with it",
        )
    _check_imports(tree, place)
    found = [value for value in vars(_executed(name, source, place)).values() if isinstance(value, Idea)]
    if len(found) != 1:
        raise IdeaError(
            expected=f"one `idea = hotlap.idea(…)` at the top level of {place}:{len(source.splitlines())}",
            found=str(len(found)) if found else "none",
            do="assign the result of one call to a name",
        )
    if found[0].parent not in RECIPES:
        raise IdeaError(
            expected=f"a recipe as the parent in {found[0].place} ({', '.join(RECIPES)})",
            found=f"`{found[0].parent}`",
            do=nearest(str(found[0].parent), list(RECIPES)),
        )
    _check_architecture(found[0])
    return IdeaFile(name, place, source, sentence, found[0])


def recipe_of(files: Sequence[IdeaFile]) -> Recipe:
    """The recipe that the ideas make of their parent."""
    idea = combined([file.idea for file in files])
    names = [file.name for file in files]
    if len(set(names)) < len(names):
        raise IdeaError(expected="each idea once", found=" + ".join(names), do="name the files apart")
    parent, name = RECIPES[idea.parent], "+".join(names)
    identities = tuple(file.identity for file in files)
    return Recipe(
        name=name,
        parent=parent.name,
        summary="; ".join(file.sentence for file in files),
        source=", ".join(file.place for file in files),
        record=None,
        config=updated(parent.config, {"recipe": name, "ideas": identities}),
        at_size=parent.at_size,
        changes=idea.settings,
        ideas=tuple(files),
    )


def _parsed(source: str, place: str) -> ast.Module:
    try:
        return ast.parse(source, place)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise IdeaError(
            expected=f"Python in {place}:{line}",
            found=str(getattr(error, "msg", error)),
            do="correct that line",
        ) from None


def _check_imports(tree: ast.Module, place: str) -> None:
    """Refuse modules of the user's own: their content would be kept nowhere."""
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            assert isinstance(node, (ast.Import, ast.ImportFrom)), "only those have names"
            if name.startswith(".") or not _is_installed(name.partition(".")[0]):
                raise IdeaError(
                    expected=f"imports of installed packages only in {place}:{node.lineno}",
                    found=f"`{name}`, which is not installed",
                    do="copy what it needs into the file, so that a run keeps all of it",
                )


def _is_installed(module: str) -> bool:
    if module == "hotlap" or module in sys.stdlib_module_names:
        return True
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return False
    if spec is None:
        return False
    places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
    return all(INSTALLED_IN & set(Path(where).resolve().parts) for where in places)


def _executed(name: str, source: str, place: str) -> types.ModuleType:
    module = types.ModuleType(f"hotlap_idea_{name.replace('-', '_')}_{content_hash(source)}")
    module.__file__ = place
    sys.modules[module.__name__] = module  # where dataclasses and torch.compile look for it
    try:
        exec(compile(source, place, "exec", dont_inherit=True), vars(module))
    except HotlapError:
        raise
    except Exception as error:
        raise blamed(error, place) from error
    return module


def blamed(error: BaseException, place: str, otherwise: str | None = None) -> IdeaError:
    """An exception as one line, with the innermost line of the idea file that led to it.

    `otherwise`: the place to name if no line of the file is on the stack.
    """
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == place]
    where = f"{place}:{lines[-1]}" if lines else otherwise or place
    found = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return IdeaError(
        expected=f"an idea that runs, {where}",
        found=found,
        do="correct that line" if lines else "correct the idea",
    )


def _check_architecture(idea: Idea) -> None:
    architecture = idea.settings.get("model.architecture", RECIPES[idea.parent].config.model.architecture)
    if architecture == "gpt2" and idea.modules:
        raise IdeaError(
            expected=f"a parent whose model is built of parts in {idea.place}",
            found=f"{idea.parent}, which is GPT-2 and has no `{next(iter(idea.modules))}` to replace",
            do="use another parent, such as flex-attention",
        )
