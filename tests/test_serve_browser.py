"""The page of `hotlap serve` in a real browser: type, watch, point at tokens, compare, from the keyboard."""

import pytest

from tests.browser import browser, console_complaints, needs_browser, requested_urls, wait_until
from tests.serving import running

pytestmark = needs_browser

TEXT = "document.querySelector('.text').textContent"
TOKENS = "[...document.querySelectorAll('.token')].map(token => token.textContent)"
TOOLTIP = "document.getElementById('alternatives')"


@pytest.fixture(scope="module")
def server():
    with running(names=("lap", "other")) as started:
        yield started


@pytest.fixture(scope="module")
def driver():
    with browser() as started:
        yield started


@pytest.fixture
def page(driver, server):
    driver.get(server.url)
    wait_until(driver, "document.body.dataset.ready")
    yield driver
    assert console_complaints(driver) == []
    assert all(url.startswith(server.url) for url in requested_urls(driver))


def press(driver, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(driver).send_keys(*keys).perform()


def slide(driver, name, value):
    driver.execute_script(
        "const slider = document.getElementById(arguments[0]); slider.value = arguments[1];"
        "slider.dispatchEvent(new Event('input', {bubbles: true}))",
        name,
        value,
    )


def write(driver, text, **sliders):
    """Type a start and write with Ctrl-Enter; the number of times that something was written before."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    for name, value in sliders.items():
        slide(driver, name, value)
    before = driver.execute_script("return Number(document.body.dataset.written || 0)")
    driver.find_element(By.ID, "prompt").send_keys(text, Keys.CONTROL, Keys.ENTER)
    return before


def written(driver, before):
    wait_until(driver, f"Number(document.body.dataset.written) === {before + 1}")


def test_two_models_write_side_by_side_what_the_api_writes(page, server):
    slide(page, "top_k", 0)
    page.execute_script("document.getElementById('seed').value = '7'")
    before = write(page, "time people", max_tokens=40, temperature=0.9)
    written(page, before)
    _, answer = server.complete(prompt="time people", seed=7, max_tokens=40, temperature=0.9)
    texts = page.execute_script("return [...document.querySelectorAll('.text')].map(t => t.textContent)")
    assert texts == ["time people" + answer["choices"][0]["text"]] * 2
    headings = page.execute_script("return [...document.querySelectorAll('h2')].map(h => h.textContent)")
    assert [heading.split()[0] for heading in headings] == ["lap", "other"]
    assert "40 tokens" in page.execute_script("return document.querySelector('.figures').textContent")
    lefts = page.execute_script(
        "return [...document.querySelectorAll('.text')].map(t => t.getBoundingClientRect().left)"
    )
    assert lefts[0] < lefts[1]


def test_pointing_at_a_token_shows_its_probability_and_the_alternatives(page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    written(page, write(page, "law", max_tokens=20, temperature=1))
    token = page.find_elements(By.CLASS_NAME, "token")[3]
    ActionChains(page).move_to_element(token).perform()
    wait_until(page, f"!{TOOLTIP}.hidden")
    rows = page.execute_script(
        f"return [...{TOOLTIP}.querySelectorAll('tr')].map(row => [row.className, row.cells[1].textContent])"
    )
    assert len(rows) in (8, 9)
    assert [name for name, _ in rows].count("drawn") == 1
    shares = [float(share.removesuffix(" %")) for _, share in rows]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.5
    ActionChains(page).move_to_element(page.find_element(By.TAG_NAME, "h1")).perform()
    wait_until(page, f"{TOOLTIP}.hidden")


def test_sliders_change_the_text(page):
    written(page, write(page, "peace", max_tokens=30, top_k=1))
    assert page.execute_script("return document.getElementById('top_k-shown').textContent") == "1"
    greedy = page.execute_script(f"return {TEXT}")
    before = page.execute_script("return Number(document.body.dataset.written)")
    page.execute_script("document.getElementById('again').click()")
    written(page, before)
    assert page.execute_script(f"return {TEXT}") == greedy  # the likeliest token each time, with any seed
    slide(page, "top_k", 0)
    slide(page, "temperature", 2)
    page.execute_script("document.getElementById('again').click()")
    written(page, before + 1)
    assert page.execute_script(f"return {TEXT}") != greedy


def test_everything_from_the_keyboard_and_a_text_stops_at_escape(page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    before = write(page, "power", max_tokens=500)
    wait_until(page, f"{TOKENS}.length > 3")
    press(page, Keys.ESCAPE)
    written(page, before)
    assert "stopped" in page.execute_script("return document.querySelector('.figures').textContent")
    assert page.execute_script(f"return {TOKENS}.length") < 2 * 500
    for _ in range(20):
        if page.execute_script("return document.activeElement.classList.contains('token')"):
            break
        press(page, Keys.TAB)
    first = page.execute_script("return document.activeElement.textContent")
    wait_until(page, f"!{TOOLTIP}.hidden")
    press(page, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    tokens = page.execute_script(
        "return [...document.activeElement.parentElement.querySelectorAll('.token')].map(t => t.textContent)"
    )
    assert tokens[0] == first
    assert page.execute_script("return document.activeElement.textContent") == tokens[2]
    press(page, Keys.ESCAPE)
    wait_until(page, f"{TOOLTIP}.hidden")
    slide(page, "max_tokens", 10)
    before = page.execute_script("return Number(document.body.dataset.written)")
    ActionChains(page).key_down(Keys.ALT).send_keys("r").key_up(Keys.ALT).perform()
    written(page, before)


def test_text_of_a_model_stays_text(page):
    evil = "<img src=x onerror='window.attacked = 1'><script>window.attacked = 2</script>"
    written(page, write(page, evil, max_tokens=10))
    assert page.execute_script(f"return {TEXT}").startswith(evil)
    assert page.execute_script("return window.attacked") is None


def test_a_phone_scrolls_down_only(page, server):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        page.get(server.url)
        wait_until(page, "document.body.dataset.ready")
        written(page, write(page, "labor " * 20, max_tokens=40))
        assert page.execute_script("return document.documentElement.scrollWidth") == 360
        tops = page.execute_script(
            "return [...document.querySelectorAll('.text')].map(t => t.getBoundingClientRect().top)"
        )
        assert tops[0] < tops[1]
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_token_is_asked_for_and_kept_for_the_visit(driver):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    with running(token="secret") as server:
        driver.get(server.url)
        wait_until(driver, "!document.getElementById('token-field').hidden")
        assert [line for line in console_complaints(driver) if "401" not in line] == []
        driver.find_element(By.ID, "token").send_keys("secret", Keys.ENTER)
        wait_until(driver, "document.body.dataset.written")
        assert driver.execute_script(f"return {TOKENS}.length") > 0
        driver.get(server.url)
        wait_until(driver, "document.body.dataset.ready")
        assert console_complaints(driver) == []
        requested_urls(driver)


def test_the_page_may_load_nothing_from_elsewhere(page, server):
    page.execute_script("fetch('http://127.0.0.1:9/').catch(() => { window.refused = true })")
    wait_until(page, "window.refused")
    assert any("Content Security Policy" in line or "violates" in line for line in console_complaints(page))
    requested_urls(page)
