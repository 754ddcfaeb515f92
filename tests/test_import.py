"""`memd import`: exports and conversations become entries again, once, whatever interrupts it."""

from __future__ import annotations

import json
import random
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from conftest import MakeDaemon
from daemon_process import DaemonProcess
from drafts import adjusted, deprecated, search
from imported import Appending, imported, problems_of
from numpy.typing import NDArray
from recording_upstream import RecordingUpstream

from memd.admin.history import log_page, story
from memd.cli.main import main
from memd.conversation.tokens import TokenCounter
from memd.embedding.embedder import Embedder, EmbedMany
from memd.entries import Draft, Status
from memd.ingest.imports import parts as import_parts
from memd.ingest.imports.parts import Sending
from memd.principals import OWNER
from memd.recall.corrections import plan_undo
from memd.store.disk import LocalDisk
from memd.store.store import ModelId, Store, StoreShared
from memd.store.tools.export import FORMS, export, shown_text
from memd.store.tools.verify import verify

NEW = {"canonical_id", "digests"}
"""What is not the same after an import."""

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You look after a lighthouse."},
    {"role": "user", "content": "The release word for the lighthouse lamp is cinnamon-42, on the brass plate."},
    {"role": "assistant", "content": "I have noted it."},
    {"role": "user", "content": [{"type": "text", "text": "And how many steps does the tower have?"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "count", "arguments": '{"of": "steps"}'}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "217"},
    {"role": "assistant", "content": "It has 217 steps."},
]


DIMENSION = 384  # of the bundled model


class StopError(Exception):
    """The process ends here."""


Run = Callable[..., Sending]


@pytest.fixture
def run(embedder: Embedder, counter: TokenCounter) -> Run:
    """`run(folder, file)` imports within this process; `embed_many` stands in for the model."""

    def run(folder: Path, file: Path, *, topic_id: str | None = None, embed_many: EmbedMany | None = None) -> Sending:
        store = opened(folder, embedder)
        try:
            return imported(file, store, counter, embed_many or embedder.embed_many, topic_id=topic_id)
        finally:
            store.close()

    return run


def opened(folder: Path, embedder: Embedder, segment_entries_max: int = 20) -> Store:
    return Store(
        folder,
        StoreShared(model=ModelId(embedder.dimension, embedder.fingerprint), segment_entries_max=segment_entries_max),
    )


def exported(folder: Path, *, live_only: bool = False) -> list[dict[str, Any]]:
    return list(export(folder, LocalDisk(), topic_id=None, live_only=live_only))


def without_new(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name not in NEW} for entry in entries]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def hashed(texts: Sequence[str]) -> NDArray[np.float32]:
    """A unit vector for each text that says nothing about its meaning: far cheaper than the model's."""
    hashes = [np.random.default_rng(zlib.crc32(text.encode())).standard_normal(DIMENSION) for text in texts]
    return np.array([vector / np.linalg.norm(vector) for vector in hashes], np.float32)


def chunk(embedder: Embedder, number: int, uuid: bytes | None = None) -> Draft:
    text = f"user: bicycle {number} has {number + 3} spokes"
    return Draft(
        uuid=uuid or number.to_bytes(2, "big") * 8,
        content=text,
        vector=embedder.embed(text).tobytes(),
        created_at=1_600_000_000_123_456 + number,
        roles=("user",),
        kind="turn" if number % 2 else "note",
        source="book.txt" if number % 3 == 0 else None,
    )


@pytest.fixture(scope="module")
def grown_once(tmp_path_factory: pytest.TempPathFactory, embedder: Embedder) -> Path:
    """A log with two topics: chunks, praise that was taken back and given again, a replaced and an adopted chunk."""
    folder = tmp_path_factory.mktemp("grown") / "grown"
    store = opened(folder, embedder)
    bikes, boats = store.topic("bikes"), store.topic("boats")
    first, second, third = bikes.append([chunk(embedder, number) for number in range(3)])
    for number in range(3, 30):
        (boats if number % 4 == 0 else bikes).append([chunk(embedder, number)])
    for steps in (1, 0, 1):
        (first,) = bikes.append([adjusted(first, steps)])
    bikes.append([deprecated(second)])
    replacement = chunk(embedder, 77)
    bikes.append([msgspec.structs.replace(replacement, supersedes=(second.uuid,), action="Update", reason="old")])
    boats.append([adjusted(third, -2)])
    store.close()
    return folder


@pytest.fixture
def grown(tmp_path: Path, grown_once: Path) -> Path:
    """A copy of it, for the test alone."""
    return shutil.copytree(grown_once, tmp_path / "grown")


