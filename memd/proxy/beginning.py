"""The beginning of an answer: a refusal may come with status 200, and nothing of it has gone to the client yet.

Rule: no byte is lost; what was read is passed on first. A stream is not held back for longer than `WAIT_SECONDS`, and
an answer that breaks off is left to whoever reads on.

LM Studio answers a stream that is too long with `event: error` (bug tracker, issue 2322), SGLang with `data: {"error":
…}` (issue 12081), text-generation-inference with the same (server.rs, `into_openai_event`), and OpenRouter with an
`error` in either kind of body once a provider was asked (docs, "Errors").
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import aiohttp
import msgspec

from memd.proxy.relay import media_type_of
from memd.proxy.upstream.refusals import BODY_BYTES_MAX
from memd.wire.content_codings import codings_of
from memd.wire.lenient_json import UNREADABLE
from memd.wire.sse import SseEvent, SseParser

WAIT_SECONDS = 5.0
"""The head of a stream waits so long for its first event; a server that refuses a prompt does it within a second or two
(LM Studio: 2 s for 31,000 tokens), and the client can do nothing with the head alone."""


class Beginning(msgspec.Struct, frozen=True):
    """The part of an answer's body that was read."""

    read: bytes = b""
    error: bytes = b""
    """The JSON of an error that came in place of a reply; empty if there is none."""


async def read_beginning(answer: aiohttp.ClientResponse) -> Beginning:
    """Read the first event of a stream, or a JSON body; more than `BODY_BYTES_MAX` is no error."""
    media_type = media_type_of(answer)
    streams = media_type == "text/event-stream"
    if codings_of(answer.headers) or not (streams or media_type == "application/json"):
        return Beginning()
    parser, event, read = SseParser(BODY_BYTES_MAX), None, b""
    until = time.monotonic() + WAIT_SECONDS
    try:
        while event is None and len(read) < BODY_BYTES_MAX:
            reading = answer.content.readany()
            seconds = max(0.0, until - time.monotonic()) if streams else None
            part = await asyncio.wait_for(reading, seconds)
            if not part:
                break
            read += part
            event = _first_event(parser, part) if streams else None
    except (aiohttp.ClientError, TimeoutError):
        pass  # it goes on, or whoever reads on is told again
    data = read if not streams else b"" if event is None else event.data
    return Beginning(read, data if _is_error(data) else b"")


def _first_event(parser: SseParser, part: bytes) -> SseEvent | None:
    return next((event for item in parser.feed(part) for event in item.events() if event.data), None)


def _is_error(data: bytes) -> bool:
    if b"error" not in data or len(data) > BODY_BYTES_MAX:
        return False
    try:
        said: Any = msgspec.json.decode(data)
    except UNREADABLE:
        return False
    return isinstance(said, dict) and bool(said.get("error"))
