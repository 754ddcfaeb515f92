"""Takes the screenshots of docs/page.md; with `--all` every view in both themes at both widths, to be looked at after a
change of the page:

    python tests/support/page_screenshots.py docs/images

Rule: what they show is played through the real daemon in front of a real llama.cpp, as in the tests; nothing is drawn.
The conversation is ours.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemon_process import DaemonProcess, ask, wait_until
from llama_server import running_llama
from page_browser import DESK, PHONE, chromium, running_chromium, tab
from playwright.sync_api import Browser
from tiny_model import write_scripted_model

TOPIC = "bike-workshop"
TOLD = (
    "First decision: we use PostgreSQL 16 as the database, not SQLite, because exclusion constraints rule out double "
    "bookings and both counters write at once.",
    "The API answers 409 with the error code ERR_7421 when a stand is already taken; the tablet shows a red card.",
    "Login tokens expire after 36 hours, so that someone who opens on Friday isn't thrown out on Saturday.",
    "Marta leads the workshop. She wants text messages and never e-mail.",
    "The reminder for customers goes out at 18:00 on the evening before the appointment.",
    "The API listens on port 7340; port 8080 belongs to the old calendar.",
    "Backups: every night at 02:30 to the NAS in the cellar, kept for 90 days. Restores are tried on the first Monday.",
)
ASKED = (
    "Which error code comes back when a stand is taken?",
    "How does Marta want to be told?",
    "Why did we not take SQLite?",
    "When does the reminder go out?",
    "Which port was it again?",
    "When does the reminder for customers go out now?",
)
LOOKS = ("desk-light", "desk-dark", "phone-light", "phone-dark")
IN_THE_DOCS = {
    *("page-turn-desk-light", "page-chunk-desk-light", "page-timeline-desk-light", "page-search-desk-dark"),
    *("page-turns-phone-light", "page-turns-phone-dark"),
}
ELSEWHERE = "The greenhouse controller speaks Modbus; its sensor of humidity has address 17."


@contextmanager
def played() -> Iterator[DaemonProcess]:
    """A daemon that has been told a few things, asked about them, and corrected once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / "tiny.gguf"
        write_scripted_model(model, marker="[mem:", reply=("No", " memory", "."), reply_seen=("As", " told", "!"))
        with running_llama(model, context=8192, log=folder / "llama.log") as url:
            daemon = DaemonProcess(folder, url).start()
            try:
                play(daemon)
                yield daemon
            finally:
                daemon.discard()


def play(daemon: DaemonProcess) -> None:
    """The conversation."""
    for text in TOLD:
        say(daemon, text)
    say(daemon, ELSEWHERE, topic="greenhouse")
    for text in ASKED[:-1]:
        say(daemon, text)
    [reminder] = ask(f"{daemon.own_url}/memd/chunks?topic={TOPIC}&contains=18:00").json["chunks"]
    correction = {"topic_id": TOPIC, "chunk_ids": [reminder["uuid"]]}
    helpful = {**correction, "action": "Helpful", "reason": "that was the question"}
    update = {
        **correction,
        "action": "Update",
        "reason": "customers forgot the appointment overnight",
        "content": "user: The reminder for customers goes out three hours before the appointment.",
    }
    for body in (helpful, update):
        assert ask(f"{daemon.own_url}/memd/corrections", body).status == 200
    say(daemon, ASKED[-1])


def say(daemon: DaemonProcess, text: str, topic: str = TOPIC) -> None:
    """In a chat of its own; returns when it is stored."""
    before = len(daemon.export())
    daemon.chat([{"role": "user", "content": text}], memory_in={"topic_id": topic})
    wait_until(lambda: len(daemon.export()) > before, lambda: "it was not stored")


def main() -> None:
    """The command."""
    target = Path(sys.argv[1])
    executable = chromium()
    assert executable is not None, "no Chromium; on Debian and Ubuntu: apt install chromium"
    with played() as daemon, running_chromium(executable) as browser:
        newest = ask(f"{daemon.own_url}/memd/turns?limit=1").json["turns"][0]["turn_id"]
        talk = ask(f"{daemon.own_url}/memd/conversations").json["conversations"][0]["conversation"]
        [chunk] = ask(f"{daemon.own_url}/memd/chunks?topic={TOPIC}&contains=18:00&all=1").json["chunks"]
        views = {
            "turns": "",
            "turn": f"#/turns/{newest}",
            "conversations": "#/conversations",
            "conversation": f"#/conversation/{TOPIC}/{talk}",
            "read": f"#/read?topic={TOPIC}",
            "timeline": "#/timeline",
            "search": "#/search?q=When+does+the+reminder+go+out%3F",
            "chunk": f"#/chunk/{TOPIC}/{chunk['uuid']}",
            "chosen": "#/search?words=the",
            "figures": "#/figures",
            "topics": "#/topics",
            "sources": "#/sources",
            "note": "#/note",
            "empty": "#/turns?topic=nothing",
        }
        for look in LOOKS:
            for name, view in views.items():
                picture = f"page-{name}-{look}"
                if picture in IN_THE_DOCS or "--all" in sys.argv:
                    take(browser, daemon, view, target / f"{picture}.png", look)


def take(browser: Browser, daemon: DaemonProcess, view: str, path: Path, look: str) -> None:
    """One picture."""
    device, scheme = look.split("-")
    size = PHONE if device == "phone" else DESK
    with tab(browser, daemon.own_url, viewport=size, color_scheme=scheme) as watched:
        watched.page.goto(f"{daemon.own_url}/memd/{view}")
        watched.page.wait_for_selector("main:not([aria-busy]) h1")
        watched.page.wait_for_selector("text=Events live", state="attached")  # on a phone only what is wrong is seen
        time.sleep(0.5)  # what is fetched when something is opened
        watched.page.screenshot(path=path)
        assert watched.wrong == [], watched.wrong


if __name__ == "__main__":
    main()