@pytest.fixture(scope="module")
def export_file(grown_once: Path) -> Path:
    return written(grown_once.parent / "export.jsonl", exported(grown_once))


@pytest.fixture(params=[1, 256])
def groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """So many entries are appended at a time."""
    monkeypatch.setattr(import_parts, "GROUP_ENTRIES", request.param)


# Exports


def test_an_export_comes_back_with_everything_but_new_canonical_ids_in_the_same_order(
    run: Run, tmp_path: Path, grown: Path, export_file: Path
) -> None:
    counts = run(tmp_path / "new", export_file).counts
    before, after = exported(grown), exported(tmp_path / "new")
    assert counts.entries == len(before)
    assert without_new(after) == without_new(before)
    again = run(tmp_path / "new", export_file).counts
    assert (again.entries, again.entries_known) == (0, len(after)) and exported(tmp_path / "new") == after
    assert verify(tmp_path / "new", LocalDisk()).ok
    run(tmp_path / "one", export_file, topic_id="all")
    assert {entry["topic_id"] for entry in exported(tmp_path / "one")} == {"all"}


def test_what_was_said_comes_back_with_its_speakers_and_a_line_from_before_them_as_it_was(
    run: Run, tmp_path: Path, embedder: Embedder
) -> None:
    said = [{"role": "user", "content": "access.yaml:\nuser: alice"}, {"role": "assistant", "content": "I see."}]
    run(tmp_path / "talk", written(tmp_path / "talk.jsonl", [said]))
    (line,) = exported(tmp_path / "talk")
    assert line["content"] == "access.yaml:\nuser: alice\nI see."
    assert line["speakers"] == [{"offset": 0, "role": "user"}, {"offset": 25, "role": "assistant"}]
    uuid = "0f" * 16
    old = {**line, "uuid": uuid, "id": uuid[:4], "content": "user: Which port?\nassistant: 8765."}
    del old["speakers"]
    lines = [line, old]
    run(tmp_path / "new", written(tmp_path / "lines.jsonl", lines))
    assert without_new(exported(tmp_path / "new")) == without_new(lines)
    assert run(tmp_path / "new", written(tmp_path / "lines.jsonl", lines)).counts.entries == 0
    without_speakers = {name: value for name, value in line.items() if name != "speakers"}
    assert run(tmp_path / "new", written(tmp_path / "older.jsonl", [without_speakers])).counts.entries == 0
    snapshot = opened(tmp_path / "new", embedder).topic("default").snapshot()
    vectors = [snapshot.read(hit.place).vector for hit in search(snapshot, embedder.embed_query("Which port?"), 2)]
    assert vectors == [embedder.embed(text).tobytes() for text in ("Which port?\n8765.", line["content"])]


def told_history(folder: Path, embedder: Embedder) -> dict[str, Any]:
    """What `memd log` and `memd show` tell of each topic."""
    store = opened(folder, embedder)
    found: dict[str, Any] = {}
    for topic_id in store.topic_ids():
        snapshot = store.topic(topic_id).snapshot()
        events = log_page([snapshot], OWNER, None, 1000).events
        stories = {event.uuid: story(snapshot, bytes.fromhex(event.uuid)).replaced_by for event in events}
        found[topic_id] = [
            (one.event, one.uuid, one.content, one.reason, one.live, one.multiplier, stories[one.uuid])
            for one in events
        ]
    store.close()
    return found


@pytest.mark.usefixtures("groups")
def test_an_import_tells_the_same_history(
    run: Run, tmp_path: Path, grown: Path, export_file: Path, embedder: Embedder
) -> None:
    run(tmp_path / "new", export_file)
    history = told_history(tmp_path / "new", embedder)
    assert history == told_history(grown, embedder)
    events = [event[0] for topic in history.values() for event in topic]
    counts = {"told": 30, "Helpful": 2, "Unhelpful": 2, "Update": 1, "replacement": 1}
    assert {event: events.count(event) for event in events} == counts


class TextEncoder:
    """The part of an encoder that undo needs."""

    def __init__(self, embedder: Embedder) -> None:
        self.fingerprint = embedder.fingerprint
        self.embed_text = embedder.embed


