"""`hotlap new idea NAME`: writes a commented idea file that runs, to be changed."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

from hotlap.cli import Parser
from hotlap.errors import ConfigError
from hotlap.files import make_directory, write_atomically, writing
from hotlap.recipes import find_recipe
from hotlap.recipes.idea_files import idea_of
from hotlap.terminal import make_console

TEMPLATE = '''"""{sentence}

The first paragraph is the sentence that tables show. docs/ideas.md explains what else can be changed: the
loss, the schedule, the initial weights, the batch, roles and optimizers of parameters.
"""

{imports}import hotlap
{code}

idea = hotlap.idea(
    "{parent}",
    # Settings, by the names that `hotlap recipes show {parent}` lists. None is changed yet.
    settings={{}},
{part})
'''
IMPORTS = """from torch import Tensor, nn
from torch.nn import functional as F

"""
PART = """    # A module in place of the recipe's; also attention, block, embedding, value_embeddings, head.
    mlp=MLP,
"""


def configure(parser: Parser) -> None:
    commands = parser.add_subparsers(dest="action", parser_class=Parser, metavar="idea", required=True)
    new = commands.add_parser("idea", help="write an idea file to start from")
    new.add_argument("name", metavar="NAME", help="of the idea: ideas/NAME.py is written")
    new.add_argument("--parent", default="softcap", help="the recipe that it changes (default: softcap)")
    new.add_argument(
        "--into", type=Path, default=Path("ideas"), help="directory of the file (default: ideas)"
    )


def run(args: argparse.Namespace) -> int:
    parent = find_recipe(args.parent)
    if parent.ideas:
        raise ConfigError(expected="a recipe as the parent", found=args.parent, do="compose ideas: a.py+b.py")
    path = args.into / f"{args.name}.py"
    content = idea_text(parent.name, with_parts=parent.config.model.architecture != "gpt2")
    idea_of(args.name, content, str(path))  # refuses a name that cannot be used
    if path.exists():
        raise ConfigError(expected=f"a new file {path}", found="one that exists", do="choose another name")
    with writing(path, ConfigError):
        make_directory(args.into)
        write_atomically(path, content.encode())
    console = make_console()
    console.print(f"wrote {path}; now change it, and race it:", markup=False, soft_wrap=True)
    console.print(f"hotlap race {parent.name} {path} --seeds 5", markup=False, soft_wrap=True)
    return 0


def idea_text(parent: str, *, with_parts: bool) -> str:
    if not with_parts:
        sentence = f"Nothing changed yet: {parent} under another name."
        return TEMPLATE.format(sentence=sentence, parent=parent, imports="", code="", part="")
    from hotlap.model.mlp import MLP

    mlp = inspect.getsource(MLP).replace("config: ModelConfig", "config").rstrip()
    code = f"from hotlap.model.layers import Matrix\n\n\n{mlp}\n"
    sentence = f"A copy of {parent}'s MLP, to be changed: say here in one sentence how, and why."
    return TEMPLATE.format(sentence=sentence, parent=parent, imports=IMPORTS, code=code, part=PART)
