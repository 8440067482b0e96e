"""`hotlap data`: prepares token shards from a corpus or your own files, verifies them, lists the corpora."""

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
from hotlap.terminal import printable

if TYPE_CHECKING:
    from hotlap.corpus.hub import HubSource
    from hotlap.corpus.prepare import ShardSettings
    from hotlap.corpus.sources import Source


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    prepare = commands.add_parser(
        "prepare",
        help="turn a corpus, or your own files, into token shards",
        description="Turn a corpus (see `hotlap data list`) or your own files and folders (.txt, .md, "
        ".html, .jsonl, .csv, .tsv, .parquet, .epub, .docx, .pdf, and archives of them) into token shards "
        "with a manifest.",
    )
    prepare.add_argument("inputs", nargs="+", metavar="CORPUS|PATH", help="a corpus, or files and folders")
    prepare.add_argument("--out", type=Path, metavar="DIR", help="where to write (printed when done)")
    prepare.add_argument(
        "--vocab",
        metavar="N|gpt2",
        help="train a vocabulary of N, or use GPT-2's (4096 for a corpus, what fits for your own files)",
    )
    prepare.add_argument("--val-fraction", metavar="F", help="fraction of documents to validate on (0.05)")
    prepare.add_argument("--shard-tokens", type=int, metavar="N", help="tokens per shard (100,000,000)")
    prepare.add_argument(
        "--tokenizer-sample-mb", type=int, metavar="MB", help="most text to train a vocabulary on (100)"
    )
    prepare.add_argument("--workers", type=int, metavar="N", help="threads (one per core)")
    prepare.add_argument("--shards", type=int, metavar="N", help="training shards, for fineweb (1)")
    prepare.add_argument("--force", action="store_true", help="replace the data in --out")
    own = prepare.add_argument_group("for your own files")
    own.add_argument(
        "--field", metavar="NAME", help="field with the text, in .jsonl, .csv, .tsv and .parquet (text)"
    )
    own.add_argument("--encoding", metavar="NAME", help="of all text files, instead of what is found in each")
    own.add_argument("--separator", metavar="TEXT", help=r"between documents in .txt and .md, such as '\n\n'")
    own.add_argument(
        "--strict", action="store_true", help="refuse what would be left out, and text that is not UTF-8"
    )
    own.add_argument("--skip-bad-files", action="store_true", help="leave out bad files that you name, too")
    own.add_argument("--skip-bad-lines", action="store_true", help="leave out and list bad lines")
    own.add_argument(
        "--keep-duplicates", action="store_true", help="keep documents in validation that repeat training"
    )
    own.add_argument("--licence", metavar="TEXT", help="license of the text, for the manifest")

    inspect = commands.add_parser("inspect", help="verify a directory of shards and print what it contains")
    inspect.add_argument("directory", type=Path, metavar="DIR")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    listing = commands.add_parser("list", help="the corpora, their licenses, and what is on this machine")
    listing.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    actions = {"prepare": run_prepare, "inspect": run_inspect, "list": run_list}
    try:
        actions[args.action](args)
    except KeyboardInterrupt:
        to_stderr("hotlap: interrupted; nothing incomplete is left, run the same command again")
        return INTERRUPTED
    return 0


def run_prepare(args: argparse.Namespace) -> None:
    from hotlap.corpus.catalog import NAMES
    from hotlap.corpus.inspect import split_line, summarize
    from hotlap.corpus.prepare import prepare
    from hotlap.data.shards import SPLITS

    if args.workers is not None and args.workers < 1:
        raise ConfigError(expected="1 worker or more", found=str(args.workers), do="leave --workers out")
    named = [name for name in args.inputs if name in NAMES]
    if not named:
        source, settings, default_directory = _own_files(args)
    elif len(args.inputs) == 1:
        source, settings, default_directory = _named_corpus(named[0], args)
    else:
        raise ConfigError(
            expected="one corpus, or files and folders",
            found=" ".join(args.inputs),
            do=f"prepare {named[0]} by itself (a folder of that name: ./{named[0]})",
        )
    directory = args.out or default_directory
    manifest = prepare(source, settings, directory, workers=args.workers, force=args.force, say=to_stderr)
    for name, count in manifest.counters.items():
        to_stderr(f"{name.replace('_', ' ')}: {count}")
    for split in SPLITS:
        _print(split_line(summarize(manifest, split)))
    _print(f"written    {directory}")


