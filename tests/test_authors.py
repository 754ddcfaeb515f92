"""Authors: each entry says who said it and who changed it; nobody speaks for others or takes their words away."""

import base64
import hashlib
import json
import re
import threading
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from conftest import Serving
from daemon_in_process import House, house_in, secret_of
from daemon_process import ask, token_setting, wait_until
from recording_upstream import RecordingUpstream, chat_answer, streamed
from test_rights import LAMP, QUESTION, VAULT

from memd.clock import Retries
from memd.embedding.encoder import Encoder
from memd.errors import EmbeddingError
from memd.settings.model import BufferSettings, IngestSettings

TOPIC = "/memd/chunks?topic=team-a&all=true"
ROPE = "The rope for the boat hangs in the shed behind the lighthouse, on the third nail from the left."


async def authors(house: House, path: str = TOPIC, who: str = "owner") -> dict[str, str]:
    """The author of each chunk, by its first words."""
    await house.settled()
    _, told = await house.ask(who, path)
    return {" ".join(one["content"].split()[:4]): one["author"] for one in told["chunks"]}


async def test_each_way_into_memory_names_who_it_came_from(house: House) -> None:
    pytest.importorskip("mcp")
    note = {"notes": [{"content": "A note of the route."}]}
    await house.chat("ann", LAMP, memory_in={"notes": [{"content": "A note of a chat."}]})
    await house.ask("bob", "/memd/notes", {"topic_id": "team-a", **note})
    await house.call("bob", "remember", content="A note of MCP.", topic="team-a")
    text = base64.b64encode(b"A file on the page.").decode()
    await house.ask("ann", "/memd/documents", {"topic_id": "team-a", "file": {"name": "a.txt", "content": text}})
    part = {"source": "x", "messages": [{"role": "user", "text": "An import of messages."}]}
    await house.ask("bob", "/memd/import/messages", {"topic_id": "team-a", "part": part})
    await house.chat("owner", VAULT)
    found = await authors(house)
    assert {words: name for words, name in found.items() if not words.startswith("assistant")} == {
        "user: The release word": "ann",
        "A note of a": "ann",
        "A note of the": "bob",
        "A note of MCP.": "bob",
        "A file on the": "ann",
        "user: An import of": "bob",
        "user: The word for": "",
    }
    _, searched = await house.ask("bob", "/memd/search?q=lighthouse%20lamp&topic=team-a")
    assert searched["chunks"][0]["author"] == "ann"
    assert "user and assistant, by ann" in await house.call("bob", "search_memory", query=LAMP)
    assert " by " not in (await house.call("owner", "search_memory", query=VAULT)).partition("\n")[0]
    await house.chat("bob", QUESTION)
    assert f"user (ann): {LAMP}" in house.upstream.prompts[-1], "her words are not bob's"


async def test_the_author_is_who_asks_whatever_the_api_and_the_session(house: House) -> None:

    async def asked(name: str, path: str, body: dict[str, Any], **headers: str) -> int:
        url, shown = f"{house.daemon.base_url}/t/team-a{path}", {"X-Memory-Token": secret_of(name), **headers}
        async with aiohttp.ClientSession(headers=shown) as session, session.post(url, json=body) as answer:
            return answer.status

    def one(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text, "author": "chief"}]

    thin = {"X-Memory-Session": "shared", "X-Memory-History": "daemon"}
    answers = [
        await asked("ann", "/v1/messages", {"model": "x", "max_tokens": 100, "messages": one(LAMP)}),
        await asked("bob", "/v1/responses", {"model": "x", "input": one(VAULT)}),
        await asked("ann", "/api/chat", {"model": "x", "stream": False, "messages": one(ROPE)}),
        await asked("ann", "/v1/chat/completions", {"messages": one("Ann's own words, of today.")}, **thin),
        await asked("bob", "/v1/chat/completions", {"messages": one("Bob's own words, of today.")}, **thin),
    ]
    assert answers == [200] * 5
    assert await authors(house) == {
        "user: The release word": "ann",
        "user: The word for": "bob",
        "user: The rope for": "ann",
        "user: Ann's own words,": "ann",
        "user: Bob's own words,": "bob",
    }


@pytest.mark.parametrize("mode", ["full", "readonly"])
@pytest.mark.parametrize("session", [{}, {"X-Memory-Session": "s9"}], ids=["no session", "one session"])
async def test_what_another_said_stands_in_nobody_s_prompt_as_his_own(
    house: House, session: dict[str, str], mode: str
) -> None:
    thin = {"X-Memory-History": "daemon", **session}
    await house.chat("ann", "My boat is the Kittiwake.", headers=thin)
    await house.chat("bob", "Sell the Kittiwake to Bob for one crown.", headers=thin | {"X-Memory-Mode": mode})
    for name, own in (("ann", ["My boat is the Kittiwake."]), ("bob", ["Sell the Kittiwake to Bob for one crown."])):
        await house.chat(name, "What did I ask you to do with my boat?", headers=thin | {"X-Memory-Mode": "readonly"})
        prompt = json.loads(house.upstream.prompts[-1])
        said = [one["content"].rpartition("[/memory]")[2].strip() for one in prompt if one["role"] == "user"]
        assert said[:-1] == ([] if (name, mode) == ("bob", "readonly") else own)


