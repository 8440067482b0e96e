"""The written page in a real browser: legend, axes, tables, keyboard, dark mode, no network."""

import json
import re

import numpy as np
import pytest

from hotlap.report.analysis import label_runs
from hotlap.report.page import write_report
from hotlap.runs.reader import load_runs
from tests.browser import browser, console_complaints, needs_browser, requested_urls, wait_until
from tests.synthetic_runs import append_metrics, make_race, make_run

pytestmark = needs_browser

LOSSES = {"softcap": [3.30, 3.31, 3.32], "adamw": [3.50, 3.52, 3.51], "block-window": [3.40, 3.42, 3.41]}
EVIL = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 2'>"
VISIBLE = "[...document.querySelectorAll('#loss .scatterlayer .trace')].length"
X_TITLE = "document.querySelector('#loss .xtitle').textContent"


@pytest.fixture(scope="module")
def driver():
    with browser() as started:
        yield started


@pytest.fixture(scope="module")
def race(tmp_path_factory):
    directory = tmp_path_factory.mktemp("race")
    changes = {label: {"evaluation.target_loss": 3.35} for label in LOSSES}
    make_race(directory, LOSSES, changes, sample=EVIL)
    write_report(label_runs(load_runs([directory])), directory / "report.html", "A race")
    return (directory / "report.html").as_uri()


@pytest.fixture
def page(driver, race):
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    driver.get(race)
    wait_until(driver, "document.body.dataset.drawn")
    return driver


def click(driver, selector):
    from selenium.webdriver.common.by import By

    element = driver.find_element(By.CSS_SELECTOR, selector)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
    element.click()


