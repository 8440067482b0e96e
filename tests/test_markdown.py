"""All Markdown of the repository: links lead somewhere, and lines are short enough to read as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WIDTH = 100
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def prose(page: Path) -> list[tuple[int, str]]:
    """The numbered lines outside code blocks."""
    found, is_code = [], False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code:
            found.append((number, line))
    return found


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the site name them."""
    headings = [line.lstrip("#").strip() for _, line in prose(page) if re.match(r"#+ ", line)]
    plain = [re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip()) for heading in plain}


def links(page: Path) -> list[str]:
    text = "\n".join(re.sub(r"`[^`]*`", "", line) for _, line in prose(page))
    return re.findall(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page):
    for link in links(page):
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            assert re.match(r"https?://[\w.-]+", link), link
            continue
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(file), f"{page.name}: {link}"


def test_links_are_found_at_all():
    assert sum(len(links(page)) for page in PAGES) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_prose_fit(page):
    for number, line in prose(page):
        is_table_or_picture = line.startswith(("|", "![", "<"))
        without_links = re.sub(r"\(?https?://\S+", "", line)
        assert is_table_or_picture or len(without_links) <= WIDTH, f"{page.name}:{number}"
