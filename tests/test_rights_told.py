"""Rights: what is told of topics that may not be read beside those that may, and who erases what he may not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from daemon_in_process import House, house_in
from test_rights import LAMP, QUESTION, VAULT, told

from memd.settings import model as settings


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
