"""Anthropic's `POST /v1/messages`: requests to messages and back, and replies.

Rule: a message is translated into a chat message as in llama.cpp, so that a conversation has the same digests in every
API. A user message with tool results is parsed into several messages, and encoded as one element again. A *piece* has
the content blocks of one `Message`; joining all pieces of an element restores it, block by block.

    element  {"role": "user", "content": [tool_result a, tool_result b, text, image]}
    pieces        tool: [tool_result a]    tool: [tool_result b]    user: [text, image]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message, ToolCall, canonical_arguments
from memd.wire import chat
from memd.wire.api import Api, MessageCache, ModelRequest, objects_in, top_level
from memd.wire.chat import with_text_in_front
from memd.wire.lenient_json import (
    ANYTHING,
    LIST,
    OBJECT,
    UNREADABLE,
    decode_or_none,
    is_list,
    is_object,
    lenient_text,
    text_or_empty,
    with_content,
)
from memd.wire.reply import CAPTURE_BYTES_MAX, Capture, SseEvent, Usage, count_of, error_text

_PLACES = "memd_places"  # member of a piece: the places of its blocks in the element; never forwarded
_TOOL_RESULT = b'"tool_result"'
_UNHASHED_TYPES = frozenset({b'"thinking"', b'"redacted_thinking"'})


class _ContentBlock(msgspec.Struct, frozen=True):
    """The members of a content block that memd reads; absent ones are empty."""

    type: Raw = Raw()
    text: Raw = Raw()
    source: Raw = Raw()
    id: Raw = Raw()
    name: Raw = Raw()
    input: Raw = Raw()
    tool_use_id: Raw = Raw()
    content: Raw = Raw()


class _ImageSource(msgspec.Struct, frozen=True):
    type: str
    media_type: str = "image/jpeg"  # as in llama.cpp
    data: str = ""
    url: str = ""


_places_decoder = msgspec.json.Decoder(list[int])
_block_decoder = msgspec.json.Decoder(_ContentBlock)
_source_decoder = msgspec.json.Decoder(_ImageSource)


def parse_message(raw: Raw | bytes) -> Message:
    """Parse one piece into a message without reasoning. Raises BadRequestBody: not a JSON object, or not valid
    Unicode."""
    try:
        members = OBJECT.decode(raw)
        if not is_list(members.get("content", Raw())):
            return chat.parse_message(raw)
        return _translated(lenient_text(members.get("role", Raw())), LIST.decode(members["content"]))
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def pieces_of(element: Raw) -> list[Raw]:
    """Split a user message into its tool results, one by one, and the rest; other messages stay whole. Raises
    BadRequestBody: it is unreadable."""
    if _TOOL_RESULT not in bytes(element):
        return [element]
    try:
        members = OBJECT.decode(element)
        if bytes(members.get("role", b"")) != b'"user"' or not is_list(members.get("content", Raw())):
            return [element]
        blocks = LIST.decode(members["content"])
        results = [place for place, block in enumerate(blocks) if bytes(_block(block).type) == _TOOL_RESULT]
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}") from error
    others = sorted(set(range(len(blocks))).difference(results))
    runs = [[place] for place in results] + ([others] if others else [])
    if len(runs) < 2:
        return [element]
    return [
        Raw(msgspec.json.encode({**members, "content": [blocks[place] for place in run], _PLACES: run})) for run in runs
    ]


def joined(pieces: Sequence[Raw]) -> Raw:
    """Join the shown pieces of one element; a block added in front of a piece stays there."""
    placed: list[tuple[int, Raw]] = []
    element: dict[str, Raw] = {}
    for piece in pieces:
        members = OBJECT.decode(piece)
        blocks = LIST.decode(members["content"])
        known = members.pop(_PLACES, None)
        places = list(range(len(placed), len(placed) + len(blocks))) if known is None else _places_decoder.decode(known)
        places = places[:1] * (len(blocks) - len(places)) + places
        placed += zip(places, blocks, strict=True)
        element = element or members
    placed.sort(key=itemgetter(0))
    element["content"] = Raw(msgspec.json.encode([block for _, block in placed]))
    return Raw(msgspec.json.encode(element))


def _block(raw: Raw) -> _ContentBlock:
    """Decode a content block; one that is not an object counts as empty."""
    return _block_decoder.decode(raw) if is_object(raw) else _ContentBlock()


def _input(arguments: str) -> Raw:
    """Return arguments as the object that `input` must be; other text, which a model may write, goes into a member."""
    try:
        OBJECT.decode(arguments.strip() or "{}")
    except UNREADABLE:
        return Raw(msgspec.json.encode({"arguments": arguments}))
    return Raw((arguments.strip() or "{}").encode())


def _translated(role: str, blocks: list[Raw]) -> Message:
    parts: list[Raw] = []
    calls: list[ToolCall] = []
    for raw in blocks:
        block = _block(raw)
        kind = bytes(block.type)
        if kind == _TOOL_RESULT:
            is_text = not is_list(block.content)
            inner = [] if is_text else [_part(one, _block(one)) for one in LIST.decode(block.content)]
            text, attachments = (lenient_text(block.content), ()) if is_text else chat.content_of(inner)
            return Message("tool", text, tool_call_id=lenient_text(block.tool_use_id), attachments=attachments)
        if kind == b'"tool_use"':
            calls.append(ToolCall(*map(lenient_text, (block.id, block.name, block.input))))
        elif kind not in _UNHASHED_TYPES:
            parts.append(_part(raw, block))
    text, attachments = chat.content_of(parts)
    return Message(role, text, tuple(calls), attachments=attachments)


def _part(raw: Raw, block: _ContentBlock) -> Raw:
    """Translate a block into a content part, without `cache_control`, which clients move from turn to turn."""
    kind = bytes(block.type)
    if kind == b'"image"' and (url := _image_url(block.source)):
        return Raw(msgspec.json.encode({"type": "image_url", "image_url": {"url": url}}))
    if not kind or kind == b'"text"':
        return raw
    members = OBJECT.decode(raw)
    members.pop("cache_control", None)
    encoded = msgspec.json.encode(members)
    if kind.endswith((b'_tool_use"', b'_tool_result"')):  # a server's own tools: clients reorder the members
        return Raw(canonical_arguments(encoded.decode()).encode())
    return Raw(encoded)


def _image_url(source: Raw) -> str:
    """Return the URL of an image as in the chat API; empty for an unknown kind of source."""
    image = decode_or_none(_source_decoder, source)
    if image is None:
        return ""
    return f"data:{image.media_type};base64,{image.data}" if image.type == "base64" else image.url


_PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class _AnthropicTold(msgspec.Struct, frozen=True):
    """The members of a whole answer, or of an event, that memd reads."""

    type: Any = None
    index: Any = 0
    message: Any = None
    content: Any = None
    content_block: Any = None
    delta: Any = None
    stop_reason: Any = None
    usage: Any = None
    error: Any = None


_told_decoder = msgspec.json.Decoder(_AnthropicTold)


class AnthropicCapture(Capture):
    """Captures the reply in one stream."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        super().__init__(bytes_max)
        self._counts: dict[str, int] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        """First events of blocks of a server's own tools, by index."""

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in the first event, `message_start`."""
        told = decode_or_none(_told_decoder, event.data)
        if told is None:
            return False
        if told.type == "message_start" and isinstance(told.message, dict):
            self._begun = True
            self._count(told.message.get("usage"))
        elif told.type == "content_block_start" and isinstance(told.content_block, dict):
            self._begin(told.index, told.content_block)
        elif told.type == "content_block_delta" and isinstance(told.delta, dict):
            self._grow(told.index, told.delta)
        elif told.type == "content_block_stop":
            self._end(told.index)
        elif told.type == "message_delta" and isinstance(told.delta, dict):
            self.finish_reason = text_or_empty(told.delta.get("stop_reason")) or self.finish_reason
            self._count(told.usage)
        elif told.type == "message_stop":
            self._ended = True
        self.error = self.error or error_text(told.error)
        return bool(told.type == "message_start")

    def take_whole(self, body: bytes) -> None:
        """See `Capture.take_whole`."""
        told = decode_or_none(_told_decoder, body) or _AnthropicTold()
        self._begun = self._ended = isinstance(told.content, list)
        for index, block in enumerate(told.content if self._begun else []):
            if isinstance(block, dict):
                self._begin(index, block)
        self._count(told.usage)
        self.finish_reason = text_or_empty(told.stop_reason) or None
        self.error = error_text(told.error)

    def _count(self, usage: Any) -> None:
        self._counts |= _counts(usage)
        self.usage = _usage(self._counts)

    def _begin(self, index: Any, block: dict[str, Any]) -> None:
        kind = text_or_empty(block.get("type"))
        if not isinstance(index, int) or index in self._parts or kind in ("thinking", "redacted_thinking"):
            return
        size_bytes = 0 if kind == "text" else len(msgspec.json.encode(block))
        part = self._part(index, is_call=kind == "tool_use", size_bytes=size_bytes)
        if part is not None and kind == "text":
            self._append(part.text, text_or_empty(block.get("text")))
        elif part is not None:
            part.whole = _message([block])
            if not part.is_call:
                self._blocks[index] = block
            part.call_id, part.name = text_or_empty(block.get("id")), text_or_empty(block.get("name"))

    def _grow(self, index: Any, delta: dict[str, Any]) -> None:
        kind = text_or_empty(delta.get("type"))
        piece = text_or_empty(delta.get({"text_delta": "text", "input_json_delta": "partial_json"}.get(kind, "")))
        if not piece or not isinstance(index, int):
            return
        if kind == "text_delta" and index not in self._parts:
            self._begin(index, {"type": "text"})  # the server sent no `content_block_start`
        if (part := self._parts.get(index)) is not None:
            part.whole = None if part.is_call else part.whole  # a call's first event has an empty input
            self._append(part.text, piece)

    def _end(self, index: Any) -> None:
        block = self._blocks.pop(index, None) if isinstance(index, int) else None
        if block is not None and (text := self._parts[index].text):
            self._parts[index].whole = _message([{**block, "input": decode_or_none(ANYTHING, bytes(text))}])


def _message(content: list[Any]) -> Message | None:
    try:
        return parse_message(msgspec.json.encode({"role": "assistant", "content": content}))
    except (BadRequestBody, *UNREADABLE):
        return None


def _counts(usage: Any) -> dict[str, int]:
    if not isinstance(usage, dict):
        return {}
    return {name: usage[name] for name in (*_PROMPT_COUNTS, "output_tokens") if count_of(usage.get(name)) is not None}


def _usage(counts: dict[str, int]) -> Usage | None:
    """Sum up the prompt's tokens; `input_tokens` excludes cached ones."""
    if "input_tokens" not in counts:
        return None
    prompt_tokens = sum(counts.get(name, 0) for name in _PROMPT_COUNTS)
    return Usage(prompt_tokens, counts.get("output_tokens"), counts.get("cache_read_input_tokens"))


