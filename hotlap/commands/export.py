"""`hotlap export RUN DIR`: writes a model to share, reads it again and compares its logits with the run's.

`--to` has other programs' forms, and `--push-to-hub` also puts the directory on the Hugging Face hub.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hotlap.cli import Parser
from hotlap.commands.model_arguments import add_model_arguments, described_step, load_model
from hotlap.errors import ConfigError
from hotlap.terminal import make_console

FORMS = ("hotlap", "transformers", "gguf")


def configure(parser: Parser) -> None:
    add_model_arguments(parser)
    parser.add_argument("directory", metavar="DIR", type=Path, help="to write; must not exist")
    parser.add_argument(
        "--to",
        choices=FORMS,
        default="hotlap",
        help="hotlap: for `hotlap.load` (default); transformers: a repository for from_pretrained; gguf: one"
        " file for llama.cpp, from recipes with the architecture gpt2 (docs/sharing.md)",
    )
    parser.add_argument(
        "--push-to-hub", metavar="NAME", help="also upload it to the Hugging Face hub, as USER/MODEL"
    )
    parser.add_argument(
        "--private", action="store_true", help="if NAME is new on the hub, let only its owner see it"
    )


def run(args: argparse.Namespace) -> int:
    from hotlap.inference.export import export, refuse_existing
    from hotlap.sharing.forms import open_form
    from hotlap.sharing.push import check_name, push

    if args.push_to_hub is not None:
        check_name(args.push_to_hub)
    elif args.private:
        raise ConfigError(
            expected="--private together with --push-to-hub", found="it alone", do="leave it out"
        )
    if args.to != "hotlap":
        if args.precision not in (None, "float32"):
            raise ConfigError(
                expected=f"--precision float32 with --to {args.to}, which is written and compared in it",
                found=args.precision,
                do="leave --precision out",
            )
        args.precision = "float32"
    form = open_form(args.to)
    refuse_existing(args.directory)
    loaded = load_model(args)
    export(loaded, args.directory, form)
    size_mib = sum(path.stat().st_size for path in args.directory.iterdir()) / 2**20
    console = make_console()
    console.print(
        f"exported {described_step(loaded)} to {args.directory} ({size_mib:.1f} MiB); {form.checked}",
        markup=False,
        soft_wrap=True,
    )
    if args.push_to_hub is not None:
        address = push(args.directory, args.push_to_hub, private=args.private)
        console.print(f"uploaded to {address}", markup=False, soft_wrap=True)
    return 0
