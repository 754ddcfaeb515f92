"""The page at /memd/, driven in a real browser as its users do: looked at, searched, steered, with hostile memories."""

from __future__ import annotations

import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, user, wait_until
from facts import CAKE, FACTS, INODES, POSTGRES
from facts import QUESTION as WHY
from page_browser import PHONE, OpenPage, chromium, chunk_with, give_token, go, live, question, rows
from playwright.sync_api import Locator, Page, Route, expect
from reserved_port import reserved_port

if chromium() is None:
    pytest.skip("there is no Chromium; on Debian and Ubuntu: apt install chromium", allow_module_level=True)

HOSTILE = (
    "<script>document.title = 'taken over'; alert(1)</script>",
    "<img src=x onerror=\"document.title='taken over'\"> the picture of the harbour",
    "</p></li><style>main{display:none}</style><iframe src=javascript:alert(2)></iframe> the frame of the harbour",
    '{{constructor.constructor("alert(3)")()}} ${alert(4)} javascript:alert(5) the template of the harbour',
    "the harbour is \u202ederetsiger\u202c and \u200bhidden\u2066 and \x1b[31mred\x1b[0m \U000e0041",
)
VIEWS = ("turns", "timeline", "search", "topics", "sources", "note")


@pytest.fixture
def told(daemon: DaemonProcess) -> DaemonProcess:
    daemon.tell(*FACTS, topic="bikes")
    return daemon


def injected(page: Page) -> Locator:
    """The texts of the memories that an opened turn or an answer of the search injects."""
    return page.locator("details.candidate:not(.out)")


def open_chunk(page: Page, daemon: DaemonProcess, words: str) -> None:
    found = chunk_with(daemon, words)
    go(page, f"chunk/bikes/{found['uuid']}")
    expect(page.get_by_role("heading", level=1)).to_contain_text(found["id"])


# -- the main story ---------------------------------------------------------------------------------------------------


def test_a_fact_is_told_found_seen_injected_corrected_and_the_correction_taken_back(
    daemon: DaemonProcess, open_page: OpenPage
) -> None:
    page = open_page(daemon)
    expect(page.get_by_text("No turn yet.")).to_be_visible()
    expect(page.get_by_text("Events live")).to_be_visible()
    daemon.tell(POSTGRES, CAKE, topic="bikes")
    expect(rows(page)).to_have_count(2)  # it came by itself
    question(daemon, WHY)
    expect(rows(page)).to_have_count(3)
    expect(rows(page).first).to_contain_text(WHY)
    rows(page).first.locator("> details > summary").click()
    shown = injected(page).filter(has_text="meaning")
    expect(page.locator("pre")).to_contain_text(f"user: {POSTGRES}")  # as the model saw it
    injected(page).first.locator("summary").click()
    expect(shown.first).to_contain_text(POSTGRES)
    shown.first.get_by_role("link").click()

    expect(page.get_by_role("heading", level=1)).to_contain_text("live")
    page.get_by_label("Reason").fill("we moved")
    page.get_by_label("New text").fill("The booking service runs on CockroachDB now.")
    page.get_by_role("button", name="Update", exact=True).click()
    expect(page.locator(".outcome")).to_contain_text("Updated.")
    expect(page.get_by_role("heading", level=1)).to_contain_text("taken out")
    assert "CockroachDB" in injected_block(daemon, question(daemon, "Which database has the booking service?"))

    page.get_by_role("button", name="Undo the last change").click()
    expect(page.locator(".outcome")).to_contain_text("Undone.")
    expect(page.get_by_role("heading", level=1)).to_contain_text("live")
    expect(page.locator("ol.log > li")).to_have_count(3)  # told, taken out by the Update, brought back
    expect(page.locator("ol.log")).to_contain_text("we moved")
    block = injected_block(daemon, question(daemon, "Which database did the booking service get?"))
    assert POSTGRES in block and "CockroachDB" not in block


def injected_block(daemon: DaemonProcess, turn_id: str) -> str:
    return str(daemon.receipt(turn_id)["block"])


# -- turns ------------------------------------------------------------------------------------------------------------