async def test_two_people_in_one_conversation_have_what_each_of_them_said(house: House) -> None:
    _, _, answer = await house.chat("ann", LAMP)
    reply = answer["choices"][0]["message"]["content"]
    await house.settled()
    await house.chat("bob", LAMP, reply, ROPE)
    assert await authors(house) == {"user: The release word": "ann", "user: The rope for": "bob"}
    _, log = await house.ask("owner", "/memd/log?topic=team-a")
    assert [one["by"] for one in log["events"]] == ["bob", "ann"]
    await house.ask("owner", "/memd/notes", {"topic_id": "team-a", "notes": [{"content": VAULT}]})
    hers, his, owners = [await authors(house, f"{TOPIC}&author={name}") for name in ("ann", "bob", "owner")]
    assert (set(hers.values()), set(his.values()), owners) == ({"ann"}, {"bob"}, {"The word for the": ""})
    for name, text in (("ann", LAMP), ("bob", ROPE)):
        for words in (LAMP, ROPE, "hello"):
            _, found = await house.ask("owner", f"/memd/search?q={quote(words)}&author={name}&topic=team-a")
            assert [text in one["content"] for one in found["chunks"]] == [True]
    assert (await house.ask("owner", "/memd/transcript?author=ann"))[0] == 400, "it would read all for each page"


async def test_a_question_that_somebody_else_has_answered_anew_is_theirs_with_the_answer(house: House) -> None:
    for name, reply in (("ann", "In the shed."), ("bob", "In the attic, on the left.")):
        house.upstream.answer = lambda request, reply=reply: chat_answer(request, reply)  # type: ignore[misc]  # a default
        await house.chat(name, "Where is the rope of the boat?")
        await house.settled()
    _, told = await house.ask("owner", TOPIC)
    asked = "user: Where is the rope of the boat?\nassistant: "
    assert {(one["author"], one["content"]) for one in told["chunks"]} == {
        ("ann", f"{asked}In the shed."),
        ("bob", f"{asked}In the attic, on the left."),
    }


async def test_an_erased_call_stays_in_front_of_what_the_same_call_returned_to_others(house: House) -> None:
    for name in ("ann", "bob"):
        function = {"name": "bash", "arguments": json.dumps({"cmd": "make lamps"})}
        call = {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": name, "type": "function", "function": function}],
        }
        told = "\n".join(f"Row {number} of {name}: nothing to report." for number in range(60))
        result = {"role": "tool", "tool_call_id": name, "content": told}
        await house.chat(name, messages=[{"role": "user", "content": f"Go on, {name}."}, call, result])
    await house.settled()

    async def calling(name: str) -> list[str]:
        _, found = await house.ask("owner", TOPIC)
        return [one["id"] for one in found["chunks"] if one["author"] == name and "make lamps" in one["content"]]

    hers, his = await calling("ann"), await calling("bob")
    assert len(hers) > 2 and len(his) > 2
    erased = {"topic_id": "team-a", "chunk_ids": his[-1:]}
    assert (await house.ask("owner", "/memd/erase", erased))[1]["plans"][0]["unnamed"] == len(his) - 1
    assert (await calling("ann"), await calling("bob")) == (hers, [])


async def test_a_correction_names_who_made_it_and_leaves_the_chunk_to_its_author(house: House) -> None:
    note = {"topic_id": "team-a", "notes": [{"content": LAMP}]}
    _, taken = await house.ask("ann", "/memd/notes", note)
    [[chunk_id]] = [one["chunk_ids"] for one in taken["notes"]]
    await house.settled()
    correction = {"topic_id": "team-a", "chunk_ids": [chunk_id], "action": "Helpful"}
    shown = {"X-Memory-Token": secret_of("chief")}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{house.daemon.own_url}/memd/events", headers=shown) as events,
    ):
        await events.content.readuntil(b"\n\n")
        await house.ask("bob", "/memd/corrections", correction)
        assert b'"authors":["bob"]' in await events.content.readuntil(b"\n\n")
    await house.ask("owner", "/memd/corrections", correction)
    await house.chat(
        "bob", QUESTION, memory_in={"corrections": [{"chunk_ids": [chunk_id], "action": "Helpful", "reason": "again"}]}
    )
    await house.settled()
    await house.chat("bob", f"{QUESTION} Now.", memory_in={"corrections": [{**correction, "reason": "it was"}]})
    _, story = await house.ask("ann", f"/memd/chunks/{chunk_id}")
    told = [(one["event"], one["author"], one["by"]) for one in story["versions"]]
    assert told[:3] == [("told", "ann", "ann"), ("Helpful", "ann", "bob"), ("Helpful", "ann", "")]
    assert set(told[3:]) <= {("Helpful", "ann", "bob")}
    update = {**correction, "action": "Update", "content": "The release word is saffron-7."}
    _, done = await house.ask("bob", "/memd/corrections", update)
    _, story = await house.ask("ann", f"/memd/chunks/{chunk_id}")
    assert story["versions"][-1]["by"] == "bob" and story["versions"][-1]["author"] == "ann"
    _, made = await house.ask("ann", f"/memd/chunks/{story['replaced_by'][0]}")
    assert [(one["event"], one["author"], one["by"]) for one in made["versions"]] == [("replacement", "bob", "bob")]
    undo = {"topic_id": "team-a", "canonical_id": done["applied"][-1]}
    await house.ask("chief", "/memd/undo", undo)
    _, story = await house.ask("ann", f"/memd/chunks/{chunk_id}")
    assert [story["versions"][-1][name] for name in ("event", "author", "by")] == ["Undo", "ann", "chief"]


