"""`hotlap data`: prepare token shards from a corpus or one's own text, inspect them, list the corpora."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotlap.errors import INTERRUPTED, ConfigError, DataError
from hotlap.progress import to_stderr

if TYPE_CHECKING:
    from hotlap.corpus.prepare import Settings
    from hotlap.data.manifest import Manifest


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="turn a corpus, or your own files, into token shards",
        description="Turn a corpus (see `hotlap data list`) or your own files and folders (.txt, .md, "
        ".jsonl, .parquet; text also as .gz or .zst) into token shards with a manifest.",
    )
    prepare.add_argument("inputs", nargs="+", metavar="CORPUS|PATH", help="a corpus, or files and folders")
    prepare.add_argument("--out", type=Path, metavar="DIR", help="where to write (printed when done)")
    prepare.add_argument(
        "--vocab",
        metavar="N|gpt2",
        help="learn N tokens from the training text, or use GPT-2's (4096)",
    )
    prepare.add_argument("--val-fraction", metavar="F", help="share of the documents to validate on (0.05)")
    prepare.add_argument("--shard-tokens", type=int, metavar="N", help="tokens a shard (100,000,000)")
    prepare.add_argument(
        "--tokenizer-sample-mb", type=int, metavar="MB", help="most text to learn a vocabulary from (100)"
    )
    prepare.add_argument("--workers", type=int, metavar="N", help="threads (one a core)")
    prepare.add_argument("--shards", type=int, metavar="N", help="training shards to fetch, for fineweb (1)")
    prepare.add_argument("--force", action="store_true", help="replace what --out holds")
    own = prepare.add_argument_group("for your own files")
    own.add_argument("--field", metavar="NAME", help="where .jsonl and .parquet have the text (text)")
    own.add_argument(
        "--separator", metavar="TEXT", help=r"what stands between documents of .txt and .md, such as '\n\n\n'"
    )
    own.add_argument("--strict", action="store_true", help="refuse invalid UTF-8 instead of replacing it")
    own.add_argument("--skip-bad-files", action="store_true", help="count empty and binary files, go on")
    own.add_argument("--licence", metavar="TEXT", help="what to note as the licence of the text")

    inspect = commands.add_parser("inspect", help="verify a directory of shards and say what it holds")
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="for a program to read")
    listing = commands.add_parser("list", help="the corpora, their licences, and what is on this machine")
    listing.add_argument("--json", action="store_true", help="for a program to read")


def run(args: argparse.Namespace) -> int:
    actions = {"prepare": run_prepare, "inspect": run_inspect, "list": run_list}
    try:
        actions[args.action](args)
    except KeyboardInterrupt:
        to_stderr("hotlap: interrupted; nothing half-written is left, run the same command again")
        return INTERRUPTED
    return 0


def run_prepare(args: argparse.Namespace) -> None:
    from hotlap.corpus.catalogue import NAMES
    from hotlap.corpus.inspect import split_line, summarize
    from hotlap.data.shards import SPLITS

    if args.workers is not None and args.workers < 1:
        raise ConfigError(expected="1 worker or more", found=str(args.workers), do="leave --workers out")
    named = [name for name in args.inputs if name in NAMES]
    if not named:
        manifest, directory = _prepare_files(args)
    elif len(args.inputs) == 1:
        manifest, directory = _prepare_corpus(named[0], args)
    else:
        raise ConfigError(
            expected="one corpus, or files and folders",
            found=" ".join(args.inputs),
            do=f"prepare {named[0]} by itself (a folder of that name: ./{named[0]})",
        )
    for name, count in manifest.counters.items():
        to_stderr(f"{name.replace('_', ' ')}: {count}")
    for split in SPLITS:
        _print(split_line(summarize(manifest, split)))
    _print(f"written    {directory}")


def _prepare_corpus(name: str, args: argparse.Namespace) -> tuple[Manifest, Path]:
    from hotlap.corpus.catalogue import prepare_corpus, prepared_directory
    from hotlap.corpus.hub import HUB_CORPORA
    from hotlap.corpus.tokenizer import GPT2

    foreign = ["field", "separator", "strict", "skip_bad_files", "licence"]
    if name in HUB_CORPORA:
        foreign += ["val_fraction", "shard_tokens", "tokenizer_sample_mb", "workers"]
        args.vocab = args.vocab or GPT2
    else:
        foreign += ["shards"]
    _refuse(args, foreign, f"that applies to the corpus {name}")
    settings = _settings(args)
    num_shards = 1 if args.shards is None else args.shards
    default_directory = prepared_directory(name, settings.vocabulary, num_shards)
    directory = args.out or default_directory
    manifest = prepare_corpus(
        name,
        settings,
        directory,
        num_shards=num_shards,
        workers=args.workers,
        force=args.force,
        say=to_stderr,
    )
    return manifest, directory


def _prepare_files(args: argparse.Namespace) -> tuple[Manifest, Path]:
    from hotlap.corpus.catalogue import NAMES
    from hotlap.corpus.prepare import prepare
    from hotlap.corpus.sources import FilesSource

    _refuse(args, ["shards"], "for one's own files")
    paths = [Path(name) for name in args.inputs]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise DataError(
            expected=f"a corpus ({', '.join(NAMES)}), a file or a folder",
            found=f"`{missing}`, which is none of them",
            do="check the spelling",
        )
    settings = _settings(args)
    source = FilesSource(
        paths,
        field=args.field or "text",
        separator=_unescaped(args.separator),
        strict=args.strict,
        skip_bad_files=args.skip_bad_files,
        licence=args.licence or "unknown",
    )
    name = paths[0].absolute().name.split(".")[0]
    directory = args.out or Path("data") / f"{name}-{settings.tokenizer_name}"
    return prepare(
        source, settings, directory, workers=args.workers, force=args.force, say=to_stderr
    ), directory


def _settings(args: argparse.Namespace) -> Settings:
    from hotlap.corpus.prepare import Settings

    given: dict[str, Any] = {}
    if args.vocab is not None:
        given["vocabulary"] = int(args.vocab) if args.vocab.isdecimal() else args.vocab
    if args.val_fraction is not None:
        try:
            given["val_fraction"] = Fraction(args.val_fraction)
        except (ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                expected="a number such as 0.05 or 1/20 as --val-fraction",
                found=f"`{args.val_fraction}`",
                do="give one from 0 to 0.5",
            ) from error
    for name in ("shard_tokens", "tokenizer_sample_mb"):
        if getattr(args, name) is not None:
            given[name] = getattr(args, name)
    return Settings(**given)


def _refuse(args: argparse.Namespace, names: list[str], where: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)]
    if given:
        raise ConfigError(expected=f"an option {where}", found=" ".join(given), do="leave it out")


def _unescaped(separator: str | None) -> str | None:
    r"""A shell hands over `\n` as two characters."""
    if separator is None:
        return None
    for written, meant in ((r"\n", "\n"), (r"\t", "\t"), (r"\r", "\r")):
        separator = separator.replace(written, meant)
    if not separator:
        raise ConfigError(expected="a text as --separator", found="an empty one", do="leave it out")
    return separator


def run_inspect(args: argparse.Namespace) -> None:
    from hotlap.corpus.inspect import as_lines, inspect_directory

    found = inspect_directory(args.directory)
    if args.json:
        _print(json.dumps(dataclasses.asdict(found), indent=1, ensure_ascii=False))
        return
    for line in as_lines(found):
        _print(line)


def run_list(args: argparse.Namespace) -> None:
    from hotlap.corpus.catalogue import entries

    listed = entries()
    if args.json:
        _print(json.dumps([dataclasses.asdict(entry) for entry in listed], indent=1))
        return
    for entry in listed:
        size = f"{entry.text_bytes / 1e6:.1f} MB" if entry.text_bytes else "200 MB a shard"
        documents = f"{entry.documents} documents, " if entry.documents else ""
        _print(f"{entry.name}: {entry.summary}")
        _print(f"    {documents}{size}; licence: {entry.licence}")
        _print(f"    {'in the cache' if entry.cached else 'not in the cache'}")
        for directory in entry.prepared:
            _print(f"    prepared in {directory}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