def test_a_turn_tells_its_scores_and_what_it_would_get_today_and_its_chunks_are_marked_and_taken_out(
    told: DaemonProcess, open_page: OpenPage
) -> None:
    turn_id = question(told, WHY)
    told.receipt(turn_id)
    page = open_page(told, f"#/turns/{turn_id}")
    expect(page.get_by_role("heading", name=re.compile(r"New in this turn \([1-9]"))).to_be_visible()
    for name in ("embed", "search", "upstream"):
        expect(page.locator("dl.timings")).to_contain_text(name)
    again = page.get_by_role("button", name="Ask memory again now")
    again.click()
    expect(page.get_by_text("the same.").or_(page.get_by_text("Nothing would change."))).to_be_visible()
    taken_out = ask(
        f"{told.own_url}/memd/corrections",
        {"topic_id": "bikes", "chunk_ids": [chunk_with(told, "PostgreSQL+because")["uuid"]], "action": "Update"},
    )
    assert taken_out.status == 200
    again.click()
    expect(page.get_by_text(re.compile(r", [1-9]\d* fewer"))).to_be_visible()

    open_chunk(page, told, "inodes")
    outcome, history = page.locator(".outcome"), page.locator("ol.log > li")
    for entries, (name, words) in enumerate(
        [("Helpful", "Marked as helpful."), ("Unhelpful", "Marked as unhelpful."), ("Take out", "Taken out.")], 2
    ):
        page.get_by_label("Reason").fill(f"why {name}")
        page.get_by_role("button", name=name, exact=True).click()
        expect(outcome).to_contain_text(words)
        expect(history).to_have_count(entries)
        expect(history.first).to_contain_text(f"why {name}")
    expect(page.get_by_role("button", name="Helpful", exact=True)).to_have_count(0)  # what is out cannot be rated
    assert "inodes" not in " ".join(live(told))
    page.get_by_role("button", name="Undo the last change").click()
    expect(page.get_by_role("heading", level=1)).to_contain_text("live")
    assert "inodes" in " ".join(live(told))