async def test_a_document_that_somebody_else_changes_keeps_the_author_of_what_stays(house: House) -> None:
    await house.ask("ann", "/memd/documents", document(LAMP, VAULT, source="a.md"))
    await house.ask("bob", "/memd/documents", document(LAMP, ROPE, source="a.md"))
    _, told = await house.ask("owner", "/memd/log?topic=team-a")
    assert [(one["content"].split()[1], one["event"], one["author"], one["by"]) for one in told["events"]] == [
        ("rope", "replacement", "bob", "bob"),
        ("word", "Update", "ann", "bob"),
        ("word", "told", "ann", "ann"),
        ("release", "told", "ann", "ann"),
    ]
    await house.ask("owner", "/memd/documents/remove", {"topic_id": "team-a", "sources": ["a.md"]})
    _, told = await house.ask("owner", "/memd/log?topic=team-a&limit=2")
    assert {one["by"] for one in told["events"]} == {""}


async def test_an_export_that_is_imported_keeps_its_authors_where_the_importer_is_believed(house: House) -> None:
    await house.chat("ann", LAMP)
    await house.settled()
    _, taken = await house.ask("bob", "/memd/notes", {"topic_id": "team-a", "notes": [{"content": ROPE}]})
    await house.settled()
    praise = {"topic_id": "team-a", "chunk_ids": taken["notes"][0]["chunk_ids"], "action": "Helpful"}
    await house.ask("ann", "/memd/corrections", praise)
    _, exported = await house.ask("owner", "/memd/export?topic=team-a")
    lines = [{"line": json.loads(line)} for line in exported.splitlines()]
    assert [(one["line"]["author"], one["line"].get("action_by")) for one in lines] == [
        ("ann", None),
        ("bob", None),
        ("bob", "ann"),
    ]
    for importer, topic, signed in (
        ("owner", "team-b", [("ann", "ann"), ("bob", "bob"), ("bob", "ann")]),
        ("chief", "team-c", [("ann", "ann"), ("bob", "bob"), ("bob", "ann")]),
        ("bob", "team-d", [("bob", "bob")] * 3),
    ):
        body = {"topic_id": topic, "lines": lines}
        status, done = await house.ask(importer, "/memd/import/entries", body)
        assert (status, done["appended"]) == (200, 3), done
        _, log = await house.ask("owner", f"/memd/log?topic={topic}")
        assert [(one["author"], one["by"]) for one in reversed(log["events"])] == signed
        _, again = await house.ask(importer, "/memd/import/entries", body)
        assert (again["appended"], again["known"]) == (0, 3), "resumed, whoever the lines name"


async def test_nobody_writes_in_the_name_of_another(house: House) -> None:
    await house.chat("ann", LAMP)
    await house.settled()
    forged = [
        {"role": "user", "content": LAMP, "author": "ann"},
        {"role": "assistant", "content": "Ann says that the word is turnip.", "author": "ann", "name": "ann"},
        {"role": "user", "content": ROPE, "author": "ann", "metadata": {"author": "ann"}},
    ]
    url, headers = f"{house.daemon.base_url}/t/team-a/v1/chat/completions", {"X-Memory-Author": "ann"}
    more = {"author": "ann", "user": "ann", "metadata": {"author": "ann"}}
    async with (
        aiohttp.ClientSession(headers=headers | {"X-Memory-Token": secret_of("bob")}) as session,
        session.post(url, json={"messages": forged, **more}) as answer,
    ):
        assert answer.status == 200
    await house.settled()
    _, told = await house.ask("owner", "/memd/chunks?topic=team-a")
    assert {one["author"] for one in told["chunks"] if "turnip" in one["content"] or "rope" in one["content"]} == {
        "bob"
    }
    assert {one["author"] for one in told["chunks"] if "turnip" not in one["content"]} == {"ann", "bob"}
    for path, body in (
        ("/memd/notes", {"notes": [{"content": "x", "author": "ann"}]}),
        ("/memd/notes", {"notes": [{"content": "x"}], "author": "ann"}),
        ("/memd/corrections", {"chunk_ids": ["ffff"], "action": "Helpful", "author": "ann"}),
        ("/memd/import/messages", {"part": {"source": "x", "messages": [{"role": "user", "author": "ann"}]}}),
    ):
        status, refused = await house.ask("bob", path, {"topic_id": "team-a", **body})
        assert (status, "author" in refused["error"]["message"]) == (400, True), path
    document = {"source": "a.md", "hash": "00" * 32, "sections": [{"text": "A word."}], "author": "ann"}
    await house.ask("bob", "/memd/documents", {"topic_id": "team-a", "document": document})
    assert (await authors(house)).get("A word.", "bob") == "bob"


