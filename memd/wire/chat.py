"""OpenAI's chat completions, `POST /v1/chat/completions`: requests to messages and back, and replies.

Rule: any JSON object becomes some `Message`, however odd its members; only unreadable JSON raises. A reply becomes the
same `Message` as the client's echo of it. Encoding changes as little as possible: a message keeps its bytes unless a
block is merged into it.

A message is usually one element of `messages`. If a client splits an answer into several, they are joined into one
message again, like the captured reply; its element of `raw_messages` is their JSON texts joined by commas. Codex stores
a conversation as items and sends each as a message, a reply's text before or after its calls:

    assistant: text | assistant: call | assistant: call | tool: result | tool: result
    assistant: call | assistant: text | tool: result

Only calls that are answered right after these elements are joined, because the results show what belongs together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby, islice, pairwise, takewhile
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import DIGEST_BYTES, RESULT_ROLES, Message, ToolCall
from memd.wire.api import Api, MessageCache, ModelRequest, list_in, top_level
from memd.wire.lenient_json import (
    LIST,
    OBJECT,
    UNREADABLE,
    decode_or_none,
    is_list,
    is_object,
    is_string,
    lenient_text,
    read_mended,
)
from memd.wire.reply import (
    CAPTURE_BYTES_MAX,
    DONE,
    Capture,
    ReplyPart,
    SseEvent,
    Usage,
    count_of,
    error_text,
    joined_answer,
    usage_of,
)

_WHITE_SPACE = b" \t\n\r"
_BLOCK_GAP = "\n\n"  # between a block and the content that it is merged into

_TEXT_TYPES = frozenset({"text", "input_text", "output_text"})
_UNHASHED_TYPES = frozenset({"reasoning", "thinking", "redacted_thinking"})
_IMAGE_TYPES = frozenset({"image_url", "image", "input_image"})
_AUDIO_TYPES = frozenset({"input_audio", "audio", "audio_url"})


class _MessageMembers(msgspec.Struct, frozen=True):
    """The members of a message that memd reads; absent ones are empty."""

    role: Raw = Raw()
    content: Raw = Raw()
    refusal: Raw = Raw()
    tool_calls: Raw = Raw()
    function_call: Raw = Raw()
    tool_call_id: Raw = Raw()
    name: Raw = Raw()


class _ContentPart(msgspec.Struct, frozen=True):
    type: Raw = Raw()
    text: Raw = Raw()
    refusal: Raw = Raw()


class _CallMembers(msgspec.Struct, frozen=True):
    id: Raw = Raw()
    function: Raw = Raw()
    custom: Raw = Raw()


class _FunctionMembers(msgspec.Struct, frozen=True):
    name: Raw = Raw()
    arguments: Raw = Raw()
    input: Raw = Raw()


_members_decoder = msgspec.json.Decoder(_MessageMembers)
_part_decoder = msgspec.json.Decoder(_ContentPart)
_call_decoder = msgspec.json.Decoder(_CallMembers)
_function_decoder = msgspec.json.Decoder(_FunctionMembers)


def parse_message(raw: Raw | bytes) -> Message:
    """Parse the JSON object `raw` into a message without reasoning. Raises BadRequestBody: not a JSON object, or not
    valid Unicode (llama.cpp refuses such a body too)."""
    try:
        members = _members_decoder.decode(raw)
        content = members.content
        text, attachments = content_of(LIST.decode(content)) if is_list(content) else (lenient_text(content), ())
        raw_calls = LIST.decode(members.tool_calls) if is_list(members.tool_calls) else []
        calls = [_tool_call(bytes(one)) for one in raw_calls]
        if is_object(members.function_call):
            calls.append(_function("", bytes(members.function_call)))
        return Message(
            role=lenient_text(members.role),
            text="\n".join(filter(None, (text, lenient_text(members.refusal)))),
            tool_calls=tuple(calls),
            tool_call_id=lenient_text(members.tool_call_id),
            name=lenient_text(members.name),
            attachments=attachments,
        )
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def with_text_in_front(raw: Raw | bytes, text: str, *, part_type: str = "text") -> Raw:
    """Put `text` and an empty line in front of the content of the message `raw`; all else keeps its bytes and order.
    Content that is neither string, list of parts nor null stays unchanged; no upstream accepts it."""
    members = OBJECT.decode(raw)
    content = bytes(members.get("content", b"null"))
    if is_string(content):
        opened = msgspec.json.encode(text + _BLOCK_GAP)
        members["content"] = Raw(opened[:-1] + content[1:])
    elif is_list(content):
        part = msgspec.json.encode({"type": part_type, "text": text + _BLOCK_GAP})
        comma = b"" if content[1:].lstrip(_WHITE_SPACE).startswith(b"]") else b","
        members["content"] = Raw(b"[" + part + comma + content[1:])
    elif content == b"null":
        members["content"] = Raw(msgspec.json.encode(text))
    return Raw(msgspec.json.encode(members))


def content_of(parts: Iterable[Raw]) -> tuple[str, tuple[bytes, ...]]:
    """Return the text of a message's parts, and the digests of the non-text ones."""
    texts: list[str] = []
    attachments: list[bytes] = []
    for raw in parts:
        text, digest = _part(raw)
        if digest is not None:
            attachments.append(digest)
        if text is not None:
            texts.append(text)
    return "\n".join(texts), tuple(attachments)


