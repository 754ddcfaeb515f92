"""Documents: files that are added, found with where they are from, and added again for no more than what changed."""

import asyncio
import base64
import hashlib
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import made_documents
import msgspec
import pytest
from archiver_stage import Stage, live_entries
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, token_setting, wait_until
from recording_upstream import RecordingUpstream

from memd.conversation.matching import aligned
from memd.entries import Entry
from memd.errors import BadDocument, EmbeddingError, StoreError
from memd.ingest.readers.text import GivenDocument, GivenSection, sections_of
from memd.ingest.sources import look as looks
from memd.ingest.sources.documents import CHUNKS_MAX, KnownDocument, TakenDocument, chunks_of, known_documents
from memd.ingest.sources.look import Chosen, Look, Seen, Source, Walk, claude_code_folders, look, project_name
from memd.ingest.sources.watch import topic_of
from memd.ingest.topics import Topic
from memd.store.snapshot import Place, Snapshot

GUIDE = """Everybody here.

# Leave

Twenty-six days a year.

Sick
----

```sh
# no heading
call Marta
```

# Pay

On the 25th.
"""


# -- reading ----------------------------------------------------------------------------------------------------------


def test_markdown_is_cut_at_its_headings_and_code_is_none() -> None:
    assert [(section.heading, section.text) for section in sections_of("guide.md", GUIDE.encode())] == [
        ((), "Everybody here."),
        (("Leave",), "Twenty-six days a year."),
        (("Leave", "Sick"), "```sh\n# no heading\ncall Marta\n```"),
        (("Pay",), "On the 25th."),
    ]
    assert sections_of("guide.txt", b"\xef\xbb\xbf# one\n") == (GivenSection((), "# one"),)
    assert sections_of("empty.md", b" \n") == ()


def test_names_and_values_in_front_of_markdown_are_text_and_no_heading() -> None:
    front = "---\nname: build\ntags:\n  - ci\n---\n"
    told = [(one.heading, one.text) for one in sections_of("a.md", f"{front}Above.\n\n# One\n\nBelow.\n".encode())]
    assert told == [((), "name: build\ntags:\n  - ci\n\nAbove."), (("One",), "Below.")]
    [below] = sections_of("a.md", f"{front}# Plans\n\nWe paint the boathouse.".encode())
    assert (below.heading, below.text) == (("Plans",), "name: build\ntags:\n  - ci\n\nWe paint the boathouse.")
    assert [one.text for one in sections_of("a.md", front.encode())] == ["name: build\ntags:\n  - ci"]
    assert [one.heading for one in sections_of("a.md", b"---\n\nplain\n---\n\nmore\n")] == [(), ("plain",)]


def written(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"text of {name}")
    return folder


def kept_of(daemon: DaemonProcess, source: str) -> list[dict[str, str]]:
    answer = ask(f"{daemon.own_url}/memd/documents/chunks?topic=default&source={source}")
    return answer.json.get("chunks", [])  # type: ignore[no-any-return]


def found(root: Path, **chosen: Any) -> list[str]:
    return [file.below for file in Walk(root, Chosen(**chosen)).files()]


def test_files_are_found_by_their_kind_without_what_is_hidden_excluded_ignored_or_elsewhere(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "elsewhere", "secret.md")
    root = written(
        tmp_path / "root", "b.md", "a/c.py", "a/d.bin", ".git/config.txt", "build/x.md", "rebuild/y.md", "a/keep.log",
        "a/drop.log", "README", "a/build/z.md",
    )  # fmt: skip
    (root / ".gitignore").write_text("*.log\n!keep.log\n")
    (root / "out.md").symlink_to(elsewhere / "secret.md")
    (root / "folder").symlink_to(elsewhere)
    (root / "in.md").symlink_to(root / "b.md")
    (root / "sly.md").symlink_to(root / "build" / "x.md")
    (root / "circle.md").symlink_to(root / "circle.md")
    assert found(root, exclude=("build",)) == ["README", "a/c.py", "a/keep.log", "b.md", "in.md", "rebuild/y.md"]
    assert found(root, exclude=("build", str(root / "a")), formats=("md",)) == ["b.md", "in.md", "rebuild/y.md"]


def test_links_out_of_a_folder_are_followed_on_request_and_go_around_no_exclusion(tmp_path: Path) -> None:
    elsewhere = written(tmp_path / "elsewhere", "one.md", "deep/two.md", "private/three.md")
    root = written(tmp_path / "root", "a.md")
    (elsewhere / "back").symlink_to(elsewhere)
    (root / "more").symlink_to(elsewhere)
    (root / "twice").symlink_to(elsewhere / "deep")
    (root / "sly.md").symlink_to(elsewhere / "private" / "three.md")
    (root / "own").symlink_to(root)
    assert found(root) == ["a.md"]
    followed = found(root, follow_links=True, exclude=("private",))
    assert followed == ["a.md", "more/deep/two.md", "more/one.md"]
    assert found(root, follow_links=True, exclude=("private", str(elsewhere / "deep"))) == ["a.md", "more/one.md"]


@pytest.mark.filterwarnings("ignore:Possible nested set")
def test_a_line_that_git_cannot_read_is_no_rule(tmp_path: Path) -> None:
    root = written(tmp_path, "a.md", "b.log")
    (root / ".gitignore").write_text("!\n\\\n[z-a]\n*.log\n")
    assert found(root) == ["a.md"]