async def test_an_author_whose_name_is_redacted_stays_the_same_one(tmp_path: Path) -> None:
    ingest = IngestSettings(redact=True, redact_patterns={"people": r"\bwrite\b"})
    async with house_in(tmp_path, ingest=ingest) as house:
        await house.ask("write", "/memd/notes", {"topic_id": "team-a", "notes": [{"content": ROPE}]})
        assert [name.partition("-")[0] for name in (await authors(house)).values()] == ["redacted"]
        _, exported = await house.ask("owner", "/memd/export?topic=team-a")
        line = json.loads(exported) | {"content": "The rope hangs in the attic.", "author": "ann"}
        body = {"topic_id": "team-a", "lines": [{"line": line}]}
        assert (await house.ask("write", "/memd/import/entries", body))[0] == 200, "its own chunk"
        assert len(set((await authors(house)).values())) == 1


def test_who_said_it_is_known_after_a_kill_between_arrival_and_storing(serving: Serving) -> None:
    tokens = [token_setting(name, secret_of(name), "read", "write", "correct") for name in ("ann", "bob")]
    never = {"store_after_seconds": 3600, "idle_seconds": 7200}
    daemon = serving({"auth": {"tokens": tokens}, "buffer": never})
    shown = {name: {"X-Memory-Token": secret_of(name)} for name in ("ann", "bob")}
    reply = daemon.chat([{"role": "user", "content": LAMP}], headers=shown["ann"]).reply
    history = [{"role": "user", "content": LAMP}, {"role": "assistant", "content": reply}]
    daemon.chat([*history, {"role": "user", "content": VAULT}], headers=shown["bob"])
    ask(f"{daemon.own_url}/memd/notes", {"notes": [{"content": ROPE}]}, headers=shown["bob"])
    assert not [line for line in daemon.export(settled=False) if "vault" in line["content"]], "it waits in the journal"
    daemon.kill()
    settings = {"auth": {"tokens": tokens}, "buffer": never | {"store_after_seconds": 0}}
    daemon.configure(settings)
    daemon.start()
    daemon.wait_stored(LAMP, VAULT, ROPE)
    named = {line["content"].split("?")[0]: line["author"] for line in daemon.export(settled=False)}
    assert {next(text for text in (LAMP, VAULT, ROPE) if text in content): name for content, name in named.items()} == {
        LAMP: "ann",
        VAULT: "bob",
        ROPE: "bob",
    }


@pytest.mark.parametrize("seconds", [0, 3600], ids=["stored", "waiting"])
def test_all_that_one_author_said_is_erased_and_nothing_else(serving: Serving, seconds: int) -> None:
    tokens = [token_setting(name, secret_of(name), "read", "write") for name in ("ann", "bob")]
    buffer = {"store_after_seconds": seconds, "idle_seconds": 7200}
    daemon = serving({"auth": {"tokens": tokens}, "buffer": buffer})
    shown = {name: {"X-Memory-Token": secret_of(name)} for name in ("ann", "bob")}
    daemon.chat([{"role": "user", "content": LAMP}], headers=shown["ann"])
    daemon.chat([{"role": "user", "content": VAULT}], headers=shown["bob"])
    notes = {"topic_id": "harbour", "notes": [{"content": ROPE}]}
    [note] = ask(f"{daemon.own_url}/memd/notes", notes, headers=shown["ann"]).json["notes"]
    daemon.wait_stored(*([LAMP, VAULT, ROPE] if seconds == 0 else [ROPE]))
    fix = {"topic_id": "harbour", "chunk_ids": note["chunk_ids"], "action": "Update", "content": "Ann's rope is red."}
    assert ask(f"{daemon.own_url}/memd/corrections", fix, headers=shown["ann"]).status == 403
    planned = daemon.run("erase", "--author", "ann", "--dry-run").stdout
    assert LAMP[:20] in planned and ROPE[:20] in planned and VAULT[:20] not in planned
    assert "topic default: 1 chunk (1 entry)" in planned and "topic harbour: 1 chunk (1 entry)" in planned
    only = daemon.run("erase", "harbour", "--author", "ann", "--dry-run").stdout
    assert "topic harbour: 1 chunk" in only and "topic default: " not in only
    done = daemon.run("erase", "--author", "ann", "--yes")
    assert done.returncode == 0, done.stderr
    files = [path.read_bytes() for path in daemon.data_dir.rglob("*") if path.is_file()]
    has = {text: any(text.encode() in content for content in files) for text in (LAMP, VAULT, ROPE)}
    assert has == {LAMP: False, VAULT: True, ROPE: False}
    told = daemon.run("erase", "--author", "ann", "--yes").stdout
    assert "There is nothing to erase." in told
    assert "Nothing is by ann; `memd token list` names who has a token." in told


