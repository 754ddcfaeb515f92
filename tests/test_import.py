"""`memd import`: exports and conversations become entries again, once, whatever interrupts it."""

import itertools
import json
import random
import re
import shutil
import zipfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask
from drafts import adjusted, deprecated, search
from recording_upstream import RecordingUpstream

from memd.admin import documents
from memd.cli import sources
from memd.cli.main import main
from memd.embedding.embedder import Embedder
from memd.entries import Draft
from memd.errors import StoreError
from memd.ingest.imports import parts as import_parts
from memd.ingest.readers.text import GivenDocument
from memd.ingest.sources.documents import TakenDocument
from memd.store.disk import LocalDisk
from memd.store.store import ModelId, Store, StoreShared
from memd.store.tools.export import FORMS, export, shown_text

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


def memd(folder: Path, *arguments: str | Path, code: int = 0, given: str | bytes | None = None) -> Result:
    """Run a command on the log in a folder, within this process."""
    result = CliRunner().invoke(main, [*map(str, arguments), "--data-dir", str(folder)], input=given)
    assert result.exit_code == code, result.output
    return result


def opened(folder: Path, embedder: Embedder) -> Store:
    model = ModelId(embedder.dimension, embedder.fingerprint)
    return Store(folder, StoreShared(model=model, segment_entries_max=20))


def exported(folder: Path, *, live_only: bool = False) -> list[dict[str, Any]]:
    return list(export(folder, LocalDisk(), topic_id=None, live_only=live_only))


def without_new(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in entry.items() if name not in NEW} for entry in entries]


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chunk(embedder: Embedder, number: int) -> Draft:
    text = f"user: bicycle {number} has {number + 3} spokes"
    return Draft(
        uuid=number.to_bytes(2, "big") * 8,
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


def test_an_export_comes_back_once_with_all_but_canonical_ids(tmp_path: Path, grown: Path, export_file: Path) -> None:
    new = tmp_path / "new"
    before = exported(grown)
    assert f"{len(before)} entries imported, 0 there already" in memd(new, "import", export_file).stdout
    assert without_new(after := exported(new)) == without_new(before)
    assert f"0 entries imported, {len(before)} there already" in memd(new, "import", export_file).stdout
    assert exported(new) == after and memd(new, "verify")
    memd(tmp_path / "one", "import", export_file, "--topic", "all")
    assert {entry["topic_id"] for entry in exported(tmp_path / "one")} == {"all"}


def test_what_was_said_comes_back_with_its_speakers(tmp_path: Path, embedder: Embedder) -> None:
    new = tmp_path / "new"
    said = [{"role": "user", "content": "access.yaml:\nuser: alice"}, {"role": "assistant", "content": "I see."}]
    memd(tmp_path / "talk", "import", written(tmp_path / "talk.jsonl", [said]))
    (line,) = exported(tmp_path / "talk")
    assert line["content"] == "access.yaml:\nuser: alice\nI see."
    assert line["speakers"] == [{"offset": 0, "role": "user"}, {"offset": 25, "role": "assistant"}]
    uuid = "0f" * 16
    old = {**line, "uuid": uuid, "id": uuid[:4], "content": "user: Which port?\nassistant: 8765."}
    del old["speakers"]
    result = {**line, "uuid": "1f" * 16, "id": "1f1f", "roles": ["tool"], "content": "it is alice", "digests": []}
    result["speakers"] = [{"offset": 0, "role": "tool", "continues": True, "call": "[call read access.yaml]"}]
    lines = [line, old, result]
    memd(new, "import", written(tmp_path / "lines.jsonl", lines))
    assert without_new(exported(new)) == without_new(lines)
    without_speakers = {name: value for name, value in line.items() if name != "speakers"}
    for again in (lines, [without_speakers]):
        assert "; 0 entries imported" in memd(new, "import", written(tmp_path / "again.jsonl", again)).stdout
    snapshot = opened(new, embedder).topic("default").snapshot()
    vectors = [snapshot.read(hit.place).vector for hit in search(snapshot, embedder.embed_query("Which port?"), 3)]
    embedded = ("Which port?\n8765.", line["content"], "it is alice")
    assert vectors[0] == embedder.embed(embedded[0]).tobytes()
    assert set(vectors) == {embedder.embed(text).tobytes() for text in embedded}


def events_of(folder: Path, topic: str) -> list[dict[str, Any]]:
    """What `memd log` tells, newest first."""
    found: list[dict[str, Any]] = json.loads(memd(folder, "log", "--topic", topic, "--json", "--limit", "500").stdout)[
        "events"
    ]
    return found


TOLD = ("event", "uuid", "content", "reason", "live", "multiplier", "supersedes")


@pytest.mark.usefixtures("groups")
def test_an_import_tells_the_same_history(tmp_path: Path, grown: Path, export_file: Path) -> None:
    memd(tmp_path / "new", "import", export_file)
    counted: Counter[str] = Counter()
    for topic in ("bikes", "boats"):
        told, before = (
            [{name: one.get(name) for name in TOLD} for one in events_of(folder, topic)]
            for folder in (tmp_path / "new", grown)
        )
        assert told == before
        counted.update(str(one["event"]) for one in told)
    assert counted == {"told": 30, "Helpful": 2, "Unhelpful": 2, "Update": 1, "replacement": 1}


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("groups", "number", "live_first"),
    [(1, 1, False), (1, 77, True), (256, 77, False), (256, 1, True)],  # 1 is the replaced chunk, 77 its replacement
    indirect=["groups"],
)
def test_what_was_imported_is_undone_as_a_whole(
    tmp_path: Path, grown: Path, export_file: Path, embedder: Embedder, number: int, live_first: bool
) -> None:
    new = tmp_path / "new"
    if live_first:
        memd(new, "import", written(tmp_path / "live.jsonl", exported(grown, live_only=True)))
    memd(new, "import", export_file)
    uuids = {one: chunk(embedder, one).uuid.hex() for one in (0, 1, 2, 77)}
    newest = {one["uuid"]: one["canonical_id"] for one in reversed(events_of(new, "bikes"))}
    assert json.loads(memd(new, "show", uuids[1], "--json").stdout)["replaced_by"] == [uuids[77]]
    memd(new, "undo", str(newest[uuids[number]]), "--topic", "bikes")
    for told in (0, 2):
        memd(new, "undo", str(newest[uuids[told]]), "--topic", "bikes")
    bikes = [one for one in exported(new, live_only=True) if one["topic_id"] == "bikes"]
    live = {one["uuid"]: one["utility_multiplier"] for one in bikes}
    assert uuids[1] in live and uuids[77] not in live, "never both"
    assert live[uuids[0]] == 1 and uuids[2] not in live