def test_the_steps_of_a_tool_loop_are_a_number_beside_their_turn_until_they_are_asked_for(
    daemon: DaemonProcess, open_page: OpenPage
) -> None:
    task = "Read every log in turn and say which one has the error."
    history: list[dict[str, Any]] = [user(task)]
    page = open_page(daemon)
    for number in range(4):
        daemon.chat(history, memory_in={"topic_id": "bikes"})
        call = {"id": f"c{number}", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        history += [
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": f"c{number}", "content": "nothing here"},
        ]
    expect(rows(page).filter(has_text="3 tool steps")).to_have_count(1)  # counted as they came
    page.reload()
    expect(rows(page).filter(has_text="3 tool steps")).to_have_count(1)
    expect(rows(page)).to_have_count(1)
    page.get_by_role("button", name="Show tool steps").click()
    expect(rows(page)).to_have_count(4)
    page.get_by_role("button", name="Hide tool steps").click()
    expect(rows(page)).to_have_count(1)


def test_older_turns_and_older_entries_come_on_request(told: DaemonProcess, open_page: OpenPage) -> None:
    for n in range(52):
        told.chat([user(f"Locker {n} belongs to crew {n * 7}.")], memory_in={"topic_id": "lockers"})
    wait_until(lambda: "Locker 51 " in told.export()[-1]["content"], lambda: str(told.export()[-1]))
    entries_in_all = len(told.export())  # 55, or more where a reply came after its question had been stored
    page = open_page(told)
    expect(rows(page)).to_have_count(50)
    page.get_by_role("button", name="Older turns").click()
    expect(rows(page)).to_have_count(55)
    expect(page.get_by_role("button", name="Older turns")).to_be_hidden()
    page.get_by_role("link", name="Timeline").click()
    entries = page.get_by_role("list", name="Log entries, newest first").locator("> li")
    expect(entries).to_have_count(50)
    page.get_by_role("button", name="Older entries").click()
    expect(entries).to_have_count(entries_in_all)


# -- the other views --------------------------------------------------------------------------------------------------


def test_the_timeline_has_the_live_conversations_and_the_log_and_says_when_there_is_more(
    told: DaemonProcess, open_page: OpenPage
) -> None:
    page = open_page(told, "#/timeline")
    live = page.locator("section", has=page.get_by_role("heading", name="Live conversations"))
    expect(live.locator("details").first).to_contain_text("in the prompt")
    expect(live).to_contain_text(CAKE)
    entries = page.get_by_role("list", name="Log entries, newest first").locator("> li")
    expect(entries).to_have_count(3)
    told.tell("The spare key hangs behind the blue bicycle.", topic="bikes")
    page.get_by_role("button", name="newer entry").click()
    expect(entries).to_have_count(4)
    told.tell(
        "The ladder is in the shed.", topic="bikes"
    )  # the list that has been drawn again hears of the next one too
    page.get_by_role("button", name="newer entry").click()
    expect(entries).to_have_count(5)


def test_the_first_look_lets_one_ask_and_the_search_explains_its_scores_and_answers_from_the_past(
    told: DaemonProcess, open_page: OpenPage
) -> None:
    page = open_page(told, expected=("404",))
    is_today = datetime.now().date() == datetime.now(ZoneInfo("Europe/Berlin")).date()  # the daemon's and the browser's
    words = r"\d pieces? of today, \d+ in all" if is_today else r"nothing of today yet, \d+ in all"
    expect(page.get_by_text("memd remembers")).to_contain_text(re.compile(words))
    page.get_by_label("Ask memory").fill("Which nuts are in the cake?")
    page.get_by_role("button", name="Ask", exact=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Search")
    expect(injected(page).filter(has_text="hazelnuts")).to_have_count(1)

    time.sleep(1.1)  # the form takes whole seconds
    before = datetime.now(ZoneInfo("Europe/Berlin")).strftime("%Y-%m-%dT%H:%M:%S")
    time.sleep(1.1)
    told.tell("Ingrid's cake comes from the bakery in Nygårdsgaten.", topic="bikes")
    page.get_by_label("Question").fill("Where does Ingrid's cake come from?")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(injected(page).filter(has_text="Nygårdsgaten")).to_contain_text("neighbours")
    page.get_by_label("As of").fill(before)
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_text("As of")).not_to_have_count(1)
    expect(injected(page).filter(has_text="hazelnuts")).to_have_count(1)
    expect(page.get_by_text("Nygårdsgaten")).to_have_count(0)
    page.reload()  # the address has the question
    expect(injected(page).filter(has_text="hazelnuts")).to_have_count(1)

    go(page, "chunk/bikes/ffffffffffff")
    expect(page.get_by_role("alert")).to_contain_text("no chunk has the id")
    expect(page.get_by_role("button", name="Try again")).to_be_visible()
    go(page, "turns/00000000000000000000")
    expect(page.get_by_role("alert")).to_contain_text("there is no receipt of turn")
    go(page, "no such view")
    expect(rows(page)).to_have_count(4)


def test_what_was_said_on_a_day_is_chosen_from_the_timeline_and_by_the_filters_of_the_search(
    told: DaemonProcess, open_page: OpenPage
) -> None:
    ends = [{"content": text, "said_at": f"2025-05-03T{text}"} for text in ("00:10", "23:50")]  # of a day of the daemon
    assert ask(f"{told.own_url}/memd/notes", {"topic_id": "bikes", "notes": ends}).status == 200
    told.wait_stored("00:10", "23:50")
    past, today = ask(f"{told.own_url}/memd/days").json["days"]
    page = open_page(told, "#/timeline", expected=("400",))
    spans = page.get_by_role("list", name="When it was said")
    chunks = page.get_by_role("list", name="Chunks").locator("li:not(.day)")
    for place, day in ((1, past), (0, today)):  # wherever the browser is
        expect(spans.get_by_role("img", name=f"{day['chunks']} chunks")).to_be_visible()
        spans.get_by_role("link").nth(place).click()
        expect(page).to_have_url(re.compile(f"#/search.from={day['day']}&to={day['day']}$"))
        expect(chunks).to_have_count(day["chunks"])
        if day is past:
            page.go_back()
    page.get_by_label("With the words").fill("HAZELNUTS")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(chunks).to_have_count(1)
    page.locator("select[name=role]").select_option("tool")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_text("Nothing that is stored is like that.")).to_be_visible()
    page.reload()  # the address has the choice
    expect(page.get_by_text("Nothing that is stored is like that.")).to_be_visible()
    page.locator("select[name=role]").select_option("user")
    page.get_by_label("Question").fill("What was said of the cake today?")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(injected(page)).to_have_count(1)
    page.get_by_label("To day").fill("2020-01-01")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("`from` is not before `to`")