@pytest.mark.parametrize("rule", ["*a" * 40 + "*b", "*[(a]" * 40 + "*b", "**/a/" * 20 + "b"])
def test_no_rule_of_a_folder_takes_ages(tmp_path: Path, rule: str) -> None:
    root = written(tmp_path, "a/" * 30 + "a" * 200 + ".md", "kept.md")
    (root / ".gitignore").write_text(f"{rule}\n*a/**/a/*aa*.md\n")
    assert found(root) == ["kept.md"]


def test_a_folder_whose_rules_are_too_many_is_not_read(tmp_path: Path) -> None:
    root = written(tmp_path, "a.md", "deep/b.md")
    (root / "deep" / ".gitignore").write_text("*.log\n" * 20_000)
    walk = Walk(root, Chosen())
    assert [file.below for file in walk.files()] == ["a.md"]
    assert walk.unread == [("deep", "the folder cannot be read (its .gitignore has more than 100,000 bytes)")]


# -- what changed -----------------------------------------------------------------------------------------------------


def document(texts: Sequence[str], source: str = "docs/a.md", **more: str) -> GivenDocument:
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    sections = tuple(GivenSection(("Rows",), text) for text in texts)
    return GivenDocument(source=source, hash=digest, sections=sections, **more)


async def taken(stage: Stage, topic: Topic, texts: Sequence[str], source: str = "docs/a.md", **more: str) -> list[str]:
    """Take a document of these sections; returns the texts that were embedded for it."""
    before = len(stage.embedder.texts)
    await stage.taker.take(topic, document(texts, source, **more))
    return stage.embedder.texts[before:]


def contents(topic: Topic) -> list[str]:
    return sorted(entry.content for entry in live_entries(topic))


def hash_of(topic: Topic) -> dict[str, str]:
    return {one.source: one.hash for one in known_documents(topic.log.snapshot())}


async def test_one_changed_line_of_500_costs_one_vector(stage: Stage, topic: Topic) -> None:
    rows = [f"Row {number} of the table." for number in range(500)]
    assert len(await taken(stage, topic, rows)) == 500
    assert await taken(stage, topic, rows) == []
    entries = topic.log.snapshot().extent.entries
    (old,) = (entry for entry in live_entries(topic) if entry.content == rows[250])
    changed = [*rows[:250], "Row 250 was wrong.", *rows[251:]]
    assert await taken(stage, topic, changed) == ["Rows\nRow 250 was wrong."]
    assert topic.log.snapshot().extent.entries == entries + 2
    (new,) = (entry for entry in live_entries(topic) if entry.content == "Row 250 was wrong.")
    assert (new.supersedes, new.reason, new.kind, new.source) == ((old.uuid,), "file changed", "document", "docs/a.md")
    assert contents(topic) == sorted(changed)


async def test_a_file_that_goes_back_to_what_it_was_is_whole_again_for_no_vector(stage: Stage, topic: Topic) -> None:
    rows = ["One.", "Two.", "Three."]
    await taken(stage, topic, rows)
    first = hash_of(topic)
    assert await taken(stage, topic, rows[:2]) == []
    assert contents(topic) == ["One.", "Two."] and hash_of(topic) != first, "it is told from the file with three"
    assert await taken(stage, topic, rows) == ["Rows\nThree."]
    assert contents(topic) == sorted(rows) and hash_of(topic) == first
    assert await taken(stage, topic, ["Two.", "One.", "Three."]) == [], "what only moved keeps its vector"
    assert len(contents(topic)) == 3


async def test_a_change_reads_as_much_however_often_the_file_was_changed_before(
    stage: Stage, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reads = Snapshot.read, Counter[int]()

    def noted(self: Snapshot, place: Place) -> Entry:
        reads[number] += 1
        return read(self, place)

    monkeypatch.setattr(Snapshot, "read", noted)
    for number in range(12):
        await taken(stage, topic, ["The first row.", *(f"Row {row} of version {number}." for row in range(5))])
    assert reads[11] == reads[2] > 0


async def test_a_document_whose_vectors_fail_is_left_as_it_was(stage: Stage, topic: Topic) -> None:
    await taken(stage, topic, ["One.", "Two."])
    stage.embedder.fails = True
    with pytest.raises(EmbeddingError):
        await taken(stage, topic, ["One.", "Three."])
    assert contents(topic) == ["One.", "Two."]


@pytest.mark.thorough
async def test_chunks_stay_in_the_order_of_their_file_whatever_changes(stage: Stage, topic: Topic) -> None:
    rng = random.Random(7)
    rows = [f"Row {number}." for number in range(6)]
    for number in range(60):
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(rows) + 1)
            if rng.random() < 0.6:
                rows.insert(place, rng.choice([f"New {number}.", "The same.", f"Row {rng.randrange(6)}."]))
            elif rows:
                rows.append(rows.pop(min(place, len(rows) - 1)))
        await taken(stage, topic, rows)
        assert [entry.content for entry in chunks_of(topic.log.snapshot(), "docs/a.md")] == rows


@pytest.mark.thorough
async def test_a_table_of_equal_rows_is_compared_in_time_that_grows_with_its_length(stage: Stage, topic: Topic) -> None:
    rows = ["The same row."] * 3_000
    await taken(stage, topic, rows)
    began = time.thread_time()
    before, after = [("Rows", row) for row in rows] * 10, [("Rows", row) for row in ["Else.", *rows[1:]]] * 10
    shared = sum(length for _, _, length in aligned(after, before))
    assert shared == 2_999 and time.thread_time() - began < 5  # difflib: hours
    assert await taken(stage, topic, ["Another.", *rows[1:-1], "The last."]) == ["Rows\nAnother.", "Rows\nThe last."]


