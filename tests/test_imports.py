"""Imports go down only: a module may import its own layer's package and the layers below it."""

import ast
import subprocess
import sys
from pathlib import Path

import hotlap

PACKAGE = Path(hotlap.__file__).parent

# Higher numbers may import lower ones. `commands` and `cli` know each other: the parser class is shared.
LEVELS = {
    "errors": 0,
    "files": 0,
    "json_files": 0,
    "waiting": 0,
    "extras": 0,
    "code_identity": 0,
    "gpus": 1,
    "settings": 1,
    "config": 2,
    "terminal": 2,
    "progress": 2,
    "live_line": 2,
    "suggestions": 3,
    "recipes": 3,
    "jobs": 3,
    "hardware": 3,
    "versions": 4,
    "attention": 3,
    "model": 4,
    "optim": 4,
    "data": 4,
    "kernels": 5,
    "corpus": 5,
    "runs": 5,
    "report": 6,
    "inference": 6,
    "serve": 7,
    "sharing": 7,
    "harness": 7,
    "distributed": 6,
    "train": 7,
    "race": 8,
    "plan": 8,
    "dial": 8,
    "acceptance": 9,
    "lab": 9,
    "emulation": 8,
    "commands": 10,
    "cli": 10,
    "__main__": 11,
}
SIDEWAYS = {("model", "optim"), ("model", "data"), ("optim", "data"), ("optim", "model"), ("data", "model")}


def imported_parts(path: Path) -> set[str]:
    """The parts of hotlap (modules or packages right below it) that a file imports anywhere in it."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        parts |= {name.split(".")[1] for name in names if name.startswith("hotlap.")}
    return parts & set(LEVELS)


def test_imports_go_down_only():
    seen = set()
    for path in PACKAGE.rglob("*.py"):
        part = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if part == "__init__":
            continue
        assert part in LEVELS, f"{part} has no place in the layers: add it here"
        seen.add(part)
        for other in imported_parts(path) - {part}:
            assert LEVELS[other] <= LEVELS[part], f"{path.relative_to(PACKAGE)} imports upwards: {other}"
            assert (part, other) not in SIDEWAYS, f"{path.relative_to(PACKAGE)} imports sideways: {other}"
    assert {"config", "recipes", "commands"} <= seen


def test_help_and_recipes_need_no_torch():
    code = (
        "import sys; from hotlap.cli import dispatch; dispatch(['recipes', 'diff', 'adamw', 'softcap']);"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert result.returncode == 0, result.stderr


def test_optimizers_can_be_imported_where_torch_cannot_distribute():
    script = (
        "import torch.distributed as dist\n"
        "for name in ('all_gather_single', 'all_gather_into_tensor'): vars(dist).pop(name, None)\n"
        "import hotlap.optim"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
