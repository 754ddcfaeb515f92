"""Web pages of other origins, in a real browser, against a running memd: what they get to see and to do."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
from daemon_process import DaemonProcess, ask, wait_until
from page_browser import chromium
from playwright.sync_api import Browser, Page
from raw_wire import RawUpstream, answer, answering, raw_upstream

if chromium() is None:
    pytest.skip("there is no Chromium; on Debian and Ubuntu: apt install chromium", allow_module_level=True)

LOADS = {
    "fetch": "url => fetch(url, {mode: 'no-cors'}).then(() => 'answered', () => 'refused')",
    "fetch with cors": "url => fetch(url).then(() => 'answered', () => 'refused')",
    "image": "url => new Promise(end => { const it = new Image(); it.onload = it.onerror = end; it.src = url })",
    "script": """url => new Promise(end => { const it = document.createElement('script');
        it.onload = it.onerror = end; it.src = url; document.head.append(it) })""",
    "frame": """url => new Promise(end => { const it = document.createElement('iframe');
        it.onload = end; it.src = url; document.body.append(it) })""",
    "link": "url => { const it = document.createElement('a'); it.href = url; document.body.append(it); it.click() }",
}


@pytest.fixture(scope="module")
def web() -> Iterator[RawUpstream]:
    """A web server, and memd's model server: whatever it is asked for is a page that memd's user happens to open."""

    page = answer(b"<!doctype html><title>kittens</title><body>", b"Content-Type: text/html")
    with raw_upstream() as running:
        running.script = answering(page)
        yield running


@pytest.fixture(scope="module")
def server_url(web: RawUpstream) -> str:
    return web.url


@pytest.fixture
def memd(kept_daemon: DaemonProcess) -> DaemonProcess:
    return kept_daemon


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    context = browser.new_context()
    try:
        page = context.new_page()
        page.goto(url)
        assert page.title() == "kittens"
        yield page
    finally:
        context.close()


@pytest.mark.parametrize("how", LOADS)
def test_a_page_of_another_site_has_nothing_looked_up(
    browser: Browser, memd: DaemonProcess, web: RawUpstream, how: str
) -> None:
    asked, before = f"{memd.own_url}/memd/chunks?contains=5511", refused(memd)
    assert ask(asked).status == 200
    hostile = f"http://localhost:{urlsplit(web.url).port}/kittens"
    with opened(browser, hostile) as page:
        page.evaluate(LOADS[how], asked)
        wait_until(lambda: refused(memd) > before, lambda: f"{refused(memd)} refused")


def test_what_is_memd_s_own_is_marked_so_for_browsers(memd: DaemonProcess) -> None:
    own = ("/memd/", "/memd/health", "/memd/metrics", "/memd/export", "/memd/nothing", "/t/../v1")
    for answered in (ask(f"{memd.own_url}{path}").headers for path in own):
        assert answered["Cross-Origin-Resource-Policy"] == "same-origin"
        assert answered["X-Content-Type-Options"] == "nosniff"
    assert ask(f"{memd.base_url}/v1/models").headers["X-Content-Type-Options"] is None


@pytest.mark.parametrize(("site", "status"), [("none", 200), ("same-origin", 200), ("same-site", 403), ("x", 403)])
def test_a_browser_s_word_on_where_a_request_comes_from_counts(memd: DaemonProcess, site: str, status: int) -> None:
    for path in ("/memd/", "/memd/health", "/memd/search?q=x"):
        answered = ask(f"{memd.own_url}{path}", headers={"Sec-Fetch-Site": site})
        assert answered.status == status


@pytest.mark.parametrize("path", ["/memd/chunks?contains=5511", "/memd/turns", "/memd/events", "/memd/"])
@pytest.mark.parametrize("at", ["model", "own"])
def test_a_page_of_the_model_server_cannot_act_as_memd(
    browser: Browser, memd: DaemonProcess, path: str, at: str
) -> None:
    before = refused(memd)
    with opened(browser, f"{memd.base_url}/kittens") as page:
        asked = f"{memd.own_url if at == 'own' else memd.base_url}{path}"
        assert page.evaluate(LOADS["fetch with cors"], asked) == "refused"
        wait_until(lambda: refused(memd) > before, lambda: f"{refused(memd)} refused")
        body = "url => fetch(url, {method: 'POST', body: '{}', headers: {'Content-Type': 'application/json'}})"
        tried = page.evaluate(f"url => ({body})(url).then(() => 'answered', () => 'refused')", asked)
        assert tried == "refused"


def test_the_page_is_found_by_who_enters_the_clients_address(browser: Browser, memd: DaemonProcess) -> None:
    page = browser.new_page()
    page.goto(f"{memd.base_url}/memd/#/search")
    assert page.url == f"{memd.own_url}/memd/#/search" and page.title().endswith("memd")
    page.goto(memd.own_url)
    assert page.url.startswith(f"{memd.own_url}/memd/")
    page.close()


def refused(memd: DaemonProcess) -> int:
    """How many requests have been answered with a 4xx since the daemon started."""
    told = ask(f"{memd.own_url}/memd/metrics").body.decode()
    found = re.search(r'^memd_responses_total\{code="4xx"\} (\d+)', told, re.MULTILINE)
    return 0 if found is None else int(found[1])
