"""Rights and tokens: every route by every right and topic, what a token sees and changes, and `memd token`."""

import getpass
import hashlib
import json
import os
import re
import subprocess
import threading
import unittest.mock
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import daemon_process
import msgspec
import pytest
import yaml
from aiohttp.test_utils import make_mocked_request
from conftest import MakeDaemon, Serving
from daemon_in_process import TOKENS, House, house_in, secret_of
from daemon_process import DaemonProcess, ask, run_memd, token_setting, wait_until
from hypothesis import given
from hypothesis import strategies as st
from raw_wire import Peer, RawUpstream, request
from recording_upstream import RecordingUpstream
from test_websockets import AGREED, UPGRADE

from memd.access import ATTEMPT_SECONDS, ATTEMPTS_MAX, WrongTokens
from memd.admin import reads, status
from memd.admin.routes import ROUTES
from memd.admin.routing import Route
from memd.errors import StoreError
from memd.principals import OWNER, RIGHTS, Principal, Principals, digest_of, overlapping
from memd.settings import model as settings
from memd.settings.model import known_principals
from memd.store.disk import LocalDisk
from memd.store.shared.books import FileBook, TokenList

LAMP, VAULT = "The release word for the lighthouse lamp is cinnamon-42.", "The word for the vault door is hibiscus-77."
QUESTION = "What is the release word for the lighthouse lamp, and what the word for the vault door?"


async def told(house: House, topic: str, text: str) -> str:
    """Note a text as the owner; returns the id of its chunk."""
    status, answer = await house.ask("owner", "/memd/notes", {"topic_id": topic, "notes": [{"content": text}]})
    assert status == 200, answer
    chunk_id: str = answer["notes"][0]["chunk_ids"][0]
    return chunk_id


Asked = tuple[str, object]
PART = {"source": "x", "messages": [{"role": "user", "text": "hello there"}]}


def asked_of(path: str, body: object = None) -> Callable[[str], Asked]:
    """How a route is asked for a topic; `TOPIC` in the path or as a member's value stands for it."""

    def asked(topic: str) -> Asked:
        filled = body
        if isinstance(body, dict):
            filled = {name: topic if value == "TOPIC" else value for name, value in body.items()}
        return path.replace("TOPIC", topic), filled

    return asked


HOW: dict[tuple[str, str], Callable[[str], Asked]] = {
    ("GET", "/memd/buffer"): asked_of("/memd/buffer?topic=TOPIC"),
    ("GET", "/memd/search"): asked_of(f"/memd/search?q={quote(QUESTION)}&topic=TOPIC"),
    ("GET", "/memd/chunks/{id}"): asked_of("/memd/chunks/ffff?topic=TOPIC"),
    ("GET", "/memd/chunks/{id}/related"): asked_of("/memd/chunks/ffff/related?topic=TOPIC"),
    ("GET", "/memd/turns/{id}"): asked_of("/memd/turns/none"),
    ("GET", "/memd/turns/{id}/replay"): asked_of("/memd/turns/none/replay"),
    ("GET", "/memd/conversations/{id}"): asked_of("/memd/conversations/none?topic=TOPIC"),
    ("POST", "/memd/notes"): asked_of("/memd/notes", {"topic_id": "TOPIC", "notes": [{"content": "A note."}]}),
    ("GET", "/memd/documents/chunks"): asked_of("/memd/documents/chunks?topic=TOPIC&source=x"),
    ("POST", "/memd/documents"): asked_of(
        "/memd/documents",
        {"topic_id": "TOPIC", "document": {"source": "a.md", "hash": "00" * 32, "sections": [{"text": "A word."}]}},
    ),
    ("POST", "/memd/documents/remove"): asked_of("/memd/documents/remove", {"topic_id": "TOPIC", "sources": ["b.md"]}),
    ("POST", "/memd/index"): asked_of("/memd/index", {}),
    ("POST", "/memd/import/messages"): asked_of("/memd/import/messages", {"topic_id": "TOPIC", "part": PART}),
    ("POST", "/memd/import/entries"): asked_of("/memd/import/entries", {"topic_id": "TOPIC", "lines": []}),
    ("POST", "/memd/corrections"): asked_of(
        "/memd/corrections", {"topic_id": "TOPIC", "chunk_ids": ["ffff"], "action": "Helpful"}
    ),
    ("POST", "/memd/undo"): asked_of("/memd/undo", {"topic_id": "TOPIC", "canonical_id": 1}),
    ("POST", "/memd/erase"): asked_of("/memd/erase", {"topic_id": "TOPIC", "dry_run": True}),
    ("POST", "/memd/grants/end"): asked_of("/memd/grants/end", {"id": "none"}),
    ("POST", "/memd/backup"): asked_of("/memd/backup", {"folder": "not absolute"}),
    ("GET", "/memd/audit"): asked_of("/memd/audit"),
    ("POST", "/memd/tokens/reload"): asked_of("/memd/tokens/reload", {}),
}
"""How a route is asked for a topic. One that reads and needs no more than that has no line."""