def _part(raw: Raw) -> tuple[str | None, bytes | None]:
    """Return a content part's text (None if it does not count) and, unless it is text, its digest."""
    encoded = bytes(raw)
    if is_string(encoded):
        return lenient_text(raw), None
    kind = ""
    if is_object(encoded):
        part = _part_decoder.decode(encoded)
        kind = lenient_text(part.type)
        if kind in _TEXT_TYPES or (not kind and bytes(part.text)):
            return lenient_text(part.text), None
        if kind == "refusal":
            return lenient_text(part.refusal), None
        if kind in _UNHASHED_TYPES:
            return None, None
    label = "[image]" if kind in _IMAGE_TYPES else "[audio]" if kind in _AUDIO_TYPES else "[file]"
    return label, hashlib.blake2b(encoded, digest_size=DIGEST_BYTES).digest()


def _tool_call(encoded: bytes) -> ToolCall:
    if not is_object(encoded):
        return ToolCall(id="", name="", arguments=encoded.decode())
    call = _call_decoder.decode(encoded)
    return _function(lenient_text(call.id), bytes(call.function) or bytes(call.custom))


def _function(call_id: str, encoded: bytes) -> ToolCall:
    if not is_object(encoded):
        return ToolCall(id=call_id, name="", arguments=encoded.decode())
    function = _function_decoder.decode(encoded)
    arguments = function.arguments if bytes(function.arguments) else function.input
    return ToolCall(id=call_id, name=lenient_text(function.name), arguments=lenient_text(arguments))


def grouped(elements: Sequence[Raw], messages: Sequence[Message]) -> list[Raw]:
    """Join the elements of each answer, their JSON texts separated by commas; others stay alone. `messages`: each
    element parsed alone."""
    groups: list[Raw] = []
    for role, run in groupby(range(len(elements)), key=lambda place: messages[place].role):
        places = [*run]
        start = _answer_start(messages, places) if role == "assistant" else places[-1] + 1
        groups += elements[places[0] : start]
        if start <= places[-1]:
            groups.append(Raw(b",".join(map(bytes, elements[start : places[-1] + 1]))))
    return groups


def _answer_start(messages: Sequence[Message], run: Sequence[int]) -> int:
    """Return where the answer at the end of a run of assistant messages begins; past the run if it has no calls."""
    end = run[-1] + 1
    results = takewhile(lambda one: one.role in RESULT_ROLES, islice(messages, end, None))
    answered = {one.tool_call_id for one in results} - {""}
    start, texts, has_calls, names = end, 0, False, set[str]()
    for place in reversed(run):
        message = messages[place]
        texts += bool(message.text.strip())
        names |= {message.name} - {""}
        if texts > 1 or len(names) > 1 or not answered.issuperset(call.id for call in message.tool_calls):
            break
        start, has_calls = place, has_calls or bool(message.tool_calls)
    return start if has_calls else end


def elements_of(raw: Raw | bytes) -> list[Raw]:
    """Split a message into its elements; `raw` is their JSON texts joined by commas. Raises BadRequestBody:
    unreadable."""
    try:
        return LIST.decode(b"".join((b"[", memoryview(raw), b"]")))
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def parse_elements(raw: Raw | bytes) -> Message:
    """Parse the elements of one message, see `elements_of`. Raises BadRequestBody: not JSON objects, or not valid
    Unicode."""
    return joined_answer([parse_message(element) for element in elements_of(raw)])


class _Choice(msgspec.Struct, frozen=True):
    index: Any = 0
    delta: Any = None
    message: Raw = Raw()
    finish_reason: Any = None


class _ChatAnswer(msgspec.Struct, frozen=True):
    """The members of a stream's chunk, or of a whole answer, that memd reads."""

    choices: list[_Choice] | None = None
    usage: Any = None
    timings: Any = None
    error: Any = None


_answer_decoder = msgspec.json.Decoder(_ChatAnswer)


_TEXT, _REFUSAL, _FUNCTION = -3, -2, -1
"""Places of an answer's parts before its calls; the last is a call in the older form."""


