"""The buffer of a topic as its journal tells it.

Rule: a record that this version cannot read costs that record, and secrets that the settings name by now are left out.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

import msgspec

from memd.conversation.events import BufferEvent, decode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.ingest.redaction.redactor import Redactor

log = logging.getLogger("memd")


def events_in(payloads: Sequence[bytes], topic_id: str, redactor: Redactor) -> tuple[list[BufferEvent], bool]:
    """Decode the records of a journal; also say whether they may stay as they are: nothing has to be redacted."""
    events = []
    for payload in payloads:
        try:
            events.append(decode_event(payload))
        except msgspec.DecodeError as error:
            fields = {"topic": topic_id, "error": error}
            log.warning("a record of hot.log is of another version and was left out", extra=fields)
    kept = [redactor.event(event) for event in events]
    return kept, kept == events


def replayed(events: Sequence[BufferEvent], window_turns: int) -> HotBuffer:
    """The buffer after these events."""
    buffer = HotBuffer(lambda: uuid.uuid4().hex[:12], window_turns)
    buffer.replay(events)
    return buffer