def how_asked(route: Route) -> Callable[[str], Asked]:
    """How a route is asked for a topic; KeyError: it needs a line above."""
    fields = msgspec.structs.fields(route.query)
    if route.method == "GET" and "{" not in route.path and not any(field.required for field in fields):
        has_topic = any(field.encode_name == "topic" for field in fields)
        return HOW.get((route.method, route.path)) or asked_of(f"{route.path}{'?topic=TOPIC' * has_topic}")
    return HOW[route.method, route.path]


GUARDED = [route for route in ROUTES if route.right != "open"]


def is_for(right: str, route: Route) -> bool:
    """Whether a token with this right in some topics is let in."""
    return route.right == "any" or (route.right == right and route.takes_who)


async def test_every_route_asks_for_its_right_in_the_topic_and_tells_of_no_other(house: House) -> None:
    assert set(HOW) <= {(route.method, route.path) for route in GUARDED}
    await told(house, "team-a", LAMP)
    await told(house, "secret", VAULT)
    await house.settled()
    for route in GUARDED:
        how = how_asked(route)
        names_topic = how("one") != how("two")
        assert route.takes_who or not names_topic, f"{route.path} has a topic, so its handler has to take `who`"
        for right in RIGHTS:
            status, answer = await house.ask(right, *how("team-a"))
            assert (status not in (401, 403)) is is_for(right, route), (route.path, right, answer)
            there, missing = [await house.ask(right, *how(topic)) for topic in ("secret", "nowhere")]
            if names_topic:
                assert there[0] == missing[0] == 403, (route.path, right)
                assert json.dumps(there[1]).replace("secret", "nowhere") == json.dumps(missing[1]), route.path
            assert "hibiscus" not in json.dumps(there)
        status, answer = await house.ask("house", *how("team-a"))
        assert (status != 403) is (route.right in ("any", "admin")), (route.path, answer)
        assert (await house.ask("", *how("team-a")))[0] == 401
        assert (await house.ask("owner", *how("team-a")))[0] not in (401, 403), route.path


async def test_what_names_no_topic_has_what_the_token_may_read_and_nothing_else(house: House) -> None:
    await told(house, "team-a", LAMP)
    await told(house, "secret", VAULT)
    await house.chat("owner", VAULT, path="/t/secret/v1")
    await house.chat("owner", LAMP, path="/t/team-a/v1")
    await house.settled()
    seen = 0
    for route in GUARDED:
        if route.method == "GET" and route.right in ("read", "any") and "{" not in route.path:
            path, _ = how_asked(route)("secret")
            path = path.replace("&topic=secret", "").replace("topic=secret", "")
            status, answer = await house.ask("ann", path)
            shown = json.dumps(answer)
            assert "hibiscus" not in shown and '"secret"' not in shown, path
            assert status in (200, 400), path
            seen += "cinnamon" in shown or "team-a" in shown
            _, all_of_it = await house.ask("owner", path)
            if "cinnamon" in shown:
                assert "hibiscus" in json.dumps(all_of_it), "the owner sees both"
    assert seen >= 10
    _, turns = await house.ask("owner", "/memd/turns?topic=secret")
    turn_id = turns["turns"][0]["turn_id"]
    for path in (f"/memd/turns/{turn_id}", f"/memd/turns/{turn_id}/replay"):
        status, answer = await house.ask("ann", path)
        missing = await house.ask("ann", path.replace(turn_id, "0" * len(turn_id)))
        assert (status, json.dumps(answer).replace(turn_id, "0" * len(turn_id))) == (404, json.dumps(missing[1]))


async def test_a_chat_needs_the_right_to_read_its_topic_and_is_remembered_with_that_to_write(house: House) -> None:
    refused = [await house.chat("ann", "Hello there!", path=f"/t/{topic}/v1") for topic in ("secret", "default")]
    refused.append(await house.chat("ann", "Hello there!", path="/v1", headers={"X-Memory-Topic": "secret"}))
    refused.append(await house.chat("ann", "Hello there!", memory_in={"topic_id": "secret"}))
    refused.append(await house.chat("write", "Hello there!"))
    assert [status for status, *_ in refused] == [403] * 5
    assert refused[0][2]["error"]["message"].startswith(
        "memd: the token 'ann' has no right to read in the topic 'secret', only in team-*, ann; name another one"
    )
    assert not house.upstream.prompts and (await house.ask("owner", "/memd/topics"))[1]["topics"] == []
    status, memory, _ = await house.chat("ann", "Hi", path="/v1", headers={"X-Memory-Mode": "off"})
    assert (status, memory) == (200, "off")
    assert (await house.chat("ann", LAMP))[0] == 200
    await house.settled()
    assert (await house.chat("reader", QUESTION))[:2] == (200, "injected")
    assert "cinnamon" in house.upstream.prompts[-1]
    await house.settled()
    _, stored = await house.ask("owner", "/memd/chunks")
    assert not [one for one in stored["chunks"] if "vault" in one["content"]], "who may not write leaves no trace"
    _, answer = await house.ask("owner", "/memd/turns?limit=1")
    assert answer["turns"][0]["mode"] == "readonly"