_ERROR_TYPES = {413: "request_too_large", 502: "api_error"}


class _Thread(msgspec.Struct, frozen=True):
    type: str = ""
    previous_message_id: str = ""


_thread_decoder = msgspec.json.Decoder(_Thread)


class AnthropicApi(Api):
    """Anthropic's messages; see `Api`."""

    name = "messages"
    path = "/messages"
    count_path = "/v1/messages/count_tokens"
    bounds = ("max_tokens",)
    standing = ("system", "tools")
    instructions = "system"
    parse_one = staticmethod(parse_message)
    capture = AnthropicCapture

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object with a list `messages` of objects, not nested too deeply, in valid Unicode."""
        members = top_level(body)
        raw_messages: list[Raw] = []
        continues: list[bool] = []
        for element in objects_in(members, self.list_name):
            pieces = pieces_of(element)
            raw_messages += pieces
            continues += [number > 0 for number in range(len(pieces))]
        goes_on_with = _thread(members.get("thread"))
        return self.request(body, members, raw_messages, cache, continues=continues, goes_on_with=goes_on_with)

    def elements(
        self, request: ModelRequest, left_out: frozenset[int], replaced: Mapping[int, str], blocks: Mapping[int, str]
    ) -> list[Raw]:
        """See `Api.elements`; a block goes after the tool results of its message."""
        changed = super().elements(request, left_out, replaced, blocks)
        numbers = list(accumulate(int(not same) for same in request.continues))  # each piece's element
        sizes = Counter(numbers)
        shown = (number for position, number in enumerate(numbers) if position not in left_out)
        pieces: dict[int, list[Raw]] = {}
        for number, piece in zip(shown, changed, strict=True):
            pieces.setdefault(number, []).append(piece)
        return [joined(some) if sizes[number] > 1 else some[0] for number, some in pieces.items()]

    def with_result(self, raw: Raw, role: str, text: str) -> Raw:
        """See `Api.with_result`; a tool's piece contains only its result."""
        if role != "tool":
            return super().with_result(raw, role, text)
        members = OBJECT.decode(raw)
        results = [with_content(block, text) for block in LIST.decode(members["content"])]
        return Raw(msgspec.json.encode(members | {"content": results}))

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`."""
        if message.role == "tool":
            result = {"type": "tool_result", "tool_use_id": message.tool_call_id, "content": message.text}
            return Raw(msgspec.json.encode({"role": "user", "content": [result]}))
        content: str | list[dict[str, Any]] = message.text
        if message.tool_calls:
            content = [{"type": "text", "text": message.text}] if message.text else []
            content += [
                {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
                for call in message.tool_calls
            ]
        return Raw(msgspec.json.encode({"role": message.role, "content": content}))

    def in_front(self, raw: Raw, text: str) -> Raw:
        """See `Api.in_front`."""
        return with_text_in_front(raw, text)

    def continues(self, message: Message, previous: Message | None) -> bool:
        """See `Api.continues`: the results of parallel calls share one user message."""
        return message.role == "tool" and previous is not None and previous.role == "tool"

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """See `Api.error_body`: Anthropic's shape."""
        error = {"type": _ERROR_TYPES.get(status, kind), "message": message}
        return msgspec.json.encode({"type": "error", "error": error})


def _thread(thread: Raw | None) -> str:
    """Return the thread, stored by the upstream, that a request continues; empty if there is none."""
    typed = None if thread is None else decode_or_none(_thread_decoder, thread)
    return f"thread {typed.previous_message_id}" if typed is not None and typed.type == "continue" else ""


ANTHROPIC = AnthropicApi()
