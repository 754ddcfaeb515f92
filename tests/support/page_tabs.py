"""Shared by the tests of the page: its tabs, and a daemon that is told something.

Rule: whatever goes wrong in a tab fails its test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from daemon_process import DaemonProcess, user
from page_browser import DESK, Watched, tab
from playwright.sync_api import Browser, Locator, Page

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


def rows(page: Page) -> Locator:
    return page.get_by_role("list", name="Turns, newest first").locator("> li")