@pytest.mark.usefixtures("groups")
def test_what_was_imported_can_be_undone(run: Run, tmp_path: Path, export_file: Path, embedder: Embedder) -> None:
    run(tmp_path / "new", export_file)
    store = opened(tmp_path / "new", embedder)
    bikes, encoder = store.topic("bikes"), TextEncoder(embedder)

    def undo(number: int) -> list[Draft]:
        snapshot = bikes.snapshot()
        newest = snapshot.history(chunk(embedder, number).uuid)[-1]
        return plan_undo(snapshot, newest.canonical_id, "undone", encoder)

    [praised] = undo(0)
    assert (praised.status, praised.utility_steps) == (Status.ACTIVE, 0)
    for number in (1, 77):  # the chunk that was replaced, and its replacement
        out, back = undo(number)
        assert (out.uuid, out.status) == (chunk(embedder, 77).uuid, Status.DEPRECATED)
        assert (back.uuid, back.content) == (chunk(embedder, 1).uuid, chunk(embedder, 1).content)
    [told] = undo(2)
    assert told.status is Status.DEPRECATED
    store.close()


@pytest.mark.parametrize("stop_after", [0, 1, 7, 12])
def test_an_interrupted_import_is_resumed_without_doubles(
    run: Run,
    tmp_path: Path,
    grown: Path,
    export_file: Path,
    embedder: Embedder,
    monkeypatch: pytest.MonkeyPatch,
    stop_after: int,
) -> None:
    monkeypatch.setattr(import_parts, "GROUP_ENTRIES", 3)
    appended = 0

    def failing(*arguments: Any) -> bytes:
        nonlocal appended
        if appended >= stop_after:
            raise StopError
        appended += 1
        return real(*arguments)

    real = Appending.post
    monkeypatch.setattr(Appending, "post", failing)
    with pytest.raises(StopError):
        run(tmp_path / "new", export_file)
    monkeypatch.setattr(Appending, "post", real)
    run(tmp_path / "new", export_file)
    assert without_new(exported(tmp_path / "new")) == without_new(exported(grown))


def test_what_was_corrected_since_the_export_stays_corrected(
    run: Run, tmp_path: Path, grown: Path, export_file: Path, embedder: Embedder
) -> None:
    store = opened(grown, embedder)
    entry = store.topic("bikes").snapshot().find(chunk(embedder, 5).uuid)
    assert entry is not None
    store.topic("bikes").append([adjusted(entry, 3)])
    store.close()
    before = exported(grown)
    run(grown, export_file)
    assert exported(grown) == before


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("number", [1, 77], ids=["the replaced chunk", "its replacement"])
def test_after_live_chunks_and_then_the_full_export_an_update_is_undone_as_a_whole(
    run: Run, tmp_path: Path, grown: Path, export_file: Path, embedder: Embedder, number: int
) -> None:
    run(tmp_path / "new", written(tmp_path / "live.jsonl", exported(grown, live_only=True)))
    run(tmp_path / "new", export_file)
    assert run(tmp_path / "new", export_file).counts.entries == 0
    store = opened(tmp_path / "new", embedder)
    snapshot = store.topic("bikes").snapshot()
    replaced, replacement = chunk(embedder, 1).uuid, chunk(embedder, 77).uuid
    assert story(snapshot, replaced).replaced_by == (replacement.hex(),)
    newest = snapshot.history(chunk(embedder, number).uuid)[-1]
    drafts = plan_undo(snapshot, newest.canonical_id, "undone", TextEncoder(embedder))
    expected = {(replacement, Status.DEPRECATED), (replaced, Status.ACTIVE)}
    assert {(one.uuid, one.status) for one in drafts} == expected, "never both live"
    store.close()


def test_an_export_from_a_machine_whose_clock_is_ahead_keeps_its_order(
    run: Run, tmp_path: Path, export_file: Path
) -> None:
    ahead = 5_000_000_000_000_000  # the year 2128
    lines = [json.loads(line) for line in export_file.read_text().splitlines()]
    for line in lines:
        line["canonical_id"] += ahead
        line["origin_id"] += ahead
    run(tmp_path / "new", written(tmp_path / "ahead.jsonl", lines))
    after = exported(tmp_path / "new")
    assert [entry["origin_id"] for entry in after] == [line["origin_id"] for line in lines]
    assert all(entry["canonical_id"] >= entry["origin_id"] for entry in after)
    assert verify(tmp_path / "new", LocalDisk()).ok


# Conversations


def long_conversation(turns: int) -> list[dict[str, Any]]:
    rng = random.Random(11)
    words = ["lamp", "oil", "ferry", "winter", "rope", "captain", "harbour", "bread", "storm", "signal", "map", "brass"]

    def sentence() -> str:
        return " ".join(rng.choices(words, k=rng.randint(5, 25))).capitalize() + "."

    def text() -> str:
        return " ".join(sentence() for _ in range(rng.randint(1, 6)))

    return [{"role": role, "content": text()} for _ in range(turns) for role in ("user", "assistant")]


