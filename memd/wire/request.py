"""A request to a model, the same for all APIs, and the functions that their parsers and encoders share.

Rule: a part that memd does not change keeps its bytes and its place; a body in which nothing changes is forwarded as it
came. What only one API has is in that API's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
from msgspec import Raw

from memd.errors import BadMemoryIn, BadRequestBody
from memd.messages import BLOCK_OPENING, Message, Speech, leading_count
from memd.selection import EVERYTHING, Selection
from memd.wire.lenient_json import (
    LIST,
    OBJECT,
    TEXT,
    UNREADABLE,
    decode_or_none,
    is_list,
    is_object,
    is_string,
    lenient_text,
    without_stand_ins,
)
from memd.wire.sideband import MemoryIn, decode_memory_in

_TOKENS_BOUND = 2.0**53  # a larger `max_tokens` is no bound (and may be infinite)

_DEPTH_TOLD = 500
"""Of brackets in brackets; how many can be read depends on the stack, some hundreds always."""
_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*"|([\[{])|[\]}]', re.DOTALL)

NOTHING_REPLACED: Mapping[int, str] = {}


class _TextPart(msgspec.Struct, frozen=True):
    text: Raw = Raw()


NULL = Raw(b"null")
_parts_decoder = msgspec.json.Decoder(list[_TextPart])
_number_decoder = msgspec.json.Decoder(float)


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request. `raw_messages`, `messages`, `digests` and `continues` run in parallel."""

    original: bytes | None
    """The body as it came; None if a sideband was removed, as it must not be forwarded."""
    fields: dict[str, Raw]
    """The top-level members in their order, without the list of messages and the sideband."""
    messages_at: int
    """The number of `fields` before the list of messages."""
    raw_messages: list[Raw]
    """Each message in its API's own syntax."""
    messages: list[Message]
    digests: list[bytes]
    """16-byte content digests."""
    read_before: int = 0
    """How many of the first messages earlier requests had too."""
    continues: list[bool]
    """For each message, whether it shared one element of the list with the message before it."""
    stream: bool
    model: str
    max_tokens: int | None
    """The bound of the reply; None if it has none."""
    window: int | None = None
    """The window that it asks for itself, in tokens (Ollama's `num_ctx`); None: the model's."""
    instructions: str
    """The text of the system prompt: of a member of its own, if the API has one, and the leading system messages."""
    standing_text: str
    """JSON text that takes room in the window besides the messages: tool definitions, separate instructions."""
    memory_in: MemoryIn | None
    """None if the request has none, or a malformed one."""
    memory_in_error: str | None
    goes_on_with: str = ""
    """The conversation that the upstream keeps, and of which these messages are the end; empty: they are all of it."""
    has_stand_ins: bool = False
    """Its parts have stand-ins (see `lenient_json`), which are not forwarded."""

    @property
    def user(self) -> str:
        """The member by which OpenAI's requests tell a program's users apart; empty if there is none."""
        return decode_or_none(TEXT, self.fields.get("user", NULL)) or ""

    @property
    def wanted(self) -> Selection:
        """The choice of chunks that may be recalled into it."""
        return EVERYTHING if self.memory_in is None else self.memory_in.filter or EVERYTHING


def instructions_in(raw: Raw, messages: Sequence[Message]) -> str:
    """Join a member's text, or the text parts that it lists, and the leading system messages."""
    parts = decode_or_none(_parts_decoder, raw) if is_list(raw) else None
    texts = [lenient_text(raw)] if is_string(raw) else [lenient_text(part.text) for part in parts or ()]
    return "\n".join([*texts, *(message.text for message in messages[: leading_count(messages)])])


def without_own_blocks(request: ModelRequest, is_own: Callable[[str], bool], speech: Speech) -> ModelRequest:
    """The request with its messages as they were said: without echoes of memory blocks that `is_own` knows."""
    messages = [
        speech.heard_alone(message, is_own) if BLOCK_OPENING in message.text else message
        for message in request.messages
    ]
    changed = [now is not before for now, before in zip(messages, request.messages, strict=True)]
    if not any(changed):
        return request
    digests = [
        message.content_digest if is_changed else digest
        for message, digest, is_changed in zip(messages, request.digests, changed, strict=True)
    ]
    return msgspec.structs.replace(request, messages=messages, digests=digests)


