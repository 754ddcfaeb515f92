"""The audit names who read, wrote, corrected and exported what, and never a word of it."""

import asyncio
import getpass
import json
import re
import subprocess
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from conftest import Serving
from crash_files import LOSSES, CrashFiles, Loss, PowerCutError
from daemon_process import Answer, DaemonProcess, ask, token_setting, tool_call, wait_until
from drafts import open_store
from full_disk import FullDisk

from memd.admin import auditing
from memd.admin.auditing import Auditor
from memd.admin.routes import ROUTES
from memd.admin.routing import BEFOREHAND, IDS_MAX, TOPICS_MAX, Extent, chunks_in
from memd.cli.main import main
from memd.errors import StoreError
from memd.principals import Principal, Principals
from memd.settings.loading import ITEMS_MAX
from memd.store.audit import (
    KINDS,
    LINE_BYTES_MAX,
    Act,
    AuditBook,
    Checked,
    Head,
    KnownHead,
    encoded,
    head_from,
    noted_head,
    read_book,
)
from memd.store.disk import LocalDisk
from memd.store.layout import AuditLayout

NOW = 1_795_444_982_372_003
SECRETS = {name: f"{name}-has-this-own-token" for name in ("owner", "ann", "bob", "eve")}


def test_every_route_is_an_act_or_has_nothing_that_was_said() -> None:
    assert {route.act for route in ROUTES if route.act} | BEFOREHAND <= set(KINDS)
    assert not [route.path for route in ROUTES if route.method == "POST" and route.act is None]


def settings() -> dict[str, Any]:
    rights = {"ann": ["read", "write", "correct"], "bob": ["read"]}
    eve = token_setting("eve", SECRETS["eve"], "read", topics=("boats", "crane-*"))
    tokens = [eve, *(token_setting(name, SECRETS[name], *given) for name, given in rights.items())]
    return {"auth": {"token": SECRETS["owner"], "tokens": tokens}}