def test_the_topics_have_their_sizes_and_choosing_one_narrows_every_view(
    told: DaemonProcess, open_page: OpenPage
) -> None:
    told.tell("The garden gate needs oil before winter.", topic="garden")
    page = open_page(told, "#/topics")
    expect(page.get_by_role("row")).to_have_count(3)
    expect(page.get_by_role("row", name=re.compile("^bikes"))).to_contain_text("3")
    page.get_by_role("row", name=re.compile("^garden")).get_by_role("link", name="garden").click()
    expect(page.get_by_role("list", name="Log entries, newest first").locator("> li")).to_have_count(1)
    page.get_by_role("link", name="Turns").click()
    expect(rows(page)).to_have_count(1)
    question(told, WHY)  # in the other topic
    question(told, "What needs oil?", topic="garden")
    expect(rows(page)).to_have_count(2)
    expect(rows(page).first).to_contain_text("What needs oil?")
    page.get_by_label("Topic").select_option("")
    expect(rows(page)).to_have_count(6)


def test_the_page_goes_on_by_itself_after_a_restart_and_shows_a_model_server_that_is_gone(
    make_daemon: MakeDaemon, open_page: OpenPage
) -> None:
    with reserved_port() as port:
        daemon = make_daemon("http://127.0.0.1:9").start("--admin-port", str(port))
        page = open_page(daemon, expected=("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED", "ERR_CONNECTION_RESET"))
        expect(page.locator("#health")).to_contain_text("does not answer")
        expect(page.get_by_text("Events live")).to_be_visible()
        assert daemon.terminate() == 0
        expect(page.get_by_text("reconnecting …")).to_be_visible()
        daemon.start("--admin-port", str(port))
        expect(page.get_by_text("Events live")).to_be_visible()


# -- who may see it, and what it may do -------------------------------------------------------------------------------


def test_with_a_token_the_page_asks_for_it_once_and_keeps_it_in_the_tab(
    make_daemon: MakeDaemon, llama: str, open_page: OpenPage
) -> None:
    daemon = make_daemon(llama, {"auth": {"token": "a secret of some length"}}).start()
    page = open_page(daemon, expected=("401",))
    dialog = page.get_by_role("dialog")
    held: list[Route] = []
    page.route("**/memd/health*", lambda route: route.continue_() if held else held.append(route))
    give_token(page, "wrong")
    expect(dialog).to_contain_text("This token is wrong")
    page.keyboard.press("Escape")
    expect(dialog).to_be_visible()  # there is nothing to see without it
    wait_until(lambda: page.evaluate("1") == 1 and held != [], lambda: "the health was not asked for")
    give_token(page, "a secret of some length")
    expect(dialog).to_be_hidden()
    with page.expect_response(lambda answer: "/memd/health" in answer.url and answer.status == 200):
        held[0].continue_()  # a refusal of the wrong one that comes after the right one does not ask again
    expect(page.get_by_text("Events live")).to_be_visible()
    expect(dialog).to_be_hidden()
    page.reload()
    expect(page.get_by_text("No turn yet.")).to_be_visible()
    expect(dialog).to_be_hidden()


def test_nothing_that_is_remembered_is_executed_and_what_is_hidden_is_made_visible(
    daemon: DaemonProcess, open_page: OpenPage
) -> None:
    daemon.tell(*HOSTILE, topic="bikes")
    turn_id = question(daemon, "What is it with the harbour? <b onclick=alert(6)>Tell me.</b>")
    daemon.receipt(turn_id)
    reason = "<svg onload=alert(7)> \u202ereason"
    for entry in daemon.export()[:5]:
        correction = {"topic_id": "bikes", "chunk_ids": [entry["uuid"]], "action": "Helpful", "reason": reason}
        assert ask(f"{daemon.own_url}/memd/corrections", correction).status == 200
    page = open_page(daemon, f"#/turns/{turn_id}")
    expect(page.locator("pre")).to_contain_text("the frame of the harbour")
    for view in ("timeline", "search?q=harbour", "search?words=harbour", f"chunk/bikes/{daemon.export()[0]['uuid']}"):
        go(page, view)
        expect(page.locator(f"main .{view.split('/')[0].split('?')[0]}")).to_contain_text("harbour")
        expect(page.locator("main:visible").locator("script, img, iframe, style, [onclick], [onload]")).to_have_count(0)
        assert "taken over" not in page.title()
    go(page, "timeline")
    expect(page.get_by_text("U+202E").first).to_be_visible()
    expect(page.get_by_text("U+200B").first).to_be_visible()
    assert "\u202e" not in page.inner_text("main")


