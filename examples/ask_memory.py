"""Ask memory without a chat: what is remembered about a question, and where it is from.

    python ask_memory.py "Why did we choose PostgreSQL?"
    python ask_memory.py "Why did we choose PostgreSQL?" --topic work --topic home

It needs Python alone. MEMD_URL is memd's own address (http://127.0.0.1:8766), MEMD_AUTH_TOKEN the `auth.token`, if
there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from datetime import datetime
from typing import Any

OWN_URL = os.environ.get("MEMD_URL", "http://127.0.0.1:8766")


def asked(path: str, **query: Any) -> Any:
    """The answer of one of memd's own routes; all of them are described in docs/openapi.json."""
    token = os.environ.get("MEMD_AUTH_TOKEN", "")
    request = urllib.request.Request(
        f"{OWN_URL}{path}?{urllib.parse.urlencode(query, doseq=True)}",
        headers={"X-Memory-Token": token} if token else {},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def main() -> int:
    """Print what a new chat with this question would be reminded of, best first."""
    parser = argparse.ArgumentParser(description="Ask memory without a chat.")
    parser.add_argument("question")
    parser.add_argument("--topic", action="append", default=[], help="only this topic; may be given again")
    given = parser.parse_args()
    try:
        answer = asked("/memd/search", q=given.question, topic=given.topic)
    except urllib.error.HTTPError as error:
        print(json.load(error)["error"]["message"], file=sys.stderr)
        return 1
    except urllib.error.URLError as error:
        print(f"no memd answers at {OWN_URL} ({error.reason}); start one: memd serve", file=sys.stderr)
        return 1
    found = [chunk for chunk in answer["chunks"] if chunk["verdict"] == "injected"]  # the others are candidates only
    for chunk in found:
        day = datetime.fromtimestamp(chunk["said_at"] / 1e6).date()  # times are microseconds since the epoch
        where = chunk["source"] or " and ".join(chunk["roles"])
        print(f"[mem:{chunk['id']}] {chunk['topic_id']}, {day}, {where}\n{chunk['content']}\n")
    if not found:
        print("Nothing is remembered that has to do with it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