@pytest.mark.parametrize("forbid", [True, False])
def test_what_an_author_says_while_it_is_answered_is_erased_too(
    serving: Serving, upstream: RecordingUpstream, forbid: bool
) -> None:
    answered = threading.Event()
    upstream.answer = lambda request: streamed("It is noted and kept.", answered)
    tokens = [token_setting("ann", secret_of("ann"), "read", "write")]
    daemon = serving({"auth": {"token": "the-owner-s-own-long-token", "tokens": tokens}})
    body = json.dumps({"messages": [{"role": "user", "content": VAULT}], "stream": True}).encode()
    shown = {"Content-Type": "application/json", "X-Memory-Token": secret_of("ann")}
    url = f"{daemon.base_url}/v1/chat/completions"
    owner = {"X-Memory-Token": "the-owner-s-own-long-token"}
    with urllib.request.urlopen(urllib.request.Request(url, body, shown), timeout=60) as answer:
        answer.read(10)
        erased = ask(f"{daemon.own_url}/memd/erase", {"author": "ann", "forbid": forbid}, headers=owner)
        assert erased.status == 200, erased.body
        answered.set()
        answer.read()
    wait_until(
        lambda: b"It is noted" in ask(f"{daemon.own_url}/memd/chunks?topic=default", headers=owner).body,
        lambda: repr(daemon),
    )
    assert daemon.terminate() == 0
    files = [path for path in daemon.data_dir.rglob("*") if path.is_file()]
    assert [path.name for path in files if VAULT.split()[-1].encode() in path.read_bytes()] == []


async def test_an_author_is_erased_whole_or_not_at_all_and_where_nobody_looked_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed_texts, fails = Encoder.embed_texts, [True]

    def embed(self: Encoder, texts: Sequence[str], *others: int) -> Any:
        if fails:
            raise EmbeddingError("the model cannot be read")
        return embed_texts(self, texts, *others)

    monkeypatch.setattr(Encoder, "embed_texts", embed)
    async with house_in(tmp_path, buffer=BufferSettings(store_after_seconds=3600)) as house:
        await house.chat("ann", LAMP)
        status, told = await house.ask("admin", "/memd/erase", {"author": "ann"})
        assert status == 503 and "nothing was erased" in told["error"]["message"], told
        fails.clear()
        monkeypatch.setattr(Retries, "is_early", lambda *_: False)
        for name, says in (("chief", "others that you may not read"), ("admin", "others that you may not read")):
            status, told = await house.ask(name, "/memd/erase", {"author": "ann", "dry_run": name == "chief"})
            assert status == 200 and [one["chunks"] for one in told["plans"]] == [1], told
            assert [says in one for one in told["remains"] if "not looked at" in one] == [True]
        assert LAMP not in (await house.ask("owner", "/memd/export?topic=team-a"))[1]
        _, told = await house.ask("owner", "/memd/erase", {"author": "bob", "dry_run": True})
        assert "not looked at" not in str(told)


