"""The page for those who have a token: it says who one is, offers what the token may do, and tells when it ends."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, token_setting, wait_until
from page_browser import chromium
from page_tabs import OpenPage
from playwright.sync_api import Locator, Page, expect
from recording_upstream import RecordingUpstream

if chromium() is None:
    pytest.skip("there is no Chromium; on Debian and Ubuntu: apt install chromium", allow_module_level=True)

OWNER = "the-owner-has-this-token"
WHO: dict[str, tuple[list[str], list[str]]] = {
    "reader": (["*"], ["read"]),
    "ann": (["team-*", "ann"], ["read", "write"]),
    "team": (["team-a"], ["read", "write", "correct"]),
    "writer": (["team-a", "ann"], ["write"]),
    "admin": (["*"], ["admin"]),
}
Enter = Callable[..., Page]


def secret_of(name: str) -> str:
    return OWNER if name == "owner" else f"{name}-has-a-token-of-this-length-here"


def token_of(name: str, **changed: Any) -> dict[str, Any]:
    topics, rights = WHO[name]
    return {**token_setting(name, secret_of(name), *rights, topics=topics), **changed}


@pytest.fixture
def daemon(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> DaemonProcess:
    auth = {"token": OWNER, "tokens": [token_of(name) for name in WHO]}
    daemon = make_daemon(upstream.url, {"auth": auth}).start()
    for topic in ("team-a", "team-b", "other"):
        note = {"topic_id": topic, "notes": [{"content": f"The key of {topic} hangs behind the compressor."}]}
        assert ask(f"{daemon.own_url}/memd/notes", note, headers={"X-Memory-Token": OWNER}).status == 200
    return daemon


@pytest.fixture
def enter(daemon: DaemonProcess, open_page: OpenPage) -> Enter:
    """Opens the page with somebody's token, as in `enter("ann", "#/note")`."""

    def new(name: str, view: str = "", **settings: Any) -> Page:
        page = open_page(daemon, view, expected=("401", "429"), **settings)
        give(page, secret_of(name))
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        return page

    return new


def give(page: Page, secret: str) -> None:
    page.get_by_role("dialog").get_by_label("Token").fill(secret)
    page.get_by_role("dialog").get_by_role("button", name="Open").click()


def exchange_tokens(daemon: DaemonProcess, *tokens: dict[str, Any]) -> None:
    """Write the settings' tokens anew; the daemon takes them up by itself."""
    given = yaml.safe_load(daemon.config.read_text())
    given["auth"]["tokens"] = tokens
    daemon.config.write_text(yaml.safe_dump(given))


def chunk_of(daemon: DaemonProcess, topic: str) -> str:
    """The view of the note of a topic; given again, it is known already and tells its chunk."""
    note = {"topic_id": topic, "notes": [{"content": f"The key of {topic} hangs behind the compressor."}]}
    [taken] = ask(f"{daemon.own_url}/memd/notes", note, headers={"X-Memory-Token": OWNER}).json["notes"]
    return f"#/chunk/{topic}/{taken['chunk_ids'][0]}"


def test_a_turn_says_who_asked(daemon: DaemonProcess, enter: Enter) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Where does the key hang?"}]}
    for name in ("owner", "reader"):
        url = f"{daemon.base_url}/t/team-a/v1/chat/completions"
        assert ask(url, body, headers={"X-Memory-Token": secret_of(name)}).status == 200
    rows = enter("team", "#/turns").locator("[data-turn]")
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("by reader")
    expect(rows.nth(1)).not_to_contain_text("by ")


def views(page: Page) -> Locator:
    return page.get_by_role("navigation", name="Views").get_by_role("link")


def test_whoever_needs_no_token_sees_the_page_as_it_was(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, open_page: OpenPage
) -> None:
    page = open_page(make_daemon(upstream.url).start())
    expect(page.get_by_text("Events live")).to_be_visible()
    expect(views(page)).to_have_count(8)
    expect(page.locator("#who")).to_be_hidden()


def test_the_page_says_who_one_is_and_takes_another_token(daemon: DaemonProcess, enter: Enter) -> None:
    page = enter("ann")
    page.get_by_role("button", name="Your token: ann").click()
    dialog = page.get_by_role("dialog", name="Your token: ann")
    expect(dialog).to_contain_text("read, write")
    expect(dialog).to_contain_text("team-*, ann")
    dialog.get_by_role("button", name="Use another token").click()
    give(page, OWNER)
    expect(page.get_by_role("button", name="Your token: owner")).to_be_visible()