class ChatCapture(Capture):
    """Captures choice 0 of a stream of chunks."""

    def __init__(self, bytes_max: int = CAPTURE_BYTES_MAX) -> None:
        super().__init__(bytes_max)
        self._parts[_TEXT] = ReplyPart()
        self._content = self._parts[_TEXT].text

    def take(self, event: SseEvent) -> bool:
        """See `Capture.take`: `memory_out` belongs in a chunk with a choice; elsewhere it breaks clients."""
        if event.data.strip() == DONE:
            self._ended = True
            return False
        answer = decode_or_none(_answer_decoder, event.data)
        if answer is None:
            return False
        if answer.usage is not None or answer.timings is not None:
            self.usage = _usage(answer) or self.usage
        if answer.error is not None:
            self.error = self.error or error_text(answer.error)
        for choice in answer.choices or ():
            if choice.index == 0:
                if choice.finish_reason is not None:
                    self.finish_reason = _text(choice.finish_reason) or self.finish_reason
                if isinstance(choice.delta, dict):
                    self._take_delta(choice.delta)
                elif bytes(choice.message):
                    self._begun, self._parts[_TEXT].whole = True, parsed_or_none(choice.message, parse_message)
        return bool(answer.choices)

    def _take_delta(self, delta: dict[str, Any]) -> None:
        self._begun = True
        self._append(self._content, _text(delta.get("content")))
        if len(delta) == 1 and "content" in delta:  # nearly every delta of a stream
            return
        if refusal := _text(delta.get("refusal")):
            self._append(self._parts.setdefault(_REFUSAL, ReplyPart()).text, refusal)
        calls = delta.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict):
                self._take_call(call)
        if isinstance(function := delta.get("function_call"), dict):
            self._take_function(self._part(_FUNCTION, is_call=True), function)

    def _take_call(self, delta: dict[str, Any]) -> None:
        """Capture a tool-call delta. Without `index` it continues the last call, or with an id begins a new one."""
        index = delta.get("index")
        if not isinstance(index, int) or index < 0:
            index = max(0, self._next_place - (not delta.get("id")))
        call = self._part(index, is_call=True)
        if call is not None:
            self._name(call, _text(delta.get("id")), "")
        for member in ("function", "custom"):
            if isinstance(function := delta.get(member), dict):
                self._take_function(call, function)

    @property
    def _next_place(self) -> int:
        return max(0, *(place + 1 for place in self._parts if isinstance(place, int)))

    def _take_function(self, call: ReplyPart | None, function: dict[str, Any]) -> None:
        if call is None:
            return
        self._name(call, "", _text(function.get("name")))
        arguments = function.get("arguments", function.get("input"))
        if isinstance(arguments, dict):
            arguments = msgspec.json.encode(arguments).decode()
        self._append(call.text, _text(arguments))


def parsed_or_none(raw: Raw, parse: Callable[[Raw], Message]) -> Message | None:
    """Parse a message or item of a whole answer, with stand-ins if needed; None if it is unreadable."""
    try:
        return read_mended(parse, raw)
    except BadRequestBody:
        return None


def _usage(answer: _ChatAnswer) -> Usage | None:
    """Read OpenAI's `usage`, else llama.cpp's `timings`: prompt_n tokens were evaluated, cache_n were cached."""
    usage = usage_of(answer.usage, "prompt_tokens", "completion_tokens")
    timings = answer.timings if isinstance(answer.timings, dict) else {}
    cache_n, prompt_n = count_of(timings.get("cache_n")), count_of(timings.get("prompt_n"))
    if usage is not None:
        return usage if usage.cached_tokens is not None else msgspec.structs.replace(usage, cached_tokens=cache_n)
    if prompt_n is not None and cache_n is not None:
        return Usage(prompt_n + cache_n, count_of(timings.get("predicted_n")), cache_n)
    return None


def _text(value: Any) -> str:
    """Return a string unchanged, the joined text parts of a list, or else the empty string."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str))
    return ""


class ChatApi(Api):
    """OpenAI's chat completions; see `Api`."""

    name = "chat"
    path = "/chat/completions"
    count_path = "/v1/chat/completions/input_tokens"
    bounds: tuple[str, ...] = ("max_completion_tokens", "max_tokens", "n_predict")
    standing: tuple[str, ...] = ("tools", "functions")
    parse_one = staticmethod(parse_elements)
    capture = ChatCapture

    def parse(self, body: bytes, cache: MessageCache | None = None) -> ModelRequest:
        """See `Api.parse`: a JSON object with a list `messages` of objects, not nested too deeply, in valid Unicode."""
        members = top_level(body)
        request = self.request(body, members, elements := list_in(members, self.list_name), cache)
        are_apart = not any(one.role == other.role == "assistant" for one, other in pairwise(request.messages))
        return request if are_apart else self.request(body, members, grouped(elements, request.messages), cache)

    def encode_message(self, message: Message) -> Raw:
        """See `Api.encode_message`."""
        members: dict[str, Any] = {"role": message.role, "content": message.text}
        if message.tool_calls:
            members["content"] = message.text or None
            members["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in message.tool_calls
            ]
        if message.tool_call_id:
            members["tool_call_id"] = message.tool_call_id
        if message.name:
            members["name"] = message.name
        return Raw(msgspec.json.encode(members))

    def in_front(self, raw: Raw, text: str) -> Raw:
        """See `Api.in_front`."""
        first, *others = elements_of(raw)
        return Raw(b",".join([with_text_in_front(first, text), *others]))


CHAT = ChatApi()