async def test_related_and_global_topics_that_may_not_be_read_are_as_if_they_were_not_there(tmp_path: Path) -> None:
    retrieval = settings.RetrievalSettings(global_topics=("secret",))
    async with house_in(tmp_path, retrieval=retrieval) as house:
        await told(house, "team-a", LAMP)
        await told(house, "secret", VAULT)
        await house.settled()
        asked: Any = {"memory_in": {"related_topic_ids": ["secret", "nowhere"]}}
        assert (await house.chat("ann", QUESTION, **asked))[1] == "injected"
        assert "cinnamon" in house.upstream.prompts[-1] and "hibiscus" not in house.upstream.prompts[-1]
        await house.settled()
        _, answer = await house.ask("ann", "/memd/turns?limit=1")
        assert answer["turns"][0]["related"] == []
        # The owner's turn in the same conversation shows both; ann, who sends it on, sees nothing of that block.
        question = f"{QUESTION} Both, please."
        assert (await house.chat("owner", question, **asked))[1] == "injected"
        assert "hibiscus" in house.upstream.prompts[-1]
        await house.settled()
        await house.chat("ann", question, "Noted.", "And which of them is for the lamp?", **asked)
        assert "Both, please." in house.upstream.prompts[-1] and "hibiscus" not in house.upstream.prompts[-1]
        await house.chat("ann", question, **asked)
        assert "hibiscus" not in house.upstream.prompts[-1], "the same request again"
        await house.settled()
        _, turns = await house.ask("ann", "/memd/turns")
        for turn in turns["turns"]:
            _, receipt = await house.ask("ann", f"/memd/turns/{turn['turn_id']}")
            assert "hibiscus" not in json.dumps(receipt) and '"secret"' not in json.dumps(receipt)


async def test_a_correction_whose_source_may_not_be_corrected_fails_as_an_unknown_id(house: House) -> None:
    await told(house, "team-a", LAMP)
    vault = await told(house, "secret", VAULT)
    await house.settled()
    await house.chat("owner", QUESTION, memory_in={"related_topic_ids": ["secret"]})
    assert "hibiscus" in house.upstream.prompts[-1]
    await house.settled()

    async def corrected(name: str, chunk_id: str) -> list[Any]:
        update = {"chunk_ids": [chunk_id], "action": "Update", "reason": "test", "content": None}
        _, _, answer = await house.chat(name, f"{name} corrects {chunk_id}", memory_in={"corrections": [update]})
        return [one for one in answer["memory_out"].get("signals", ()) if one["type"] == "correction_failed"]

    assert await corrected("ann", vault) == [{"type": "correction_failed", "chunk_id": vault}]
    assert await corrected("ann", "ffff") == [{"type": "correction_failed", "chunk_id": "ffff"}]
    _, story = await house.ask("owner", f"/memd/chunks/{vault}")
    assert [one["event"] for one in story["versions"]] == ["told"]
    assert await corrected("reader", vault) == [{"type": "correction_failed", "chunk_id": vault}]
    assert await corrected("owner", vault) == []


async def test_the_tools_of_mcp_have_the_rights_of_who_calls_them(house: House) -> None:
    pytest.importorskip("mcp")
    await told(house, "team-a", LAMP)
    await told(house, "secret", VAULT)
    assert (await house.call("ann", "list_topics")).startswith("team-a: ")
    assert "secret" not in await house.call("ann", "list_topics")
    found = await house.call("ann", "search_memory", query=QUESTION)
    assert "cinnamon" in found and "hibiscus" not in found
    assert "hibiscus" in await house.call("owner", "search_memory", query=QUESTION)
    told_no = await house.call("reader", "remember", content="x", topic="team-a")
    assert told_no == "the token 'reader' has no right to write; it may read"


