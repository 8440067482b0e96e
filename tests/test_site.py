"""The documentation site: its drawings, its links once built, and what a browser makes of it."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.browser import browser, console_complaints, needs_browser, requested_urls

ROOT = Path(__file__).parents[1]
DRAWINGS = ROOT / "docs" / "drawings"
HAS_MKDOCS = all(importlib.util.find_spec(name) for name in ("mkdocs", "material", "mkdocstrings"))
needs_mkdocs = pytest.mark.skipif(not HAS_MKDOCS, reason="mkdocs-material is not installed (make docs)")
DESKTOP, PHONE = 1280, 390


def test_the_drawings_are_those_that_the_script_draws():
    spec = importlib.util.spec_from_file_location("draw", DRAWINGS / "draw.py")
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    assert {path.name for path in DRAWINGS.glob("*.svg")} == draw.DRAWINGS.keys()
    for name, made in draw.DRAWINGS.items():
        assert (DRAWINGS / name).read_text(encoding="utf-8") == made(), f"run docs/drawings/draw.py: {name}"


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # of the theme, about its own future
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    return folder


class Page(HTMLParser):
    """What a page links to, what it loads, and the anchors that it has."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {value for name, value in attrs if name in ("id", "name") and value}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") in ("stylesheet", "icon", "preload", "preconnect"):
            self.loaded.append(given["href"])
        elif tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.loaded.append(given["src"])


@needs_mkdocs
@pytest.mark.slow
def test_every_link_of_the_site_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site):
    pages = {path: Page(path) for path in site.rglob("*.html")}
    assert {"index.html", "api.html", "commands.html", "readme.html"} <= {path.name for path in pages}
    checked = 0
    for path, page in pages.items():
        if path.name == "404.html":  # its links are from the root of a server
            continue
        assert not [url for url in page.loaded if re.match(r"(?:https?:)?//", url)], path.name
        for link in [*page.links, *page.loaded]:
            if re.match(r"[a-z]+:", link):
                continue
            target, _, anchor = unquote(link).partition("#")
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert file.exists(), f"{path.name}: {link}"
            if anchor and file in pages:
                assert anchor in pages[file].anchors, f"{path.name}: {link}"
            checked += 1
    assert checked > 1000


@needs_mkdocs
@pytest.mark.slow
def test_every_page_has_a_place_in_the_navigation(site):
    listed = set(Page(site / "index.html").links)
    assert {f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md")} - {"index.html"} <= listed


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_):
        pass


@contextmanager
def served(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@needs_mkdocs
@needs_browser
@pytest.mark.slow
def test_pages_fit_a_desk_and_a_phone_and_ask_for_nothing_foreign(site):
    with served(site) as address, browser() as driver:
        for width, is_mobile in ((DESKTOP, False), (PHONE, True)):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": is_mobile}
            driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            for name in ("index", "getting-started", "how-it-works", "recipes", "api", "commands"):
                driver.get(f"{address}/{name}.html")
                assert driver.execute_script("return document.documentElement.scrollWidth") <= width, name
                pictures = "return [...document.images].every(i => i.complete && i.naturalWidth > 0)"
                assert driver.execute_script(pictures), name
        assert [url for url in requested_urls(driver) if not url.startswith(address)] == []
        assert console_complaints(driver) == []