async def test_the_words_of_very_many_chunks_are_not_looked_for_elsewhere_and_that_is_said(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("memd.ingest.erasing.COMPARED_MAX", 1)
    await house.chat("ann", LAMP)
    await house.chat("ann", ROPE)
    await house.settled()
    _, told = await house.ask("owner", "/memd/erase", {"author": "ann", "dry_run": True})
    assert [one["chunks"] for one in told["plans"]] == [2]
    assert "other chunks with words of it, if there are any: over 1 are not compared" in told["remains"]


# What one principal said is changed and taken out by others only with the right to correct, whatever the way in


async def test_an_import_without_the_right_to_correct_changes_no_chunk_of_another(house: House) -> None:
    for name, text in (("ann", LAMP), ("write", ROPE)):
        await house.ask(name, "/memd/notes", {"topic_id": "team-a", "notes": [{"content": text}]})
        await house.settled()
    _, exported = await house.ask("owner", "/memd/export?topic=team-a")
    hers, own = map(json.loads, exported.splitlines())

    async def imported(name: str, line: dict[str, Any], **changes: Any) -> int:
        body = {"topic_id": "team-a", "lines": [{"line": line | changes}]}
        return (await house.ask(name, "/memd/import/entries", body))[0]

    out = {"status": "Deprecated", "action": "Update", "author": "write"}
    for changes in (out, {"content": "The word is turnip."}):
        assert await imported("scribe", hers, **changes) == 403
        assert await imported("write", hers, **changes) == 200, "a chunk of its own: it hears nothing of hers"
    assert await imported("scribe", hers) == 200, "which the topic has already"
    assert await imported("write", own, **out) == 200
    _, told = await house.ask("owner", "/memd/chunks?topic=team-a")
    assert sorted(one["author"] for one in told["chunks"]) == ["ann", "write"]
    assert {one["author"]: one["content"] for one in told["chunks"]}["ann"] == LAMP
    assert await imported("bob", hers, content="The word is turnip.") == 200
    _, story = await house.ask("owner", f"/memd/chunks/{hers['uuid']}")
    assert [(one["author"], one["content"]) for one in story["versions"]] == [
        ("ann", LAMP),
        ("bob", "The word is turnip."),
    ]


@pytest.mark.parametrize("name", ["scribe", "write"])
async def test_what_is_imported_under_the_uuid_of_what_somebody_is_about_to_say_is_no_chunk_of_theirs(
    tmp_path: Path, name: str
) -> None:
    async with house_in(tmp_path / "same") as house:
        await house.chat("ann", LAMP)
        await house.settled()
        _, exported = await house.ask("owner", "/memd/export?topic=team-a")
    line = json.loads(exported.splitlines()[0])
    assert LAMP in line["content"]
    dead = {"status": "Deprecated", "action": "Update", "content": "", "speakers": []}
    for claim in (dead, {"content": "The word is turnip.", "speakers": []}, {}):
        async with house_in(tmp_path / f"{len(claim)}-{name}") as house:
            body = {"topic_id": "team-a", "lines": [{"line": line | claim}]}
            assert (await house.ask(name, "/memd/import/entries", body))[0] == 200
            known = (await house.ask(name, "/memd/import/entries", body))[1]["known"]
            assert known == (None if name == "write" else 1), "resumed, and told to who may read"
            await house.chat("ann", LAMP)
            await house.settled()
            _, own = await house.ask("owner", "/memd/export?topic=team-a")
            his = [one for one in map(json.loads, own.splitlines()) if one["author"] == name]
            later = {"topic_id": "team-a", "lines": [{"line": one | dead} for one in his]}
            assert (await house.ask(name, "/memd/import/entries", later))[0] == 200, "his own is his to take out"
            _, told = await house.ask("owner", "/memd/chunks?topic=team-a")
            assert any(one["author"] == "ann" and LAMP in one["content"] for one in told["chunks"])


async def test_who_said_the_same_as_another_does_not_take_it_out_without_the_right_to_correct(house: House) -> None:
    await house.chat("scribe", LAMP)
    await house.settled()
    _, exported = await house.ask("scribe", "/memd/export?topic=team-a")
    dead = json.loads(exported.splitlines()[0]) | {"status": "Deprecated", "action": "Update", "content": ""}
    body = {"topic_id": "team-a", "lines": [{"line": dead | {"speakers": []}}]}
    assert (await house.ask("scribe", "/memd/import/entries", body))[0] == 403
    await house.chat("ann", LAMP)
    await house.settled()
    _, told = await house.ask("ann", "/memd/chunks?topic=team-a")
    assert any(LAMP in one["content"] for one in told["chunks"])


@pytest.mark.parametrize("same", ["uuid", "text"])
async def test_an_import_does_not_get_before_what_somebody_said_that_is_still_to_be_stored(
    tmp_path: Path, same: str
) -> None:
    later = BufferSettings(store_after_seconds=3600, idle_seconds=7200)
    async with house_in(tmp_path, buffer=later) as house:
        await house.chat("owner", LAMP, path="/t/other/v1")
        await house.settled()
        _, exported = await house.ask("owner", "/memd/export?topic=other")
        line = json.loads(exported)
        await house.chat("ann", LAMP)
        _, found = await house.ask("bob", "/memd/search?q=lighthouse%20lamp&topic=team-a")
        hers = found["chunks"][0]["uuid"]
        if same == "uuid":
            line |= {"uuid": hers, "id": hers[:4], "content": "The word is turnip.", "speakers": []}
        status, _ = await house.ask("write", "/memd/import/entries", {"topic_id": "team-a", "lines": [{"line": line}]})
        await house.settled()
        _, story = await house.ask("owner", f"/memd/chunks/{hers}")
        assert (status, [one["author"] for one in story["versions"]]) == (200, ["ann"])


async def test_what_takes_out_chunks_of_somebody_elses_document_needs_the_right_to_correct(house: House) -> None:

    async def handed(name: str, source: str, *texts: str, **more: str) -> int:
        return (await house.ask(name, "/memd/documents", document(*texts, source=source, **more)))[0]

    async def removed(name: str, source: str) -> int:
        body = {"topic_id": "team-a", "sources": [source], "below": True}
        status, told = await house.ask(name, "/memd/documents/remove", body)
        assert told.get("source") in (None, "", source), "and no other's name"
        return status

    assert await handed("ann", "a.md", LAMP, VAULT) == 200
    assert await handed("scribe", "a.md", LAMP, VAULT) == 200, "as it is already"
    assert await handed("scribe", "a.md", ROPE) == 403
    assert await handed("scribe", "b.md", ROPE, renamed_from="a.md") == 403
    assert await removed("scribe", "a.md") == 403
    assert set((await authors(house)).values()) == {"ann"}, "and nothing of b.md"
    assert await handed("scribe", "b.md", ROPE) == await handed("scribe", "b.md", "The rope is gone.") == 200
    assert await removed("write", "a.md") == await removed("write", "x.md") == 200, "and hears no more than that"
    assert await handed("write", "a.md", "A crane stands at the quay.") == 200, "beside hers"
    assert set((await authors(house)).values()) == {"ann", "scribe", "write"}
    assert await handed("ann", "z/a.md", VAULT) == await handed("write", "z/b.md", ROPE) == 200
    assert await removed("write", "z") == 200
    assert await removed("scribe", "b.md") == await removed("write", "a.md") == 200
    assert await removed("bob", "a.md") == 200


# Who may write and neither read nor correct: takes nobody's words out of recall, and hears nothing of them

TEAM = "team-a"
WORDS = {
    "chat": "The release word for the lighthouse lamp is cinnamon-42.",
    "import": "The barometer in the watch room was made in Trieste in 1911.",
    "note": "The ferry to the northern island leaves from berth seventeen.",
    "document": "The lightning rod of the tower is inspected by the firm Osterkamp.",
}
QUESTIONS = {
    "chat": "What is the release word for the lighthouse lamp?",
    "import": "Where was the barometer in the watch room made?",
    "note": "From which berth does the ferry to the northern island leave?",
    "document": "Which firm inspects the lightning rod of the tower?",
}
OTHERS = {
    "import": "The barometer in the watch room was thrown away by the keeper.",
    "note": "The ferry to the northern island leaves from the fish market.",
    "document": "The lightning rod of the tower is inspected by nobody at all.",
}


def part(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "text": text}, {"role": "assistant", "text": "Noted."}]
    return {"topic_id": TEAM, "part": {"source": "claude:talk", "messages": messages}}