async def test_an_import_from_the_future_into_one_topic_moves_no_ids_of_others(house: House) -> None:
    await told(house, "team-a", LAMP)
    await house.settled()
    _, exported = await house.ask("owner", "/memd/export?topic=team-a")
    line = json.loads(exported.splitlines()[0]) | {"id": "abab", "uuid": "ab" * 16}
    body = {"topic_id": "team-a", "lines": [{"line": line | {"canonical_id": 1 << 52, "origin_id": 1 << 52}}]}
    status, refused = await house.ask("ann", "/memd/import/entries", body)
    assert (status, "origin_id" in refused["error"]["message"]) == (400, True)
    assert house.daemon.store.clock.next() < 1 << 52
    assert (await house.ask("ann", "/memd/import/entries", {**body, "lines": [{"line": line}]}))[0] == 200
    assert (await house.ask("owner", "/memd/import/entries", body))[0] == 200, "whose ids they all are"


async def test_events_are_those_of_topics_that_may_be_read_and_end_with_the_token(house: House) -> None:
    shown = {"X-Memory-Token": secret_of("ann")}
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{house.daemon.own_url}/memd/events", headers=shown) as events,
    ):
        await events.content.readuntil(b"\n\n")
        for topic_id in ("secret", "team-a"):
            house.daemon.events.publish("stored", {"topic_id": topic_id, "chunks": 1})
        assert b'"team-a"' in await events.content.readuntil(b"\n\n")
        for shown_from in ((), ("secret",)):
            turn = {"topic_id": "team-a", "shown": ["a3f9"], "shown_from": shown_from}
            house.daemon.events.publish("turn", turn)
        assert b"a3f9" in await events.content.readuntil(b"\n\n")
        assert b"a3f9" not in await events.content.readuntil(b"\n\n"), "the id of a chunk of another topic"
        house.daemon.principals.exchange({hashlib.sha256(b"other").digest(): OWNER})
        house.daemon.events.publish("stored", {"topic_id": "team-a", "chunks": 2})
        assert await events.content.read() == b""


SHORT, LONG = "short-one", secret_of("ann")


class Door:
    """Requests of addresses, let in or refused, at a time that the test sets."""

    def __init__(self) -> None:
        self.now = 1_000.0
        principals = Principals({digest_of(SHORT): OWNER, digest_of(LONG): OWNER})
        self.wrong = WrongTokens(principals, lambda *_: None, clock=lambda: self.now)

    said = ""
    """Of the last answer."""

    def __call__(self, secret: str, address: str = "10.0.0.7", path: str = "/memd/health") -> tuple[int, str | None]:
        headers = {"X-Memory-Token": secret} if secret else {}
        transport = unittest.mock.Mock()
        transport.get_extra_info.return_value = (address, 1)
        request = make_mocked_request("GET", path, headers, transport=transport)
        answer = self.wrong.refusal(request)
        self.said = "" if answer is None else str(answer.text)
        return (200, None) if answer is None else (answer.status, answer.headers.get("Retry-After"))


def test_wrong_tokens_of_one_address_are_limited_and_a_long_right_one_is_not_locked_out() -> None:
    door = Door()
    assert door("")[0] == 401 and "memd: no token was shown; show auth.token" in door.said
    assert [door(f"guess-{number}")[0] for number in range(ATTEMPTS_MAX)] == [401] * ATTEMPTS_MAX
    assert "memd: this token is none that memd knows, or was taken back; show" in door.said
    assert door("one-more") == (429, "1")
    assert door(SHORT) == (429, "1"), "what could be guessed is not looked at"
    assert door(LONG) == (200, None), "behind the same proxy"
    assert door("") == (401, None), "nothing was tried"
    assert door("elsewhere", "10.0.0.8") == (401, None)
    door.now += ATTEMPT_SECONDS
    assert [door("guess")[0], door("guess")[0]] == [401, 429]
    door.now += ATTEMPT_SECONDS
    assert door(SHORT) == (200, None)
    assert door("", "10.0.0.9", f"/memd/health?token={LONG}") == (401, None), "an address shows no token"
    assert door(LONG, path=f"/memd/health?x={LONG}") == (400, None), "also where another header shows it"
    assert door(LONG, path="/v1/models?key=of-the-model-server") == (200, None)


@pytest.mark.thorough
def test_the_memory_of_addresses_is_bounded_and_a_network_of_ipv6_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.access.LIMITED_MAX", 300)
    door = Door()
    for number in range(ATTEMPTS_MAX + 1):
        last = door("guess", f"2001:db8::{number:x}")
    assert last == (429, "1")
    for number in range(300 + 5):
        door("guess", f"10.0.{number >> 8}.{number & 255}")
    assert len(door.wrong._tried) == 300


# Rights: what is told of topics that may not be read beside those that may, and who erases what he may not read


