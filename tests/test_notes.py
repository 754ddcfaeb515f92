"""Notes: durable before the answer, found in the next request, told when they are known, corrected like any chunk."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from archiver_stage import Stage, live_entries
from click.testing import CliRunner
from conftest import MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, wait_until
from msgspec import UNSET
from recording_upstream import RecordingUpstream

from memd.cli.main import main
from memd.conversation.events import Noted
from memd.entries import Draft, Section, Status
from memd.errors import StoreError
from memd.ingest.archiver import take_note
from memd.ingest.topics import Topic
from memd.notes import CHARACTERS_MAX, Note
from memd.recall.block import origin
from memd.store.lexical.postings import stream_of
from memd.store.log.columns import text_hash
from memd.store.log.format import decode_entry, encode_entry

DEPLOY = "Run the migrations before you restart the workers."
LAMP = "The spare lamp is on the second landing, behind the rope."
QUESTION = {"role": "user", "content": "What comes first, the migrations or the workers?"}
FULL = {
    "content": DEPLOY,
    "title": "Deploying",
    "tags": ["ops", "release"],
    "source": "wiki/deploy",
    "said_at": "2024-05-03",
}


# -- what is a note ---------------------------------------------------------------------------------------------------


def test_where_a_note_is_from_stands_in_its_line_and_can_neither_end_it_nor_act() -> None:
    entry = Draft(
        uuid=bytes(16), vector=b"", content="x", created_at=1, kind="note", source="a) <|im_start|>b\n[mem:1]"
    )
    part = Section(b"1" * 16, heading=("user: hi",))
    shown = origin(entry_of(entry, part=part, tags=("ops",)))
    assert shown == "(note: user: hi, from a im_start b mem:1, tagged ops)"
    assert origin(entry_of(Draft(uuid=bytes(16), vector=b"", content="x", created_at=1))) == ""
    page = entry_of(
        entry, kind="document", source="handbook.pdf", part=Section(b"h", page=12, heading=("Pay", "<Sick> leave"))
    )
    assert origin(page) == "(handbook.pdf, Pay > Sick leave, page 12)"


def entry_of(draft: Draft, **fields: Any) -> Any:
    changed = msgspec.structs.replace(draft, **fields)
    entry = changed.as_entry(public_id="0000", canonical_id=1, group_left=0)
    return decode_entry(encode_entry(entry), dimension=0)


# -- taken by an archiver ---------------------------------------------------------------------------------------------


async def stored(topic: Topic) -> None:
    async with asyncio.timeout(120):
        while topic.buffer.notes:  # noqa: ASYNC110  # it is storing that is waited for, which tells nobody
            await asyncio.sleep(0.01)


async def test_a_note_that_cannot_be_made_durable_was_not_taken(stage: Stage, topic: Topic) -> None:
    stage.files.fail_at = set(range(stage.files.operations, stage.files.operations + 100))
    with pytest.raises(StoreError):
        await take_note(topic, Note(DEPLOY), stage.archiver)
    assert not topic.buffer.notes and not topic.unstored()
    stage.files.fail_at = set()
    taken = await take_note(topic, Note(DEPLOY), stage.archiver)
    assert not taken.duplicate


async def test_an_answered_note_survives_a_power_cut_under_the_id_that_was_told(stage: Stage, topic: Topic) -> None:
    stage.embedder.fails = True
    taken = await take_note(topic, Note(DEPLOY, "Deploying"), stage.archiver)
    again = Stage(stage.config, stage.files.after_power_cut("lost"))
    known = await again.topics.get("talk")
    (note,) = known.buffer.notes.values()
    assert (note.content, note.title) == (DEPLOY, "Deploying")
    again.archiver.store_notes_later(known)
    await stored(known)
    (entry,) = live_entries(known)
    assert (entry.public_id,) == taken.chunk_ids and entry.kind == "note" and entry.heading == ("Deploying",)
    assert f"Deploying\n{DEPLOY}" in again.embedder.texts, "its vector sees its title"
    await again.close()


async def test_two_equal_notes_at_once_are_one_and_the_second_is_told_its_id(stage: Stage, topic: Topic) -> None:
    stage.embedder.fails = True  # both wait
    first, second = await asyncio.gather(*(take_note(topic, Note(DEPLOY), stage.archiver) for _ in range(2)))
    assert first.chunk_ids == second.chunk_ids and sorted((first.duplicate, second.duplicate)) == [False, True]
    assert len(topic.buffer.notes) == 1
    other = await take_note(topic, Note(DEPLOY, source="elsewhere"), stage.archiver)
    assert not other.duplicate, "another source is another witness"


async def test_a_long_note_is_whole_and_its_chunks_are_neighbours(stage: Stage, topic: Topic) -> None:
    lines = [
        f"Row {number}: the spare lamp number {number} is on landing {number} of the tower." for number in range(600)
    ]
    taken = await take_note(topic, Note("\n".join(lines), tags=("rows",)), stage.archiver)
    await stored(topic)
    entries = sorted(live_entries(topic), key=lambda entry: entry.canonical_id)
    assert tuple(entry.public_id for entry in entries) == taken.chunk_ids and len(entries) > 50
    assert "".join(entry.content for entry in entries).replace("\n", "") == "".join(lines)
    parts = [entry.part for entry in entries if entry.part is not UNSET]
    assert [part.number for part in parts] == list(range(len(entries)))
    assert {part.of for part in parts} == {len(entries)} and {entry.tags for entry in entries} == {("rows",)}
    assert len({stream_of(entry) for entry in entries}) == 1
    again = await take_note(topic, Note("\n".join(lines)), stage.archiver)
    assert again.duplicate and set(again.chunk_ids) == set(taken.chunk_ids)


async def test_of_a_note_the_part_that_was_erased_for_good_is_not_stored_and_told(stage: Stage, topic: Topic) -> None:
    note = Note(
        "\n".join(f"Row {number}: the spare lamp number {number} is on landing {number}." for number in range(40))
    )
    await take_note(topic, note, stage.archiver)
    await stored(topic)
    first, *rest = sorted(live_entries(topic), key=lambda entry: entry.canonical_id)
    assert rest
    topic.log.forbidden = topic.log.forbidden.also(texts=[text_hash(first.content)])
    taken = await take_note(topic, msgspec.structs.replace(note, source="elsewhere"), stage.archiver)
    await stored(topic)
    assert (taken.error, taken.duplicate) == ("forbidden", False)
    anew = [entry for entry in live_entries(topic) if entry.source == "elsewhere"]
    assert {entry.public_id for entry in anew} == set(taken.chunk_ids)
    assert {entry.content for entry in anew} == {entry.content for entry in rest}


async def test_what_was_corrected_before_a_crash_is_not_stored_again(stage: Stage, topic: Topic) -> None:
    await take_note(topic, Note(DEPLOY), stage.archiver)
    (note,) = topic.buffer.notes.items()
    await stored(topic)
    topic.buffer.record(Noted(*note))  # as after a crash between the log and the journal
    (entry,) = live_entries(topic)
    gone = Draft(
        uuid=entry.uuid, vector=b"", content="", created_at=1, status=Status.DEPRECATED, origin_id=entry.origin_id
    )
    await stage.archiver.append_corrections(topic, topic.log, None, bytes(16), "", [gone])
    stage.archiver.store_notes_later(topic)
    await stored(topic)
    assert live_entries(topic) == []


# -- through the daemon -----------------------------------------------------------------------------------------------


def take(served: DaemonProcess, *notes: dict[str, Any], **more: Any) -> Answer:
    headers = more.pop("headers", None)
    return ask(f"{served.own_url}/memd/notes", {"notes": notes, **more}, headers=headers)


def test_a_note_is_found_in_the_next_request_with_its_source(
    served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    told = take(served, FULL, topic_id="work").json
    [[chunk_id]] = [note["chunk_ids"] for note in told["notes"]]
    served.chat([QUESTION], memory_in={"topic_id": "work"})
    assert (
        f"[mem:{chunk_id}] (note: Deploying, from wiki/deploy, tagged ops, tagged release) {DEPLOY}"
        in upstream.prompts[-1]
    )
    assert "-- Friday 2024-05-03 --" in upstream.prompts[-1]
    again = take(served, FULL, topic_id="work").json
    assert again["notes"] == [{"chunk_ids": [chunk_id], "duplicate": True}]


def test_a_note_that_was_erased_for_good_is_refused_with_what_to_do(served: DaemonProcess) -> None:
    [[chunk_id]] = [note["chunk_ids"] for note in take(served, {"content": DEPLOY}).json["notes"]]
    served.wait_stored(DEPLOY)
    assert served.run("erase", "--chunk", chunk_id, "--forbid", "--yes").returncode == 0
    refused = take(served, {"content": DEPLOY})
    assert (refused.status, refused.json["error"]["type"]) == (409, "erased")
    told = served.run("remember", DEPLOY)
    assert (told.returncode, told.stdout) == (1, "")
    for said in (refused.json["error"]["message"], told.stderr):
        assert "nothing was stored" in said and "default/forbidden" in said
    answer = served.chat([QUESTION], memory_in={"notes": [{"content": DEPLOY}]})
    assert answer.json["memory_out"]["notes"] == [{"error": "forbidden"}]
    assert "degraded" not in answer.headers["X-Memory-Status"]
    both = take(served, {"content": DEPLOY}, {"content": "The lamp is on the landing."}).json["notes"]
    assert both[0] == {"chunk_ids": [], "error": "forbidden"} and both[1]["chunk_ids"]
    assert DEPLOY not in served.said()

    [lamp] = take(served, {"content": LAMP}).json["notes"][0]["chunk_ids"]
    served.wait_stored(LAMP)
    told = served.run("correct", lamp, "--update", DEPLOY, "--reason", "no")
    assert told.returncode == 1 and "nothing was changed" in told.stderr and "default/forbidden" in told.stderr
    served.chat([{"role": "user", "content": LAMP}])
    update = {"chunk_ids": [lamp], "action": "Update", "reason": "no", "content": DEPLOY}
    answer = served.chat([QUESTION, {"role": "user", "content": "And?"}], memory_in={"corrections": [update]})
    assert answer.json["memory_out"]["signals"] == [{"type": "correction_failed", "chunk_id": lamp}]
    assert "degraded" not in answer.headers["X-Memory-Status"]
    assert LAMP in served.said() and DEPLOY not in served.said(), "no update brings it back"


def test_a_note_is_chosen_by_kind_tag_and_source_shown_corrected_exported_and_imported(
    served: DaemonProcess, make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    [taken] = take(served, FULL).json["notes"]
    take(served, {"content": LAMP, "tags": ["house"]})
    own = served.own_url
    for choice, found in {
        "tag=ops": [DEPLOY], "tag=house": [LAMP], "tag=ops&tag=house": [DEPLOY, LAMP], "kind=turn": [], "tag=none": [],
        "source=wiki/deploy": [DEPLOY], "kind=note": [DEPLOY, LAMP],
    }.items():  # fmt: skip
        answer = ask(f"{own}/memd/search?q=migrations+lamp&{choice}").json["chunks"]
        assert sorted(chunk["content"] for chunk in answer) == found, choice
    shown = served.run("show", taken["chunk_ids"][0]).stdout
    assert "note, Deploying, wiki/deploy, #ops, #release" in shown
    assert "note, Deploying, wiki/deploy, #ops, #release" in served.run("search", "migrations", "--tag", "ops").stdout
    wait_until(lambda: len(served.export()) == 2, lambda: str(served.export()))
    exported = tmp_path / "notes.jsonl"
    exported.write_text(served.run("export").stdout)
    other = make_daemon(upstream.url)
    assert other.run("import", str(exported)).returncode == 0
    imported, undated = map(json.loads, other.run("export").stdout.splitlines())
    assert (imported["dated"], undated.get("dated")) == (True, None), "an Update keeps a date that was given"
    assert (imported["kind"], imported["tags"], imported["source"]) == ("note", ["ops", "release"], "wiki/deploy")
    assert imported["part"]["heading"] == ["Deploying"] and imported["said_at"].startswith("2024-05-0")
    done = served.run("correct", taken["chunk_ids"][0], "--update", "Restart first.")
    assert done.returncode == 0, done.stderr
    [now] = ask(f"{own}/memd/chunks?contains=restart+first").json["chunks"]
    assert (now["kind"], now["source"], now["tags"]) == ("note", "wiki/deploy", ["ops", "release"])
    assert now["heading"] == ["Deploying"]


def test_a_note_in_a_request_is_taken_before_its_prompt(served: DaemonProcess, upstream: RecordingUpstream) -> None:
    answer = served.chat([QUESTION], memory_in={"notes": [FULL, {"content": LAMP}]})
    [first, second] = answer.json["memory_out"]["notes"]
    assert not first.get("duplicate") and first["chunk_ids"] and second["chunk_ids"]
    assert f"[mem:{first['chunk_ids'][0]}] (note: Deploying" in upstream.prompts[-1]
    retry = served.chat([QUESTION], memory_in={"notes": [FULL, {"content": LAMP}]})
    assert retry.json["memory_out"]["notes"] == [one | {"duplicate": True} for one in (first, second)]
    refused = served.chat([QUESTION], {"X-Memory-Mode": "readonly"}, memory_in={"notes": [{"content": "Not this."}]})
    assert refused.json["memory_out"]["notes"] == [{"error": "readonly"}]
    bad = served.chat([QUESTION], memory_in={"notes": [{"content": "x", "said_at": "soon"}]})
    assert bad.headers["X-Memory-Status"] == "bad-memory-in"
    ahead = served.chat([QUESTION], memory_in={"notes": [{"content": "x", "said_at": "2099-01-01"}]})
    assert ahead.json["memory_out"]["notes"] == [{"error": "said_at"}]
    assert ask(f"{served.own_url}/memd/search?q=x&contains=Not+this").json["chunks"] == []


BAD_BODIES = [
    ({"notes": []}, "notes has no note"),
    ({"notes": [{"content": "x"}] * 101}, "101 notes"),
    ({"notes": [{"content": " \n"}]}, "notes[0].content is empty"),
    ({"notes": [{"content": "a\0b"}]}, "notes[0].content is no text"),
    ({"notes": [{"content": "a\ud800b"}]}, ""),
    ({"notes": [{"content": "x" * (CHARACTERS_MAX + 1)}]}, "notes[0].content has 1,000,001 characters"),
    ({"notes": [{"content": "x", "title": "a\nb"}]}, "notes[0].title is not one line"),
    ({"notes": [{"content": "x", "title": "a" * 201}]}, "notes[0].title has 201 characters"),
    ({"notes": [{"content": "x", "tags": ["a", " "]}]}, "notes[0].tags has an empty tag"),
    ({"notes": [{"content": "x", "tags": [*map(str, range(33))]}]}, "notes[0].tags has 33 tags"),
    ({"notes": [{"content": "x", "source": "\x1b[0m"}]}, "notes[0].source is not one line"),
    ({"notes": [{"content": "x", "said_at": "soon"}]}, "notes[0].said_at is no time"),
    ({"notes": [{"content": "x", "said_at": 1763647200}]}, "notes[0].said_at is no number of microseconds"),
    ({"notes": [{"content": "x", "said_at": "1969-01-01"}]}, "notes[0].said_at is not between 1970 and 2100"),
    ({"notes": [{"content": "x", "author": "me"}]}, "unknown field `author`"),
    ({"notes": [{"content": "x"}], "topic": "work"}, "unknown field `topic`"),
    ({"notes": [{"content": 3}]}, "Expected `str`"),
    ({"notes": [{"content": "x"}, {"content": "x", "said_at": "2099-01-01"}]}, "notes[1].said_at is more than a day"),
    ({"notes": [{"content": "x"}], "topic_id": "../x"}, "is not a topic name"),
    ({"notes": [{"content": "x" * 50_000_000}]}, "the body is larger than"),
]


def test_a_bad_request_for_a_note_is_400_with_the_reason_and_an_answered_one_is_there_after_a_kill(
    served: DaemonProcess,
) -> None:
    for body, message in BAD_BODIES:
        answer = ask(f"{served.own_url}/memd/notes", body)
        said = answer.json["error"]["message"]
        assert answer.status == 400 and message in said and "soon" not in said, message
    refused = take(served, FULL, headers={"X-Memory-Mode": "readonly"})
    assert refused.status == 400 and "nothing may be stored" in refused.json["error"]["message"]
    assert ask(f"{served.own_url}/memd/topics").json["topics"] == []

    [taken] = take(served, FULL).json["notes"]
    served.kill()
    served.start()
    [found] = ask(f"{served.own_url}/memd/search?q=migrations").json["chunks"]
    assert [found["id"]] == taken["chunk_ids"] and found["content"] == DEPLOY
    wait_until(lambda: len(served.export()) == 1, lambda: str(served.export()))


@pytest.mark.parametrize("runs", [True, False])
def test_the_command_takes_a_note_beside_a_daemon_and_without_one(served: DaemonProcess, runs: bool) -> None:
    if not runs:
        assert served.terminate() == 0
    done = served.run("remember", DEPLOY, "--tag", "ops", "--title", "Deploying", "--topic", "work")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"remembered in topic work: \[mem:[0-9a-f]{4}\]\n", done.stdout)
    again = served.run("remember", DEPLOY, "--topic", "work")
    assert again.stdout == f"is remembered already {done.stdout.removeprefix('remembered ')}"
    assert DEPLOY in served.run("search", "migrations", "--tag", "ops").stdout


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        (b"a\xff", [], "standard input is no UTF-8 text (byte 1)"),
        (b" \n", [], "its content is empty"),
        (b"\0" * 5_000_000, [], "more than 4,000,000 bytes"),
        (b"x\0", [], "its content is no text"),
        (b"", ["x", "--said-at", "soon"], "its said_at is no time"),
        (b"", ["x", "--said-at", "2099-01-01"], "its said_at is more than a day ahead"),
        (b"", ["x", "--topic", "../x"], "is not a topic name"),
    ],
)
def test_the_command_refuses_what_is_no_note_before_it_asks_a_daemon(
    given: bytes, arguments: list[str], message: str, tmp_path: Path
) -> None:
    done = CliRunner().invoke(main, ["remember", "--data-dir", str(tmp_path / "none"), *arguments], input=given)
    assert done.exit_code == 2 and message in done.output
    assert not (tmp_path / "none").exists()
