"""What mkdocs does beyond its defaults: pages of the repository's root, and those that may not exist yet."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
COMMANDS = "commands.md"


def on_config(config: Any) -> Any:
    there = {*ROOT_PAGES.values(), COMMANDS, *(path.name for path in Path(config["docs_dir"]).glob("*.md"))}
    nav = existing(config["nav"], there)
    # A page that nobody has given a place is found nevertheless.
    more = sorted(there - set(pages_of(nav)))
    config["nav"] = [*nav, {"More": list(more)}] if more else nav
    return config


def pages_of(nav: list[Any]) -> list[str]:
    targets = [target for entry in nav for target in entry.values()]
    return [
        page for target in targets for page in (pages_of(target) if isinstance(target, list) else [target])
    ]


def existing(nav: list[Any], there: set[str]) -> list[Any]:
    """The navigation without pages that do not exist, and without sections that are then empty."""
    kept = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            target = existing(target, there)
        elif target not in there:
            continue
        if target:
            kept.append({title: target})
    return kept


def on_files(files: Files, *, config: Any) -> Files:
    for name, page in ROOT_PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=within_site(text)))
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    for name, page in ROOT_PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({page}")
    return markdown


def within_site(text: str) -> str:
    """A page of the root with its links as the site has them; files of code are named and not linked."""
    text = re.sub(r"\]\(docs/", "](", text)
    for name, page in ROOT_PAGES.items():
        text = text.replace(f"]({name}", f"]({page}")
    return re.sub(r"\[([^]]*)\]\((?:hotlap|bench|tests|ideas)/[^)]*\)", r"\1", text)


def commands_page() -> str:
    """Every command's own help."""
    from hotlap.cli import COMMANDS as SUMMARIES
    from hotlap.cli import command_parser

    os.environ["COLUMNS"] = "88"  # whatever the width of the terminal that builds the site
    parts = ["# Commands\n\nWhat `hotlap COMMAND --help` says of each, without the settings."]
    for command, summary in SUMMARIES.items():
        parser = command_parser(command)
        if parser.takes_settings:
            parser.epilog = "settings: see `hotlap recipes show RECIPE`"
        parts.append(
            f"## hotlap {command}\n\n{summary[0].upper()}{summary[1:]}.\n\n```text\n{parser.format_help()}```"
        )
    return "\n\n".join(parts) + "\n"