async def answered_from_both(house: House) -> tuple[str, str]:
    """Have an answer stored in team-a that was given with a chunk of it and one of `secret`; the uuids of both."""
    for topic, text in (("team-a", LAMP), ("secret", VAULT)):
        await told(house, topic, text)
    await house.settled()
    await house.chat("owner", QUESTION, memory_in={"related_topic_ids": ["secret"]})
    assert "cinnamon" in house.upstream.prompts[-1] and "hibiscus" in house.upstream.prompts[-1]
    await house.settled()
    found = {}
    for topic in ("team-a", "secret"):
        _, page = await house.ask("owner", f"/memd/chunks?topic={topic}&kind=note")
        [found[topic]] = [one["uuid"] for one in page["chunks"]]
    return found["team-a"], found["secret"]


async def test_an_answer_names_of_the_chunks_that_it_was_given_with_those_that_may_be_read(house: House) -> None:
    lamp, vault = await answered_from_both(house)
    _, page = await house.ask("owner", "/memd/chunks?topic=team-a")
    [answer] = [one for one in page["chunks"] if one["shown"]]
    paths = [
        *("/memd/log", "/memd/chunks", "/memd/transcript", "/memd/export", f"/memd/chunks/{answer['uuid']}"),
        *("/memd/log?topic=team-a", "/memd/export?topic=team-a"),
    ]
    for path in paths:
        for name, sees in (("owner", True), ("ann", False), ("reader", False)):
            status, given = await house.ask(name, path)
            assert status == 200 and (vault in json.dumps(given)) is sees, (path, name)
            assert lamp in json.dumps(given), (path, name)
    _, lines = await house.ask("ann", "/memd/export")
    assert [one["shown"] for one in map(json.loads, lines.splitlines()) if one.get("shown")] == [[lamp]]
    _, story = await house.ask("ann", f"/memd/chunks/{answer['uuid']}")
    assert [one["shown"] for one in story["versions"]] == [[lamp]]


async def test_figures_of_the_whole_daemon_are_for_who_may_read_all_of_it(tmp_path: Path) -> None:
    async with house_in(tmp_path, ingest=settings.IngestSettings(redact=True)) as house:
        await told(house, "secret", "The key is AKIAIOSFODNN7EXAMPLE.")
        await told(house, "team-a", LAMP)
        await house.settled()
        _, whole = await house.ask("owner", "/memd/stats")
        assert sum(whole["redacted"].values()) == 1 and whole["tasks"] and whole["cache_bytes"] is not None
        _, own = await house.ask("ann", "/memd/stats")
        hidden = {name for name, value in own.items() if value is None and whole[name] is not None}
        assert hidden == {"cache_bytes", "tasks", "background_tasks", "embedding_backlog", "redacted"}
        assert set(own["topics"]) == {"team-a"} and own["memory_bytes"] < whole["memory_bytes"]


async def test_a_chunk_of_another_topic_than_the_named_one_is_told_with_its_own_to_who_may_read_that(
    house: House,
) -> None:
    lamp, vault = await told(house, "team-a", LAMP), await told(house, "secret", VAULT)
    for name, chunk_id, topic, other in (
        ("owner", lamp, "secret", "team-a"),
        ("owner", vault, "team-a", "secret"),
        ("ann", vault, "team-a", ""),
    ):
        for asked in (f"/memd/chunks/{chunk_id}?topic={topic}", f"/memd/chunks/{chunk_id}/related?topic={topic}"):
            status, answer = await house.ask(name, asked)
            said = (
                f"topic {topic} has no chunk '{chunk_id}': it is in topic {other}" if other else "no chunk has the id"
            )
            assert status == 404 and said in answer["error"]["message"], answer
            assert other or "secret" not in answer["error"]["message"]
    body = {"topic_id": "team-a", "chunk_ids": [vault], "dry_run": True}
    status, answer = await house.ask("owner", "/memd/erase", body)
    assert status == 404 and "it is in topic secret" in answer["error"]["message"]


async def test_who_may_erase_and_not_read_erases_by_any_id_and_hears_no_text(house: House) -> None:
    ids = [await told(house, "team-a", f"{LAMP} {number}") for number in range(2)]
    await told(house, "secret", f"{LAMP} 0")
    await house.settled()
    _, page = await house.ask("owner", "/memd/chunks?topic=team-a")
    uuids = {one["id"]: one["uuid"] for one in page["chunks"]}
    vault = await told(house, "secret", VAULT)

    async def erased(chunk_id: str, **more: Any) -> tuple[int, Any]:
        return await house.ask("admin", "/memd/erase", {"chunk_ids": [chunk_id], **more})

    for chunk_id, more in ((ids[0], {}), (uuids[ids[1]], {"topic_id": "team-a"})):
        status, planned = await erased(chunk_id, dry_run=True, **more)
        assert status == 200 and [one["chunks"] for one in planned["plans"]] == [1], planned
        status, done = await erased(chunk_id, **more)
        assert status == 200 and [one["chunks"] for one in done["done"]] == [1]
        assert "cinnamon" not in json.dumps([planned, done]) and "secret" not in json.dumps([planned, done])
    _, page = await house.ask("owner", "/memd/chunks?topic=team-a")
    assert page["chunks"] == []
    missing = await erased("abcdef012345")
    assert missing[0] == 404 and "no chunk has the id 'abcdef012345'" in missing[1]["error"]["message"]
    there = await erased(vault)
    assert json.dumps(there).replace(vault, "abcdef012345") == json.dumps(missing), "as if it were not there"
    assert (await erased(vault, topic_id="secret"))[0] == 403


