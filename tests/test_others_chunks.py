"""What one principal said is changed and taken out by others only with the right to correct, whatever the way in."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from daemon_in_process import House, house_in
from test_authors import ROPE, authors
from test_rights import LAMP, VAULT

from memd.settings.model import BufferSettings


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
        assert await imported("write", hers, **changes) == 403
    assert await imported("write", hers) == 200, "which the topic has already"
    assert await imported("write", own, **out) == 200
    assert await imported("bob", hers, content="The word is turnip.") == 200
    _, log = await house.ask("owner", "/memd/log?topic=team-a")
    assert [(one["author"], one["by"]) for one in log["events"]] == [
        ("bob", "bob"),
        ("write", "write"),
        ("write", "write"),
        ("ann", "ann"),
    ]


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
        assert (status, [one["author"] for one in story["versions"]]) == (403 if same == "uuid" else 200, ["ann"])


async def test_what_takes_out_chunks_of_somebody_elses_document_needs_the_right_to_correct(house: House) -> None:

    async def handed(name: str, source: str, *texts: str, **more: str) -> int:
        sections = [{"text": text, "heading": [str(place)]} for place, text in enumerate(texts)]
        digest = hashlib.sha256("".join(texts).encode()).hexdigest()
        document = {"source": source, "hash": digest, "sections": sections, **more}
        return (await house.ask(name, "/memd/documents", {"topic_id": "team-a", "document": document}))[0]

    async def removed(name: str, source: str) -> int:
        return (await house.ask(name, "/memd/documents/remove", {"topic_id": "team-a", "sources": [source]}))[0]

    assert await handed("ann", "a.md", LAMP, VAULT) == 200
    assert await handed("scribe", "a.md", LAMP, VAULT) == 200, "as it is already"
    assert await handed("scribe", "a.md", ROPE) == 403
    assert await handed("scribe", "b.md", ROPE, renamed_from="a.md") == 403
    assert await removed("scribe", "a.md") == 403
    assert set((await authors(house)).values()) == {"ann"}, "and nothing of b.md"
    assert await handed("scribe", "b.md", ROPE) == await handed("scribe", "b.md", "The rope is gone.") == 200
    assert await removed("write", "a.md") == 404, "who may not read does not hear that somebody has it"
    assert await handed("write", "a.md", "A crane stands at the quay.") == 200, "beside hers"
    assert set((await authors(house)).values()) == {"ann", "scribe", "write"}
    assert await removed("scribe", "b.md") == await removed("write", "a.md") == 200
    assert await removed("bob", "a.md") == 200