@pytest.mark.parametrize(
    ("name", "count", "topics"),
    [
        ("owner", 8, ["all topics", "other", "team-a", "team-b"]),
        ("reader", 7, ["all topics", "other", "team-a", "team-b"]),
        ("ann", 8, ["all topics", "team-a", "team-b"]),
        ("team", 8, ["all topics", "team-a"]),
        ("writer", 1, ["all topics"]),
        ("admin", 0, ["all topics"]),
    ],
)
def test_views_and_topics_are_those_that_the_token_may_see(
    enter: Enter, name: str, count: int, topics: list[str]
) -> None:
    page = enter(name)
    expect(views(page)).to_have_count(count)
    expect(page.locator("#topic option")).to_have_text(topics)
    expect(page.get_by_text("reconnecting")).to_have_count(0)


@pytest.mark.parametrize(
    ("name", "corrects", "writes"), [("reader", 0, 0), ("ann", 0, 1), ("team", 1, 1), ("owner", 1, 1)]
)
def test_what_the_token_may_not_do_is_not_offered(
    daemon: DaemonProcess, enter: Enter, name: str, corrects: int, writes: int
) -> None:
    page = enter(name, chunk_of(daemon, "team-a"))
    expect(page.get_by_text("The key of team-a hangs").first).to_be_visible()
    expect(page.get_by_role("button", name="Take out")).to_have_count(corrects)
    page.goto(f"{daemon.own_url}/memd/#/search?words=key&topic=team-a")
    expect(page.get_by_role("list", name="Chunks, latest first")).to_be_visible()
    expect(page.get_by_role("checkbox")).to_have_count(corrects)
    page.goto(f"{daemon.own_url}/memd/#/sources")
    expect(page.get_by_text("Remembered documents")).to_be_visible()
    expect(page.get_by_role("form", name="Files to remember")).to_have_count(writes)


def test_who_may_write_alone_puts_down_notes_in_the_topics_of_the_token(daemon: DaemonProcess, enter: Enter) -> None:
    page = enter("writer")
    expect(page.get_by_role("heading", level=1)).to_have_text("A note")
    topic = page.get_by_role("form", name="A note").get_by_label("Topic")
    expect(topic.locator("option")).to_have_text(["team-a", "ann"])
    topic.select_option("ann")
    page.get_by_label("What is to be remembered").fill("The lamp is oiled on Mondays.")
    page.get_by_role("button", name="Remember").click()
    expect(page.locator(".outcome")).to_contain_text("Remembered:")
    expect(page.locator(".outcome a")).to_have_count(0)  # there is nothing behind a link for this token
    page.goto(f"{daemon.own_url}/memd/#/turns")
    expect(page.get_by_text("It may write in team-a, ann. This view needs the right to read.")).to_be_visible()


def test_a_token_that_is_revoked_while_the_page_is_open_is_asked_for_and_another_s_shows_what_that_one_may(
    daemon: DaemonProcess, enter: Enter
) -> None:
    page = enter("ann", "#/note")
    page.get_by_label("What is to be remembered").fill("The lamp is oiled on Mondays.")
    exchanged = token_of("ann", token_sha256=hashlib.sha256(b"another-secret-of-ann's").hexdigest())
    exchange_tokens(daemon, exchanged)
    wait_until(lambda: is_refused(daemon, secret_of("ann")), daemon.log.read_text)
    page.get_by_role("button", name="Remember").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("This token is no longer valid")
    expect(page.get_by_label("What is to be remembered")).to_have_value("The lamp is oiled on Mondays.")
    give(page, "another-secret-of-ann's")
    expect(page.locator(".outcome")).to_contain_text("Remembered:")
    expect(dialog).to_be_hidden()
    exchange_tokens(daemon, token_of("team"))
    wait_until(lambda: is_refused(daemon, "another-secret-of-ann's"), daemon.log.read_text)
    page.get_by_role("link", name="Search").click()
    expect(dialog).to_contain_text("This token is no longer valid")
    give(page, secret_of("team"))
    expect(page.get_by_role("button", name="Your token: team")).to_be_visible()
    expect(page.locator("#topic option")).to_have_text(["all topics", "team-a"])


def is_refused(daemon: DaemonProcess, secret: str) -> bool:
    return ask(f"{daemon.own_url}/memd/me", headers={"X-Memory-Token": secret}).status == 401


def test_after_too_many_wrong_tokens_the_page_says_when_to_try_again(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, open_page: OpenPage
) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": OWNER}}).start()
    page = open_page(daemon, expected=("401", "429"))
    expect(page.get_by_role("dialog")).to_be_visible()
    for number in range(60):
        ask(f"{daemon.own_url}/memd/me", headers={"X-Memory-Token": f"guess {number}"})
    give(page, OWNER)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Too many wrong tokens came from this address.")
    expect(dialog.get_by_role("button", name=re.compile(r"Try again in \d+ s"))).to_be_disabled()
    dialog.get_by_role("button", name="Open").click()  # once it can be: the token is still there
    expect(dialog).to_be_hidden()
    expect(page.get_by_text("Events live")).to_be_visible()