# Patterns of topics, and what is left of a principal's rights for a program

ANN = Principal("ann", ("team-*", "ann"), frozenset({"read", "write"}))


@given(st.text("ab-*", min_size=1, max_size=7), st.text("ab-/", max_size=9))
def test_a_star_stands_for_any_characters(pattern: str, name: str) -> None:
    wanted = re.fullmatch("[^/]*".join(map(re.escape, pattern.split("*"))), name) is not None
    assert Principal("x", (pattern,), frozenset({"read"})).may("read", name) == wanted


def test_no_pattern_makes_a_long_name_take_long() -> None:
    """A regular expression takes four minutes for 40 letters. Whoever lets a program in chooses both."""
    [pattern] = ANN.narrowed(("read",), (f"team-{'*a' * 60}b",)).topics
    greedy = Principal("x", (pattern, "*a*a*a*a*a*a*a*a-"), frozenset({"read"}))
    assert not greedy.may("read", f"team-{'a' * 120}") and greedy.may("read", f"team-{'a' * 120}b")


@pytest.mark.parametrize(
    ("patterns", "found"),
    [
        (["a", "b"], None),
        (["a*", "*b"], ("a*", "*b")),
        (["a*b", "ac*"], ("a*b", "ac*")),
        (["a*b", "b*"], None),
        (["x", "a", "a"], ("a", "a")),
        (["*", "z"], ("*", "z")),
        (["*a", "*b"], None),
    ],
)
def test_patterns_that_one_name_could_match_overlap(patterns: list[str], found: tuple[str, str] | None) -> None:
    assert overlapping(patterns) == found


def test_a_grant_never_has_more_than_its_principal_has_now() -> None:
    narrowed = ANN.narrowed(("read", "correct"), ())
    assert narrowed == Principal("ann", ("team-*", "ann"), frozenset({"read"}))
    narrowed = ANN.narrowed(("read",), ("team-a", "ann*", "secret"))
    asked = ("team-a", "ann", "team-b", "secret", "annie")
    assert [topic for topic in asked if narrowed.may("read", topic)] == ["team-a", "ann"]
    assert not ANN.narrowed(("read",), ("secret",)).topics
    assert not ANN.narrowed(("read",), ("*",)).may_everywhere("read")
    everyone = Principal("bob", ("*",), frozenset({"read"}))
    assert everyone.narrowed(("read",), ()).may_everywhere("read")
    assert not everyone.narrowed(("read",), ("team-*",)).may_everywhere("read")


# Tokens that memd token makes, and a running daemon that follows at once

NOTE = {"topic_id": "team-a", "notes": [{"content": "The lamp is in the attic."}]}


def status_of(served: DaemonProcess, secret: str, body: object = None) -> int:
    headers = {"X-Memory-Token": secret} if secret else {}
    return ask(f"{served.own_url}/memd/{'notes' if body else 'topics'}", body, headers=headers).status


def made(served: DaemonProcess, name: str, topics: str, rights: str) -> str:
    done = served.run("token", "add", name, "--topics", topics, "--rights", rights)
    assert done.returncode == 0, done.stderr
    secret: str = done.stdout.strip()
    assert secret.startswith("memd_") and len(secret) > 40
    return secret