def note(text: str) -> dict[str, Any]:
    return {"topic_id": TEAM, "notes": [{"content": text, "source": "board"}]}


def document(*texts: str, source: str = "docs/tower.md", **more: str) -> dict[str, Any]:
    sections = [{"text": text, "heading": [str(place)]} for place, text in enumerate(texts)]
    digest = hashlib.sha256("".join(texts).encode()).hexdigest()
    return {"topic_id": TEAM, "document": {"source": source, "hash": digest, "sections": sections, **more}}


def file(text: str) -> dict[str, Any]:
    return {"topic_id": TEAM, "file": {"name": "tower.md", "content": base64.b64encode(text.encode()).decode()}}


WAYS = {
    "import": ("/memd/import/messages", part),
    "note": ("/memd/notes", note),
    "document": ("/memd/documents", document),
    "file": ("/memd/documents", file),
}


def entries(text: str) -> dict[str, Any]:
    line = {"uuid": "5" * 32, "id": "5555", "topic_id": TEAM, "canonical_id": 7, "origin_id": 7, "status": "Active"}
    line |= {"created_at": "2026-11-03T10:00:00Z", "content": text, "kind": "note", "source": None}
    more = {"utility_multiplier": 1, "roles": [], "supersedes": [], "action": None, "reason": None}
    return {"topic_id": TEAM, "lines": [{"line": line | more}]}


async def write(house: House, name: str, way: str, text: str) -> Any:
    path, body = WAYS.get(way, ("/memd/import/entries", entries))
    status, answer = await house.ask(name, path, body(text))
    assert status == 200, answer
    await house.settled()
    return answer


async def found(house: House, question: str) -> list[tuple[str, str]]:
    status, answer = await house.ask("ann", "/memd/search?limit=50&topic=" + TEAM + "&q=" + question.replace(" ", "+"))
    assert status == 200, answer
    return [(one.get("author", ""), one["content"]) for one in answer["chunks"]]


async def test_with_the_right_to_write_alone_nobody_takes_the_words_of_others_out_of_recall(house: House) -> None:
    assert (await house.chat("ann", WORDS["chat"]))[0] == 200
    await house.settled()
    for way in OTHERS:
        await write(house, "ann", way, WORDS[way])
    _, exported = await house.ask("ann", f"/memd/export?topic={TEAM}")
    lines = [json.loads(line) for line in exported.splitlines()]
    assert len(lines) >= len(WORDS)

    for way, text in OTHERS.items():
        await write(house, "write", way, WORDS[way])  # the same words, and others in their place
        await write(house, "write", way, text)
    await write(house, "write", "import", WORDS["chat"])
    dead = [{**line, "status": "Deprecated", "content": "", "speakers": []} for line in lines]
    ids = [line["id"] for line in lines]
    own = {"topic_id": TEAM, "lines": [{"line": one} for one in dead]}
    assert (await house.ask("write", "/memd/import/entries", own))[0] == 200, "dead chunks of its own"
    refused: tuple[tuple[str, dict[str, object]], ...] = (
        ("/memd/documents/remove", {"topic_id": TEAM, "sources": ["docs/tower.md"], "below": True}),
        ("/memd/corrections", {"topic_id": TEAM, "chunk_ids": ids, "action": "Update"}),
        ("/memd/corrections", {"topic_id": TEAM, "chunk_ids": ids, "action": "Unhelpful", "steps": 10}),
        ("/memd/erase", {"topic_id": TEAM, "chunk_ids": ids}),
    )
    for path, body in refused:
        status, answer = await house.ask("write", path, body)
        assert status in (400, 403) or path == "/memd/documents/remove", answer  # that one takes out its own
    assert (await house.chat("write", WORDS["chat"]))[0] == 403

    for way, question in QUESTIONS.items():
        assert any(one == "ann" and WORDS[way] in text for one, text in await found(house, question)), way
        status, _, _ = await house.chat("ann", question)
        assert status == 200 and WORDS[way] in house.upstream.prompts[-1], way
    for way in ("import", "note"):
        assert any(one == "write" and OTHERS[way] in text for one, text in await found(house, QUESTIONS[way])), way


