"""A night job: the local model reads what was said in a topic on one day, and writes notes about it.

    python night_notes.py --topic work                     # yesterday
    python night_notes.py --topic work --day 2026-11-20    # or today

memd itself writes no summaries. This job stands outside, and only who starts it has such notes. What was said stays as
it is; a note is one more chunk, which names the chunks that it was made from as its source. For each note the job
prints the line that takes it out again. A day that has notes already is left alone.

It needs Python alone. MEMD_URL is memd's own address (http://127.0.0.1:8766), MEMD_BASE_URL the one for models
(http://127.0.0.1:8765/v1), MEMD_AUTH_TOKEN the `auth.token`, if there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from typing import Any

OWN_URL = os.environ.get("MEMD_URL", "http://127.0.0.1:8766")
BASE_URL = os.environ.get("MEMD_BASE_URL", "http://127.0.0.1:8765/v1")
TOKEN = os.environ.get("MEMD_AUTH_TOKEN", "")
CHARACTERS_MAX = 8_000
"""Of what the model reads at once: about 2,000 tokens, which fits into a small window."""
SECONDS_MAX = 600
TAG = "night"
NOTE = re.compile(r"^\W*((?:[0-9a-f]{4,32}[\s,]*)+)[\]):]+\s*(\S.*)$", re.MULTILINE)
TASK = """Below are records of one day, each behind its id in brackets. Write down what will matter later: decisions, \
facts, names, open tasks. Write at most five notes, each on a line of its own, in words that can stand alone. Begin \
each with the ids of the records that it is from, like this:
[a3f9, b01c] The office moves to Bergen in May.
Write nothing else. If nothing will matter later, write: nothing."""


def asked(url: str, body: object = None, headers: Mapping[str, str] | None = None, **query: Any) -> Any:
    """The answer to a GET, or to a POST of a body."""
    sent = {"Content-Type": "application/json", "X-Memory-Token": TOKEN, **(headers or {})}
    request = urllib.request.Request(
        f"{url}?{urllib.parse.urlencode(query, doseq=True)}" if query else url,
        None if body is None else json.dumps(body).encode(),
        {name: value for name, value in sent.items() if value},
    )
    with urllib.request.urlopen(request, timeout=SECONDS_MAX) as answer:
        return json.load(answer)


def said_on(topic: str, day: date) -> list[dict[str, Any]]:
    """The live chunks of conversations on one day, oldest first."""
    chunks: list[dict[str, Any]] = []
    page: dict[str, Any] = {"next": ""}
    while page["next"] is not None:
        chosen: dict[str, Any] = {"topic": topic, "kind": "turn", "from": day, "to": day, "limit": 100}
        page = asked(f"{OWN_URL}/memd/chunks", **chosen | ({"before": page["next"]} if page["next"] else {}))
        chunks += page["chunks"]
    return sorted(chunks, key=lambda chunk: chunk["said_at"])


def portions(chunks: list[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """The chunks' texts by their ids, as many at a time as the model is to read at once."""
    portion: dict[str, str] = {}
    for chunk in chunks:
        text = chunk["content"][:CHARACTERS_MAX]
        if portion and sum(map(len, portion.values())) + len(text) > CHARACTERS_MAX:
            yield portion
            portion = {}
        portion[chunk["id"]] = text
    if portion:
        yield portion


def notes_of(portion: Mapping[str, str], model: str) -> Iterator[tuple[list[str], str]]:
    """What the model writes about some chunks: the ids that a note is from, and its text.

    `X-Memory-Mode: off`: the model is shown no memory, and nothing of this call is remembered.
    """
    records = "\n\n".join(f"[{chunk_id}] {text}" for chunk_id, text in portion.items())
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": f"{TASK}\n\n{records}"}]}
    headers = {"X-Memory-Mode": "off", "Authorization": f"Bearer {TOKEN}" if TOKEN else ""}
    answer = asked(f"{BASE_URL}/chat/completions", body, headers)
    for found in NOTE.finditer(answer["choices"][0]["message"]["content"] or ""):
        ids = [one for one in re.findall(r"[0-9a-f]+", found[1]) if one in portion]
        if ids:  # a note that names no record is the model's own invention
            yield ids, found[2].strip()


def day(said: str) -> date:
    """The day that an argument names."""
    days_ago = {"today": 0, "yesterday": 1}.get(said)
    return date.fromisoformat(said) if days_ago is None else date.today() - timedelta(days=days_ago)


def main() -> int:
    """Write the notes of a day, and say how to take them back."""
    parser = argparse.ArgumentParser(description="Let the local model write notes about a day.")
    parser.add_argument("--topic", default="default")
    parser.add_argument("--day", type=day, default="yesterday", help="yesterday, today or 2026-11-20")
    parser.add_argument("--model", default="local")
    given = parser.parse_args()
    tag = f"{TAG}-{given.day}"
    try:
        if asked(f"{OWN_URL}/memd/chunks", topic=given.topic, tag=tag)["chunks"]:
            print(f"{given.day} has notes already (memd search … --tag {tag}).")
            return 0
        notes = [
            {"content": text, "title": f"Notes of {given.day}", "tags": [TAG, tag], "source": f"mem:{','.join(ids)}"}
            for portion in portions(said_on(given.topic, given.day))
            for ids, text in notes_of(portion, given.model)
        ]
        if not notes:
            print(f"There is nothing to note of {given.day} in topic {given.topic}.")
            return 0
        taken = asked(f"{OWN_URL}/memd/notes", {"topic_id": given.topic, "notes": notes[:100]})["notes"]
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace"), file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(f"no memd answers at {OWN_URL} or {BASE_URL} ({error.reason}); start one: memd serve", file=sys.stderr)
        return 1
    for note, kept in zip(notes, taken, strict=False):
        print(f"{note['content']}\n  from {note['source']}")
        print(f"  to take it out: memd correct {' '.join(kept['chunk_ids'])} --deprecate --topic {given.topic}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
