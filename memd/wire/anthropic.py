"""Anthropic's `POST /v1/messages`: requests to messages and back, and replies.

Rule: a message is translated into a chat message as llama.cpp does it, so that a conversation has the same digests
through every API. A user message with tool results is parsed into several messages and encoded as one element again. A
*piece* has the blocks of one `Message`; joining all pieces of an element gives that element, block by block.

    element  {"role": "user", "content": [tool_result a, tool_result b, text, image]}
    pieces        tool: [tool_result a]    tool: [tool_result b]    user: [text, image]

The events of
a reply are put together to a message of the API, which is parsed as an echo is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import Message
from memd.wire import chat
from memd.wire.api import Api, MessageCache, ModelRequest, objects_in, top_level
from memd.wire.chat import with_text_in_front
from memd.wire.lenient_json import (
    LIST,
    OBJECT,
    UNREADABLE,
    decode_or_none,
    is_list,
    is_object,
    text_or_empty,
    with_content,
)
from memd.wire.reply import CAPTURE_BYTES_MAX, STRUCTURE_BYTES, Capture, Reply, SseEvent, Usage, count_of, error_text

_PLACES = "memd_places"  # member of a piece: the places of its blocks in the element; never forwarded
_TOOL_RESULT = b'"tool_result"'
_UNHASHED_TYPES = frozenset({b'"thinking"', b'"redacted_thinking"'})


class _ContentBlock(msgspec.Struct, frozen=True):
    """The members of a content block that memd reads; an absent one is empty."""

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
    """Parse one piece into a message without reasoning. Raises BadRequestBody: not a JSON object, or text in it is not
    valid Unicode."""
    try:
        members = OBJECT.decode(raw)
        if not is_list(members.get("content", Raw())):
            return chat.parse_message(raw)
        translated = _translated(members.get("role"), LIST.decode(members["content"]))
        return chat.parse_message(msgspec.json.encode(translated))
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def pieces_of(element: Raw) -> list[Raw]:
    """Split a user message into its tool results, one by one, and the rest; any other message stays whole. Raises
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


def joined(pieces: Sequence[Raw], texts: Sequence[str]) -> Raw:
    """Join the pieces of one element that are to be shown. `texts`: the text to put in front of each piece's blocks;
    empty for none."""
    placed: list[tuple[int, Raw]] = []
    element: dict[str, Raw] = {}
    for piece, text in zip(pieces, texts, strict=True):
        members = OBJECT.decode(with_text_in_front(piece, text) if text else piece)
        blocks = LIST.decode(members["content"])
        known = members.pop(_PLACES, None)
        places = list(range(len(placed), len(placed) + len(blocks))) if known is None else _places_decoder.decode(known)
        places = places[:1] * (len(blocks) - len(places)) + places  # for a block added in front
        placed += zip(places, blocks, strict=True)
        element = element or members
    placed.sort(key=lambda block: block[0])
    element["content"] = Raw(msgspec.json.encode([block for _, block in placed]))
    return Raw(msgspec.json.encode(element))


def _block(raw: Raw) -> _ContentBlock:
    """Decode a content block; one that is no object has no members."""
    return _block_decoder.decode(raw) if is_object(raw) else _ContentBlock()


def _input(arguments: str) -> Raw:
    """Return arguments as the object that `input` must be; other text, which a model may write, as a member of one."""
    try:
        OBJECT.decode(arguments.strip() or "{}")
    except UNREADABLE:
        return Raw(msgspec.json.encode({"arguments": arguments}))
    return Raw((arguments.strip() or "{}").encode())