def test_a_daemon_does_not_store_an_imported_conversation_again(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    file = written(tmp_path / "talk.jsonl", [CONVERSATION])
    daemon = make_daemon(upstream.url, {"buffer": {"idle_seconds": 0}})
    assert daemon.run("import", str(file)).returncode == 0
    before = daemon.export()
    daemon.start()
    daemon.chat([*CONVERSATION, {"role": "user", "content": "Thank you, that is all for today."}])
    daemon.chat([{"role": "user", "content": "A new conversation, in which the old one is handed over."}])
    daemon.restart()
    contents = [entry["content"] for entry in daemon.export()]
    assert contents[: len(before)] == [entry["content"] for entry in before]
    assert sum("cinnamon-42" in content or "217" in content for content in contents[len(before) :]) == 0


def test_importing_a_conversation_again_or_one_that_goes_on_adds_only_what_is_new(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "talk.jsonl", [CONVERSATION])
    run(tmp_path / "new", file)
    once = exported(tmp_path / "new")
    assert run(tmp_path / "new", file).counts.chunks == 0
    assert exported(tmp_path / "new") == once
    longer = [*CONVERSATION, {"role": "user", "content": "Who painted the tower?"}]
    assert run(tmp_path / "new", written(tmp_path / "longer.jsonl", [longer])).counts.chunks == 1
    assert shown_text(exported(tmp_path / "new")[len(once)]) == "user: Who painted the tower?"


def test_conversations_that_overlap_add_nothing_when_they_are_imported_again(run: Run, tmp_path: Path) -> None:
    long = long_conversation(40)
    other_ending = [{"role": "user", "content": "Now for something else: the ferry is late, is it not?"}]
    file = written(tmp_path / "talk.jsonl", [long, long[7:], long[21:50] + other_ending])
    run(tmp_path / "new", file, embed_many=hashed)
    once = exported(tmp_path / "new")
    assert run(tmp_path / "new", file, embed_many=hashed).counts.chunks == 0
    assert exported(tmp_path / "new") == once


def test_an_interrupted_import_of_a_long_conversation_goes_on_where_it_was(run: Run, tmp_path: Path) -> None:
    file = written(tmp_path / "long.jsonl", [long_conversation(100)])
    embedded = 0

    def failing(texts: Sequence[str]) -> NDArray[np.float32]:
        nonlocal embedded
        embedded += len(texts)
        if embedded > 120:  # of about 200
            raise StopError
        return hashed(texts)

    with pytest.raises(StopError):
        run(tmp_path / "new", file, embed_many=failing)
    assert len(exported(tmp_path / "new")) > 0
    run(tmp_path / "new", file, embed_many=hashed)
    run(tmp_path / "whole", file, embed_many=hashed)
    contents = [[entry["content"] for entry in exported(tmp_path / name)] for name in ("new", "whole")]
    assert contents[0] == contents[1]
    assert verify(tmp_path / "new", LocalDisk()).ok


# What is wrong


GOOD = [{"role": "user", "content": "A good line about sailing boats."}]


@pytest.mark.parametrize(
    "bad",
    [
        "no json",
        "{}",
        '{"messages": 3}',
        "3",
        '"text"',
        '["text"]',
        '[{"content": "nobody said this"}]',
        '[{"title": "of nobody", "create_time": 1714730400, "mapping": 3}]',
        '{"conversations": [{"from": "nobody", "value": "of another program"}]}',
        '{"uuid": "00"}',
        "\xff",
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_conversation_is_named_and_the_rest_goes_on(run: Run, tmp_path: Path, bad: str) -> None:
    file = tmp_path / "mixed.jsonl"
    after = json.dumps([{"role": "user", "content": "Read all the same."}])
    file.write_bytes(f"{json.dumps(GOOD)}\n\n{bad}\n{after}\n".encode("latin-1"))
    [problem] = problems_of(run(tmp_path / "new", file))
    assert problem.startswith("mixed.jsonl, line 3")
    contents = [shown_text(entry) for entry in exported(tmp_path / "new")]
    assert contents == ["user: A good line about sailing boats.", "user: Read all the same."]


CONTRADICTIONS: list[tuple[str, object]] = [
    ("uuid", "../../../etc"),
    ("uuid", "0" * 31),
    ("id", "zzzz"),
    ("id", ""),
    ("topic_id", "../elsewhere"),
    ("canonical_id", 1 << 60),
    ("canonical_id", 1 << 53),  # the entries after it could not be exported
    ("canonical_id", -1),
    ("origin_id", 1 << 53),
    ("status", "Lost"),
    ("utility_multiplier", 1e9),
    ("utility_multiplier", 1.2),
    ("utility_multiplier", 0),
    ("created_at", "yesterday"),
    ("created_at", "2024-01-01T00:00:00"),
    ("created_at", "1960-01-01T00:00:00Z"),
    ("said_at", "1969-12-31T23:59:59Z"),
    ("supersedes", ["00"]),
    ("content", None),
]


def test_an_entry_that_contradicts_itself_is_refused(run: Run, tmp_path: Path, export_file: Path) -> None:
    first, line, last = (json.loads(line) for line in export_file.read_text().splitlines()[:3])
    bad = [{**line, member: value} for member, value in CONTRADICTIONS]
    problems = problems_of(run(tmp_path / "new", written(tmp_path / "bad.jsonl", [first, *bad, last])))
    named = [problem.partition(": ")[0] for problem in problems]
    assert named == [f"bad.jsonl, line {number}" for number in range(2, len(bad) + 2)]
    assert [entry["content"] for entry in exported(tmp_path / "new")] == [first["content"], last["content"]]


def test_the_command_counts_what_it_did_and_refuses_to_run_beside_a_daemon(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.cli.running.START_SECONDS_MAX", 0.1)  # it is not about a daemon that is just starting
    file = written(tmp_path / "talk.jsonl", [CONVERSATION])
    arguments = ["import", str(file), "--topic", "talk", "--data-dir", str(tmp_path / "new")]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.stderr
    assert "1 file read; 1 conversation (OpenAI messages 1) imported as " in result.stdout
    store = opened(tmp_path / "new", embedder)
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 1
    assert "is in use by another memd" in result.stderr and "stop that one" in result.stderr
    store.close()
    file.write_text("what is this?\n")
    result = CliRunner().invoke(main, ["import", str(file), "--data-dir", str(tmp_path / "other")])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and f"{file}, line 1: it is no JSON object" in result.stderr


def test_add_takes_each_file_for_what_it_is_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "house.md").write_text("# House\n\nThe spare key is with Ann.\n")
    (folder / "package.json").write_text('{"name": "lighthouse", "port": 4443}\n')
    talk = written(folder / "talk.jsonl", [CONVERSATION])

    def add(*arguments: str | Path) -> str:
        where = ["--data-dir", str(tmp_path / "new")]
        result = CliRunner().invoke(main, ["add", *map(str, arguments), *where], input=talk.read_text())
        assert result.exit_code == 0, result.output
        return result.stdout

    assert re.fullmatch(
        r"topic default: 2 files looked at, .*; 2 chunks written, 0 taken out\n"
        r"1 file read; 1 conversation \(OpenAI messages 1\) imported as \d chunks?, .*\n",
        add(folder),
    )
    nameless = [tmp_path / name for name in ("talk", "talk.txt", "talk.json.1")]  # as a browser or a phone saves it
    for file in nameless:
        file.write_bytes(talk.read_bytes())
    given: list[list[str | Path]] = [[folder], [talk], [folder, talk], ["-"], [folder, "--format", "openai"]]
    given += [[one] for one in nameless]
    for again in given:
        assert re.search(r"^1 file read; .* imported as 0 chunks, 7 messages there already", add(*again), re.MULTILINE)
    kinds = {entry["kind"] for entry in export(tmp_path / "new", LocalDisk(), topic_id=None, live_only=True)}
    assert kinds == {"turn", "document"}
    assert "3 files looked at" in add(
        folder, "--as", "notes", "--format", "md", "--format", "json", "--format", "jsonl"
    )
    refused = CliRunner().invoke(main, ["add", str(folder), "--format", "openai", "--format", "md"])
    assert refused.exit_code == 2 and "give no other --format" in refused.stderr


@pytest.mark.parametrize(
    ("path", "format_", "said"),
    [
        ("conversations.json", "chatgtp", "no such format; did you mean chatgpt? There are chatgpt, claude, "),
        (".", "markdwn", "no such format; did you mean markdown? There are chatgpt, claude, "),
        (".", "qqqq", "no such format. There are chatgpt, claude, "),
        ("conversations.json", "pdf", "conversations.json is not of --format pdf\n"),
        ("-", "chatgtp", "no such format; did you mean chatgpt?"),
        ("-", "md", "- is an export of conversations"),
    ],
)
def test_a_format_that_there_is_not_or_that_is_not_the_files_is_refused(
    tmp_path: Path, path: str, format_: str, said: str
) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "conversations.json").write_bytes((EXPORTS / "chatgpt.json").read_bytes())
    given = path if path == "-" else str(folder / path)
    arguments = ["add", given, "--format", format_, "--data-dir", str(tmp_path / "new")]
    result = CliRunner().invoke(main, arguments, input="Anything.")
    assert result.exit_code == 2 and said in result.stderr
    assert not (tmp_path / "new").exists()


def test_a_suffix_that_memd_has_no_reader_of_its_own_for_is_a_format_where_files_have_it(tmp_path: Path) -> None:
    folder = tmp_path / "ship"
    folder.mkdir()
    (folder / "log.nautical").write_text("The anchor chain was changed in Bergen.\n")
    (folder / "other.md").write_text("The mast was changed in Turku.\n")
    for path in (folder, folder / "log.nautical"):
        arguments = ["add", str(path), "--format", "nautical", "--data-dir", str(tmp_path / "new")]
        result = CliRunner().invoke(main, arguments)
        assert result.exit_code == 0 and "1 file looked at" in result.stdout


def test_of_a_folder_what_is_of_others_is_passed_over_and_what_was_cut_off_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    written(folder / "talk.jsonl", [CONVERSATION])
    (folder / "package.json").write_text('{"name": "a package"}')
    cut = folder / "conversations.json"
    cut.write_bytes((EXPORTS / "chatgpt.json").read_bytes()[:400])
    result = CliRunner().invoke(main, ["import", str(folder), "--data-dir", str(tmp_path / "new")])
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert f"{cut}, element 1 (byte 1): the file ends in the middle of it: it was cut off" in result.stderr
    assert "1 file without conversations passed over; 1 problem, named above" in result.stdout


def test_an_export_that_was_cut_off_in_its_first_conversation_is_named_and_is_no_document(tmp_path: Path) -> None:
    cut = tmp_path / "conversations.json"
    cut.write_bytes((EXPORTS / "chatgpt.json").read_bytes()[:400])
    result = CliRunner().invoke(main, ["add", str(cut), "--data-dir", str(tmp_path / "new")])
    assert result.exit_code == 1
    assert f"{cut}, element 1 (byte 1): the file ends in the middle of it: it was cut off" in result.stderr
    assert "written" not in result.stdout


def test_a_topic_of_its_own_is_called_as_the_export_or_as_the_folder_that_an_agent_worked_in(tmp_path: Path) -> None:
    packed, sessions = tmp_path / "chatgpt export.zip", tmp_path / "sessions"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(EXPORTS / "claude.json", "conversations.json")
    sessions.mkdir()
    (sessions / "lathe.jsonl").write_bytes((EXPORTS / "claude-code.jsonl").read_bytes())
    written(sessions / "talk.jsonl", [CONVERSATION])
    where = ["--topic", "auto", "--data-dir", str(tmp_path / "new")]
    result = CliRunner().invoke(main, ["add", str(packed), *where])
    assert result.exit_code == 0 and "; they are in topic chatgpt-export;" in result.stdout, result.output
    result = CliRunner().invoke(main, ["add", str(sessions), *where])
    assert result.exit_code == 0 and "they are in 2 topics" in result.stdout
    topics = {entry["topic_id"] for entry in export(tmp_path / "new", LocalDisk(), topic_id=None, live_only=True)}
    assert topics == {"chatgpt-export", "lathe", "sessions"}


def test_a_folder_that_is_an_unpacked_export_is_taken_as_one(tmp_path: Path) -> None:
    inbox = tmp_path / "inbox"
    unpacked = inbox / "chatgpt"
    unpacked.mkdir(parents=True)
    (inbox / "house.md").write_text("The spare key is with Ann.\n")
    chats = json.loads((EXPORTS / "chatgpt.json").read_text())[:1]
    (unpacked / "conversations.json").write_text(json.dumps(chats))
    for name in ("chat.html", "user.json", "message_feedback.json"):
        (unpacked / name).write_text('{"email": "ada@example.org"}')

    def kinds_after_adding(path: Path, *, into: str) -> list[str]:
        result = CliRunner().invoke(main, ["add", str(path), "--data-dir", str(tmp_path / into)])
        assert result.exit_code == 0, result.output
        assert (
            f"{unpacked}: an export of ChatGPT, of which the conversations are taken and nothing else" in result.stdout
        )
        assert "(left out: chat.html, message_feedback.json, user.json)" in result.stdout
        entries = export(tmp_path / into, LocalDisk(), topic_id=None, live_only=True)
        return sorted({entry["kind"] for entry in entries})

    assert kinds_after_adding(unpacked, into="one") == ["turn"]
    assert kinds_after_adding(inbox, into="two") == ["document", "turn"]
    result = CliRunner().invoke(main, ["add", str(unpacked / "user.json"), "--data-dir", str(tmp_path / "three")])
    assert result.exit_code == 0 and "1 chunk written" in result.stdout, "a file that is named is wanted"


def test_of_the_zips_in_a_folder_exports_are_taken_damaged_ones_named_and_others_passed_over(tmp_path: Path) -> None:
    folder = tmp_path / "downloads"
    folder.mkdir()
    (folder / "house.md").write_text("The spare key is with Ann.\n")
    with zipfile.ZipFile(folder / "claude-export.zip", "w") as archive:
        archive.write(EXPORTS / "claude.json", "conversations.json")
    with zipfile.ZipFile(folder / "photos.zip", "w") as archive:
        archive.writestr("beach.jpg", b"\xff\xd8")
    (folder / "broken.zip").write_bytes((folder / "claude-export.zip").read_bytes()[:1_000])
    (folder / "odd.zip").write_bytes(b"\0" * 100)
    (folder / "empty.zip").write_bytes(b"")
    for command in ("add", "import"):
        result = CliRunner().invoke(main, [command, str(folder), "--data-dir", str(tmp_path / command)])
        assert result.exit_code == 1 and result.stderr.count("\n") == 3
        for name in ("broken", "odd", "empty"):
            assert f"{folder / name}.zip, the file: it is no whole zip" in result.stderr
        assert "(Claude " in result.stdout
        assert "1 file without conversations passed over; 3 problems, named above" in result.stdout
        assert ("1 file looked at" in result.stdout) == (command == "add"), "the note is no export"


@pytest.mark.parametrize(
    "piped", [b"We leave for Turku at nine.\n", b"PK\x03\x04 and more", b"[ ] Oars\n", b"%PDF-1.7\n\xff", b""]
)
def test_what_can_be_piped_is_said_where_something_else_was(tmp_path: Path, piped: bytes) -> None:
    result = CliRunner().invoke(main, ["add", "-", "--data-dir", str(tmp_path / "new")], input=piped)
    assert result.exit_code == 1 and result.stderr.count("\n") == 1
    assert "standard input, all of it: this is no exported conversation (JSON, JSON Lines" in result.stderr
    assert "as - has to be; add others as files" in result.stderr
    assert "`memd remember -` remembers piped text" in result.stdout


def test_times_that_cannot_be_are_told_and_the_message_is_dated_as_if_it_had_none(tmp_path: Path) -> None:
    times = ["2024-05-03T10:00:00Z", "2199-01-01", 0, "last week", None]
    told = [{"role": "user", "content": f"The ferry number {n} leaves."} for n in range(len(times))]
    dated = [[message | {"timestamp": at}] for message, at in zip(told, times, strict=True)]
    dated.append([{**CONVERSATION[1], "timestamp": "2024-05-03T10:00:00Z"}, {**CONVERSATION[2], "timestamp": 5e12}])
    file = written(tmp_path / "chats.jsonl", dated)
    result = CliRunner().invoke(main, ["import", str(file), "--data-dir", str(tmp_path / "new")])
    assert "; 4 times in the future, before 1980 or unreadable: dated by the message before" in result.stdout
    years = [entry.get("said_at", entry["created_at"])[:4] for entry in exported(tmp_path / "new")]
    now = f"{datetime.now(UTC):%Y}"
    assert years[:5] == ["2024", now, now, now, now] and set(years[5:]) == {"2024"}


# And back


@pytest.mark.parametrize("form", list(FORMS))
def test_conversations_come_back_through_every_form_that_is_written_for_other_programs(
    run: Run, tmp_path: Path, form: str
) -> None:
    long = [{"role": "user", "content": f"Turn {n}: {text}"} for n, text in enumerate(["word " * 900, "short", "end"])]
    answered = [said for one in long for said in (one, {"role": "assistant", "content": f"Re: {one['content'][:20]}"})]
    run(tmp_path / "new", written(tmp_path / "talk.jsonl", [answered, CONVERSATION]), embed_many=hashed)
    note = ["remember", "A note is no conversation.", "--data-dir", str(tmp_path / "new")]
    assert CliRunner().invoke(main, note).exit_code == 0
    output = tmp_path / "out.json"
    result = CliRunner().invoke(main, ["export", "--as", form, "--output", str(output), "--data-dir", note[-1]])
    assert result.exit_code == 0, result.output
    again = run(tmp_path / "newer", output, embed_many=hashed)
    assert (problems_of(again), again.counts.conversations.total()) == ([], 2)
    texts = [
        ["".join(shown_text(entry).split()) for entry in exported(tmp_path / name) if entry["kind"] == "turn"]
        for name in ("new", "newer")
    ]
    if form == "open-webui":  # it knows users and assistants
        texts = [[text.replace("tool:", "assistant:") for text in side] for side in texts]
    assert sorted(texts[0]) == sorted(texts[1])
    assert all("said_at" in entry for entry in exported(tmp_path / "newer")) or form == "sharegpt"


def test_turns_of_a_topic_are_one_conversation_until_an_hour_passes(tmp_path: Path, embedder: Embedder) -> None:
    store = opened(tmp_path / "new", embedder)
    times = [0, 1_800, 3_600, 9_000]
    for number, seconds in enumerate(times):
        said = chunk(embedder, 2 * number + 1)
        said = msgspec.structs.replace(said, source=None, said_at=1_700_000_000_000_000 + seconds * 1_000_000)
        store.topic("bikes").append([said])
    store.close()
    arguments = ["export", "--as", "openai", "--data-dir", str(tmp_path / "new")]
    lines = CliRunner().invoke(main, arguments).stdout.splitlines()
    assert [len(json.loads(line)["messages"]) for line in lines] == [3, 1]
    assert json.loads(lines[0])["title"] == "user: bicycle 1 has 4 spokes"


# Beside a daemon

ROOT = Path(__file__).parent.parent
EXPORTS = ROOT / "tests" / "exports"


@pytest.fixture
def exports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a project's folder with all files that docs/imports.md names."""
    home, project = tmp_path / "home", tmp_path / "belfry"
    whole, _, other = json.loads((EXPORTS / "chatgpt.json").read_text())
    files = {
        home / ".claude/projects/-srv-ada-lathe/026f8ccd.jsonl": "claude-code.jsonl",
        home / ".codex/sessions/2025/10/29/rollout-2025-10-29.jsonl": "codex.jsonl",
        project / ".aider.chat.history.md": "aider.chat.history.md",
        project / "chat-export.json": "open-webui.json",
        project / "messages.jsonl": "openai.jsonl",
        project / "sharegpt.json": "sharegpt.json",
    }
    for path, name in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text((EXPORTS / name).read_text())
    (project / "conversations.json").write_text(json.dumps([whole, other]))
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(project)
    return project


def documented() -> list[str]:
    """The commands of the page on imports."""
    page = (ROOT / "docs" / "imports.md").read_text()
    block = page.partition("```sh\n")[2].partition("```")[0]
    return [line.partition("#")[0].strip() for line in block.splitlines()]


def test_every_command_of_the_page_works_beside_a_daemon_and_done_again_adds_nothing(
    served: DaemonProcess, exports: Path
) -> None:
    def ran(command: str) -> str:
        line, _, source = command.partition(" < ")
        [memd, *arguments] = [str(Path(word).expanduser()) for word in line.split()]
        assert memd == "memd"
        given = (exports / source).read_text() if source else None
        result = CliRunner().invoke(main, [*arguments, "--data-dir", str(served.data_dir)], input=given)
        assert result.exit_code == 0, f"{command}: {result.output}"
        return result.stdout

    told = [ran(command) for command in documented()]
    assert "2 conversations (ChatGPT 2) imported as 4 chunks, " in told[0] and "with 1 other branch" in told[0]
    assert "(Claude Code 1)" in told[2] and "(Aider 2)" in told[4] and " imported as 0 chunks" in told[-2]
    entries = served.export()
    assert {entry["topic_id"] for entry in entries} == {"default", "lathe", "orrery", "belfry"}
    sources = {entry["source"].partition(":")[0] for entry in entries}
    assert sources == {"chatgpt", "open-webui", "claude-code", "codex", "aider", "sharegpt", "openai"}
    found = json.loads(ran("memd search --topic lathe --json Which-pitch-has-the-lead-screw"))["chunks"]
    assert "The pitch is 3 mm." in found[0]["content"]
    assert len(json.loads((exports / "chats.json").read_text())) == 11
    for command in documented()[:-1]:
        assert " imported as 0 chunks" in ran(command)
    assert len(served.export()) == len(entries)


def test_what_went_through_memd_is_not_imported_again_and_what_goes_on_elsewhere_is(
    served: DaemonProcess, tmp_path: Path
) -> None:
    asked = {"role": "user", "content": "Which rope holds the bell of the lighthouse, the hemp or the wire?"}
    reply = served.chat([asked]).json["choices"][0]["message"]
    live = served.export()
    assert live
    further = [
        {"role": "user", "content": "And who spliced it?"},
        {"role": "assistant", "content": "Ada, in May."},
    ]
    file = written(tmp_path / "talk.jsonl", [[asked, reply]])
    assert served.run("import", str(file)).returncode == 0
    assert served.export() == live
    written(file, [[asked, reply, *further]])
    assert "imported as 1 chunk, 2 messages there already" in served.run("import", str(file)).stdout
    assert shown_text(served.export()[-1]).startswith("user: And who spliced it")
