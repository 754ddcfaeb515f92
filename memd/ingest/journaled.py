"""The buffer of a topic as its journal tells it.

Rule: a record that this version cannot read costs that record, and secrets that the settings name by now are left out.
Prompts have all that clients send; the journal does not have the text of messages that are never to be stored again.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence

import msgspec

from memd.conversation.conversation import Buffered
from memd.conversation.events import Appended, Branched, BufferEvent, Heard, Returned, decode_event
from memd.conversation.hot_buffer import HotBuffer
from memd.ingest.redaction.redactor import Redactor
from memd.store.erasure.forbidden import ForbiddenText

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


def without_forbidden(event: BufferEvent, forbidden: ForbiddenText) -> BufferEvent:
    """The event without the text of forbidden messages."""

    def kept(items: list[Buffered]) -> list[Buffered]:
        return [
            msgspec.structs.replace(item, message=item.message.erased)
            if item.message is not None and forbidden.has_message(item.identity, item.message)
            else item
            for item in items
        ]

    if isinstance(event, Appended):
        return msgspec.structs.replace(event, messages=kept(event.messages))
    if isinstance(event, Branched):
        way = msgspec.structs.replace(event.rewriting, added=kept(event.rewriting.added))
        return msgspec.structs.replace(event, rewriting=way)
    if isinstance(event, Heard | Returned):
        messages = {
            position: message.erased if forbidden.has_message(b"", message) else message
            for position, message in event.messages.items()
        }
        return msgspec.structs.replace(event, messages=messages)
    return event