def _named_corpus(name: str, args: argparse.Namespace) -> tuple[Source | HubSource, ShardSettings, Path]:
    from hotlap.corpus.catalog import corpus_source, prepared_directory
    from hotlap.corpus.hub import HUB_CORPORA
    from hotlap.corpus.tokenizer import GPT2

    foreign = ["field", "separator", "encoding", "strict", "skip_bad_files", "skip_bad_lines", "licence"]
    foreign += ["keep_duplicates"]
    if name in HUB_CORPORA:
        foreign += ["val_fraction", "shard_tokens", "tokenizer_sample_mb", "workers"]
        args.vocab = args.vocab or GPT2
    else:
        foreign += ["shards"]
    _refuse(args, foreign, f"that applies to the corpus {name}")
    settings = _settings(args)
    num_shards = 1 if args.shards is None else args.shards
    directory = prepared_directory(name, settings.vocabulary, num_shards)
    return corpus_source(name, num_shards, to_stderr), settings, directory


def _own_files(args: argparse.Namespace) -> tuple[Source | HubSource, ShardSettings, Path]:
    from hotlap.corpus.catalog import NAMES
    from hotlap.corpus.prepare import AUTO
    from hotlap.corpus.sources import FilesSource

    _refuse(args, ["shards"], "for your own files")
    paths = [Path(name) for name in args.inputs]
    missing = next((path for path in paths if not path.exists()), None)
    if missing is not None:
        raise DataError(
            expected=f"a corpus ({', '.join(NAMES)}), a file or a folder",
            found=f"`{missing}`, which is neither",
            do="check the spelling",
        )
    args.vocab = args.vocab or AUTO
    settings = _settings(args)
    source = FilesSource(
        paths,
        field=args.field or "text",
        separator=_unescaped(args.separator),
        encoding=args.encoding,
        strict=args.strict,
        skip_bad_files=args.skip_bad_files,
        skip_bad_lines=args.skip_bad_lines,
        licence=args.licence or "unknown",
    )
    name = paths[0].absolute().name.split(".")[0]
    ending = "" if settings.vocabulary == AUTO else f"-{settings.tokenizer_name}"
    return source, settings, Path("data") / f"{name}{ending}"


def _settings(args: argparse.Namespace) -> ShardSettings:
    from hotlap.corpus.prepare import ShardSettings

    given: dict[str, Any] = {"keep_duplicates": args.keep_duplicates}
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
    return ShardSettings(**given)


def _refuse(args: argparse.Namespace, names: list[str], where: str) -> None:
    given = [f"--{name.replace('_', '-')}" for name in names if getattr(args, name) not in (None, False)]
    if given:
        raise ConfigError(expected=f"an option {where}", found=" ".join(given), do="leave it out")


def _unescaped(separator: str | None) -> str | None:
    r"""The separator with `\n`, two characters in a shell, as a newline; likewise `\t` and `\r`."""
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
        text = json.dumps(dataclasses.asdict(found), indent=1, ensure_ascii=False)
        sys.stdout.write(printable(text, lines=True) + "\n")
        return
    for line in as_lines(found):
        _print(line)


def run_list(args: argparse.Namespace) -> None:
    from hotlap.corpus.catalog import entries

    listed = entries()
    if args.json:
        sys.stdout.write(json.dumps([dataclasses.asdict(entry) for entry in listed], indent=1) + "\n")
        return
    for entry in listed:
        size = f"{entry.text_bytes / 1e6:.1f} MB" if entry.text_bytes else "200 MB per shard"
        documents = f"{entry.documents} documents, " if entry.documents else ""
        _print(f"{entry.name}: {entry.summary}")
        _print(f"    {documents}{size}; license: {entry.licence}")
        _print(f"    {'in the cache' if entry.cached else 'not in the cache'}")
        for directory in entry.prepared:
            _print(f"    prepared in {directory}")


def _print(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")
