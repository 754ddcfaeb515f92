"""The golden files under tests/golden/ as code: one folder per version of the format, never changed again.

A new version of the format gets a new folder; the old ones stay, because every later memd must read them. To write the
folder of the present version, once:

    python tests/support/golden_files.py
"""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from drafts import DIMENSION, counting_clock, open_journal, open_store
from histories import new_buffer, receive, talk
from msgspec.structs import replace

from memd.conversation.events import Injected, Placed, decode_event, encode_event
from memd.entries import Draft, Entry, Status
from memd.messages import Block, BlockChunk
from memd.store.disk import LocalDisk
from memd.store.log.format import FORMAT_VERSION
from memd.store.log.journal import read_journal
from memd.store.store import Store
from memd.store.tools.export import export

GOLDEN = Path(__file__).parent.parent / "golden"
TOPIC = "bike-workshop"
FINGERPRINT = "golden-model-0123456789abcdef"
SEGMENT_ENTRIES_MAX = 4
EXPECTED = "expected.json"


def vector(number: int) -> bytes:
    """A unit vector of halves and zeros, exact in float32 on every machine."""
    places = [(number + step) % DIMENSION for step in (0, 1, 3, 6)]
    values = np.zeros(DIMENSION, dtype="<f4")
    values[places] = [0.5, 0.5 if number % 2 else -0.5, 0.5, 0.5]
    return values.tobytes()


def chunk(number: int, text: str) -> Draft:
    """A new chunk."""
    digest = hashlib.blake2b(str(number).encode(), digest_size=16).digest
    return Draft(
        uuid=hashlib.sha256(f"uuid {number}".encode()).digest()[:16],
        content=text,
        vector=vector(number),
        created_at=1_760_000_000_000_000 + number,
        roles=("user", "assistant") if number % 2 else ("user",),
        digests=(digest(), bytes(16)) if number % 2 else (digest(),),
    )


def entry_of(before: Entry, **changes: Any) -> Draft:
    """Another entry of a known chunk."""
    fields: dict[str, Any] = {
        name: getattr(before, name)
        for name in ("uuid", "content", "vector", "created_at", "roles", "digests", "public_id", "origin_id")
    }
    return Draft(**(fields | changes))


def opened(data_dir: Path) -> Store:
    """The store of a golden folder."""
    clock = counting_clock(1_770_000_000_000_000)
    return open_store(None, data_dir, segment_entries_max=SEGMENT_ENTRIES_MAX, fingerprint=FINGERPRINT, now_us=clock)


def write(data_dir: Path) -> None:
    """Write everything that a log can contain: sealed and merged segments, an active one, corrections, a journal."""
    store = opened(data_dir)
    topic = store.topic(TOPIC)
    first = topic.append([chunk(n, f"user: part {n} of the brake goes on shelf {n + 3}.") for n in range(3)])
    topic.append([chunk(3, "user: ¿Dónde está la llave? 钥匙 🔧\nassistant: Behind the door.")])
    helpful = entry_of(first[0], utility_steps=2, action="Helpful", reason="it was right")
    replaced = entry_of(first[1], status=Status.DEPRECATED, vector=b"", content="", action="Update", reason="moved")
    topic.append([helpful, replaced, chunk(4, "user: part 1 of the brake is on shelf 9 now.")])
    topic.append([chunk(5, "")])
    for _ in range(2):
        store.clock.now_us()  # as sealing did when the folders were written
    topic.merge((1, 2))
    later = replace(chunk(6, "note: from another program"), kind="note", source="notes.md")
    topic.append([later, entry_of(first[2], utility_steps=-4, action="Unhelpful", reason="")])
    topic.append([chunk(7, "x" * 300)])
    store.close()
    _write_journal(data_dir / TOPIC / "hot.log")
    (data_dir / "memd.lock").unlink()
    (data_dir / EXPECTED).write_text(json.dumps(found(data_dir), indent=1, ensure_ascii=False) + "\n")


def found(data_dir: Path) -> dict[str, Any]:
    """A golden folder as a reader sees it."""
    events = [decode_event(payload) for payload in read_journal(data_dir / TOPIC / "hot.log", LocalDisk())]
    buffer = new_buffer()
    buffer.replay(events)
    return {
        "export": list(export(data_dir, LocalDisk(), topic_id=None, live_only=False)),
        "journal": [type(event).__name__ for event in events],
        "conversations": [
            {
                "id": one.id,
                "stored": one.stored,
                "left_out": one.left_out,
                "messages": [m.message.text if m.message is not None else None for m in one.messages],
                "blocks": [block.text for block in one.blocks.values()],
            }
            for one in buffer.conversations()
        ],
    }


def _write_journal(path: Path) -> None:
    path.unlink(missing_ok=True)
    journal, _ = open_journal(path, LocalDisk())
    buffer = new_buffer()
    one = talk(buffer, "u:Where is the pump?", "a:On the left.", "u:And the oil?", "a:Behind it.", now=1000.0)
    arrival = receive(buffer, "u:Where is the pump?", "a:On the left.", "u:And the oil?", "a:Behind it.", "u:Thanks!")
    shown = BlockChunk(shown_id="abcd", uuid=bytes(range(16)), topic_id=TOPIC, origin_id=17)
    block = Block("[memory]\n[mem:abcd] the oil", 7, (shown,))
    buffer.record(Placed(arrival.conversation.id, one.messages[-1].digest, block))
    buffer.record(Injected([shown]))
    buffer.mark(one, stored=2)
    buffer.mark(one, left_out=2)
    talk(buffer, "u:Another talk", "a:Yes?", session="second", now=1001.0)
    journal.append([encode_event(event) for event in buffer.take_unsaved()])


if __name__ == "__main__":
    folder = GOLDEN / f"v{FORMAT_VERSION}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write(folder)
    print(f"wrote {folder}")
