"""`hotlap serve RUN…`: an OpenAI-compatible server for trained models, with a page to play with them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from hotlap.cli import Parser
from hotlap.commands.model_arguments import add_loading_arguments, described_step
from hotlap.errors import ConfigError
from hotlap.extras import installer
from hotlap.terminal import make_console

if TYPE_CHECKING:
    from hotlap.inference.load import LoadedModel
    from hotlap.serve.app import Served

TOKEN_VARIABLE = "HOTLAP_SERVE_TOKEN"
NEEDED = ("starlette", "uvicorn")


def configure(parser: Parser) -> None:
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", type=Path, help="a run's directory, or an exported model's"
    )
    add_loading_arguments(parser)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="the address to listen on (default: this machine only)")
    add("--port", type=int, default=8000, help="0: any free port (default: %(default)s)")
    add("--token", help=f"required of every API request; also in the variable {TOKEN_VARIABLE}")
    add("--allow-host", metavar="NAME", action="append", default=[], help="a further name of this server")
    add("--rows", type=int, default=32, metavar="N", help="texts written at once, per model (%(default)s)")
    add("--queue", type=int, default=64, metavar="N", help="texts that may wait, per model (%(default)s)")
    add("--context", type=int, metavar="N", help="tokens of a prompt and its text (default: as trained)")
    add("--threads", type=int, metavar="N", help="for each model (default: one core fewer than there are)")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="per request (%(default)s)")
    add("--open", action="store_true", help="open the page in a browser")


def run(args: argparse.Namespace) -> int:
    check_arguments(args)
    from hotlap.serve.app import build_app
    from hotlap.serve.guard import HostNames
    from hotlap.serve.page import page_routes
    from hotlap.serve.server import address_of, listen, make_server, must_have_token, serve

    token = args.token or os.environ.get(TOKEN_VARIABLE) or None
    must_have_token(args.host, token)
    console = make_console()
    set_threads(args.threads)
    with listen(args.host, args.port) as bound:  # before the models are loaded, which takes longer
        models = load_models(args)
        for served in models:
            console.print(describe(served), markup=False, soft_wrap=True)
        app = build_app(
            models,
            names=HostNames(args.host, args.allow_host),
            token=token,
            timeout_seconds=args.timeout,
            pages=page_routes(),
        )
        url = address_of(bound)

        def ready() -> None:
            console.print(f"page  {url}\nAPI   {url}v1 (Ctrl-C stops)", markup=False, soft_wrap=True)
            if args.open:
                webbrowser.open(url)

        serve(make_server(app, models), bound, ready)
    console.print("stopped")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    if missing := missing_packages():
        raise ConfigError(
            expected=f"the packages {' and '.join(NEEDED)} for `hotlap serve`",
            found=f"no {' and no '.join(missing)}",
            do=f"`{installer()} {' '.join(missing)}`",
        )
    for name, least in (("rows", 1), ("queue", 0), ("context", 2), ("threads", 1)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise ConfigError(expected=f"--{name} of at least {least}", found=str(value), do="change it")
    if not args.timeout > 0:
        raise ConfigError(expected="--timeout above 0 seconds", found=f"{args.timeout:g}", do="change it")


def missing_packages() -> list[str]:
    """Those of the extra `serve` that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def set_threads(asked: int | None) -> None:
    """By default a core is left to the requests. OpenMP's own variable goes before that."""
    import torch

    from hotlap.hardware import usable_cores

    if asked is not None:
        torch.set_num_threads(asked)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() - 1))


def load_models(args: argparse.Namespace) -> list[Served]:
    from hotlap.inference.load import load
    from hotlap.serve.app import Served
    from hotlap.serve.engine import Engine

    models: list[Served] = []
    for path in args.runs:
        loaded = load(
            path,
            checkpoint=args.checkpoint,
            device=args.device,
            precision=args.precision,
            trust_code=args.trust_code,
        )
        name = path.resolve().name
        used = {served.name for served in models}
        number = 2
        while name in used:
            name, number = f"{path.resolve().name}-{number}", number + 1
        context = context_tokens(loaded, args.context)
        models.append(Served(name, Engine(loaded, args.rows, args.queue), context))
    return models


def context_tokens(loaded: LoadedModel, asked: int | None) -> int:
    """How long a prompt and its text may be together: by default what the model saw at once in training."""
    from hotlap.model import GPT2

    trained = loaded.config.batch.sequence_tokens
    if isinstance(loaded.model, GPT2):
        trained = min(trained, loaded.model.max_tokens)
        if asked is not None and asked > trained:
            raise ConfigError(
                expected=f"--context of at most {trained}, the number of learned positions",
                found=str(asked),
                do="lower it",
            )
    return trained if asked is None else asked


def describe(served: Served) -> str:
    engine = served.engine
    cache_mb = engine.decoder.cache_bytes / 1e6
    return (
        f"{served.name}: {described_step(engine.loaded)}; {served.context_tokens:,} tokens of context;"
        f" {engine.num_rows} texts at once, cache {cache_mb:,.0f} MB; {engine.repeatability()}"
    )
