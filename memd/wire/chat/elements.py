"""Which elements of `messages` are one answer: some clients send its text and its calls as messages of their own.

Rule: an answer is one message, as its reply was captured, whatever its client makes of it; so it is known again. Codex
keeps a conversation as items and makes a message of each, of a reply's text in front of its calls or behind them:

    assistant: text | assistant: call | assistant: call | tool: result | tool: result
    assistant: call | assistant: text | tool: result

The results tell what belongs together: only calls that are answered right behind the elements are joined.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import msgspec
from msgspec import Raw

from memd.errors import BadRequestBody
from memd.messages import RESULT_ROLES, Message
from memd.wire.chat.message import parse_message
from memd.wire.lenient_json import UNREADABLE, decode_or_none, text_or_empty


class _Head(msgspec.Struct, gc=False):
    role: Any = None
    tool_call_id: Any = None


class _Call(msgspec.Struct, gc=False):
    id: str = ""


class _Part(msgspec.Struct, gc=False):
    """The members that tell whether an element is part of an answer; one of another type is looked into no further."""

    content: Any = None
    refusal: Any = None
    tool_calls: list[_Call] | None = None
    function_call: None = None
    name: Any = None

    @property
    def says_something(self) -> bool:
        """Whether it has more than calls and white space."""
        return bool(self.refusal) or bool(self.content.strip() if isinstance(self.content, str) else self.content)


_head_decoder = msgspec.json.Decoder(_Head)
_part_decoder = msgspec.json.Decoder(_Part)
_ONE_BEHIND_ANOTHER = b"\1\1"
_elements_decoder = msgspec.json.Decoder(list[Raw])


def are_apart(elements: Sequence[Raw]) -> bool:
    """Whether no two in a row can be one answer, whatever stands around them; quick: most clients have none."""
    return _ONE_BEHIND_ANOTHER not in _marked(elements)


def grouped(elements: Sequence[Raw]) -> list[Raw]:
    """Join the elements of one answer, their JSON texts separated by commas; all others stay alone."""
    marked = _marked(elements)
    if _ONE_BEHIND_ANOTHER not in marked:
        return list(elements)
    groups: list[Raw] = []
    run: list[Raw] = []  # of the assistant's elements
    for position, element in enumerate(elements):
        if run and not (marked[position - 1] and marked[position] and _is_assistants(run[-1], element)):
            groups += _with_answer_joined(run, elements, position)
            run = []
        run.append(element)
    return groups + _with_answer_joined(run, elements, len(elements))


def elements_of(raw: Raw | bytes) -> list[Raw]:
    """The elements of one message, `raw` being their JSON texts joined by commas.

    Raises:
        BadRequestBody: it cannot be read.
    """
    try:
        return _elements_decoder.decode(b"[%b]" % bytes(raw))
    except UNREADABLE as error:
        raise BadRequestBody(f"a message cannot be read: {error}; it must be a JSON object in valid UTF-8") from error


def parse_elements(raw: Raw | bytes) -> Message:
    """Parse the elements of one message, see `elements_of`.

    Raises:
        BadRequestBody: not JSON objects, or text in them is not valid Unicode.
    """
    return joined_answer([parse_message(element) for element in elements_of(raw)])


def joined_answer(parts: Sequence[Message]) -> Message:
    """Join the parts of one answer; a single message stays as it is."""
    if len(parts) == 1:
        return parts[0]
    return Message(
        role="assistant",
        text="\n".join(part.text for part in parts if part.text),
        tool_calls=tuple(call for part in parts for call in part.tool_calls),
        name=next((part.name for part in parts if part.name), ""),
        attachments=tuple(digest for part in parts for digest in part.attachments),
    )


def _marked(elements: Sequence[Raw]) -> bytes:
    """A byte for each: 1 where it may be an assistant's."""
    return bytes([b'"assistant"' in bytes(element) for element in elements])


def _is_assistants(*elements: Raw) -> bool:
    return all(_head(element).role == "assistant" for element in elements)


def _head(element: Raw) -> _Head:
    return decode_or_none(_head_decoder, element) or _Head()


def _with_answer_joined(run: list[Raw], elements: Sequence[Raw], end: int) -> list[Raw]:
    """A run of the assistant's elements, which ends before `end`, with those joined that are one answer."""
    if len(run) < 2:
        return run
    heads = takewhile(lambda head: head.role in RESULT_ROLES, map(_head, elements[end:]))
    answered = {text_or_empty(head.tool_call_id) for head in heads} - {""}
    start, texts, calls, names = len(run), 0, 0, set[str]()
    for position in reversed(range(len(run))):
        part = decode_or_none(_part_decoder, run[position])
        if part is None:
            break
        texts += part.says_something
        names |= {text_or_empty(part.name)} - {""}
        if texts > 1 or len(names) > 1 or not answered.issuperset(call.id for call in part.tool_calls or ()):
            break
        start, calls = position, calls + len(part.tool_calls or ())
    return [*run[:start], Raw(b",".join(map(bytes, run[start:])))] if calls and start < len(run) else run