def test_should_the_page_ever_put_text_in_as_markup_the_browser_refuses_to_run_it_as_all_from_elsewhere(
    daemon: DaemonProcess, open_page: OpenPage
) -> None:
    page = open_page(daemon, expected=("Content Security Policy", "404"))
    expect(page.get_by_text("No turn yet.")).to_be_visible()
    page.evaluate("document.body.append(Object.assign(document.createElement('p'), {id: 'planted'}))")
    blocked = page.evaluate(
        """() => new Promise(resolve => {
          addEventListener('securitypolicyviolation', event => resolve(event.violatedDirective), {once: true});
          document.getElementById('planted').innerHTML = '<img src=x onerror="document.title=1">';
          document.querySelector('#planted img').dispatchEvent(new Event('error'));
          setTimeout(() => resolve('nothing was refused'), 3000);
        })"""
    )
    assert blocked.startswith(("script-src", "img-src"))
    assert page.title() == "Turns · memd"

    served = ask(f"{daemon.own_url}/memd/")
    assert served.status == 200 and served.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = served.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    files = re.findall(r'(?:src|href)="([^"#]+)"', served.body.decode())
    assert set(files) == {"data:,", "page.css", "page.js"}
    script = ask(f"{daemon.own_url}/memd/page.js")
    assert script.headers["Content-Type"].startswith("text/javascript") and script.headers["ETag"]
    again = ask(f"{daemon.own_url}/memd/page.js", headers={"If-None-Match": script.headers["ETag"]})
    assert again.status == 304
    assert ask(f"{daemon.own_url}/memd/", headers={"Host": "memd.example.com"}).status == 403
    assert ask(f"{daemon.own_url}/memd/..%2f..%2fpyproject.toml").status == 404


# -- for everybody ----------------------------------------------------------------------------------------------------


def test_everything_is_reached_by_keyboard(told: DaemonProcess, open_page: OpenPage) -> None:
    question(told, WHY)
    page = open_page(told)
    expect(rows(page)).to_have_count(4)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    page.keyboard.press("Tab")
    expect(page.get_by_label("Ask memory")).to_be_focused()
    rest = (page.get_by_role("button", name="Ask", exact=True), page.get_by_text("Times and tokens of these turns"))
    for next_one in (*rest, rows(page).first.locator("> details > summary")):
        page.keyboard.press("Tab")
        if next_one is rest[1] and page.get_by_role("link", name="of today").count():
            page.keyboard.press("Tab")  # what was remembered today is a link
        expect(next_one).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("pre")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Question")).to_be_focused()
    page.keyboard.type("Why did the build fail: cache/inodes?")
    page.keyboard.press("Enter")
    expect(injected(page).first).to_contain_text("ERR_7421")
    for name in ("Turns", "Timeline", "Search", "Topics"):
        page.get_by_role("link", name=name, exact=True).focus()
        page.keyboard.press("Enter")
        expect(page.get_by_role("link", name=name, exact=True)).to_have_attribute("aria-current", "page")
        expect(page.get_by_role("heading", level=1, name=name)).to_be_visible()
        expect(page.locator("main")).to_be_focused()
        assert page.title() == f"{name} · memd"