def test_a_token_is_made_exchanged_and_taken_back_beside_a_running_daemon(served: DaemonProcess) -> None:
    assert status_of(served, "") == 200
    ann = made(served, "ann", "team-*,ann", "read, write")
    assert status_of(served, "") == 401, "now there are tokens"
    assert (status_of(served, ann, NOTE), status_of(served, ann)) == (200, 200)
    assert ann not in (served.data_dir / "memd.tokens").read_text()
    assert "lamp" in served.run("search", "Where is the lamp?").stdout, "commands on this machine need no token"
    reader = served.folder / "reader.yaml"
    reader.write_text(yaml.safe_dump({"auth": {"token": made(served, "bob", "team-*", "read")}}))
    refused = served.run("remember", "x", "--config", str(reader))
    assert (refused.returncode, refused.stderr) == (1, "memd: the token 'bob' has no right to write; it may read\n")
    assert "there is a token ann already" in served.run("token", "add", "ann", "--topics=*", "--rights=read").stderr
    listed = served.run("token", "list").stdout.splitlines()
    assert listed[0].startswith("ann: read, write in team-*, ann (since 20") and len(listed) == 2
    rotated = served.run("token", "rotate", "ann").stdout.strip()
    assert (status_of(served, ann), status_of(served, rotated)) == (401, 200)
    assert served.run("token", "revoke", "ann").stdout == "revoked ann\n"
    assert status_of(served, rotated) == 401
    assert served.run("token", "revoke", "ann").returncode == 1
    assert served.run("token", "revoke", "bob").returncode == 0
    assert status_of(served, "") == 401, "what was closed stays closed while it runs"
    assert json.loads(served.run("token", "list", "--json").stdout) == []
    told = [json.loads(line) for line in served.run("audit", "--act", "token", "--json").stdout.splitlines()[1:]]
    assert [(one["who"], one["detail"]) for one in told] == [
        (getpass.getuser(), detail)
        for detail in (
            *("added ann: read, write in team-*, ann", "added bob: read in team-*", "rotated ann", "revoked ann"),
            "revoked bob",
        )
    ]
    acts = [json.loads(line) for line in served.run("audit", "--act", "settings", "--json").stdout.splitlines()[1:]]
    taken = [one["detail"] for one in acts if one["detail"] != "no token has changed"]  # it was taken up just before
    assert taken == [f"tokens {one}" for one in ("added: bob", "changed: ann", "gone: ann", "gone: bob")], (
        "with ann it began"
    )


