import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

import hotlap
from hotlap.errors import ReportError
from hotlap.files import atomic_directory
from hotlap.race.directory import RaceDirectory
from hotlap.race.plan import make_plan
from hotlap.race.watched import WatchedRace
from hotlap.report.live import MAX_CONNECTIONS, LiveHandler, LiveServer, WatchedRun
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


@pytest.fixture
def server(run):
    with LiveServer(WatchedRun(run)) as started:
        thread = threading.Thread(target=started.serve_forever, args=(0.05,))
        thread.start()
        yield started
        started.shutdown()
        thread.join()


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
    with LiveServer(WatchedRun(run)) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        before = threading.active_count()
        silent = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(100)]
        for connection in silent:
            connection.settimeout(30)
            assert threading.active_count() <= before + MAX_CONNECTIONS
        assert [connection.recv(1) for connection in silent] == [b""] * len(silent)  # closed by the server
        for connection in silent:
            connection.close()
        assert get(server, "/")[0] == 200
        server.shutdown()
        thread.join()


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
        (softcap, adamw), notes = (list(part) for part in server.watched.read())
        assert (softcap, adamw) == ("softcap", "adamw")
        assert notes == [
            "1 of 4 runs have ended",
            "training: adamw-seed0 on A processor <of note>, step 50 of 50",
        ]
        before = server.version()
        append_metrics(far, metric_lines(steps=50, final_loss=3.3)[:1])
        assert server.version() != before
        with atomic_directory(directory.path / "adamw-seed0") as work:
            work.rmdir()
            make_run(work, recipe="adamw")
            assert server.watched.read()[1][0] == "1 of 4 runs have ended"
        shutil.rmtree(far)
        assert server.watched.read()[1] == ["2 of 4 runs have ended"]
    finally:
        server.server_close()


def test_wrong_input(tmp_path, run, server):
    assert "config.json" in complaint(run_hotlap("watch", str(tmp_path / "nowhere")))
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