def press(driver, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def first_column(driver):
    return driver.execute_script(
        "return [...document.querySelector('table.sortable').tBodies[0].rows]"
        ".map(row => row.cells[0].dataset.value)"
    )


def test_every_figure_is_drawn_without_complaint_or_request(page):
    for plot in ("loss", "target", "window", "lr", "momentum", "tokens_per_s", "memory_mib"):
        assert page.execute_script(f"return document.querySelectorAll('#{plot} .trace').length") >= 3, plot
    assert console_complaints(page) == []
    assert requested_urls(page) == []


def test_a_request_is_forbidden_by_the_page_itself(page):
    page.execute_script("fetch('http://127.0.0.1:9/').catch(() => { window.refused = true })")
    wait_until(page, "window.refused")
    assert any("Content Security Policy" in line or "violates" in line for line in console_complaints(page))
    requested_urls(page)


@pytest.fixture(scope="module")
def one_run(tmp_path_factory):
    run = make_run(tmp_path_factory.mktemp("single") / "one", steps=50, clips=True)
    append_metrics(run, [{"kind": "sample", "step": 51, "text": "The state of the Union is mending."}])
    write_report(label_runs(load_runs([run])), run / "report.html", "One run & <more>")
    return run


@pytest.fixture
def one(driver, one_run):
    """The page of a single run; the lines of its metrics by kind."""
    driver.get((one_run / "report.html").as_uri())
    wait_until(driver, "document.body.dataset.drawn")
    lines = [json.loads(line) for line in (one_run / "metrics.jsonl").read_text().splitlines()]
    return {kind: [line for line in lines if line["kind"] == kind] for kind in ("train", "validation")}


def point_at(driver, plot, part):
    """Move the mouse to a part (0 to 1) of the width of a plot, at half its height."""
    from selenium.webdriver.common.action_chains import ActionChains

    area = driver.find_element("css selector", f"#{plot} .draglayer .nsewdrag")
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    offset = round((part - 0.5) * area.rect["width"])
    ActionChains(driver).move_to_element_with_offset(area, offset, 0).perform()
    return area


def hover_lines(driver, plot):
    """The texts of the hover box: the title and a line per curve."""
    texts = f"[...document.querySelectorAll('#{plot} .hoverlayer text')].map(t => t.textContent)"
    wait_until(driver, f"{texts}.length > 1")
    return driver.execute_script(f"return {texts}")


def curve(driver, name, plot="loss"):
    return driver.execute_script(
        f"return document.getElementById('{plot}').data"
        f".find(t => t.name === '{name}' && t.hoverinfo !== 'skip').y"
    )


def test_the_hover_text_has_the_values_of_the_metrics(driver, one):
    click(driver, "[data-axis='y'][data-value='loss']")
    click(driver, "[data-axis='y'][data-value='val_loss']")
    point_at(driver, "loss", 0.61)
    title, *lines = hover_lines(driver, "loss")
    trained = next(line["loss"] for line in one["train"] if line["step"] == int(title))
    validated = next(line["val_loss"] for line in one["validation"] if line["step"] == 30)
    assert lines == [f"training : {trained:.7g} at {title}", f"softcap : {validated:.7g} at 30"]
    for plot, field in (("tokens_per_s", "tokens_per_s"), ("grad_norm", "grad_norm"), ("lr", "lr")):
        point_at(driver, plot, 0.3)
        title, text = hover_lines(driver, plot)
        value = next(line[field] for line in one["train"] if line["step"] == int(title))
        assert text == f"softcap : {value:,.7g}", (plot, title)


def test_several_seeds_show_their_mean_and_range(page):
    point_at(page, "loss", 0.5)
    _, *lines = hover_lines(page, "loss")
    assert len(lines) == len(LOSSES)
    for line in lines:
        mean, low, high = map(float, re.fullmatch(r"\S+ : ([\d.]+) \(([\d.]+) to ([\d.]+)\)", line).groups())
        assert low < mean < high


def test_smoothing_is_off_until_asked_for(driver, one):
    from selenium.webdriver.common.keys import Keys

    measured = [line["loss"] for line in one["train"]]
    click(driver, "[data-axis='y'][data-value='loss']")
    wait_until(driver, "document.querySelector('#loss .ytitle').textContent.startsWith('training')")
    assert curve(driver, "softcap") == pytest.approx(measured, rel=1e-8)
    driver.find_element("css selector", "#smoothing").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    wait_until(driver, "document.getElementById('loss').data.length === 2")
    assert driver.find_element("css selector", "#smoothing-width").text == "2 %"
    smooth = curve(driver, "softcap")
    assert np.abs(np.diff(smooth, 2)).mean() < 0.5 * np.abs(np.diff(measured, 2)).mean()
    assert np.mean(smooth) == pytest.approx(np.mean(measured), rel=0.01)
    # The measured values stay in the hover text, and as a faint line.
    point_at(driver, "loss", 0.5)
    title, text = hover_lines(driver, "loss")
    at = int(title) - 1
    assert text == f"softcap : {smooth[at]:.7g}, unsmoothed {measured[at]:.7g}"
    assert driver.execute_script(
        "return document.getElementById('loss').data.find(t => t.hoverinfo === 'skip').y"
    ) == pytest.approx(measured, rel=1e-8)
    driver.find_element("css selector", "#smoothing").send_keys(Keys.HOME)
    wait_until(driver, "document.getElementById('loss').data.length === 1")
    assert curve(driver, "softcap") == pytest.approx(measured, rel=1e-8)


def axes(driver, axis="xaxis"):
    """{plot: its axis} of every figure that is drawn over the run's axis."""
    plots = ("loss", "tokens_per_s", "memory_mib", "grad_norm", "lr", "momentum", "window")
    return {
        plot: driver.execute_script(
            f"const a = document.getElementById('{plot}')._fullLayout?.{axis};"
            "return a && {type: a.type, range: a.range, title: a.title.text, auto: a.autorange}"
        )
        for plot in plots
    }


def test_axes_become_logarithmic_and_keep_their_part(driver, one):
    click(driver, "[data-log='y']")
    wait_until(driver, "document.getElementById('loss')._fullLayout.yaxis.type === 'log'")
    assert {plot: axis["type"] for plot, axis in axes(driver, "yaxis").items()} == {
        **dict.fromkeys(axes(driver), "linear"),
        "loss": "log",
    }
    low, high = axes(driver, "yaxis")["loss"]["range"]
    assert 2 < 10**low < 3.5
    assert 4 < 10**high < 7
    click(driver, "[data-log='x']")
    wait_until(driver, "document.getElementById('window')._fullLayout.xaxis.type === 'log'")
    assert {axis["type"] for axis in axes(driver).values()} == {"log"}
    click(driver, "[data-log='x']")
    wait_until(driver, "document.getElementById('window')._fullLayout.xaxis.type === 'linear'")
    assert console_complaints(driver) == []


def test_figures_over_the_same_axis_zoom_together(driver, one):
    from selenium.webdriver.common.action_chains import ActionChains

    area = point_at(driver, "lr", 0.25)
    width = area.rect["width"]
    ActionChains(driver).click_and_hold().move_by_offset(round(width / 2), 0).release().perform()
    wait_until(driver, "document.getElementById('loss')._fullLayout.xaxis.autorange !== true")
    ranges = {plot: axis["range"] for plot, axis in axes(driver).items()}
    start, end = ranges["lr"]
    assert start == pytest.approx(12.5, abs=3)
    assert end == pytest.approx(37.5, abs=3)
    assert all(range_ == pytest.approx([start, end]) for range_ in ranges.values()), ranges
    low, high = axes(driver, "yaxis")["loss"]["range"]
    assert high - low < 2  # fitted to what is left
    # The other axis begins with all of it, and a double click brings that back.
    ActionChains(driver).double_click(point_at(driver, "tokens_per_s", 0.5)).perform()
    wait_until(driver, "document.getElementById('lr')._fullLayout.xaxis.autorange === true")
    assert {axis["auto"] for axis in axes(driver).values()} == {True}
    click(driver, "[data-last='0.1']")
    wait_until(driver, "document.getElementById('lr')._fullLayout.xaxis.autorange !== true")
    assert axes(driver)["memory_mib"]["range"] == pytest.approx([45, 50])
    click(driver, "[data-axis='x'][data-value='train_s']")
    wait_until(driver, f"{X_TITLE} === 'training time in seconds'")
    assert {axis["title"] for axis in axes(driver).values()} == {"training time in seconds"}
    assert axes(driver)["memory_mib"]["range"] == pytest.approx([4.5, 5.0])
    assert console_complaints(driver) == []


def test_values_can_be_read_with_the_keyboard(driver, one):
    from selenium.webdriver.common.keys import Keys

    driver.execute_script("document.getElementById('lr').focus()")
    press(driver, Keys.END)
    press(driver, Keys.ARROW_LEFT)
    said = "document.getElementById('readout').textContent"
    wait_until(driver, f"{said}.startsWith('49, ')")
    assert driver.execute_script(f"return {said}") == f"49, softcap : {one['train'][48]['lr']:.7g}"
    assert hover_lines(driver, "lr")[0] == "49"


def test_the_theme_is_toggled_and_remembered(page):
    def ground():
        return page.execute_script("return getComputedStyle(document.body).backgroundColor")

    assert ground() == "rgb(255, 255, 255)"
    click(page, "[data-theme-toggle]")
    assert ground() == "rgb(20, 23, 28)"
    dark_ink = "document.querySelector('#loss .xtitle').style.fill === 'rgb(232, 234, 237)'"
    wait_until(page, dark_ink)
    page.refresh()
    wait_until(page, "document.body.dataset.drawn")
    assert ground() == "rgb(20, 23, 28)"
    wait_until(page, dark_ink)
    assert page.find_element("css selector", "[data-theme-toggle]").get_attribute("aria-pressed") == "true"
    click(page, "[data-theme-toggle]")
    assert ground() == "rgb(255, 255, 255)"
    assert page.execute_script("return localStorage.length") == 0  # it follows the system again


def test_the_picture_is_saved_with_title_size_and_hardware(driver, one, tmp_path):
    import matplotlib.image
    from selenium.webdriver.support.ui import WebDriverWait

    behavior = {"behavior": "allow", "downloadPath": str(tmp_path)}
    driver.execute_cdp_cmd("Browser.setDownloadBehavior", behavior)
    click(driver, "[data-save-picture]")
    title = driver.execute_script("return picture().layout.title")
    assert title["text"] == "One run &amp; &lt;more&gt;"
    assert title["subtitle"]["text"] == (
        "pico · 1.2 M parameters · A processor &lt;of note&gt; · float32 · 2026-01-01"
    )
    file = tmp_path / "One-run-more-.png"
    WebDriverWait(driver, 30).until(lambda _: file.is_file(), "no picture was saved")
    pixels = matplotlib.image.imread(file)
    assert pixels.shape[:2] == (1350, 2400)
    blue = np.abs(pixels[..., :3] - np.array([0, 0x72, 0xB2]) / 255).max(axis=2) < 0.01
    assert blue.sum() > 2000  # the curve
    assert console_complaints(driver) == []
    assert requested_urls(driver) == []


def test_samples_show_what_changed_when_asked(driver, one):
    strong = driver.find_element("css selector", ".samples del")
    assert strong.get_property("textContent") == " strong."
    assert not strong.is_displayed()
    assert driver.find_element("css selector", ".samples ins").text.strip() == "mending."
    click(driver, "[data-marks]")
    assert strong.is_displayed()
    click(driver, "[data-marks]")
    assert not strong.is_displayed()


def test_samples_stay_text(page):
    assert page.execute_script("return window.attacked") is None
    assert page.execute_script("return document.querySelector('pre').textContent") == EVIL


def test_a_legend_click_hides_the_series_everywhere_and_brings_it_back(page):
    before = page.execute_script(f"return {VISIBLE}")
    click(page, ".legend [data-label='adamw']")
    wait_until(page, f"{VISIBLE} === {before - 2}")  # its line and its band
    hidden = page.execute_script(
        "return ['loss', 'target', 'lr'].map(id => document.getElementById(id).data"
        ".filter(t => t.visible === false).every(t => t.meta === 'adamw'))"
    )
    assert hidden == [True, True, True]
    assert page.execute_script("return document.querySelectorAll('#target .points path').length") == 6
    click(page, ".legend [data-label='adamw']")
    wait_until(page, f"{VISIBLE} === {before}")


def test_the_axes_switch_and_hidden_series_stay_hidden(page):
    assert page.execute_script(f"return {X_TITLE}") == "steps"
    click(page, ".legend [data-label='softcap']")
    click(page, "[data-axis='x'][data-value='train_s']")
    wait_until(page, f"{X_TITLE} === 'training time in seconds'")
    click(page, "[data-axis='y'][data-value='val_bpb']")
    wait_until(page, "document.querySelector('#loss .ytitle').textContent === 'bits per byte'")
    assert page.execute_script(f"return {VISIBLE}") == 4


def test_the_table_sorts_both_ways(page):
    assert first_column(page) == list(LOSSES)
    header = "table.sortable thead th:nth-child(4) button"  # final loss
    click(page, header)
    assert first_column(page) == ["softcap", "block-window", "adamw"]
    click(page, header)
    assert first_column(page) == ["adamw", "block-window", "softcap"]
    sorts = page.execute_script(
        "return [...document.querySelector('table.sortable thead tr').cells]"
        ".map(header => header.getAttribute('aria-sort'))"
    )
    assert sorts[3] == "descending"
    assert set(sorts[:3] + sorts[4:]) == {"none"}


def test_unknown_values_sort_last_both_ways(page):
    header = "table.sortable thead th:nth-last-child(4) button"  # p (Holm): the first recipe has none
    for _ in range(2):
        click(page, header)
        assert first_column(page)[-1] == "softcap"


def test_everything_works_from_the_keyboard(page):
    from selenium.webdriver.common.keys import Keys

    focused = "document.activeElement.dataset"
    wanted = [("label", "adamw"), ("value", "val_bpb"), ("value", "tokens")]
    for _ in range(40):
        press(page, Keys.TAB)
        data = page.execute_script(f"return {{...{focused}}}")
        if wanted and data.get(wanted[0][0]) == wanted[0][1]:
            press(page, Keys.SPACE if len(wanted) % 2 else Keys.ENTER)
            wanted.pop(0)
        if page.execute_script("return !!document.activeElement.closest('.sortable thead')"):
            break
    assert wanted == []
    press(page, Keys.ENTER)
    assert first_column(page) == sorted(LOSSES)
    wait_until(page, f"{X_TITLE} === 'training tokens'")
    assert page.execute_script(f"return {VISIBLE}") == 4


def test_figures_follow_into_the_dark(page):
    def ink():
        return page.execute_script("return document.querySelector('#loss .xtitle').style.fill")

    light = ink()
    page.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    wait_until(page, f"document.querySelector('#loss .xtitle').style.fill !== '{light}'")
    assert page.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 28)"


def test_a_phone_scrolls_down_only(driver, race):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        driver.get(race)
        wait_until(driver, "document.body.dataset.drawn")
        assert driver.execute_script("return document.documentElement.scrollWidth") == 360
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_single_run_has_no_legend_and_no_target(driver, tmp_path):
    run = make_run(tmp_path / "one")
    write_report(label_runs(load_runs([run])), tmp_path / "one.html", "one")
    driver.get((tmp_path / "one.html").as_uri())
    wait_until(driver, "document.body.dataset.drawn")
    assert driver.execute_script("return document.querySelector('.legend')") is None
    assert driver.execute_script("return document.getElementById('target').closest('section').hidden")
    assert console_complaints(driver) == []