def _translated(role: Raw | None, blocks: list[Raw]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": role if role is not None else "", "content": []}
    calls: list[Any] = []
    for raw in blocks:
        block = _block(raw)
        kind = bytes(block.type)
        if kind == _TOOL_RESULT:
            content: Any = block.content
            if is_list(content):
                content = [_part(one, _block(one)) for one in LIST.decode(content)]
            return {"role": "tool", **_present(tool_call_id=block.tool_use_id, content=content)}
        if kind == b'"tool_use"':
            function = _present(name=block.name, arguments=block.input)
            calls.append({**_present(id=block.id), "function": function})
        elif kind not in _UNHASHED_TYPES:
            message["content"].append(_part(raw, block))
    return {**message, "tool_calls": calls}


def _part(raw: Raw, block: _ContentBlock) -> Any:
    """Translate a block into a content part, without `cache_control`, which clients move from turn to turn."""
    kind = bytes(block.type)
    if kind == b'"text"':
        return {"type": "text", **_present(text=block.text)}
    if kind == b'"image"' and (url := _image_url(block.source)):
        return {"type": "image_url", "image_url": {"url": url}}
    if not kind:
        return raw
    members = OBJECT.decode(raw)
    members.pop("cache_control", None)
    return members


def _image_url(source: Raw) -> str:
    """Return the URL of an image as in the chat API; empty for an unknown kind of source."""
    image = decode_or_none(_source_decoder, source)
    if image is None:
        return ""
    return f"data:{image.media_type};base64,{image.data}" if image.type == "base64" else image.url


def _present(**members: Any) -> dict[str, Any]:
    """Leave out the members that are absent in the original: their empty bytes are no JSON."""
    return {name: value for name, value in members.items() if not isinstance(value, Raw) or bytes(value)}


_PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")


class _AnthropicAnswer(msgspec.Struct, frozen=True):
    """The members of a whole answer that memd reads."""

    role: Any = None
    content: Any = None
    stop_reason: Any = None
    usage: Any = None
    error: Any = None


class _AnthropicEvent(msgspec.Struct, frozen=True):
    type: Any = None
    index: Any = 0
    message: Any = None
    content_block: Any = None
    delta: Any = None
    usage: Any = None
    error: Any = None


_answer_decoder = msgspec.json.Decoder(_AnthropicAnswer)
_event_decoder = msgspec.json.Decoder(_AnthropicEvent)


class _PartialBlock(msgspec.Struct):
    """A content block whose deltas are still coming."""

    block: dict[str, Any]
    """The block as it began, without the member that the deltas lengthen."""
    text: bytearray = msgspec.field(default_factory=bytearray)
    """The member that the deltas lengthen: the text of a text block, the input of a tool call."""


class AnthropicCapture(Capture):
    """Captures the reply of one stream."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        super().__init__(bytes_max)
        self._started = False
        self._stopped = False
        self._counts: dict[str, int] = {}
        self._blocks: dict[int, _PartialBlock] = {}

    @property
    def finished(self) -> bool:
        """See `Capture.finished`."""
        return self.error is None and (self._stopped or self.finish_reason is not None)

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in the first event, `message_start`."""
        decoded = decode_or_none(_event_decoder, event.data)
        if decoded is None:
            return False
        if decoded.type == "message_start" and isinstance(decoded.message, dict):
            self._started = True
            self._count(decoded.message.get("usage"))
        elif decoded.type == "content_block_start" and isinstance(decoded.content_block, dict):
            self._begin(decoded.index, decoded.content_block)
        elif decoded.type == "content_block_delta" and isinstance(decoded.delta, dict):
            self._grow(decoded.index, decoded.delta)
        elif decoded.type == "message_delta" and isinstance(decoded.delta, dict):
            self.finish_reason = text_or_empty(decoded.delta.get("stop_reason")) or self.finish_reason
            self._count(decoded.usage)
        elif decoded.type == "message_stop":
            self._stopped = True
        self.error = self.error or error_text(decoded.error)
        return bool(decoded.type == "message_start")

    def message(self) -> Message | None:
        """See `Capture.message`."""
        if not (self._started or self._blocks):
            return None
        message = _message([_block_now(self._blocks[index]) for index in sorted(self._blocks)])
        is_one = message is not None and (self.finished or message.text or message.tool_calls or message.attachments)
        return message if is_one else None

    def _count(self, usage: Any) -> None:
        self._counts |= _counts(usage)
        self.usage = _usage(self._counts)

    def _begin(self, index: Any, block: dict[str, Any]) -> None:
        kind = text_or_empty(block.get("type"))
        if not isinstance(index, int) or index in self._blocks or kind in ("thinking", "redacted_thinking"):
            return
        partial = _PartialBlock({**block, "type": kind})
        if kind == "text":
            partial.block = {"type": kind}
            size = 0
        else:
            size = len(msgspec.json.encode(partial.block))
        if self._budget.take(STRUCTURE_BYTES + size):
            self._blocks[index] = partial
            partial.text += self._budget.cut(text_or_empty(block.get("text")) if kind == "text" else "")

    def _grow(self, index: Any, delta: dict[str, Any]) -> None:
        member = {"text_delta": "text", "input_json_delta": "partial_json"}.get(text_or_empty(delta.get("type")), "")
        piece = text_or_empty(delta.get(member))
        if not piece or not isinstance(index, int):
            return
        if index not in self._blocks and member == "text":
            self._begin(index, {"type": "text"})  # the server sent no `content_block_start`
        if index in self._blocks:
            self._blocks[index].text += self._budget.cut(piece)


def _message(content: list[Any]) -> Message | None:
    try:
        return parse_message(msgspec.json.encode({"role": "assistant", "content": content}))
    except (BadRequestBody, *UNREADABLE):
        return None


def _block_now(partial: _PartialBlock) -> dict[str, Any]:
    """Return the block as the client has it now. The input of a call stays text, because it may be incomplete."""
    if partial.block["type"] == "text":
        return {**partial.block, "text": partial.text.decode()}
    return {**partial.block, "input": partial.text.decode()} if partial.text else partial.block


def _counts(usage: Any) -> dict[str, int]:
    if not isinstance(usage, dict):
        return {}
    return {name: usage[name] for name in (*_PROMPT_COUNTS, "output_tokens") if count_of(usage.get(name)) is not None}


def _usage(counts: dict[str, int]) -> Usage | None:
    """Sum up the prompt's tokens: `input_tokens` are only those that were not cached."""
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
        """See `Api.elements`; a block stands behind the tool results of its message."""
        raws, elements = request.raw_messages, list[Raw]()
        for element in _elements(request.continues):
            shown = [position for position in element if position not in left_out]
            raw = [raws[p] for p in shown]
            for place, p in enumerate(shown):
                if p in replaced and request.messages[p].role == "tool":  # the piece is nothing but its result
                    members = OBJECT.decode(raws[p])
                    blocks_of = [with_content(block, replaced[p]) for block in LIST.decode(members["content"])]
                    raw[place] = Raw(msgspec.json.encode(members | {"content": blocks_of}))
                elif p in replaced:
                    raw[place] = with_content(raws[p], replaced[p])
            if len(element) > 1 and shown:
                elements.append(joined(raw, [blocks.get(position, "") for position in shown]))
            elif shown:
                elements.append(with_text_in_front(raw[0], blocks[shown[0]]) if shown[0] in blocks else raw[0])
        return elements

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

    def parse_reply(self, body: bytes) -> Reply:
        """See `Api.parse_reply`."""
        answer = decode_or_none(_answer_decoder, body)
        if answer is None:
            return Reply(message=None)
        message = _message(answer.content) if isinstance(answer.content, list) else None
        stop_reason = text_or_empty(answer.stop_reason) or None
        return Reply(message, _usage(_counts(answer.usage)), stop_reason, error_text(answer.error))

    def error_body(self, status: int, message: str, kind: str) -> bytes:
        """See `Api.error_body`: Anthropic's shape."""
        error = {"type": _ERROR_TYPES.get(status, kind), "message": message}
        return msgspec.json.encode({"type": "error", "error": error})


def _thread(thread: Raw | None) -> str:
    """The thread that a request goes on with, which the upstream keeps; empty if it has none."""
    typed = None if thread is None else decode_or_none(_thread_decoder, thread)
    return f"thread {typed.previous_message_id}" if typed is not None and typed.type == "continue" else ""


def _elements(continues: Sequence[bool]) -> Iterator[range]:
    """Group the positions of the messages by element of the list."""
    begins = [position for position, same in enumerate(continues) if not same]
    return (range(begin, end) for begin, end in pairwise([*begins, len(continues)]))


ANTHROPIC = AnthropicApi()