async def test_a_long_document_is_given_up_when_the_daemon_ends(stage: Stage, topic: Topic) -> None:
    taking = asyncio.gather(stage.taker.take(topic, document([f"Row {one}." for one in range(400)])))
    while not stage.embedder.texts:  # noqa: ASYNC110 - a model tells nobody when it is asked
        await asyncio.sleep(0)
    stage.taker.stop()
    with pytest.raises(StoreError, match="nothing of this document is stored yet"):
        await taking
    embedded = len(stage.embedder.texts)
    with pytest.raises(StoreError):
        await taken(stage, topic, ["One."])
    assert embedded < 400 and contents(topic) == []


@pytest.mark.thorough
async def test_a_document_of_too_many_chunks_is_refused(stage: Stage, topic: Topic) -> None:
    with pytest.raises(BadDocument, match="20,001 chunks, and a document may have 20,000: add it in parts"):
        await taken(stage, topic, ["x"] * (CHUNKS_MAX + 1))


# -- as a user does it ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runs", [True, False])
def test_a_folder_is_added_found_added_again_renamed_and_taken_out(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path, runs: bool
) -> None:
    daemon = make_daemon(upstream.url)
    if runs:
        daemon.start()
    docs = tmp_path / "handbook"
    docs.mkdir()
    (docs / "guide.md").write_text(GUIDE)
    (docs / "tool.py").write_text("def lamp() -> str:\n    return 'second landing'\n")
    (docs / "photo.txt").write_bytes(b"\x89PNG\0")
    (docs / "old.txt").write_bytes(b"a\xff")
    first = daemon.run("add", str(docs))
    assert first.returncode == 1 and "handbook/photo.txt: left out: it is no text" in first.stdout
    assert "handbook/old.txt: left out: it is no UTF-8 text (byte 1): save it as UTF-8" in first.stdout
    assert (
        "topic default: 4 files looked at as documents, 0 of them unchanged, 2 left out; 5 chunks written, 0 taken out"
        in first.stdout
    )
    for name in ("photo.txt", "old.txt"):
        (docs / name).unlink()
    assert said(daemon, "add", str(docs)).endswith("2 of them unchanged; 0 chunks written, 0 taken out\n")
    shown = said(daemon, "search", "When is pay day?", "--kind", "document")
    assert "document, Pay, handbook/guide.md" in shown and "On the 25th." in shown
    [pay, *_] = [one["id"] for one in daemon.export() if "On the 25th." in one["content"]]
    assert all("later" not in line and "apart" not in line for line in said(daemon, "related", pay).splitlines())
    belongs = json.loads(said(daemon, "related", pay, "--json"))["chunks"]
    assert {one["seconds_apart"] for one in belongs} <= {None}, "all of a folder are added at one time"
    nowhere = daemon.run("search", "When is pay day?", "--tag", "nowhere")
    assert nowhere.returncode == 1 and "of what was chosen" in nowhere.stdout
    chosen = ("--tag", "nowhere", "--source", "handbok", "--author", "owner", "--role", "usr")
    told = daemon.run("search", "When is pay day?", *chosen).stdout.splitlines()
    unknown = ["source 'handbok'", "tag 'nowhere'", "role 'usr'"]
    assert told[1:] == [f"No chunk has {one}; `memd log` shows what chunks have." for one in unknown]
    if runs:
        daemon.chat([{"role": "user", "content": "On which day of the month is pay day?"}])
        assert "(handbook/guide.md, Pay) On the 25th." in upstream.prompts[-1]
    (docs / "guide.md").write_text(GUIDE.replace("25th", "27th"))
    (docs / "tool.py").rename(docs / "lamp.py")
    assert said(daemon, "add", str(docs)).endswith("0 of them unchanged; 2 chunks written, 2 taken out\n")
    listed = said(daemon, "sources")
    assert "handbook/lamp.py  1 chunk" in listed and "tool.py" not in listed and "2 documents, 5 chunks" in listed
    (docs / "lamp.py").unlink()
    assert said(daemon, "add", str(docs)).endswith("1 of them unchanged; 0 chunks written, 1 taken out\n")
    other = written(tmp_path / "other" / "handbook", "x.md")
    (other / "guide.md").write_text((docs / "guide.md").read_text())  # the same file in both
    refused = daemon.run("add", str(other), "--as", "handbook")
    assert refused.returncode == 1 and "another folder is called handbook: give it another name" in refused.stderr
    assert "5 chunks written, 0 taken out" in said(daemon, "add", str(other))
    listed = said(daemon, "sources")
    assert "handbook/guide.md  4 chunks" in listed and "handbook@other/guide.md  4 chunks" in listed
    assert "0 chunks written, 0 taken out" in said(daemon, "add", str(docs), str(other))
    assert "2 documents taken out" in said(daemon, "sources", "--remove", "handbook@other")
    assert "1 chunk written" in said(daemon, "add", str(other / "x.md"), "--as", "second")
    for emptied in (docs / "guide.md", other / "x.md"):
        emptied.rename(tmp_path / emptied.name)
    empty, missing = daemon.run("add", str(docs)), daemon.run("add", str(other / "x.md"), "--as", "second")
    assert empty.returncode == 1 and "1 document from before, which stay: is its disk mounted?" in empty.stderr
    assert missing.returncode == 2 and "2 documents, 5 chunks" in said(daemon, "sources")
    assert "1 document taken out" in said(daemon, "sources", "--remove", "handbook")
    assert "1 document, 1 chunk" in said(daemon, "sources")
    assert json.loads(said(daemon, "sources", "--json", "--remove", "second"))["documents"] == []
    missing = daemon.run("sources", "--remove", "handbook")
    assert missing.returncode == 1 and "there is no document 'handbook'" in missing.stderr
    assert said(daemon, "verify")


