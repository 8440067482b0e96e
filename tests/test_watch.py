import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

import hotlap
from hotlap.cli import dispatch
from hotlap.errors import ReportError
from hotlap.files import atomic_directory
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.watched import WatchedRace
from hotlap.report.curves import MOST_STYLES
from hotlap.report.folder import WatchedFolder
from hotlap.report.live import MAX_CONNECTIONS, LiveHandler, LiveServer, WatchedRun
from hotlap.runs.reader import load_run
from tests.browser import browser, console_complaints, needs_browser, requested_urls, wait_until
from tests.command import complaint
from tests.command import hotlap as run_hotlap
from tests.synthetic_runs import append_metrics, make_run, metric_lines


@pytest.fixture
def run(tmp_path):
    directory = make_run(tmp_path / "going", status=None)
    lines = metric_lines(steps=50, final_loss=3.3)
    (directory / "metrics.jsonl").write_text("")
    append_metrics(directory, lines[:20])
    return directory


@contextmanager
def serving(watched):
    with LiveServer(watched) as started:
        thread = threading.Thread(target=started.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield started
        finally:
            started.shutdown()
            thread.join()


@pytest.fixture
def server(run):
    with serving(WatchedRun(run)) as started:
        yield started


def get(server, path, host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_the_page_may_ask_its_own_server_and_no_other(server):
    status, body = get(server, "/")
    assert status == 200
    assert b"connect-src 'self'" in body
    assert b'data-live="/news.json"' in body
    assert get(server, "/elsewhere")[0] == 404


def test_news_comes_when_there_is_some(server, run):
    status, body = get(server, "/news.json?version=")
    assert status == 200
    first = json.loads(body)
    assert first["figures"]["loss"]["loss"]["step"]["data"][-1]["x"][-1] == 18
    assert get(server, f"/news.json?version={first['version']}") == (204, b"")
    append_metrics(run, metric_lines(steps=50, final_loss=3.3)[20:30])
    status, body = get(server, f"/news.json?version={first['version']}")
    assert status == 200
    assert json.loads(body)["figures"]["loss"]["loss"]["step"]["data"][-1]["x"][-1] == 27


def test_a_damaged_file_is_news_too(server, run):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("oops\n")
    status, body = get(server, "/news.json")
    assert status == 200
    assert "metrics.jsonl:21" in json.loads(body)["error"]
    assert get(server, "/")[0] == 500


def test_only_this_machine_gets_an_answer(server):
    assert server.socket.getsockname()[0] == "127.0.0.1"
    others = {"127.0.0.2"} | {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family == socket.AF_INET and address.address != "127.0.0.1"
    }
    for address in others:
        with pytest.raises(OSError, match=r"refused|unreachable|timed out|assign"):
            socket.create_connection((address, server.server_port), timeout=2).close()


def test_a_foreign_host_name_that_points_here_is_refused(server):
    assert get(server, "/news.json", host=f"evil.example:{server.server_port}")[0] == 403
    assert get(server, "/news.json", host=f"localhost:{server.server_port}")[0] == 200


def test_connections_that_say_nothing_end_and_are_few(run, monkeypatch):
    monkeypatch.setattr(LiveHandler, "timeout", 0.2)
    with serving(WatchedRun(run)) as server:
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(100)]
        for connection in silent:
            connection.settimeout(30)
            assert threading.active_count() <= before + MAX_CONNECTIONS
        assert [connection.recv(1) for connection in silent] == [b""] * len(silent)  # closed by the server
        for connection in silent:
            connection.close()
        assert get(server, "/")[0] == 200


def test_a_race_is_watched_with_the_runs_that_train_elsewhere(tmp_path):
    plan = make_plan(["softcap", "adamw"], "pico", 2, {"schedule.steps": 50})
    directory = RaceDirectory(tmp_path / "race")
    directory.write_plan(plan)
    with pytest.raises(ReportError, match="a race with a run that has begun"):
        LiveServer(WatchedRace(directory.path))
    make_run(directory.path / "softcap-seed0")
    far = make_run(directory.path / ".live" / "adamw-seed0", recipe="adamw", status=None)
    server = LiveServer(WatchedRace(directory.path))
    try:
        (softcap, adamw), notes = (list(part) for part in server.watched.read({}))
        assert (softcap, adamw) == ("softcap", "adamw")
        assert notes == [
            "1 of 4 runs have ended",
            "training: adamw-seed0 on A processor <of note>, step 50 of 50",
        ]
        before = server.version({})
        append_metrics(far, metric_lines(steps=50, final_loss=3.3)[:1])
        assert server.version({}) != before
        with atomic_directory(directory.path / "adamw-seed0") as work:
            work.rmdir()
            make_run(work, recipe="adamw")
            assert server.watched.read({})[1][0] == "1 of 4 runs have ended"
        shutil.rmtree(far)
        assert server.watched.read({})[1] == ["2 of 4 runs have ended"]
    finally:
        server.server_close()


def test_wrong_input(tmp_path, run, server):
    assert "no directory" in complaint(run_hotlap("watch", str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ReportError, match=r"without config\.json"):
        dispatch(["watch", str(tmp_path / "empty")])
    for port in (server.server_port, 99999):
        with pytest.raises(ReportError, match="a port to listen on"):
            LiveServer(WatchedRun(run), port)


def test_the_command_prints_its_address_and_stops_when_interrupted(run):
    with subprocess.Popen(
        [sys.executable, "-m", "hotlap", "watch", str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(hotlap.__file__).parents[1],
    ) as process:
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("GET", "/news.json")
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert "stopped" in out
    assert err == ""


@pytest.fixture
def folder(tmp_path):
    """Two runs and a race of two, of which one is training, and one whose files are damaged."""
    runs = tmp_path / "runs"
    make_run(runs / "first", started="2026-01-01T00:00:00Z", final_loss=3.3)
    make_run(runs / "second", started="2026-01-02T00:00:00Z", final_loss=3.2, recipe="adamw")
    for seed in (0, 1):
        make_run(runs / "race" / f"softcap-{seed}", seed=seed, started=f"2026-01-0{3 + seed}T00:00:00Z")
    damaged = make_run(runs / "damaged")
    (damaged / "metrics.jsonl").write_text("oops\n")
    make_run(runs / ".hidden" / "elsewhere")
    return runs


def drawn(folder, **query):
    return list(WatchedFolder(folder).read(query)[0])


def test_a_folder_draws_what_is_ticked_and_reads_nothing_else(folder):
    assert drawn(folder, run=["second", "race/softcap-1"]) == ["race/softcap-1", "second"]  # newest first
    assert drawn(folder, run=[""]) == []
    make_run(folder.parent / "outside")
    assert drawn(folder, run=["../outside", "gone", "damaged", ".hidden/elsewhere"]) == []
    both = WatchedFolder(folder).read({"run": ["race/softcap-0", "race/softcap-1"], "by": ["recipe"]})[0]
    assert {label: len(runs) for label, runs in both.items()} == {"softcap": 2}


def test_before_any_tick_a_folder_draws_what_trains_or_else_the_newest(folder):
    assert drawn(folder) == ["race/softcap-1"]
    make_run(folder / "going", status=None, started="2025-01-01T00:00:00Z")
    assert drawn(folder) == ["going"]


def test_a_folder_lists_every_run_and_says_which_cannot_be_read(folder):
    watched = WatchedFolder(folder)
    names = re.findall(r'data-run="([^"]*)"( checked)?( disabled)?', watched.picker({"run": ["first"]}))
    assert names == [
        ("race/softcap-1", "", ""),
        ("race/softcap-0", "", ""),
        ("second", "", ""),
        ("first", " checked", ""),
        ("damaged", "", " disabled"),
    ]
    assert any("damaged" in note and "metrics.jsonl:1" in note for note in watched.read({})[1])


def test_more_runs_than_colors_are_named(folder):
    for number in range(MOST_STYLES):
        make_run(folder / f"more-{number}")
    names = [f"more-{number}" for number in range(MOST_STYLES)]
    runs, notes = WatchedFolder(folder).read({"run": [*names, "first"]})
    assert len(runs) == MOST_STYLES
    assert notes[-1].startswith(f"{MOST_STYLES} of {MOST_STYLES + 1} ticked runs are drawn")


def test_a_folder_reads_again_only_what_has_changed(folder, monkeypatch):
    watched = WatchedFolder(folder)
    watched.read({})
    read = []
    monkeypatch.setattr(
        "hotlap.report.folder.load_run", lambda path: read.append(path.name) or load_run(path)
    )
    append_metrics(folder / "first", [{"kind": "warning", "step": 50, "text": "new"}])
    make_run(folder / "third")
    before = watched.read({"run": ["first"]})
    assert sorted(read) == ["first", "third"]
    assert watched.read({"run": ["first"]}) == before
    assert len(read) == 2


def test_news_of_a_folder_tells_of_ticks_and_of_runs_that_begin(folder):
    with serving(WatchedFolder(folder)) as server:
        first = json.loads(get(server, "/news.json?run=first&version=")[1])
        assert get(server, f"/news.json?run=first&version={first['version']}")[0] == 204
        other = json.loads(get(server, f"/news.json?run=first&run=second&version={first['version']}")[1])
        curves = other["figures"]["loss"]["val_loss"]["step"]["data"]
        assert [curve["meta"] for curve in curves] == ["second", "first"]
        nothing = json.loads(get(server, "/news.json?run=&version=")[1])
        assert nothing["fragments"]["verdict"] == "<p>No run is ticked.</p>"
        assert nothing["figures"]["loss"] is None
        make_run(folder / "third")
        news = json.loads(get(server, f"/news.json?run=first&version={first['version']}")[1])
        assert 'data-run="third"' in news["fragments"]["picker"]
        assert b'data-run="third"' in get(server, "/?run=")[1]
        shutil.rmtree(folder)
        assert "no directory" in json.loads(get(server, "/news.json?run=first")[1])["error"]


@needs_browser
def test_ticked_runs_are_drawn_together_while_they_train(folder):
    from selenium.webdriver.common.keys import Keys

    going = make_run(folder / "going", status=None, started="2026-02-01T00:00:00Z")
    lines = metric_lines(steps=50, final_loss=3.3)
    (going / "metrics.jsonl").write_text("")
    append_metrics(going, lines[:20])
    validations = "document.getElementById('loss').data.filter(t => t.name !== 'training')"
    curves = f"{validations}.map(t => t.meta)"
    last = f"{validations}.find(t => t.meta === 'going').x.at(-1)"
    with serving(WatchedFolder(folder)) as server, browser() as driver:

        def box(name):
            return driver.find_element("css selector", f"[data-run='{name}']")

        driver.get(server.url)
        wait_until(driver, "document.body.dataset.drawn")
        assert driver.execute_script(f"return {curves}") == ["going"]
        box("first").click()
        wait_until(driver, f"{curves}.length === 2")
        box("second").send_keys(Keys.SPACE)
        wait_until(driver, f"{curves}.join() === 'going,second,first'")
        assert driver.execute_script("return document.activeElement.dataset.run") == "second"
        assert "compared with" in driver.find_element("css selector", "[data-fragment=verdict]").text
        append_metrics(going, lines[20:])
        wait_until(driver, f"{last} === 50")
        make_run(folder / "third", started="2026-03-01T00:00:00Z")
        wait_until(driver, "document.querySelector('[data-run=third]')")
        assert not box("third").is_selected()
        assert driver.execute_script("return document.activeElement.dataset.run") == "second"
        driver.find_element("css selector", "#filter").send_keys("race/")
        shown = "[...document.querySelectorAll('[data-run]')].filter(b => !b.closest('tr').hidden)"
        assert driver.execute_script(f"return {shown}.map(b => b.dataset.run)") == [
            "race/softcap-1",
            "race/softcap-0",
        ]
        driver.find_element("css selector", "[data-tick=none]").click()
        wait_until(driver, "document.getElementById('loss').closest('section').hidden")
        driver.find_element("css selector", "[data-tick=listed]").click()
        wait_until(driver, f"{curves}.join() === 'race/softcap-1,race/softcap-0'")
        driver.find_element("css selector", "#by-recipe").click()
        wait_until(driver, f"new Set({curves}).size === 1 && {curves}[0] === 'softcap'")
        driver.refresh()
        wait_until(driver, "document.body.dataset.drawn")
        assert driver.execute_script(f"return [...new Set({curves})]") == ["softcap"]
        assert box("race/softcap-0").is_selected()
        assert driver.find_element("css selector", "#by-recipe").is_selected()
        assert console_complaints(driver) == []
        assert all(url.startswith(server.url) for url in requested_urls(driver))


@needs_browser
def test_the_curve_grows_in_place_while_the_run_goes_on(server, run):
    lines = metric_lines(steps=50, final_loss=3.3)
    points = "document.getElementById('loss').data.at(-1).x.length"
    last = "document.getElementById('loss').data.at(-1).x.at(-1)"
    with browser() as driver:
        driver.get(server.url)
        wait_until(driver, "document.body.dataset.drawn")
        assert wait_until(driver, last) == 10
        before = driver.execute_script(f"return {points}")
        # The drawing is changed, not replaced: the same element, and a zoom that holds.
        driver.execute_script("document.querySelector('#loss .main-svg').dataset.kept = 'yes'")
        driver.execute_script("Plotly.relayout('lr', {'xaxis.range': [2, 9]})")
        for line in lines[20:]:
            append_metrics(run, [line])
        wait_until(driver, f"{last} === 50")
        assert driver.execute_script(f"return {points}") > before
        assert driver.execute_script("return document.querySelector('#loss .main-svg').dataset.kept") == "yes"
        assert driver.execute_script("return document.getElementById('lr').layout.xaxis.range") == [2, 9]
        wait_until(driver, "document.querySelector('.facts').textContent.includes('50 of 50')")
        assert "The state of the Union" in driver.execute_script(
            "return document.querySelector('pre').textContent"
        )
        assert console_complaints(driver) == []
        urls = requested_urls(driver)
        assert f"{server.url}news.json?version=" in urls
        assert all(url.startswith(server.url) for url in urls)