def test_a_command_without_the_right_token_changes_tokens_and_the_daemon_follows_by_itself(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    served = make_daemon(upstream.url)
    served.environment = {"MEMD_AUTH_TOKEN": "o" * 40}
    served.start()
    added = served.run("token", "add", "ann", "--topics=*", "--rights=read")
    assert added.returncode == 0 and added.stderr.endswith("memd: the running daemon takes this up within a second\n")
    wait_until(lambda: status_of(served, added.stdout.strip()) == 200, served.log.read_text)


def test_the_settings_are_read_again_and_no_list_that_is_wrong_or_gone_takes_a_token_back(serving: Serving) -> None:
    def settings_of(*names: str) -> dict[str, Any]:
        return {"auth": {"tokens": [token_setting(name, f"secret-of-{name}", "read") for name in names]}}

    def troubles() -> int:
        return served.log.read_text().count("tokens stay as they were")

    served = serving(settings_of("ann"))
    assert (status_of(served, "secret-of-ann"), status_of(served, "secret-of-bob")) == (200, 401)
    cid, whole = made(served, "cid", "team-*", "read"), served.config.read_text()
    wrong = (yaml.safe_dump(settings_of("ann", other)) for other in ("ann", "cid"))
    for left in ("", whole[: whole.index("rights")], "a: [", "nothing: known", *wrong):
        before = troubles()
        served.config.write_text(left)
        wait_until(lambda before=before: troubles() > before, served.log.read_text)  # type: ignore[misc]  # a default
        assert [status_of(served, secret) for secret in ("secret-of-ann", cid)] == [200, 200], left
    assert served.run("token", "revoke", "cid").returncode == 0
    assert status_of(served, cid) == 401
    wait_until(
        lambda: status_of(served, "secret-of-cid") == 200, served.log.read_text
    )  # only that both had it was wrong
    served.config.unlink()
    eve = served.run("token", "add", "eve", "--topics=*", "--rights=read").stdout.strip()
    assert status_of(served, eve) == status_of(served, "secret-of-ann") == 200
    served.configure(settings_of("bob"))
    wait_until(lambda: status_of(served, "secret-of-bob") == 200, served.log.read_text)
    assert status_of(served, "secret-of-ann") == 401
    audit = served.run("audit", "--act", "settings", "--json", "--config", str(served.config)).stdout.splitlines()[1:]
    *_, taken = map(json.loads, audit)
    told = "tokens added: bob; gone: ann, cid"
    assert (taken["who"], taken["from"], taken["detail"]) == ("memd", str(served.config), told)
    assert (
        "stands in auth.tokens of the settings"
        in served.run("token", "revoke", "bob", "--config", str(served.config)).stderr
    )


@pytest.mark.process
def test_a_wrong_token_is_not_made(make_daemon: MakeDaemon) -> None:
    daemon = make_daemon("http://127.0.0.1:9")
    for name, topics, rights, reason in (
        ("x", "team-*,team-a", "read", "have team-* and team-a, which overlap"),
        ("x", "a", ",", "memd: rights is not what it should be"),
        ("owner", "a", "read", "the name owner is that of auth.token"),
        ("a b", "a", "read", "name is not what it should be; give 1 to 64 letters"),
    ):
        done = daemon.run("token", "add", name, "--topics", topics, "--rights", rights)
        assert (done.returncode, done.stdout) == (2, "") and reason in done.stderr
    daemon.data_dir.mkdir(exist_ok=True)
    (daemon.data_dir / "memd.tokens").write_text('{"tokens": [], "version": 2}')
    with pytest.raises(StoreError, match="is no list of tokens"):  # it is one of a later version
        TokenList(FileBook(LocalDisk(), daemon.data_dir)).read()


@pytest.mark.process
def test_a_command_may_have_the_token_of_anybody_in_its_variable(tmp_path: Path) -> None:
    def memd(*arguments: str, **token: str) -> subprocess.CompletedProcess[str]:
        return run_memd(*arguments, "--data-dir", tmp_path / "memory", **token)

    secret = memd("token", "add", "ann", "--topics", "*", "--rights", "read").stdout.strip()
    listed = memd("token", "list", MEMD_AUTH_TOKEN=secret)
    assert "ann: read in *" in listed.stdout and "owner" not in listed.stdout
    for command in (
        ["remember", "The lamp is in the attic."],
        ["token", "add", "bob", "--topics", "x", "--rights", "read"],
    ):
        done = memd(*command, MEMD_AUTH_TOKEN=secret)
        assert done.returncode == 0, done.stderr


def test_the_log_counts_what_waits_in_the_topics_that_a_token_may_read(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serving({"buffer": {"store_after_seconds": 3600, "idle_seconds": 3600}})
    ann, ben = (made(served, name, name, "read,write") for name in ("ann", "ben"))
    for name, secret in (("ann", ann), ("ben", ben)):
        said = [{"role": "user", "content": "The lamp is in the attic."}]
        served.chat(said, {"Authorization": f"Bearer {secret}"}, memory_in={"topic_id": name})
    monkeypatch.setattr(daemon_process, "clean_environment", lambda: {**os.environ, "MEMD_AUTH_TOKEN": ann})
    wait_until(lambda: "2 messages are not in the log yet" in served.run("log").stdout, lambda: repr(served))
    assert "4 messages" in served.run("stats").stdout, "who reads the files reads all of them"


# The end of a token: what is under way with it


@asynccontextmanager
async def streaming(tmp_path: Path, path: str) -> AsyncIterator[tuple[aiohttp.ClientResponse, Callable[[], None]]]:
    """A stream that ann reads, from behind its first part on, and how her token is taken back."""
    async with house_in(tmp_path) as house:
        for number in range(3):
            await told(house, "team-a", f"{LAMP} {number}")
        await house.settled()

        def revoke() -> None:
            left = tuple(one for one in TOKENS if one.name != "ann")
            auth = type(house.daemon.config.auth)(token=secret_of("owner"), tokens=left)
            house.daemon.principals.exchange(known_principals(auth))

        shown = {"X-Memory-Token": secret_of("ann")}
        async with (
            aiohttp.ClientSession() as session,
            session.get(house.daemon.own_url + path, headers=shown) as answer,
        ):
            yield answer, revoke


async def test_the_stream_of_events_of_a_token_that_was_taken_back_ends_also_when_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "PING_SECONDS", 0.05)
    async with streaming(tmp_path, "/memd/events") as (events, revoke):
        await events.content.readuntil(b": ping\n\n")
        revoke()
        assert (await events.content.read()).replace(b": ping\n\n", b"") == b""


async def test_an_export_of_a_token_that_was_taken_back_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    monkeypatch.setattr(reads, "EXPORTED_AT_ONCE", 1)
    given = 0

    def slowly(lines: Iterator[bytes], count: int) -> Iterator[bytes]:
        nonlocal given
        given += 1
        assert given == 1 or go.wait(60)
        return islice(lines, count)

    monkeypatch.setattr(reads, "islice", slowly)
    async with streaming(tmp_path, "/memd/export") as (answer, revoke):
        assert b"cinnamon" in await answer.content.readline()
        revoke()
        go.set()
        with pytest.raises(aiohttp.ClientError):
            await answer.content.read()


def test_a_tunnel_of_a_token_that_was_taken_back_ends(
    make_daemon: MakeDaemon, raw: RawUpstream, connect: Callable[..., Peer]
) -> None:
    ended = threading.Event()

    def script(peer: Peer) -> None:
        peer.send(AGREED)
        peer.read_to_end()
        ended.set()

    raw.script = script
    daemon = make_daemon(raw.url).start()
    secret = daemon.run("token", "add", "ann", "--topics=*", "--rights=read").stdout.strip()
    client = connect(daemon.base_url, request(b"GET", b"/v1/realtime", *UPGRADE, b"X-Memory-Token: " + secret.encode()))
    assert client.read_head().startswith(b"HTTP/1.1 101")
    assert daemon.run("token", "revoke", "ann").returncode == 0
    assert ended.wait(60) and client.read_to_end() == b""
