"""The page in the machine's own Chromium, headless.

Rule: a browser that logs an error, or that asks anybody but the daemon for something, fails the test that used it.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from daemon_process import DaemonProcess, ask, user
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, Response, expect, sync_playwright

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
"""The first draws no window: a new tab costs it a third of the processor time."""
DESK = {"width": 1280, "height": 900}
PHONE = {"width": 375, "height": 720}
MILLISECONDS_MAX = 60_000  # only a failure waits as long, however busy the machine is
expect.set_options(timeout=MILLISECONDS_MAX)


def chromium() -> str | None:
    """The path of a Chromium on this machine."""
    return next((found for name in NAMES if (found := shutil.which(name)) is not None), None)


@contextmanager
def running_chromium(executable: str) -> Iterator[Browser]:
    """A headless browser. Without its sandbox: containers often forbid one, and nothing but memd is opened in it."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            browser.close()


class Watched:
    """What went wrong in a tab while it was open."""

    def __init__(self, page: Page, base_url: str) -> None:
        self.page = page
        self.watch(base_url)
        page.on("console", self._listen_to)
        page.on("pageerror", lambda error: self._note(f"uncaught: {error}"))
        page.on("dialog", lambda dialog: self._note(f"a dialog opened: {dialog.message}"))
        page.on("response", self._look_at)

    def watch(self, base_url: str, expected: tuple[str, ...] = ()) -> None:
        """Begin anew. `expected`: parts of complaints that a test brings about on purpose."""
        self.wrong: list[str] = []
        self.expected = expected
        self._base_url = base_url

    def unexpected(self) -> list[str]:
        """The complaints that nobody has brought about."""
        return [text for text in self.wrong if not any(part in text for part in self.expected)]

    def _listen_to(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self._note(message.text)

    def _look_at(self, response: Response) -> None:
        if not response.url.startswith((f"{self._base_url}/", "data:,")):
            self._note(f"asked elsewhere: {response.url}")

    def _note(self, text: str) -> None:
        self.wrong.append(text)


@contextmanager
def tab(browser: Browser, base_url: str, **settings: Any) -> Iterator[Watched]:
    """A new profile with one tab, not yet at the page; settings are Playwright's, such as `viewport`."""
    settings = {"viewport": DESK, "locale": "en-GB", "timezone_id": "Europe/Berlin", **settings}
    context = browser.new_context(**settings)
    context.set_default_timeout(MILLISECONDS_MAX)
    try:
        yield Watched(context.new_page(), base_url)
    finally:
        context.close()


# Tabs of tests, and what they ask of the page

OpenPage = Callable[..., Page]


def opened_pages(browser: Browser, kept: Watched) -> Iterator[OpenPage]:
    """The fixture `open_page`: opens the page of a daemon, as in `open_page(daemon, "#/search")`.

    A test's first one opens in the tab that is kept, emptied; further ones, and those that are to be another device,
    open in a new profile.
    """
    opened: list[tuple[Any, Watched]] = []
    free = [kept]

    def new(daemon: DaemonProcess, view: str = "", expected: tuple[str, ...] = (), **settings: Any) -> Page:
        if free and settings.keys() <= {"viewport", "color_scheme"}:
            watched = free.pop()
            watched.page.set_viewport_size(settings.get("viewport", DESK))
            watched.page.emulate_media(color_scheme=settings.get("color_scheme", "light"))
        else:
            context = tab(browser, daemon.own_url, **settings)
            watched = context.__enter__()
            opened.append((context, watched))
        watched.watch(daemon.own_url, expected)
        watched.page.goto(f"{daemon.own_url}/memd/{view}")
        return watched.page

    yield new
    wrong = [text for watched in (kept, *(watched for _, watched in opened)) for text in watched.unexpected()]
    for context, _ in opened:
        context.__exit__(None, None, None)
    if not free:
        empty(kept)
    assert wrong == [], wrong


def empty(kept: Watched) -> None:
    """Leave nothing of a test in the tab."""
    kept.page.unroute_all()
    kept.page.evaluate("localStorage.clear(), sessionStorage.clear()")
    kept.page.goto("about:blank")
    kept.page.context.clear_cookies()
    kept.watch("")


def question(daemon: DaemonProcess, text: str, topic: str = "bikes") -> str:
    """Ask in a new chat; the turn's id."""
    return str(daemon.chat([user(text)], memory_in={"topic_id": topic}).headers["X-Memory-Turn"])


def chunk_with(daemon: DaemonProcess, words: str) -> dict[str, Any]:
    """The only chunk with these words."""
    [found] = ask(f"{daemon.own_url}/memd/chunks?contains={words}").json["chunks"]
    return dict(found)


def live(daemon: DaemonProcess) -> list[str]:
    """The texts that are live."""
    return [json.loads(line)["content"] for line in ask(f"{daemon.own_url}/memd/export?live=1").body.splitlines()]


def go(page: Page, view: str) -> None:
    """Go to another view without loading the page anew."""
    page.evaluate("hash => { location.hash = hash }", f"#/{view}")


def give_token(page: Page, secret: str) -> None:
    """Answer the page, which asks for a token."""
    page.get_by_role("dialog").get_by_label("Token").fill(secret)
    page.get_by_role("dialog").get_by_role("button", name="Open").click()


def rows(page: Page) -> Locator:
    return page.get_by_role("list", name="Turns, newest first").locator("> li")
