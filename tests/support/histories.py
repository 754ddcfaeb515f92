"""Histories in shorthand for the tests of the hot buffer: `"u:hello"` is a user's message, `"a:hi"` an answer.

`"c:read#7"` is an assistant that calls a tool with the call id 7, `"t:done#7"` the result of that call, `"p:reminder"`
what a program wrote in the user's name, `"r:failed"` a result that it gives there.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from memd.conversation.conversation import Conversation, History
from memd.conversation.events import BufferEvent, decode_event, encode_event
from memd.conversation.hot_buffer import Arrival, HotBuffer
from memd.messages import Block, BlockChunk, Message, ToolCall, chain_all

WINDOW_TURNS = 4


def said(shorthand: str) -> Message:
    """The message that a shorthand stands for."""
    kind, _, text = shorthand.partition(":")
    text, _, call_id = text.partition("#")
    if kind == "c":
        return Message("assistant", "", tool_calls=tuple(ToolCall(one, text, "{}") for one in call_id.split(",")))
    if kind == "t":
        return Message("tool", text, tool_call_id=call_id)
    if kind == "p":
        return Message("user", text, own_words="")
    if kind == "r":
        return Message("user", text, is_result=True)
    return Message({"u": "user", "a": "assistant", "s": "system"}[kind], text)


def history_of(messages: Iterable[Message], tokens: int = 10, session: str | None = None) -> History:
    """These messages, each of so many tokens."""
    said = list(messages)
    return History(said, [message.content_digest for message in said], lambda some, _: [tokens] * len(some), session)


def digest_at(history: Sequence[str]) -> bytes:
    """The chained digest of the last message of a history."""
    return chain_all(said(one).content_digest for one in history)[-1]


def new_buffer() -> HotBuffer:
    """An empty buffer whose conversations are called 1, 2, 3 …"""
    names = itertools.count(1)
    return HotBuffer(lambda: str(next(names)), WINDOW_TURNS)


def receive(buffer: HotBuffer, *history: str, session: str | None = None, now: float = 0.0) -> Arrival:
    """A request with this history; every message costs ten tokens."""
    return buffer.receive(history_of(map(said, history), session=session), now)


def glance(buffer: HotBuffer, *history: str, session: str | None = None) -> Arrival:
    """The same for a request that leaves no trace."""
    return buffer.glance(history_of(map(said, history), session=session))


def talk(buffer: HotBuffer, *history: str, session: str | None = None, now: float = 0.0) -> Conversation:
    """A request with all but the last message, which is the model's answer to it."""
    arrival = receive(buffer, *history[:-1], session=session, now=now)
    return buffer.reply(arrival, said(history[-1]), 10, now)


def conversation_of(*history: str) -> Conversation:
    """A conversation that holds this history."""
    return receive(new_buffer(), *history).conversation


def texts(conversation: Conversation) -> list[str]:
    """What its messages say; a message that left the prompt has no text any more."""
    return [item.message.text if item.message is not None else "(left out)" for item in conversation.messages]


def block(name: str, tokens: int = 10) -> Block:
    """A block that shows one chunk."""
    uuid = name.encode().ljust(16, b"\0")
    return Block(f"[memory] {name}", tokens, (BlockChunk(uuid.hex()[:4], uuid, "default", 1),))


def state(buffer: HotBuffer) -> list[Any]:
    """Everything that a buffer is: its conversations in order, what was injected, what stands in their dictionaries."""
    # How often it changed is no state; see `Conversation.origin` and `replaced` on what is not journalled.
    states = ({**vars(one), "changes": None, "origin": None, "replaced": None} for one in buffer.conversations())
    return [*states, *buffer.retelling()()]


def replayed(events: Sequence[BufferEvent]) -> HotBuffer:
    """A buffer out of a journal, by way of its bytes."""
    again = new_buffer()
    again.replay([decode_event(encode_event(event)) for event in events])
    return again
