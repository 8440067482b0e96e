"""The written page in a real browser: legend, axes, tables, keyboard, dark mode, no network."""

import pytest

from hotlap.report.analysis import label_runs
from hotlap.report.page import write_report
from hotlap.runs.reader import load_runs
from tests.browser import browser, console_complaints, needs_browser, requested_urls, wait_until
from tests.synthetic_runs import make_race, make_run

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