def renamed(request: ModelRequest, name: str) -> ModelRequest:
    """The request with this name for who speaks as the user and has none; what is forwarded stays as it is."""
    messages, digests = [*request.messages], [*request.digests]
    for place, message in enumerate(messages):
        if (message.opens_turn or message.is_result) and not message.name:
            messages[place] = msgspec.structs.replace(message, name=name)
            digests[place] = messages[place].content_digest
    return msgspec.structs.replace(request, messages=messages, digests=digests)


def top_level(body: bytes) -> dict[str, Raw]:
    """Split a body into its top-level members. Raises BadRequestBody: it is not a JSON object."""
    try:
        return OBJECT.decode(body)
    except RecursionError as error:
        raise BadRequestBody(f"the request body is nested too deeply, around byte {_deep_at(body)}") from error
    except ValueError as error:
        raise BadRequestBody(f"the request body is not a readable JSON object: {error}") from error


def objects_in(members: Mapping[str, Raw], name: str) -> list[Raw]:
    """Return the elements of the member `name`. Raises BadRequestBody: it is not a list of objects."""
    elements = list_in(members, name)
    check_objects(elements, name)
    return elements


def list_in(members: Mapping[str, Raw], name: str) -> list[Raw]:
    """Return the elements of the member `name`, of which each should be an object. Raises BadRequestBody: it is not a
    list."""
    if name not in members:
        raise BadRequestBody(f"the request body has no `{name}`; it must be a list of objects")
    try:
        return LIST.decode(members[name])
    except UNREADABLE as error:
        raise BadRequestBody(f"`{name}` is not a list of objects: {error}") from error


def check_objects(elements: Sequence[Raw], name: str) -> None:
    """Make sure that the elements of the member `name` are objects; raises BadRequestBody if one is not."""
    for position, raw in enumerate(elements):
        if not is_object(raw):
            raise BadRequestBody(f"`{name}[{position}]` is not an object")


def encode_body(request: ModelRequest, list_name: str, elements: list[Raw] | Raw) -> bytes:
    """Encode the body with `elements` as its messages: a list, or the string that an `input` may be."""
    members = list(request.fields.items())
    body: dict[str, Raw | list[Raw]] = dict(members[: request.messages_at])
    body[list_name] = elements
    body.update(members[request.messages_at :])
    encoded = msgspec.json.encode(body)
    return without_stand_ins(encoded) if request.has_stand_ins else encoded


def without_sideband(
    members: Mapping[str, Raw], list_name: str, *, reads: bool
) -> tuple[dict[str, Raw], int, list[Raw]]:
    """Return the other members, the number of them before the list, and every `memory_in` in order of precedence.

    Without `reads` a `memory_in` is one of the others.
    """
    fields: dict[str, Raw] = {}
    messages_at = 0
    in_metadata: list[Raw] = []
    on_top: list[Raw] = []
    for name, raw in members.items():
        if name == list_name:
            messages_at = len(fields)
        elif name == "memory_in" and reads:
            on_top.append(raw)
        elif name == "metadata" and reads:
            rest = decode_or_none(OBJECT, raw)
            if rest is None or "memory_in" not in rest:
                fields[name] = raw
                continue
            in_metadata.append(rest.pop("memory_in"))
            if rest:
                fields[name] = Raw(msgspec.json.encode(rest))
        else:
            fields[name] = raw
    return fields, messages_at, in_metadata + on_top


def memory_in_of(sidebands: Iterable[Raw]) -> tuple[MemoryIn | None, str | None]:
    """Decode the first MemoryIn that is not null; its fault if it is malformed."""
    for raw in sidebands:
        if bytes(raw) == b"null":
            continue
        try:
            return decode_memory_in(raw), None
        except BadMemoryIn as error:
            return None, str(error)
    return None, None


def _deep_at(body: bytes) -> int:
    """Where the brackets in a body become too many: the place of the first that is `_DEPTH_TOLD` deep."""
    depth = 0
    for found in _BRACKET.finditer(body):
        if found[1]:
            depth += 1
        elif found[0] in b"]}":
            depth -= 1
        if depth == _DEPTH_TOLD:
            return found.start()
    return len(body)


def first_bound(fields: Mapping[str, Raw], names: Sequence[str]) -> int | None:
    """Return the first of `names` that is a number from 0 on: -1 is unbounded in llama.cpp, other types are ignored."""
    for name in names:
        try:
            number = _number_decoder.decode(fields[name])
        except (KeyError, *UNREADABLE):
            continue
        if 0 <= number < _TOKENS_BOUND:
            return int(number)
    return None