def test_a_correction_stays_while_the_file_has_the_text_and_goes_with_it(served: DaemonProcess, tmp_path: Path) -> None:
    docs = tmp_path / "house"
    docs.mkdir()
    first = {"Port": "4711 is the port.", "Lift": "The lift is out.", "One": "It is 1.", "Two": "It is 2."}

    def add(name: str = "a.md", **changed: str) -> list[str]:
        told = {**first, **changed}
        (docs / name).write_text("\n\n".join(f"# {heading}\n\n{text}" for heading, text in told.items()))
        said(served, "add", str(docs))
        return sorted(one["content"] for one in kept_of(served, f"house/{name}"))

    def correct(*contents: str, **update: str) -> None:
        ids = [one["id"] for one in kept_of(served, "house/a.md") if one["content"] in contents]
        body = {"topic_id": "default", "chunk_ids": ids, "action": "Update", "reason": "it is wrong", **update}
        assert ask(f"{served.own_url}/memd/corrections", body).status == 200

    add()
    correct("4711 is the port.", content="4822 is the port.")
    correct("4822 is the port.", content="4933 is the port.")
    correct("The lift is out.")
    correct("It is 1.", "It is 2.", content="It is 12.")
    corrected = ["4933 is the port.", "It is 12."]
    assert add(New="More.") == [*corrected, "More."]
    assert add(New="Less.", Two="It is 3.") == [*corrected, "It is 3.", "Less."], "it replaced the other one, too"
    (docs / "a.md").rename(docs / "b.md")
    assert add("b.md", New="Less.", Two="It is 3.") == [*corrected, "It is 3.", "Less."]
    assert "1 document, 4 chunks" in said(served, "sources")
    assert add("b.md", One="It is 4.", Two="It is 3.") == ["4933 is the port.", "It is 3.", "It is 4."]
    assert "The port is 5000." in add("b.md", Port="The port is 5000.")
    assert [one for one in add("b.md") if "port" in one] == ["4711 is the port."], "it was written again"
    assert said(served, "verify")


def test_a_source_that_is_taken_out_and_added_again_has_its_corrections(served: DaemonProcess, tmp_path: Path) -> None:
    root = written(tmp_path / "club", "a.md")
    told = {"Balls": "They cost 4 euros.", "Bar": "It opens at 9.", "Court": "Court 1 is open.", "Key": "Ask Ines."}

    def add(**changed: str) -> list[str]:
        (root / "a.md").write_text("\n\n".join(f"# {name}\n\n{text}" for name, text in (told | changed).items()))
        said(served, "add", str(root))
        return sorted(one["content"] for one in kept_of(served, "club/a.md"))

    add()
    balls, bar, court, key = (one["id"] for one in kept_of(served, "club/a.md"))
    said(served, "correct", balls, "--update", "They cost 6 euros.")
    said(served, "correct", court, "--update", "Court 1 is wet.")
    said(served, "undo", court)
    said(served, "undo", court)
    said(served, "correct", bar, "--deprecate")
    said(served, "correct", key, "--helpful")
    corrected = ["Ask Ines.", "Court 1 is wet.", "They cost 6 euros."]
    assert add(Hall="Two stairs down.") == [*corrected, "Two stairs down."]
    for changed in ({}, {"Hall": "Three stairs up."}):
        said(served, "sources", "--remove", "club")
        assert add(**changed) == sorted([*corrected, *changed.values()])
        assert '"multiplier":1.5' in said(served, "show", "--json", key)
    assert "counts once now" in said(served, "undo", key)
    said(served, "undo", balls)
    assert add(Hall="None.") == ["Ask Ines.", "Court 1 is wet.", "None.", "They cost 4 euros."]
    said(served, "undo", balls)
    said(served, "sources", "--remove", "club")
    assert add(Balls="They are free.") == ["Ask Ines.", "Court 1 is wet.", "They are free."]
    assert add() == ["Ask Ines.", "Court 1 is wet.", "They cost 4 euros."], "it was written again"
    assert said(served, "verify")


def test_a_correction_stays_when_what_it_took_out_is_erased(served: DaemonProcess, tmp_path: Path) -> None:
    root = written(tmp_path / "house", "a.md")
    for text in ("# Port\n\n4711.\n", "# Port\n\n4711.\n\n# Lift\n\nIt is out.\n"):
        (root / "a.md").write_text(text)
        said(served, "add", str(root))
        if "Lift" not in text:
            [old] = [one["id"] for one in served.export()]
            said(served, "correct", old, "--update", "4822.", "--reason", "it moved")
            said(served, "erase", "default", "--chunk", old, "--forbid", "--yes")
    assert sorted(one["content"] for one in kept_of(served, "house/a.md")) == ["4822.", "It is out."]


