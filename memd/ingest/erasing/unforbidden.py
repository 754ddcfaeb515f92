"""The events of a buffer as they may be journalled where messages are never to be stored again.

Rule: pure. Prompts have what clients send; the journal does not have the text of what is forbidden.
"""

from __future__ import annotations

import msgspec

from memd.conversation.conversation import Buffered
from memd.conversation.events import Appended, Branched, BufferEvent, Heard, Returned
from memd.store.erasure.forbidden import ForbiddenText


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