def fail_after(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    """Let so many parts of an import be taken, and no more."""
    real, taken = getattr(documents, name), itertools.count()

    def taking(*arguments: Any, **options: Any) -> Any:
        if next(taken) >= count:
            raise StoreError("the disk is gone")
        return real(*arguments, **options)

    monkeypatch.setattr(documents, name, taking)


@pytest.mark.parametrize("stop_after", [0, 1, 7, 12])
def test_an_interrupted_import_is_resumed_without_doubles(
    tmp_path: Path, grown: Path, export_file: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int
) -> None:
    monkeypatch.setattr(import_parts, "GROUP_ENTRIES", 3)
    with monkeypatch.context() as patched:
        fail_after(patched, "line_drafts", stop_after)
        memd(tmp_path / "new", "import", export_file, code=1)
    memd(tmp_path / "new", "import", export_file)
    assert without_new(exported(tmp_path / "new")) == without_new(exported(grown))


def test_an_interrupted_add_says_what_is_in_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("oars", "mast", "rope"):
        (folder / f"{name}.md").write_text(f"The {name} was bought in Bergen.")
    real, taken = sources._Keeper.take, itertools.count()

    def take(keeper: sources._Keeper, document: GivenDocument) -> TakenDocument:
        if next(taken) == 2:
            raise KeyboardInterrupt
        return real(keeper, document)

    with monkeypatch.context() as patched:
        patched.setattr(sources._Keeper, "take", take)
        stopped = memd(tmp_path / "new", "add", folder, code=1)
    assert "topic default: 2 files looked at as documents, 0 of them unchanged; 2 chunks written" in stopped.stdout
    assert "interrupted; the same command goes on with the rest" in stopped.stderr
    assert (
        "3 files looked at as documents, 2 of them unchanged; 1 chunk written"
        in memd(tmp_path / "new", "add", folder).stdout
    )


def test_what_was_corrected_since_the_export_stays_so(grown: Path, export_file: Path, embedder: Embedder) -> None:
    memd(grown, "correct", chunk(embedder, 5).uuid.hex(), "--helpful")
    before = exported(grown)
    memd(grown, "import", export_file)
    assert exported(grown) == before


def test_an_export_from_a_machine_whose_clock_is_ahead_keeps_its_order(tmp_path: Path, export_file: Path) -> None:
    ahead = 5_000_000_000_000_000  # the year 2128
    lines = [json.loads(line) for line in export_file.read_text().splitlines()]
    for line in lines:
        line["canonical_id"] += ahead
        line["origin_id"] += ahead
    memd(tmp_path / "new", "import", written(tmp_path / "ahead.jsonl", lines))
    after = exported(tmp_path / "new")
    assert [entry["origin_id"] for entry in after] == [line["origin_id"] for line in lines]
    assert all(entry["canonical_id"] >= entry["origin_id"] for entry in after) and memd(tmp_path / "new", "verify")


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


def test_importing_a_conversation_again_or_one_that_goes_on_adds_only_what_is_new(tmp_path: Path) -> None:
    long = long_conversation(15)
    other_ending = [{"role": "user", "content": "Now for something else: the ferry is late, is it not?"}]
    overlapping = [long, long[7:], long[11:22] + other_ending]
    longer = [*CONVERSATION, {"role": "user", "content": "Who painted the tower?"}]
    for conversations in ([CONVERSATION], overlapping):
        for imported in (True, False):
            told = memd(tmp_path / "new", "import", written(tmp_path / "talk.jsonl", conversations)).stdout
            assert (" imported as 0 chunks" in told) is not imported
    once = exported(tmp_path / "new")
    told = memd(tmp_path / "new", "import", written(tmp_path / "longer.jsonl", [longer])).stdout
    assert " imported as 1 chunk; " in told
    assert [shown_text(one) for one in exported(tmp_path / "new")[len(once) :]] == ["user: Who painted the tower?"]


@pytest.mark.thorough
def test_an_interrupted_import_goes_on_in_a_long_conversation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_parts, "STRETCH_CHARACTERS", 2_000)
    file = written(tmp_path / "long.jsonl", [long_conversation(20)])
    with monkeypatch.context() as patched:
        fail_after(patched, "part_drafts", 3)
        memd(tmp_path / "new", "import", file, code=1)
    begun = len(exported(tmp_path / "new"))
    for name in ("new", "whole"):
        memd(tmp_path / name, "import", file)
    contents = [[entry["content"] for entry in exported(tmp_path / name)] for name in ("new", "whole")]
    assert 0 < begun < len(contents[0]) and contents[0] == contents[1] and memd(tmp_path / "new", "verify")


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
def test_a_line_that_is_no_conversation_is_named_and_the_rest_goes_on(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "mixed.jsonl"
    after = json.dumps([{"role": "user", "content": "Read all the same."}])
    file.write_bytes(f"{json.dumps(GOOD)}\n\n{bad}\n{after}\n".encode("latin-1"))
    [problem] = memd(tmp_path / "new", "import", file, code=1).stderr.splitlines()
    assert problem.startswith(f"{file}, line 3")
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


def test_an_entry_that_contradicts_itself_is_refused(tmp_path: Path, export_file: Path) -> None:
    first, line, last = (json.loads(line) for line in export_file.read_text().splitlines()[:3])
    bad = [{**line, member: value} for member, value in CONTRADICTIONS]
    file = written(tmp_path / "bad.jsonl", [first, *bad, last])
    problems = memd(tmp_path / "new", "import", file, code=1).stderr.splitlines()
    named = [problem.partition(": ")[0] for problem in problems]
    assert named == [f"{file}, line {number}" for number in range(2, len(bad) + 2)]
    assert [entry["content"] for entry in exported(tmp_path / "new")] == [first["content"], last["content"]]


def test_the_command_counts_what_it_did_and_refuses_to_run_beside_a_daemon(
    tmp_path: Path, embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.cli.running.START_SECONDS_MAX", 0.1)  # it is not about a daemon that is just starting
    file = written(tmp_path / "talk.jsonl", [CONVERSATION])
    told = memd(tmp_path / "new", "import", file, "--topic", "talk").stdout
    assert "1 file read; 1 conversation (OpenAI messages 1) imported as " in told
    store = opened(tmp_path / "new", embedder)
    result = memd(tmp_path / "new", "import", file, "--topic", "talk", code=1)
    assert "is in use by another memd" in result.stderr and "stop that one" in result.stderr
    store.close()
    file.write_text("what is this?\n")
    result = memd(tmp_path / "other", "import", file, code=1)
    assert result.stderr.count("\n") == 1 and f"{file}, line 1: it is no JSON object" in result.stderr


def test_add_takes_each_file_for_what_it_is_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "notes"
    folder.mkdir()
    (folder / "house.md").write_text("# House\n\nThe spare key is with Ann.\n")
    (folder / "package.json").write_text('{"name": "lighthouse", "port": 4443}\n')
    talk = written(folder / "talk.jsonl", [CONVERSATION])

    def add(*arguments: str | Path) -> str:
        return memd(tmp_path / "new", "add", *arguments, given=talk.read_text()).stdout

    assert re.fullmatch(
        r"topic default: 2 files looked at as documents, .*; 2 chunks written, 0 taken out\n"
        r"1 file read; 1 conversation \(OpenAI messages 1\) imported as \d chunks?; .*\n",
        add(folder),
    )
    nameless = [tmp_path / name for name in ("talk", "talk.txt", "talk.json.1")]  # as a browser or a phone saves it
    for file in nameless:
        file.write_bytes(talk.read_bytes())
    given: list[list[str | Path]] = [[folder], [talk], [folder, talk], ["-"], [folder, "--format", "openai"]]
    given += [[one] for one in nameless]
    for again in given:
        assert re.search(
            r"^1 file read; .* imported as 0 chunks; .*; 7 messages added nothing: there", add(*again), re.MULTILINE
        )
    kinds = {entry["kind"] for entry in export(tmp_path / "new", LocalDisk(), topic_id=None, live_only=True)}
    assert kinds == {"turn", "document"}
    assert "3 files looked at" in add(
        folder, "--as", "notes", "--format", "md", "--format", "json", "--format", "jsonl"
    )
    refused = memd(tmp_path / "new", "add", folder, "--format", "openai", "--format", "md", code=2)
    assert "give no other --format" in refused.stderr


@pytest.mark.parametrize(
    ("path", "format_", "said"),
    [
        ("conversations.json", "chatgtp", "no such format; did you mean chatgpt? There are chatgpt, claude, "),
        (".", "markdwn", "no such format; did you mean markdown? There are chatgpt, claude, "),
        (".", "qqqq", "no such format; there are chatgpt, claude, "),
        ("conversations.json", "pdf", "conversations.json is not of --format pdf\n"),
        ("-", "chatgtp", "no such format; did you mean chatgpt?"),
        ("-", "md", "- is an export of conversations"),
    ],
)
def test_a_format_that_is_none_or_not_the_files_is_refused(tmp_path: Path, path: str, format_: str, said: str) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    (folder / "conversations.json").write_bytes((EXPORTS / "chatgpt.json").read_bytes())
    given = path if path == "-" else str(folder / path)
    result = memd(tmp_path / "new", "add", given, "--format", format_, code=2, given="Anything.")
    assert said in result.stderr
    assert not (tmp_path / "new").exists()


def test_conversations_of_a_program_where_there_are_none_are_one_true_line_and_no_success(tmp_path: Path) -> None:
    folder, binary, text = tmp_path / "exports", tmp_path / "photo.json", tmp_path / "notes.md"
    folder.mkdir()
    none = "no conversation of ChatGPT was found, and none stored\n"
    told = memd(tmp_path / "new", "add", folder, "--format", "chatgpt", code=1)
    assert told.stdout == f"0 files read; {none}" and told.stderr == ""
    (folder / "talk.json").write_bytes((EXPORTS / "claude.json").read_bytes())
    told = memd(tmp_path / "new", "import", folder, "--format", "chatgpt", code=1)
    passed = f"1 file without conversations of ChatGPT passed over ({folder / 'talk.json'})"
    assert told.stdout == f"0 files read; {passed}; {none}" and told.stderr == ""
    binary.write_bytes(b"\xff\xd8\n\x00\x01\n" * 8)
    text.write_text("# The harbour\n\nIt has a wall.\n")
    for file in (binary, text):
        told = memd(tmp_path / "new", "add", file, "--format", "chatgpt", code=1)
        said = f"{file}, the file: there is no conversation in it; line 1: it is no JSON object"
        assert told.stderr.startswith(said) and told.stderr.count("\n") == 1, told
        assert told.stdout == f"1 file read; 1 problem, named above; {none}"


def test_a_suffix_that_memd_has_no_reader_of_its_own_for_is_a_format_where_files_have_it(tmp_path: Path) -> None:
    folder = tmp_path / "ship"
    folder.mkdir()
    (folder / "log.nautical").write_text("The anchor chain was changed in Bergen.\n")
    (folder / "other.md").write_text("The mast was changed in Turku.\n")
    for path in (folder, folder / "log.nautical"):
        assert "1 file looked at" in memd(tmp_path / "new", "add", path, "--format", "nautical").stdout


def test_of_a_folder_what_is_of_others_is_passed_over_and_what_was_cut_off_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "exports"
    folder.mkdir()
    written(folder / "talk.jsonl", [CONVERSATION])
    (folder / "package.json").write_text('{"name": "a package"}')
    cut = folder / "conversations.json"
    cut.write_bytes((EXPORTS / "chatgpt.json").read_bytes()[:400])
    result = memd(tmp_path / "new", "import", folder, code=1)
    assert result.stderr.count("\n") == 1
    said = f"{cut}, element 1 (byte 1): the file ends in the middle of it: it was cut off. Get it again. "
    assert said in result.stderr
    passed = f"1 file without conversations passed over ({folder / 'package.json'}); 1 problem, named above"
    assert passed in result.stdout
    alone = memd(tmp_path / "alone", "add", cut, code=1)
    assert said in alone.stderr and "written" not in alone.stdout, "nor is it a document"


def test_cut_off_json_with_the_names_of_an_export_is_a_document_where_that_is_said(tmp_path: Path) -> None:
    cut = tmp_path / "devices.json"
    cut.write_text('{"mapping": {"hall": "blue lamp"}, "notes": ["the vermilion key is under the step", "and mo')
    said = memd(tmp_path / "new", "add", cut, code=1).stderr
    assert f"{cut}, element 1 (byte 0): the file ends in the middle of it: it was cut off. Get it again" in said
    assert "Nothing is taken; --format json adds it as a document" in said
    assert "1 chunk written" in memd(tmp_path / "new", "add", cut, "--format", "json").stdout
    assert "vermilion key" in memd(tmp_path / "new", "export").stdout


def test_a_topic_of_its_own_is_called_as_the_export_or_as_the_folder_that_an_agent_worked_in(tmp_path: Path) -> None:
    packed, sessions = tmp_path / "chatgpt export.zip", tmp_path / "sessions"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(EXPORTS / "claude.json", "conversations.json")
    sessions.mkdir()
    (sessions / "lathe.jsonl").write_bytes((EXPORTS / "claude-code.jsonl").read_bytes())
    written(sessions / "talk.jsonl", [CONVERSATION])
    for path, said in ((packed, "; they are in topic chatgpt-export;"), (sessions, "they are in 2 topics")):
        assert said in memd(tmp_path / "new", "add", path, "--topic", "auto").stdout
    topics = {entry["topic_id"] for entry in export(tmp_path / "new", LocalDisk(), topic_id=None, live_only=True)}
    assert topics == {"chatgpt-export", "lathe", "sessions"}


def test_a_conversation_is_found_by_its_title_and_shown_as_it_was_said(served: DaemonProcess, tmp_path: Path) -> None:
    said = {"uuid": "2", "sender": "human", "text": "Ok, we take the Enyaq 85, in blue. Delivery in June."}
    chats = [{"uuid": "1", "name": "Choosing a car", "chat_messages": [said]}]
    (path := tmp_path / "conversations.json").write_text(json.dumps(chats))
    memd(folder := served.data_dir, "add", path)
    [chunk] = json.loads(memd(folder, "search", "--json", "which car did we decide on").stdout)["chunks"]
    assert chunk["verdict"] == "injected" and chunk["content"] == f"user: {said['text']}"
    assert chunk["heading"] == ["Choosing a car"]
    [brief] = ask(f"{served.own_url}/memd/conversations").json["conversations"]
    memd(folder, "export", "--as", "open-webui", "--output", output := tmp_path / "chats.json")
    assert brief["title"] == json.loads(output.read_text())[0]["title"] == "Choosing a car"
    [again] = exported(folder)
    memd(other := tmp_path / "other", "add", written(tmp_path / "export.jsonl", [again]))
    assert exported(other)[0]["part"] == again["part"]


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
        told = memd(tmp_path / into, "add", path).stdout
        assert f"{unpacked}: an export of ChatGPT, of which the conversations are taken and nothing else" in told
        assert "(left out: chat.html, message_feedback.json, user.json)" in told
        entries = export(tmp_path / into, LocalDisk(), topic_id=None, live_only=True)
        return sorted({entry["kind"] for entry in entries})

    assert kinds_after_adding(unpacked, into="one") == ["turn"]
    assert kinds_after_adding(inbox, into="two") == ["document", "turn"]
    told = memd(tmp_path / "three", "add", unpacked / "user.json").stdout
    assert "1 chunk written" in told, "a file that is named is wanted"


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
        result = memd(tmp_path / command, command, folder, code=1)
        assert result.stderr.count("\n") == 3
        for name in ("broken", "odd", "empty"):
            assert f"{folder / name}.zip, the file: it is no whole zip" in result.stderr
        assert "(Claude " in result.stdout
        said = f"1 file without conversations passed over ({folder / 'photos.zip'}); 3 problems, named above"
        assert said in result.stdout
        assert ("1 file looked at" in result.stdout) == (command == "add"), "the note is no export"


SLACK: dict[str, list[dict[str, Any]]] = {
    "channels.json": [{"id": "C1", "name": "general", "members": ["U1", "U2"]}],
    "users.json": [{"id": "U1", "name": "kari", "profile": {"real_name": "Kari Nes"}}, {"id": "U2", "name": "ola"}],
    "general/2024-03-01.json": [
        {"type": "message", "subtype": "channel_join", "user": "U2", "text": "<@U2> has joined", "ts": "1709290000.1"},
        {"type": "message", "user": "U1", "text": "<@U2>: standup &amp; coffee at 09:15", "ts": "1709290800.000200"},
        {"type": "message", "user": "U2", "text": "Fine, I tell the vendors.", "ts": "1709290900.000300"},
    ],
    "general/2024-03-02.json": [
        {"type": "message", "subtype": "channel_join", "user": "U2", "text": "<@U2> has joined", "ts": "1709377200.1"}
    ],
}


def test_an_export_of_slack_is_read_channel_by_channel_with_the_names_of_people(tmp_path: Path) -> None:
    unpacked, packed = tmp_path / "slack", tmp_path / "Fjord Slack export.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for name, values in SLACK.items():
            archive.writestr(name, json.dumps(values))
        archive.extractall(unpacked)
    for path in (packed, unpacked, unpacked / "general" / "2024-03-01.json"):
        told = memd(folder := tmp_path / f"as {path.name}", "add", path).stdout
        assert "1 conversation (Slack 1) imported" in told, told
        is_whole = path.suffix != ".json"
        assert ("nothing else (left out: channels.json, users.json)" in told) == is_whole, told
        chunk, answer = exported(folder)
        assert (chunk["content"], answer["content"]) == ("@ola: standup & coffee at 09:15", "Fine, I tell the vendors.")
        assert [one["speakers"][0]["name"] for one in (chunk, answer)] == ["Kari Nes", "ola"]
        assert chunk["source"] == "slack:general/2024-03-01" and chunk["said_at"] == "2024-03-01T11:00:00.000200Z"
        assert [*chunk["part"]["heading"]] == ["general"]


def test_what_add_takes_of_a_zip_or_a_folder_and_what_it_leaves_out_is_said(tmp_path: Path) -> None:
    (notes := tmp_path / "notes").mkdir()
    for name in ("house.md", "a.jpg", "b.JPG", "letters.pst", "song.flac"):
        (notes / name).write_text("The spare key is with Ann.")
    told = memd(tmp_path / "new", "add", notes, code=1).stdout
    assert "letters.pst: left out: " in told and "save it as EML" in told
    assert "passed over, as memd does not read such files: .jpg 2, .flac 1\n" in told
    assert "passed over" not in memd(tmp_path / "new", "add", notes, "--format", "md").stdout, "nobody wants those"

    packed = tmp_path / "data.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        archive.write(EXPORTS / "claude.json", "conversations.json")
        for name in ("users.json", "projects.json", "memories.json"):
            archive.writestr(name, '[{"name": "Quay"}]')
    told = memd(tmp_path / "new", "add", packed).stdout
    left_out = "(left out: users.json, projects.json, memories.json)"
    said = f"{packed}: an export of Claude, of which the conversations are taken and nothing else {left_out}\n"
    assert told.startswith(said) and "1 conversation (Claude 1) imported" in told

    chats = tmp_path / "chats.json"
    chats.write_text('{"chats": [{"messages": [{"role": "user", "content": "The oars are in the loft."}]}]}')
    said = f"{chats}: taken for a document, as it has no conversation of a program that memd knows\n"
    told = memd(tmp_path / "new", "add", chats).stdout
    assert (
        told
        == f"{said}topic default: 1 file looked at as a document, 0 of them unchanged; 1 chunk written, 0 taken out\n"
    )
    assert said not in memd(tmp_path / "new", "add", chats, "--format", "json").stdout, "that is what it is to be"

    with zipfile.ZipFile(tmp_path / "notes.zip", "w") as archive:
        archive.writestr("oars.md", "The oars are in the loft.")
    result = memd(tmp_path / "new", "add", str(tmp_path / "notes.zip"), code=1)
    said = "of a zip only an export of conversations is read: unpack it, and add its folder"
    assert result.stderr == f"{tmp_path / 'notes.zip'}, the file: {said}\n"
    assert "piped" not in result.stdout


@pytest.mark.parametrize(
    "piped", [b"We leave for Turku at nine.\n", b"PK\x03\x04 and more", b"[ ] Oars\n", b"%PDF-1.7\n\xff", b""]
)
def test_what_can_be_piped_is_said_where_something_else_was(tmp_path: Path, piped: bytes) -> None:
    result = memd(tmp_path / "new", "add", "-", code=1, given=piped)
    assert result.stderr.count("\n") == 1
    assert "standard input, all of it: this is no exported conversation (JSON, JSON Lines" in result.stderr
    assert "as - has to be; add others as files" in result.stderr
    assert "`memd remember -` remembers piped text" in result.stdout


def test_times_that_cannot_be_are_told_and_the_message_is_dated_as_if_it_had_none(tmp_path: Path) -> None:
    times = ["2024-05-03T10:00:00Z", "2199-01-01", 0, "last week", None]
    told = [{"role": "user", "content": f"The ferry number {n} leaves."} for n in range(len(times))]
    dated = [[message | {"timestamp": at}] for message, at in zip(told, times, strict=True)]
    dated.append([{**CONVERSATION[1], "timestamp": "2024-05-03T10:00:00Z"}, {**CONVERSATION[2], "timestamp": 5e12}])
    file = written(tmp_path / "chats.jsonl", dated)
    result = memd(tmp_path / "new", "import", file)
    assert "; 4 times in the future, before 1980 or unreadable: dated by the message before" in result.stdout
    years = [entry.get("said_at", entry["created_at"])[:4] for entry in exported(tmp_path / "new")]
    now = f"{datetime.now(UTC):%Y}"
    assert years[:5] == ["2024", now, now, now, now] and set(years[5:]) == {"2024"}


@pytest.mark.parametrize("form", list(FORMS))
def test_conversations_come_back_through_every_form_for_other_programs(tmp_path: Path, form: str) -> None:
    long = [{"role": "user", "content": f"Turn {n}: {text}"} for n, text in enumerate(["word " * 900, "short", "end"])]
    answered = [said for one in long for said in (one, {"role": "assistant", "content": f"Re: {one['content'][:20]}"})]
    output = tmp_path / "out.json"
    memd(tmp_path / "new", "import", written(tmp_path / "talk.jsonl", [answered, CONVERSATION]))
    memd(tmp_path / "new", "remember", "A note is no conversation.")
    memd(tmp_path / "new", "export", "--as", form, "--output", output)
    assert "; 2 conversations (" in memd(tmp_path / "newer", "import", output).stdout
    turns = [[entry for entry in exported(tmp_path / name) if entry["kind"] == "turn"] for name in ("new", "newer")]
    texts = ["".join("".join(shown_text(entry).split()) for entry in side) for side in turns]
    if form == "open-webui":  # it knows users and assistants
        texts = [text.replace("tool:", "assistant:") for text in texts]
    messages = [sorted(re.split("(?=user:|assistant:|tool:)", text)) for text in texts]
    assert messages[0] == messages[1]
    assert all("said_at" in entry for entry in exported(tmp_path / "newer")) or form == "sharegpt"


def test_turns_of_a_topic_are_one_conversation_until_an_hour_passes(tmp_path: Path, embedder: Embedder) -> None:
    store = opened(tmp_path / "new", embedder)
    times = [0, 1_800, 3_600, 9_000]
    for number, seconds in enumerate(times):
        said = chunk(embedder, 2 * number + 1)
        said = msgspec.structs.replace(said, source=None, said_at=1_700_000_000_000_000 + seconds * 1_000_000)
        store.topic("bikes").append([said])
    store.close()
    lines = memd(tmp_path / "new", "export", "--as", "openai").stdout.splitlines()
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


def test_every_command_of_the_page_works_and_done_again_adds_nothing(served: DaemonProcess, exports: Path) -> None:
    def ran(command: str) -> str:
        line, _, source = command.partition(" < ")
        [name, *arguments] = [str(Path(word).expanduser()) for word in line.split()]
        assert name == "memd"
        given = (exports / source).read_text() if source else None
        return memd(served.data_dir, *arguments, given=given).stdout

    told = [ran(command) for command in documented()]
    assert "2 conversations (ChatGPT 2) imported as 6 chunks; " in told[0] and "with 1 other branch" in told[0]
    assert "(Claude Code 1)" in told[2] and "(Aider 2)" in told[4] and " imported as 0 chunks" in told[-2]
    entries = served.export()
    assert {entry["topic_id"] for entry in entries} == {"default", "lathe", "orrery", "belfry"}
    sources = {entry["source"].partition(":")[0] for entry in entries}
    assert sources == {"chatgpt", "open-webui", "claude-code", "codex", "aider", "sharegpt", "openai"}
    found = json.loads(ran("memd search --topic lathe --json Which-pitch-has-the-lead-screw"))["chunks"]
    assert any("The pitch is 3 mm." in one["content"] for one in found[:3]), "beside the question and the steps"
    assert len(json.loads((exports / "chats.json").read_text())) == 11
    for command in documented()[:-1]:
        assert " imported as 0 chunks" in ran(command)
    assert len(served.export()) == len(entries)


def test_what_went_through_memd_is_not_imported_again(served: DaemonProcess, tmp_path: Path) -> None:
    asked = {"role": "user", "content": "Which rope holds the bell of the lighthouse, the hemp or the wire?"}
    reply = served.chat([asked]).json["choices"][0]["message"]
    live = served.export()
    assert live
    further = [{"role": "user", "content": "And who spliced it?"}, {"role": "assistant", "content": "Ada, in May."}]
    file = written(tmp_path / "talk.jsonl", [[asked, reply]])
    assert served.run("import", str(file)).returncode == 0
    assert served.export() == live
    written(file, [[asked, reply, *further]])
    told = served.run("import", str(file)).stdout
    assert "imported as 1 chunk; they are in " in told and "; 2 messages added nothing: there already, " in told
    assert shown_text(served.export()[-1]).startswith("user: And who spliced it")