class Team:
    """A daemon and those who have a token."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self.daemon = daemon

    def ask(self, who: str, path: str, body: object = None) -> Answer:
        return ask(f"{self.daemon.own_url}{path}", body, headers={"X-Memory-Token": SECRETS[who]})

    def say(self, who: str, text: str, metadata: dict[str, str] | None = None) -> Answer:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "metadata": metadata or {}}
        return ask(f"{self.daemon.base_url}/v1/chat/completions", body, headers={"X-Memory-Token": SECRETS[who]})

    def call(self, who: str, tool: str, **arguments: str) -> Answer:
        """Call a tool over MCP."""
        headers = {"X-Memory-Token": SECRETS[who], "Accept": "application/json, text/event-stream"}
        return ask(f"{self.daemon.own_url}/mcp", tool_call(tool, **arguments), headers=headers)

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.daemon.run(command, "--config", str(self.daemon.config), *arguments)

    def acts(self, *flags: str) -> list[dict[str, Any]]:
        done = self.run("audit", "--json", *flags)
        state, *acts = map(json.loads, done.stdout.splitlines())
        assert done.returncode == (0 if acts else 1), done
        assert state["chain"]["is_whole"], state
        return acts

    @property
    def files(self) -> list[Path]:
        return sorted((self.daemon.data_dir / "memd.audit").iterdir())


@pytest.fixture
def team(serving: Serving) -> Team:
    return Team(serving(settings()))


def test_the_audit_says_who_did_what_and_quotes_nothing(team: Team, tmp_path: Path) -> None:
    daemon = team.daemon
    team.say("ann", "The lighthouse keeper is called KESTREL.")
    [note] = team.ask("ann", "/memd/notes", {"notes": [{"content": "The crane needs OSPREY oil."}]}).json["notes"]
    chunk = note["chunk_ids"][0]
    found = team.ask("bob", "/memd/search?q=Which+oil+does+the+OSPREY+crane+need").json["chunks"]
    assert chunk in [one["id"] for one in found]
    change = {"topic_id": "default", "chunk_ids": [chunk], "action": "Update", "content": "HERON oil", "reason": "IBIS"}
    assert team.ask("ann", "/memd/corrections", change).status == 200
    assert team.ask("ann", "/memd/chunks/KESTREL-is-no-id").status in (400, 404)
    assert b"list_topics" not in team.call("bob", "list_topics").body
    assert b"OSPREY" in team.call("bob", "read_memory", id=chunk).body
    assert team.ask("bob", "/memd/notes", {"notes": [{"content": "GOSHAWK"}]}).status == 403
    exported = team.ask("owner", "/memd/export").body.splitlines()
    assert ask(f"{daemon.own_url}/memd/search?q=KESTREL", headers={"X-Memory-Token": "a guess"}).status == 401
    acts = team.acts()
    told = [(one["who"], one["act"], one.get("what", "")) for one in acts]
    assert ("ann", "write", "POST /memd/notes") in told
    assert ("ann", "correct", "POST /memd/corrections") in told
    assert {("", "refused", ""), ("bob", "refused", "POST /memd/notes")} <= set(told)
    assert [one["from"] for one in acts if one["act"] == "read" and one["who"] == "bob"] == ["127.0.0.1 by MCP"]
    [search] = [one for one in acts if one["act"] == "search"]
    assert {one["uuid"] for one in found} == set(search["ids"]) and search["count"] == len(found)
    assert (search["who"], search["topics"], search["from"]) == ("bob", ["default"], "127.0.0.1")
    [turn] = [one for one in acts if one["act"] == "write" and one.get("turn")]
    assert "n" not in turn and turn["who"] == "ann" and team.ask("owner", f"/memd/turns/{turn['turn']}").status == 200
    assert "  by ann" in team.run("turn", turn["turn"]).stdout.splitlines()[0]
    [export] = [one for one in acts if one["act"] == "export"]
    assert export["who"] == "owner" and export["ends"] and export["count"] == len(exported)
    assert [one["act"] for one in team.acts("--who", "bob")] == ["search", "read", "refused"]
    assert {one["act"] for one in team.acts("--act", "correct", "--act", "export")} == {"correct", "export"}
    assert team.acts("--from", "2100-01-01") == []
    assert {one["act"] for one in team.acts("--topic", "elsewhere")} <= {"export", "read", "audit"}
    written = b"".join(path.read_bytes() for path in team.files)
    words = ("KESTREL", "GOSHAWK", "OSPREY", "HERON", "IBIS", "lighthouse", "crane", "guess", *SECRETS.values())
    assert [word for word in words if word.encode() in written] == []
    assert team.run("backup", str(tmp_path / "backup")).returncode == 0
    head = team.run("audit", "--head").stdout.strip()
    first = team.run("audit", "--verify").stdout
    assert re.search(r"none changed\. Its head is \d+:[0-9a-f]{10,15}… \(`memd audit --head`", first), first
    expected = team.run("audit", "--verify", "--expect", head).stdout
    assert f"It has the line that was expected ({head[:16]}…), unchanged up to there." in expected
    assert "expected" not in first
    daemon.terminate()
    after = team.acts("--expect", head)
    assert [(one["act"], one["from"]) for one in after if one["act"] == "backup"] == [("backup", "memd backup")]
    assert after[-1]["act"] == "stop"
    assert "memd.audit: " in team.run("verify").stdout
    copied = read_book(LocalDisk(), tmp_path / "backup", lambda _: True)
    assert copied is not None and copied.findings == () and str(copied.head) == str(noted(tmp_path / "backup"))


def test_a_restored_audit_says_that_it_was_restored_and_that_its_backup_came_to_an_end(
    team: Team, tmp_path: Path
) -> None:
    team.ask("ann", "/memd/search?q=crane")
    team.acts()
    assert team.run("backup", str(tmp_path / "backup")).returncode == 0
    folder = tmp_path / "restored"
    done = CliRunner().invoke(main, ["restore", str(tmp_path / "backup"), str(folder)])
    assert done.exit_code == 0, done.output
    for flags in ([], ["--act", "backup", "--act", "restore"]):
        told = CliRunner().invoke(main, ["audit", "--data-dir", str(folder), *flags])
        assert told.exit_code == 0 and "no end is recorded" not in told.stdout, told.stdout
        rows = [line for line in told.stdout.splitlines() if line.endswith(("  memd backup", "  memd restore"))]
        assert len(rows) == 2 and all(str(tmp_path / "backup") in one for one in rows), told.stdout
    assert CliRunner().invoke(main, ["verify", str(folder)]).exit_code == 0


def test_an_act_is_told_as_what_became_of_it_and_without_a_daemon_as_that_of_whoever_ran_the_command(
    team: Team,
) -> None:
    [note] = team.ask("ann", "/memd/notes", {"notes": [{"content": "The crane needs oil."}]}).json["notes"]
    [chunk] = note["chunk_ids"]
    wrong = {"chunk_ids": [chunk, "ffff"], "action": "Unhelpful", "reason": "no"}
    for who in ("bob", "ann"):
        assert chunk in team.say(who, "What does the crane need?").headers["X-Memory-Injected"]
        team.say(who, f"Is it so, {who}?", {"memory_in": json.dumps({"corrections": [wrong]})})
    corrected = [(one["who"], one["ids"], one.get("detail", "")) for one in team.acts("--act", "correct")]
    failed = "not corrected"
    assert corrected == [("bob", [chunk, "ffff"], failed), ("ann", [chunk], ""), ("ann", ["ffff"], failed)]

    told = [
        team.ask("ann", "/memd/notes", {"topic_id": topic, "notes": [{"content": f"{topic} {n}"}]}).json["notes"]
        for topic, n in (("cranes", 1), ("cranes", 2), ("boats", 3))
    ]
    chunks = [chunk for [note] in told for chunk in note["chunk_ids"]]
    assert team.ask("owner", "/memd/erase", {"chunk_ids": chunks}).status == 200
    [act] = team.acts("--act", "erase")
    assert act["count"] == 3 and set(act["topics"]) == {"cranes", "boats"}, "of all its topics"

    team.say("ann", "The lighthouse keeper is called Ada.")
    team.daemon.wait_stored("is called Ada")
    team.daemon.terminate()
    conversations = team.run("export", "--as", "openai").stdout.splitlines()
    team.run("search", "crane")
    team.run("export")
    commands = [one for one in team.acts() if one["act"] in ("search", "export")]
    assert {one["who"] for one in commands} == {getpass.getuser()}
    assert [one["from"] for one in commands] == ["memd export", "memd search", "memd export"]
    assert commands[0]["count"] == len(conversations) > 0
    said, *rows = team.run("audit").stdout.splitlines()
    shown = {int(number) for row in rows for number in re.findall(r"\d+", row[:8].partition("  20")[0])}
    assert f"is whole: {len(shown)} lines" in said and shown == set(range(1, len(shown) + 1)), "each line is somewhere"


def test_an_act_that_names_no_topic_is_one_on_those_of_the_token(team: Team) -> None:
    assert team.ask("eve", "/memd/export").status == 200
    by_topic = [team.acts("--act", "export", "--topic", topic) for topic in ("boats", "crane-2")]
    assert [[(one["who"], one["topics"]) for one in acts] for acts in by_topic] == [[("eve", ["boats", "crane-*"])]] * 2
    assert team.acts("--who", "eve", "--topic", "cranes") == [], "which her token may not read"


def noted(data_dir: Path) -> Head | None:
    return noted_head(LocalDisk(), AuditLayout(data_dir))


def test_a_changed_line_is_told_before_anything_else_and_by_verify_check_and_backup(team: Team, tmp_path: Path) -> None:
    team.ask("ann", "/memd/search?q=crane")
    team.acts()
    assert team.run("backup", str(tmp_path / "backup")).returncode == 0
    [month] = [path for path in team.files if path.suffix == ".jsonl"]
    month.write_bytes(month.read_bytes().replace(b'"who":"ann"', b'"who":"bob"', 1))
    beside = team.run("audit")
    assert beside.returncode == 1 and beside.stdout.startswith("THE AUDIT IS NOT WHOLE"), beside
    assert "one of the two was changed" in beside.stdout.splitlines()[1]
    assert "was changed or cut" in team.run("backup", str(tmp_path / "backup")).stdout
    team.daemon.terminate()
    assert team.run("audit", "--verify").stdout.splitlines()[1] == beside.stdout.splitlines()[1]
    assert team.run("verify").returncode == 1
    assert "was changed" in team.run("check").stdout


def test_after_a_kill_the_audit_goes_on_and_settings_that_changed_in_between_are_told(team: Team) -> None:
    team.ask("ann", "/memd/search?q=crane")
    team.acts()
    team.daemon.kill()
    [month] = [path for path in team.files if path.suffix == ".jsonl"]
    with month.open("ab") as file:
        file.write(b'{"n":99,"at":')
    changed = settings()
    changed["auth"]["tokens"].pop()
    team.daemon.configure(changed | {"retrieval": {"top_k": 7}})
    team.daemon.start()
    wait_until(lambda: month.read_text().count('"act":"start"') == 2, month.read_text)  # beside its work
    acts = team.acts()
    assert [one["act"] for one in acts if one["who"] == "memd"] == ["file", "recovered"]
    assert [one["detail"] for one in acts if one["act"] in ("token", "settings")] == ["changed: retrieval", "gone: bob"]


def test_where_nobody_else_has_a_token_nothing_is_recorded(served: DaemonProcess) -> None:
    served.chat([{"role": "user", "content": "Hello there, I am Ann."}])
    assert served.run("export").returncode == 0
    assert not (served.data_dir / "memd.audit").exists()
    shown = served.run("audit")
    assert (
        shown.stdout.startswith("No audit is kept in")
        and "memd token add" in shown.stdout
        and "write" in shown.stdout
        and shown.returncode == 0
    )


def test_a_turn_whose_receipt_is_not_kept_is_a_line(serving: Serving) -> None:
    team = Team(serving(settings() | {"receipts": {"enabled": False}}))
    [note] = team.ask("ann", "/memd/notes", {"notes": [{"content": "The crane needs oil."}]}).json["notes"]
    asked = {"chunk_ids": note["chunk_ids"], "action": "Helpful", "reason": "IBIS"}
    team.say("ann", "What does the crane need?")
    team.say("ann", "Thanks.", {"memory_in": json.dumps({"corrections": [asked]})})
    told = [
        (one["act"], [id_[:4] for id_ in one.get("ids", [])]) for one in team.acts("--who", "ann") if "turn" not in one
    ]
    assert told[1:3] == [("read", note["chunk_ids"]), ("write", [])] and ("correct", note["chunk_ids"]) in told


# -- in one process ---------------------------------------------------------------------------------------------------


@pytest.fixture
def disk() -> FullDisk:
    return FullDisk()


@pytest.fixture
def auditor(disk: FullDisk, tmp_path: Path) -> Auditor:
    return Auditor(AuditBook(disk, tmp_path), Principals(), "always")


def read(tmp_path: Path) -> list[Act]:
    kept = read_book(LocalDisk(), tmp_path, lambda _: True)
    assert kept is not None and kept.findings == ()
    return [act for _, act in kept.acts if act.act != "file"]


def act(number: int, kind: str = "search") -> Act:
    return Act(at=NOW + number, act=kind, who="ann", source="10.0.0.7", count=number)


async def test_on_a_full_disk_acts_wait_and_what_must_be_recorded_first_is_not_done(
    auditor: Auditor, disk: FullDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    auditor.note(act(1))
    assert await auditor.flush()
    disk.full = True
    auditor.note(act(2))
    assert not await auditor.flush()
    with pytest.raises(StoreError, match=r"this was not done.*disk is full"):
        await auditor.begin(act(3, "export"))
    disk.full = False
    assert await auditor.begin(act(4, "export")) == 4
    monkeypatch.setattr(auditing, "WAITING_MAX", 3)
    disk.full = True
    for number in range(5, 10):
        auditor.note(act(number))
    assert not await auditor.flush()
    disk.full = False
    assert await auditor.flush()
    kept = [(one.act, one.count) for one in read(tmp_path)]
    assert kept[:3] == [("search", 1), ("search", 2), ("export", 4)]
    assert kept[3:] == [("search", 5), ("search", 6), ("search", 7), ("lost", 2)], "of more than may wait the number"


async def test_attempts_that_were_refused_in_quick_succession_are_one_line(auditor: Auditor, tmp_path: Path) -> None:
    for _ in range(500):
        auditor.note(Act(at=NOW, act="refused", who="bob", source="10.0.0.7", what="GET /memd/export", status=403))
    auditor.note(act(1))
    assert await auditor.flush()
    assert [(one.act, one.times) for one in read(tmp_path)] == [("refused", 500), ("search", 1)]


async def test_whoever_asks_waits_for_what_is_being_written(auditor: Auditor, tmp_path: Path) -> None:
    auditor.note(act(1))
    writing = asyncio.create_task(auditor.flush())
    await asyncio.sleep(0)  # the thread has the act
    head = await auditor.written()
    assert head is not None and [one.count for one in read(tmp_path)] == [1]
    assert await writing


async def test_an_audit_that_began_goes_on_though_the_last_token_is_gone(disk: FullDisk, tmp_path: Path) -> None:
    principals = Principals()
    auditor = Auditor(AuditBook(disk, tmp_path), principals, "auto")
    before = auditor.is_on
    principals.exchange({b"1": Principal("ann", ("*",), frozenset())})
    assert (before, auditor.is_on) == (False, True)
    auditor.note(act(1))
    await auditor.flush()
    assert Auditor(AuditBook(disk, tmp_path), Principals(), "auto").is_on
    assert not Auditor(AuditBook(disk, tmp_path), principals, "never").is_on


def test_no_line_has_more_ids_and_topics_than_a_line_holds() -> None:
    many = [SimpleNamespace(uuid=f"{number:032x}", topic_id=f"{number:0128}") for number in range(500)]
    told = Extent().and_of(chunks_in(many))
    assert (len(told.ids), len(told.topics), told.count) == (IDS_MAX, TOPICS_MAX, 500)
    line, _ = encoded(Act(at=NOW, act="read", who="w" * 64, **msgspec.structs.asdict(told)), Head())
    assert len(line) <= LINE_BYTES_MAX


async def test_an_act_with_a_detail_of_any_length_keeps_no_other_out_of_the_audit(
    auditor: Auditor, tmp_path: Path
) -> None:
    auditor.note(act(1))
    await auditor.begin(msgspec.structs.replace(act(2, "backup"), detail="/\udcff" + "\x01" * 40_000))
    auditor.note(msgspec.structs.replace(act(3, "start"), tokens=tuple(f"{name:064}" for name in range(ITEMS_MAX))))
    assert await auditor.flush()
    assert [(one.act, len(one.tokens)) for one in read(tmp_path)] == [("search", 0), ("backup", 0), ("start", 10_000)]
    [detail] = [one.detail for one in read(tmp_path) if one.act == "backup"]
    assert detail.startswith(r"/\udcff") and len(detail) < 5_000


def test_encrypting_a_directory_is_an_act_of_whoever_did_it(tmp_path: Path) -> None:
    key, folder = tmp_path / "key", tmp_path / "memory"
    open_store(None, folder).close()
    variables = {"MEMD_ENCRYPTION_KEY_FILE": str(key), "MEMD_AUDIT_RECORD": "always"}
    for command in (["key", "new", str(key)], ["encrypt", "on", "--data-dir", str(folder)]):
        done = CliRunner().invoke(main, command, env=variables)
        assert done.exit_code == 0, done.output
    [begun, ended] = read(folder)
    assert (begun.act, begun.who, begun.begins, ended.ends) == ("settings", getpass.getuser(), True, 2)
    assert ended.detail.startswith("encryption with the key ")


# The chain: which line is missing, changed, moved or put in, and what a kept head says

NOVEMBER, DECEMBER, JANUARY = (
    int(datetime(*day, tzinfo=UTC).timestamp() * 1e6) for day in ((2026, 11, 5), (2026, 12, 5), (2027, 1, 5))
)


def line_of(number: int, at: int = NOVEMBER) -> Act:
    return Act(at=at + number, act="search", who="ann", source="10.0.0.7", topics=("work",), count=number)


def checked(data_dir: Path, *known: KnownHead) -> Checked:
    found = read_book(LocalDisk(), data_dir, lambda _: True, known)
    assert found is not None
    return found


@pytest.fixture
def month(tmp_path: Path) -> Path:
    """A file with lines 1 (its beginning) to 7."""
    AuditBook(LocalDisk(), tmp_path).append([line_of(number) for number in range(2, 8)])
    return tmp_path / "memd.audit" / "2026-11.jsonl"


def _hash(line: bytes) -> str:
    return line.split(b'"hash":"')[1][:64].decode()


def _forged(lines: list[bytes]) -> bytes:
    """A line that follows the third."""
    return encoded(line_of(99), Head(3, _hash(lines[2])))[0]


Lines = list[bytes]
AMONG_TWO = "there is another line 4: one of the two was put in"
TAMPERED: dict[str, tuple[Callable[[Lines], Lines], str]] = {
    "removed": (lambda ls: ls[:3] + ls[4:], "4: line 4 is missing before it"),
    "three removed": (lambda ls: ls[:2] + ls[5:], "3: lines 3 to 5 are missing before it"),
    "first removed": (lambda ls: ls[1:], "1: line 1 is missing before it"),
    "changed": (
        lambda ls: [*ls[:3], ls[3].replace(b'"ann"', b'"bob"'), *ls[4:]],
        "4: line 4 does not follow line 3: one of the two was changed",
    ),
    "changed with its hash": (
        lambda ls: [*ls[:3], _forged(ls), *ls[4:]],
        "5: line 5 does not follow line 4: one of the two was changed",
    ),
    "first changed": (lambda ls: [ls[0].replace(b'"memd"', b'"root"'), *ls[1:]], "1: line 1 was changed"),
    "swapped": (lambda ls: [*ls[:3], ls[4], ls[3], *ls[5:]], "5: line 4 stands behind line 5"),
    "put in": (lambda ls: [*ls[:3], _forged(ls), *ls[3:]], f"5: {AMONG_TWO}"),
    "doubled": (lambda ls: [*ls[:4], ls[3], *ls[4:]], f"5: {AMONG_TWO}"),
    "emptied": (lambda ls: [*ls[:3], b"{}\n", *ls[4:]], "4 cannot be read"),
    "rubbish put in": (lambda ls: [*ls[:3], b"\xff\x00\n", *ls[3:]], "4 cannot be read"),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_line_is_named(month: Path, name: str) -> None:
    tamper, says = TAMPERED[name]
    month.write_bytes(b"".join(tamper(month.read_bytes().splitlines(keepends=True))))
    assert checked(month.parent.parent).findings == (f"2026-11.jsonl:{says}",), "one deed is one finding"


def test_the_end_is_missed_by_whoever_kept_the_head_and_so_is_what_was_written_anew(month: Path) -> None:
    data_dir = month.parent.parent
    head = AuditBook(LocalDisk(), data_dir).append([line_of(8)])
    whole = month.read_bytes()
    month.write_bytes(b"".join(whole.splitlines(keepends=True)[:6]))
    assert checked(data_dir).findings == (), "the rest hangs together: by itself a chain does not show a cut end"
    kept = KnownHead(head_from(f"{head}\n"), "the note of Monday")
    assert checked(data_dir, kept).findings == ("lines 7 to 8 are missing at the end: the note of Monday has line 8",)
    month.write_bytes(whole)
    assert checked(data_dir, kept).findings == ()

    kept = KnownHead(checked(data_dir).head, "the backup")
    lines = month.read_bytes().splitlines(keepends=True)
    head = Head(3, _hash(lines[2]))
    forged = []
    for number in range(40, 45):
        line, head = encoded(line_of(number), head)
        forged.append(line)
    month.write_bytes(b"".join([*lines[:3], *forged]))
    assert checked(data_dir).findings == ()
    [said] = checked(data_dir, kept).findings
    assert said == "line 8 is not the one that the backup has: what stands before it was written anew"


def test_the_kept_head_of_the_folder_shows_a_cut_end_and_the_gap_stays(month: Path) -> None:
    data_dir = month.parent.parent
    AuditBook(LocalDisk(), data_dir).keep_head()
    month.write_bytes(b"".join(month.read_bytes().splitlines(keepends=True)[:5]))
    [said] = checked(data_dir).findings
    assert said == f"lines 6 to 7 are missing at the end: {AuditLayout(data_dir).head} has line 7"
    AuditBook(LocalDisk(), data_dir).append([line_of(8)])
    found = checked(data_dir)
    assert found.findings == ("2026-11.jsonl:6: lines 6 to 7 are missing before it",)
    assert found.head.n == 8


def test_old_months_are_removed_as_the_settings_say_and_that_is_no_gap(tmp_path: Path) -> None:
    for at in (NOVEMBER, DECEMBER, JANUARY):
        AuditBook(LocalDisk(), tmp_path, keep_months=2).append([line_of(1, at)])
    assert AuditLayout(tmp_path).names(LocalDisk()) == ["2026-12.jsonl", "2027-01.jsonl"]
    found = checked(tmp_path)
    assert found.findings == ()
    assert found.notices == ("lines 1 to 2 are not kept any more (audit.keep_months)",)
    assert [one.upto for _, one in found.acts if one.act == "removed"] == [2]


def test_a_line_that_was_not_finished_is_taken_out_and_a_line_says_so(month: Path) -> None:
    data_dir = month.parent.parent
    with month.open("ab") as file:
        file.write(b'{"n":8,"at":17')
    found = checked(data_dir)
    assert (found.findings, found.notices) == (
        (),
        ("the last 14 bytes of 2026-11.jsonl are of a line that was not finished",),
    )
    AuditBook(LocalDisk(), data_dir).append([line_of(9)])
    found = checked(data_dir)
    assert (found.findings, found.notices) == ((), ())
    assert [(n, one.act, one.count) for n, one in found.acts[-2:]] == [(8, "recovered", 14), (9, "search", 9)]


@pytest.mark.parametrize("loss", LOSSES)
def test_whatever_a_power_cut_leaves_what_was_appended_is_there_and_the_chain_is_whole(loss: Loss) -> None:
    for cut_after in range(40):
        files = CrashFiles()
        files.make_directory(Path("/data"))
        files.sync_directory(Path("/"))
        files.cut_after = files.operations + cut_after
        acknowledged = 0
        try:
            book = AuditBook(files, Path("/data"))
            for number, at in enumerate((NOVEMBER, NOVEMBER, DECEMBER, DECEMBER), 1):
                book.append([line_of(number, at), line_of(number, at)])
                acknowledged = number
                book.keep_head()
        except PowerCutError:
            pass
        again = files.after_power_cut(loss)
        AuditBook(again, Path("/data")).append([line_of(9, DECEMBER)])
        found = read_book(again, Path("/data"), lambda one: one.act == "search")
        assert found is not None and found.findings == (), f"after {cut_after}: {found}"
        kept = {one.count for _, one in found.acts}
        assert kept >= {*range(1, acknowledged + 1), 9}, f"after {cut_after}"


def test_several_processes_append_to_one_chain(tmp_path: Path) -> None:
    books = [AuditBook(LocalDisk(), tmp_path) for _ in range(3)]  # each knows nothing of what the others do

    def work(book: AuditBook) -> None:
        for number in range(10):
            book.append([line_of(number)])

    threads = [threading.Thread(target=work, args=(book,)) for book in books]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = checked(tmp_path)
    assert found.findings == () and found.head.n == 31