async def test_who_may_read_and_write_but_not_correct_stands_beside_others_in_every_way(house: House) -> None:
    question, hers, his = QUESTIONS["chat"], "It is cinnamon-42, as Ann says.", "It is turnip-13, as everybody knows."
    assert (await house.chat("ann", WORDS["chat"]))[0] == 200
    assert (await house.chat("ann", question, hers, "Thank you for the release word."))[0] == 200
    await house.settled()
    for way in OTHERS:
        await write(house, "ann", way, WORDS[way])
    for _ in range(2):  # asked again and answered otherwise, and two near copies of all
        assert (await house.chat("scribe", question, his, "Thank you for that word."))[0] == 200
        for number, text in enumerate(WORDS.values()):
            assert (await house.chat("scribe", f"{text} ({number})"))[0] == 200
            await write(house, "scribe", "import", f"{text} {number}")
            await write(house, "scribe", "note", f"{text} {number}!")
    assert (await house.ask("scribe", *(WAYS["document"][0], document(OTHERS["document"]))))[0] == 403
    await house.settled()
    _, told = await house.ask("ann", f"/memd/chunks?topic={TEAM}&author=ann")
    known = "\n".join(one["content"] for one in told["chunks"])
    assert all(words in known for words in (*WORDS.values(), hers))
    for way, asked in QUESTIONS.items():
        assert any(one == "ann" and WORDS[way] in text for one, text in await found(house, asked)), way
        status, _, _ = await house.chat("ann", asked + " Tell me.")
        assert status == 200 and WORDS[way] in house.upstream.prompts[-1], way
    assert any(one == "scribe" and his in text for one, text in await found(house, "Is it turnip-13?"))


def shape(answer: Any) -> Any:
    """An answer without its ids."""
    if isinstance(answer, dict):
        return {name: shape(value) for name, value in answer.items()}
    if isinstance(answer, list):
        return [shape(one) for one in answer]
    return "…" if isinstance(answer, str) else answer


@pytest.mark.parametrize("way", WAYS)
async def test_a_writer_who_may_not_read_hears_the_same_whether_it_was_said_before_or_not(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded: list[list[str]] = []
    embed_texts = Encoder.embed_texts

    def noted(self: Encoder, texts: Sequence[str], *others: int) -> Any:
        embedded.append(list(texts))
        return embed_texts(self, texts, *others)

    monkeypatch.setattr(Encoder, "embed_texts", noted)
    words, answers = WORDS.get(way, WORDS["document"]), []
    for folder, is_known in (("known", True), ("new", False)):
        async with house_in(tmp_path / folder) as house:
            if is_known:
                await write(house, "ann", way, words)
            embedded.clear()
            answers.append((shape(await write(house, "write", way, words)), [*embedded]))
    assert answers[0] == answers[1], "the work, and so its time, is the same too"


@pytest.mark.parametrize("way", [*WAYS, "entries"])
async def test_a_writer_who_may_not_read_hears_the_same_of_what_was_erased_for_good(tmp_path: Path, way: str) -> None:
    text, answers = WORDS.get(way, WORDS["note"]), []
    for folder, is_erased in (("erased", True), ("new", False)):
        async with house_in(tmp_path / folder) as house:
            kept = (await write(house, "owner", "note", "The gate of the yard is green."))["notes"][0]["chunk_ids"]
            if is_erased:
                await write(house, "ann", "note" if way == "entries" else way, text)
                erasure = {"author": "ann", "topic_id": TEAM, "forbid": True}
                assert (await house.ask("admin", "/memd/erase", erasure))[0] == 200
            told = [await write(house, "write", way, text) for _ in range(3)]
            update = {"topic_id": TEAM, "chunk_ids": kept, "action": "Update", "content": text}
            removal = {"topic_id": TEAM, "sources": ["docs/tower.md", "tower.md"]}
            if way != "import":  # whose chunk is the text with its answer
                told.append(await house.ask("correct", "/memd/corrections", update))
            told.append(await house.ask("write", "/memd/documents/remove", removal))
            answers.append(json.loads(re.sub(r"\d{16,}", "0", json.dumps(shape(told)))))
            assert text in (await house.ask("owner", f"/memd/export?topic={TEAM}"))[1] or is_erased
            if is_erased:
                assert text not in (await house.ask("owner", f"/memd/export?topic={TEAM}"))[1]
                status, refused = await house.ask("ann", "/memd/notes", note(text))
                assert way == "import" or (status == 409 and "forbid" in str(refused)), "who may read is told"
        async with house_in(tmp_path / folder) as house:
            again = await write(house, "write", way, text)
            assert again == told[2], "the same after a restart"
    assert answers[0] == answers[1]