def test_at_a_phone_s_width_nothing_is_cut_off_and_every_target_is_large_enough(
    told: DaemonProcess, open_page: OpenPage
) -> None:
    told.tell("A" * 300 + " is a word without an end.", "https://example.org/" + "path/" * 60, topic="long")
    turn_id = question(told, WHY)
    told.receipt(turn_id)
    page = open_page(told, viewport=PHONE, has_touch=True, is_mobile=True)
    views = (
        *VIEWS,
        f"turns/{turn_id}",
        "search?q=word",
        "search?from=2020-01-01",
        f"chunk/bikes/{chunk_with(told, 'inodes')['uuid']}",
    )
    for view in views:
        go(page, view)
        expect(page.locator("main")).not_to_have_attribute("aria-busy", "true")
        expect(page.locator("main h1")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
        low = page.evaluate(
            "[...document.querySelectorAll('button, select, input, nav a')].filter(e => e.offsetParent)"
            ".filter(e => e.getBoundingClientRect().height < 24).map(e => e.outerHTML)"
        )
        assert low == [], view
    heights = page.evaluate("[...document.querySelectorAll('nav a')].map((link) => link.offsetHeight)")
    assert heights and max(heights) < 50, "no word of the menu is broken"
    page.set_viewport_size({"width": 420, "height": 800})
    parts = [*page.locator("nav a").all(), *page.locator("#health li").all()]
    places = [box for part in parts if (box := part.bounding_box()) is not None]
    assert len(places) == len(parts) >= 11 and all(box["x"] + box["width"] <= 420 for box in places), "all is seen"
    assert page.evaluate("document.querySelector('header').offsetHeight") <= 110


def test_a_note_is_put_down_and_its_chunk_says_where_it_is_from(daemon: DaemonProcess, open_page: OpenPage) -> None:
    page = open_page(daemon, "#/note")
    page.get_by_label("What is to be remembered").fill(POSTGRES)
    page.get_by_label("Title").fill("Databases")
    page.get_by_label("Tags").fill("db, decisions")
    page.get_by_role("textbox", name="Topic").fill("bikes")
    page.get_by_role("button", name="Remember").click()
    expect(page.locator(".outcome")).to_contain_text("Remembered:")
    page.get_by_label("What is to be remembered").fill(POSTGRES)
    page.get_by_role("button", name="Remember").click()
    expect(page.locator(".outcome")).to_contain_text("It is remembered already:")
    page.locator(".outcome a").click()
    expect(page.locator("main")).to_contain_text("Databases, #db, #decisions")
    expect(page.locator("main")).to_contain_text(POSTGRES)


def test_a_folder_is_seen_with_its_errors_a_file_is_dropped_read_in_order_and_taken_out(
    serving: Serving, open_page: OpenPage, tmp_path: Path
) -> None:
    folder = tmp_path / "handbook"
    folder.mkdir()
    (folder / "guide.md").write_text(f"Before all.\n\n# Databases\n\n{POSTGRES}\n\n## Errors\n\n{INODES}\n")
    (folder / "photo.txt").write_bytes(b"\0")
    daemon = serving({"sources": [str(folder), str(tmp_path / "missing")]})
    page = open_page(daemon, "#/sources")
    configured = page.get_by_role("list", name="Folders of config.yaml").locator("> li")
    expect(configured.nth(0)).to_contain_text("up to date")
    expect(configured.nth(0)).to_contain_text("1 file left out")
    expect(configured.nth(1)).to_contain_text("missing: cannot be read (No such file or directory)")
    configured.nth(0).locator("summary").click()
    expect(configured.nth(0)).to_contain_text("handbook/photo.txt: it is no text")

    (tmp_path / "cake.md").write_text(CAKE)
    page.get_by_label("Drop files here, or choose them").set_input_files(tmp_path / "cake.md")
    expect(page.locator(".outcome")).to_contain_text("cake.md is remembered: 1 new chunk.")
    kept = page.get_by_role("list", name="Remembered documents").locator("> li")
    expect(kept).to_have_count(2)
    (folder / "more.md").write_text("The lathe needs oil.")
    expect(kept.filter(has_text="handbook")).to_contain_text("2 documents, 4 chunks")  # it came by itself
    expect(kept.filter(has_text="handbook").get_by_role("button")).to_have_count(0)  # it would come back
    kept.filter(has_text="cake.md").get_by_role("button", name="Remove …").click()
    kept.filter(has_text="cake.md").get_by_role("button", name="Take out 1 chunk").click()
    expect(kept).to_have_count(1)

    kept.locator("summary").click()
    kept.get_by_role("link", name="handbook/guide.md").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("handbook/guide.md")
    shown = page.get_by_role("list", name="Chunks, in the document's order").locator("> li")
    expect(shown).to_contain_text(["Before all.", "Databases", POSTGRES, "Databases > Errors", INODES])
    shown.nth(2).get_by_role("link").click()
    expect(page.get_by_role("link", name="all of it")).to_be_visible()