def test_a_correction_is_undone_under_the_name_that_the_file_has_now(served: DaemonProcess, tmp_path: Path) -> None:
    root = written(tmp_path / "club", "a.md")
    told = {
        "Balls": "The machine costs 4 euros.",
        "Court": "Court 1 is open.",
        "Bar": "It opens at 9.",
        "Key": "Ask Ines.",
    }
    (root / "a.md").write_text("\n\n".join(f"# {heading}\n\n{text}" for heading, text in told.items()))
    said(served, "add", str(root))
    ids = {one["content"]: one["id"] for one in kept_of(served, "club/a.md")}

    def shown(name: str) -> list[str]:
        return sorted(one["content"] for one in kept_of(served, f"club/{name}"))

    balls, court, bar = (ids[told[name]] for name in ("Balls", "Court", "Bar"))
    said(served, "correct", balls, "--update", "The machine costs 6 euros.")
    said(served, "correct", court, "--update", "Court 1 is closed.")
    said(served, "correct", bar, "--deprecate")
    [closed] = [one["id"] for one in kept_of(served, "club/a.md") if one["content"] == "Court 1 is closed."]
    said(served, "correct", closed, "--update", "Court 1 is wet.")
    for before, now in (("a.md", "b.md"), ("b.md", "c.md")):
        (root / before).rename(root / now)
        said(served, "add", str(root))
        assert shown(now) == ["Ask Ines.", "Court 1 is wet.", "The machine costs 6 euros."]
    assert len(json.loads(said(served, "show", "--json", balls))["replaced_by"]) == 1
    assert "is shown again" in said(served, "undo", bar)
    assert "It opens at 9." in shown("c.md")
    said(served, "undo", balls)
    assert shown("c.md") == ["Ask Ines.", "Court 1 is wet.", "It opens at 9.", "The machine costs 4 euros."]
    refused = served.run("undo", court)
    assert refused.returncode == 2 and "undo that one first" in refused.stderr
    said(served, "undo", closed)
    assert "Court 1 is closed." in shown("c.md") and "Court 1 is wet." not in shown("c.md")
    assert "0 chunks written, 0 taken out" in said(served, "add", str(root))
    said(served, "undo", balls)
    assert shown("c.md") == ["Ask Ines.", "Court 1 is closed.", "It opens at 9.", "The machine costs 6 euros."]
    assert not shown("a.md") and not shown("b.md")
    assert said(served, "verify")


def test_a_page_of_which_nothing_is_read_is_named_with_the_reason(served: DaemonProcess, tmp_path: Path) -> None:
    page = b"<title>Shop</title><nav>Home</nav><div id=root></div><script>show()</script>"
    root = written(tmp_path / "web", "a.md")
    (root / "app.html").write_bytes(page)
    (root / "empty.md").write_bytes(b"\n")
    told = served.run("add", str(root))
    assert told.returncode == 1 and "web/app.html: left out: nothing in it is text that memd reads" in told.stdout
    assert "1 left out; 1 chunk written" in told.stdout
    body = {"topic_id": "default", "file": {"name": "app.html", "content": base64.b64encode(page).decode()}}
    refused = ask(f"{served.own_url}/memd/documents", body)
    assert refused.status == 400 and "nothing in it is text that memd reads" in refused.body.decode()


def test_a_file_is_found_by_its_name_and_shown_as_before(served: DaemonProcess, tmp_path: Path) -> None:
    root = written(tmp_path / "house", *(f"entry {number}.md" for number in range(20)))
    for name, text in {
        "quokka-handover.md": "The keys are with the porter.",
        "retry_policy.py": "def wait(n):\n    return min(30, 2 ** n)",
        "Reisebericht Lofoten.txt": "Wir sahen Wale.",
    }.items():
        (root / name).write_text(text)
    said(served, "add", str(root))
    (root / "retry_policy.py").rename(root / "patience.py")
    said(served, "add", str(root))
    for question, text in {
        "What does quokka-handover.md say?": "The keys are with the porter.",
        "What does patience.py do?": "def wait(n):\n    return min(30, 2 ** n)",
        "Was steht im Reisebericht Lofoten?": "Wir sahen Wale.",
    }.items():
        found = json.loads(said(served, "search", "--json", question))["chunks"]
        assert found[0]["content"] == text and found[0]["verdict"] == "injected", question
    gone = json.loads(served.run("search", "--json", "show me retry_policy").stdout)["chunks"]
    assert all(one["verdict"] != "injected" for one in gone)


def test_one_file_is_one_document_however_it_is_added(served: DaemonProcess, tmp_path: Path) -> None:
    root = written(tmp_path / "house", "a.md", "b.md", "Notes on the boiler")
    (root / "tool").write_bytes(b"\x7fELF\0\0 not a text")
    assert "1 chunk written" in said(served, "add", str(root / "a.md"))
    assert "3 files looked at" in (told := said(served, "add", str(root))) and "3 chunks written, 1 taken out" in told
    listed = said(served, "sources")
    assert "house/a.md" in listed and "house/Notes on the boiler" in listed and "3 documents, 3 chunks" in listed
    assert "1 of them unchanged; 0 chunks written" in said(served, "add", str(root / "b.md"))
    (root / "b.md").write_text("another text")
    assert "1 chunk written, 1 taken out" in said(served, "add", str(root / "b.md"))
    assert "3 documents, 3 chunks" in said(served, "sources")


def test_a_file_whose_name_is_redacted_stays_when_added_again(serving: Serving, tmp_path: Path) -> None:
    root = written(tmp_path / "bank", "DE89370400440532013000.md", "a\ndefault  b.md")
    daemon = serving({"ingest": {"redact": True}})
    assert "2 chunks written, 0 taken out" in said(daemon, "add", str(root))
    assert "0 chunks written, 0 taken out" in said(daemon, "add", str(root))
    (root / "DE89370400440532013000.md").write_text("another text")
    assert "1 chunk written, 1 taken out" in said(daemon, "add", str(root))
    listed = said(daemon, "sources")
    assert "bank/[redacted:iban].md  1 chunk" in listed and "bank/a\\x0adefault  b.md  1 chunk" in listed
    assert "bank/a\\x0adefault  b.md" in said(daemon, "search", "text of a"), "on one line"


