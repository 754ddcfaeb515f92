"""One message of Ollama's `/api/chat`: parsing and encoding it.

Rule: as in `wire/chat/message.py`, from whose messages these differ in three members: `images` holds the attachments,
`tool_name` stands where OpenAI has `tool_call_id`, and a call's arguments are an object. Ollama's own clients do not
send the ids of calls back, so a call has none here and is known by its arguments.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from memd.messages import DIGEST_BYTES, Message
from memd.wire.chat import message as chat
from memd.wire.lenient_json import decode_or_none


class _OwnMembers(msgspec.Struct):
    images: list[Raw] | None = None
    tool_name: str | None = None


_own_decoder = msgspec.json.Decoder(_OwnMembers)
_arguments_decoder = msgspec.json.Decoder(dict[str, Any])


def parse_message(raw: Raw | bytes) -> Message:
    """Parse the JSON object `raw` into a message without its thinking.

    Raises:
        BadRequestBody: not a JSON object, or text in it is not valid Unicode.
    """
    message = without_call_ids(chat.parse_message(raw))
    own = decode_or_none(_own_decoder, raw) or _OwnMembers()
    if not own.images and not own.tool_name:
        return message
    digests = [hashlib.blake2b(bytes(image), digest_size=DIGEST_BYTES).digest() for image in own.images or ()]
    return msgspec.structs.replace(
        message,
        text="\n".join([*([message.text] if message.text else ()), *["[image]"] * len(digests)]),
        attachments=(*message.attachments, *digests),
        name=message.name or own.tool_name or "",
    )


def without_call_ids(message: Message) -> Message:
    """The message as Ollama's own clients send it back."""
    if not any(call.id for call in message.tool_calls):
        return message
    calls = tuple(msgspec.structs.replace(call, id="") for call in message.tool_calls)
    return msgspec.structs.replace(message, tool_calls=calls)


def encode_message(message: Message) -> bytes:
    """Encode `message` as a JSON object, without its attachments; the text has `[image]` for each."""
    members: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        members["tool_calls"] = [
            {"function": {"name": call.name, "arguments": _arguments(call.arguments)}} for call in message.tool_calls
        ]
    if message.name:
        members["tool_name" if message.role == "tool" else "name"] = message.name
    return msgspec.json.encode(members)


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as the object that Ollama wants, also if a model made no object of them."""
    return decode_or_none(_arguments_decoder, text.encode()) or ({"arguments": text} if text.strip("{} ") else {})