def test_a_page_and_a_sheet_are_said_wherever_a_chunk_is_shown_and_a_bad_file_is_named(
    served: DaemonProcess, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    root = tmp_path / "office"
    root.mkdir()
    made_documents.pdf(root / "pay.pdf", ["Words first.", "# Pay\nPay day is the 25th of the month."])
    made_documents.workbook(root / "keys.xlsx", {"Cellar keys": [["Door", "Hook"], ["boiler room", "blue hook"]]})
    (root / "broken.pdf").write_bytes(b"%PDF-1.7 nothing more")
    (root / "old.pages").write_bytes(b"x")
    told = served.run("add", str(root))
    assert told.returncode == 1 and "3 chunks written" in told.stdout
    assert "office/broken.pdf: left out: it is no PDF that can be read" in told.stdout
    assert "office/old.pages: left out: files of this kind cannot be read: export it as PDF" in told.stdout
    for question, place, name in (
        ("On which day of the month is pay day?", "(office/pay.pdf, Pay, page 2) Pay day", "page 2"),
        ("Where does the key of the boiler room hang?", "(office/keys.xlsx, sheet Cellar keys) Door: boiler", "sheet"),
        ("What is in the sheet of the cellar keys?", "(office/keys.xlsx, sheet Cellar keys) Door: boiler", "sheet"),
    ):
        served.chat([{"role": "user", "content": question}])
        assert place in upstream.prompts[-1]
        assert name in said(served, "search", question, "--kind", "document")


def said(daemon: DaemonProcess, *arguments: str) -> str:
    done = daemon.run(*arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


# Sources: folders of the settings, looked at again and again


class Kept:
    """Documents in a dictionary: what a look hands over, and takes out."""

    def __init__(self) -> None:
        self.documents: dict[str, GivenDocument] = {}
        self.taken: list[str] = []

    def known(self) -> Sequence[KnownDocument]:
        return [KnownDocument("t", one.source, one.hash, 1, 0, one.root) for one in self.documents.values()]

    def take(self, document: GivenDocument) -> TakenDocument:
        self.taken.append(document.source)
        self.documents.pop(document.renamed_from or "", None)
        self.documents[document.source] = document
        return TakenDocument(1, 0, document.source)

    def remove(self, sources: Sequence[str]) -> TakenDocument:
        for source in sources:
            del self.documents[source]
        return TakenDocument(0, len(sources))

    def texts(self) -> dict[str, str]:
        return {source: one.sections[0].text for source, one in sorted(self.documents.items())}


class Looker:
    """Looks at one folder again and again, as a daemon does."""

    def __init__(self, root: Path, kept: Kept | None = None, name: str = "") -> None:
        self.root, self.kept, self.name = root, kept or Kept(), name
        self.seen: dict[str, Seen] = {}

    def look(self, step: Callable[[], None] = lambda: None, *, force: bool = False, **chosen: Any) -> Look:
        self.kept.taken.clear()
        told = Look()
        source = Source(path=self.root, name=self.name, chosen=Chosen(**chosen))
        look(source, self.kept, self.seen, told, force=force, step=step)
        return told


def aged(*files: Path) -> None:
    """Let files have been written some time ago, so that they are known by their size and time."""
    for file in files:
        os.utime(file, (time.time() - 60, time.time() - 60))


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    folder = tmp_path / "one" / "docs"
    (folder / "deep").mkdir(parents=True)
    for name in ("a.md", "b.md", "deep/c.md"):
        (folder / name).write_text(f"text of {name}")
        aged(folder / name)
    return folder


def test_only_what_changed_is_read_and_only_what_is_gone_taken_out(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looker = Looker(docs)
    assert looker.look().written == 3
    with monkeypatch.context() as patched:
        patched.setattr(looks, "read_at_one_moment", lambda found, _: pytest.fail(f"{found.path} is read again"))
        assert looker.look().unchanged == 3
    (docs / "a.md").write_text("another text")
    (docs / "b.md").rename(docs / "deep" / "b.md")
    assert looker.look().unchanged == 1 and looker.kept.taken == ["docs/a.md", "docs/deep/b.md"]
    assert looker.kept.documents["docs/deep/b.md"].renamed_from == "docs/b.md"
    (docs / "a.md").unlink()
    assert looker.look().taken_out == 1 and sorted(looker.kept.documents) == ["docs/deep/b.md", "docs/deep/c.md"]
    assert looker.look(force=True).done == 2 and len(looker.kept.taken) == 2
    looker.kept.documents.clear()  # somebody took them out
    assert looker.look().written == 2


def test_a_folder_that_is_locked_keeps_its_documents(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looker, listed = Looker(docs), os.scandir
    looker.look()

    def refuse(folder: str) -> Any:
        if folder.endswith("deep"):  # whoever runs the tests may be allowed to read everything
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(os, "scandir", refuse)
    (docs / "b.md").unlink()
    told = looker.look()
    assert told.problems == [("docs/deep", "the folder cannot be read (Permission denied)")]
    assert sorted(looker.kept.documents) == ["docs/a.md", "docs/deep/c.md"]


def test_a_file_that_vanishes_between_listing_and_reading_is_gone_and_no_problem(docs: Path) -> None:
    looker = Looker(docs)
    looker.look()
    told = looker.look(step=lambda: (docs / "b.md").unlink(missing_ok=True))
    assert not told.problems and sorted(looker.kept.documents) == ["docs/a.md", "docs/deep/c.md"]


def test_a_file_that_is_written_to_while_it_is_read_is_never_taken_half(docs: Path) -> None:
    looker, file, ended = Looker(docs, name="docs"), docs / "a.md", threading.Event()
    texts = ["".join(f"Row {row} of version {version}.\n" for row in range(1_000)) for version in range(2)]
    seen: set[str] = set()
    held_up_seconds = 0.0

    def edit() -> None:
        nonlocal held_up_seconds
        version = 0
        while not ended.is_set():
            with file.open("r+") as opened:  # in place, in pieces: the worst that an editor does
                began = time.monotonic()
                for start in range(0, len(texts[version]), 1_250):
                    opened.write(texts[version][start : start + 1_250])
                    opened.flush()
                held_up_seconds = max(held_up_seconds, time.monotonic() - began)
            version = 1 - version
            ended.wait(0.25)  # else nobody ever sees a whole one

    file.write_text(texts[1])
    editor = threading.Thread(target=edit)
    editor.start()
    try:
        for _ in range(10):
            looker.look()
            if "docs/a.md" in looker.kept.documents:
                seen.add(looker.kept.texts()["docs/a.md"] + "\n")
    finally:
        ended.set()
        editor.join()
    # On a machine that let the editor wait in mid-sentence its file had not changed for long enough to be taken.
    assert seen <= set(texts) or held_up_seconds > looks.SETTLED_SECONDS / 2
    looker.look()
    assert looker.kept.texts()["docs/a.md"] + "\n" == file.read_text()


@pytest.mark.parametrize("where", ["file", "folder"])
def test_a_link_in_the_place_of_a_listed_file_or_folder_is_not_followed(docs: Path, tmp_path: Path, where: str) -> None:
    apart = tmp_path / "apart"
    apart.mkdir()
    (apart / "c.md").write_text("a secret")
    place, target = (docs / "deep", apart) if where == "folder" else (docs / "deep" / "c.md", apart / "c.md")

    def swap() -> None:  # after the listing, before the first file
        if not place.is_symlink():
            place.rename(tmp_path / "was")
            place.symlink_to(target)

    looker = Looker(docs)
    told = looker.look(swap)
    assert "a secret" not in str(looker.kept.documents)
    assert [source for source, _ in told.problems] == ["docs/deep/c.md"] and told.written == 2


def test_a_pipe_that_takes_the_place_of_a_listed_file_keeps_nobody_waiting(docs: Path) -> None:
    def swap() -> None:
        if (docs / "a.md").is_file():
            (docs / "a.md").unlink()
            os.mkfifo(docs / "a.md")

    told = Looker(docs).look(swap)
    assert told.problems == [("docs/a.md", "it is no file with a content")] and told.written == 2


def test_a_folder_that_is_too_deep_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    root = tmp_path / "docs"
    deep = root.joinpath(*["d"] * 300)
    deep.mkdir(parents=True)
    for folder in (root, deep):
        (folder / "a.md").write_text("text")
    told = Looker(root).look()
    assert told.written == 1 and "more than 200 folders deep" in told.problems[0][1]


def test_what_cannot_be_read_is_named_each_time_and_read_once(docs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (docs / "b.md").write_bytes(b"\0")
    os.mkfifo(docs / "pipe.md")
    aged(docs / "b.md")
    looker = Looker(docs)
    problem = [("docs/b.md", "it is no text: it has bytes of something else in it")]
    assert looker.look().problems == problem
    monkeypatch.setattr(looks, "read_at_one_moment", lambda found, _: pytest.fail(f"{found.path} is read again"))
    assert looker.look().problems == problem


def test_what_claude_code_noted_is_found_with_the_project_that_it_is_about(tmp_path: Path) -> None:
    def noted(project: str, *sessions: str) -> None:
        folder = tmp_path / "projects" / project_name(project)
        (folder / "memory").mkdir(parents=True)
        (folder / "memory" / "MEMORY.md").write_text("- [Build](build.md)\n")
        lines = [json.dumps({"type": "summary"}), *(json.dumps({"cwd": cwd, "type": "user"}) for cwd in sessions)]
        (folder / "1.jsonl").write_text("\n".join([*lines, "{"]))

    noted("/Users/me/my_shop", "/Users/me", "/Users/me/my_shop")
    noted("/Users/me/a/app", "/Users/me/a/app")
    noted("/Users/me/b/app", "/Users/me/b/app")
    noted("/srv/gone")
    (tmp_path / "projects" / "-empty" / "memory").mkdir(parents=True)
    found = claude_code_folders({"CLAUDE_CONFIG_DIR": str(tmp_path)})
    assert {one.name: topic_of(one.project) for one in found} == {
        "claude-code/my_shop": "my_shop",
        "claude-code/Users-me-a-app": "app",
        "claude-code/Users-me-b-app": "app",
        "claude-code/srv-gone": "srv-gone",
    }


# -- as a daemon does it ----------------------------------------------------------------------------------------------


def state_of(daemon: DaemonProcess, number: int = 0) -> dict[str, Any]:
    state: dict[str, Any] = ask(f"{daemon.own_url}/memd/index").json["sources"][number]
    return state


def live(daemon: DaemonProcess) -> Counter[str]:
    lines = ask(f"{daemon.own_url}/memd/export?live=1").body.splitlines()
    return Counter(msgspec.json.decode(line)["content"] for line in lines)


def test_a_folder_of_the_settings_is_watched_kept_while_it_is_missing_and_found_from_every_topic(
    serving: Serving, upstream: RecordingUpstream, docs: Path, tmp_path: Path
) -> None:
    settings = {
        "sources": [{"path": str(docs), "topic": "auto", "exclude": ["deep"]}, str(tmp_path / "later")],
        "retrieval": {"global_topics": ["docs"]},
    }
    daemon = serving(settings)
    wait_until(lambda: state_of(daemon)["state"] == "fine", lambda: f"not looked at: {daemon!r}")
    assert live(daemon) == Counter(["text of a.md", "text of b.md"])
    missing = "later: cannot be read (No such file or directory)"
    wait_until(lambda: missing in state_of(daemon, 1)["error"], lambda: f"not looked for: {daemon!r}")
    wait_until(lambda: state_of(daemon)["is_watched"], lambda: f"not watched: {daemon!r}")

    (docs / "b.md").write_text("The spare key hangs behind the clock on the second landing.")
    wait_until(lambda: any("spare key" in text for text in live(daemon)), lambda: f"not seen: {daemon!r}")
    daemon.chat([{"role": "user", "content": "Where does the spare key hang?"}], memory_in={"topic_id": "chat"})
    assert "(docs/b.md) The spare key" in upstream.prompts[-1]

    refused = daemon.run("sources", "--remove", "docs")
    assert refused.returncode == 2 and "docs would come back: `sources` of the settings has it" in refused.stderr
    known = ask(f"{daemon.own_url}/memd/sources?topic=docs").json
    assert [(one["name"], one["documents"], one["chunks"]) for one in known["known"]] == [("docs", 2, 2)]

    docs.rename(tmp_path / "later")  # one is missing now, and the other one is there
    asked = daemon.run("index", "--force", "--config", str(daemon.config))
    assert asked.returncode == 1 and "what is known of it stays" in asked.stdout
    assert "topic default: " in asked.stdout and "3 files; " in asked.stdout
    (tmp_path / "later").rename(docs)
    wait_until(lambda: state_of(daemon)["state"] == "fine", lambda: f"not seen that it is back: {daemon!r}")
    assert daemon.run("verify").returncode == 0


OWNER, GUEST = "a secret of the owner's own", "a secret of somebody who may write"


@pytest.mark.parametrize(
    ("source", "root"),
    [("docs/zz.md", "22" * 8), ("docs/b.md", "22" * 8), ("docs/b.md", "")],
    ids=["name", "file", "hash"],
)
def test_what_others_hand_over_under_the_name_of_a_folder_changes_nothing_of_it(
    serving: Serving, docs: Path, source: str, root: str
) -> None:
    auth = {"token": OWNER, "tokens": [token_setting("guest", GUEST, "write")]}
    daemon = serving({"sources": [{"path": str(docs), "topic": "t"}], "auth": auth})

    def asked(path: str, body: object = None, token: str = OWNER) -> Any:
        answer = ask(daemon.own_url + path, body, headers={"X-Memory-Token": token})
        assert answer.status == 200, answer.body
        return answer.json

    def texts() -> set[tuple[str, str]]:
        chunks = asked("/memd/chunks?topic=t")["chunks"]
        return {(one["author"], one["content"]) for one in chunks}

    def is_fine() -> bool:
        [state] = asked("/memd/index")["sources"]
        return bool(state["state"] == "fine")

    wait_until(lambda: is_fine() and len(texts()) == 3, lambda: f"not looked at: {daemon!r}")
    new = "The spare key hangs behind the clock on the second landing."
    document = {"source": source, "hash": hashlib.sha256(new.encode()).hexdigest(), "sections": [{"text": "Ropes."}]}
    asked("/memd/documents", {"topic_id": "t", "document": document | {"root": root}}, GUEST)
    (docs / "b.md").write_text(new)
    asked("/memd/index", {"force": False})
    wait_until(lambda: is_fine() and ("", new) in texts(), lambda: f"not seen: {texts()} {daemon!r}")
    own = {("", "text of a.md"), ("", new), ("", "text of deep/c.md")}
    assert texts() == own | {("guest", "Ropes.")}, "beside it"
    assert {one["source"].partition("/")[0] for one in asked("/memd/documents?topic=t")["documents"]} == {"docs"}


def test_killed_while_it_reads_a_folder_nothing_is_there_twice_and_nothing_is_lost(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    texts = {f"The lamp number {number} stands on its own landing." for number in range(150)}
    for number, text in enumerate(sorted(texts)):
        (docs / f"{number}.md").write_text(text)
    daemon = make_daemon(upstream.url, {"sources": [str(docs)]})
    for documents in (1, 60):
        daemon.start()
        wait_until(partial(lambda least: len(live(daemon)) >= least, documents), lambda: f"nothing read: {daemon!r}")
        daemon.send_signal(signal.SIGKILL)
        daemon.wait()
    assert 1 <= len({entry["content"] for entry in daemon.export()}) <= 150
    done = daemon.run("index", "--config", str(daemon.config))  # without a daemon, the command does it
    assert done.returncode == 0, done.stderr + done.stdout
    assert Counter(entry["content"] for entry in daemon.export()) == Counter(texts)
    daemon.start()
    wait_until(lambda: state_of(daemon)["state"] == "fine", lambda: f"not looked at: {daemon!r}")
    assert live(daemon) == Counter(texts) and state_of(daemon)["written"] == 0
