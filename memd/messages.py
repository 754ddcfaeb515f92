"""A chat message as memd sees it, whatever API it came through, what was said in it, and the digests that identify it.

Rule: pure values. `wire` makes `Message`s out of bytes, `conversation` works on them, nothing else knows JSON shapes.
Two texts have one form, which is hashed, if a client that means no other message makes one of the other; nothing else.
Prompts and what is stored have the text as it was said. What is known of clients:

    line ends                 CRLF comes back as LF: aider, Zed and whatever keeps chats in text files on Windows
    white space at line ends  gone: editors' chats (Continue, Zed), Markdown renderers; models end lines with blanks
    Unicode                   NFC comes back as NFD, and the other way round: files and clipboards of macOS
    thinking                  `<think>…</think>`, and the like, comes back as `<details type="reasoning">…</details>`
                              (Open WebUI), or not at all (see `without_thinking`)
    links                     bare ones come back as `[link](link)` or `<link>`: rich-text editors (LobeChat, Notion)
    a call's arguments        reordered, reformatted, with defaults added (claude-code's `replace_all: false`): a call
                              that has an id is known by that
    numbers in arguments      as JavaScript reads and writes them

What was said is found in time linear in the text, which is untrusted; a text in which nothing is found is said as it
stands. Programs wrap a user's words; what a model wrote is its own, and a tool's result, which may be any file, loses
no more than what stands at its ends, and never all of it. A whole message that a program wrote in the name of the user
or of the model was said by neither; one in which it gives the model results is stored like those of tools, and asks
nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

_EXACT_IN_DOUBLE_MAX = 2**53
_LINK = re.compile(r"\[([^\[\]\n]{1,2000})\]\((?:https?://|mailto:)?\1/?\)|<(https?://[^\s<>]{1,2000})>")
_THINKING = {
    '<details type="reasoning"': "</details>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
    "[THINK]": "[/THINK]",
    **{f"<{tag}>": f"</{tag}>" for tag in ("think", "thinking", "reason", "reasoning", "thought", "Thought")},
}
"""The marks around the thinking of DeepSeek-R1, Qwen 3 and others, and what Open WebUI makes of all of them."""
_THINKING_OPENED = re.compile(rf"\s*({'|'.join(map(re.escape, _THINKING))})")


def with_line_feeds(text: str) -> str:
    """The text with a line feed where a line ends, whatever ended it."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def normal_text(text: str) -> str:
    """The text in its form; quick where there is nothing to change."""
    text = with_line_feeds(text)
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])  # a regex takes six times as long
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if "](" in text or "<http" in text:
        text = _LINK.sub(lambda found: found[1] or found[2], text)
    return text.strip()


def without_thinking(text: str) -> str:
    """An answer without the thinking that it begins with; an open end is an interrupted reply's, and stays."""
    done = 0
    while opened := _THINKING_OPENED.match(text, done):
        closing = _THINKING[opened[1]]
        end = text.find(closing, opened.end())
        if end < 0:
            break
        done = end + len(closing)
    return text[done:].strip() if done else text


def canonical_arguments(arguments: str) -> str:
    """Tool arguments in one form for all serialisations of the same JSON value (none at all: `{}`); else unchanged."""
    try:
        value = _as_javascript(json.loads(arguments.strip() or "{}"))
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, OverflowError, RecursionError):  # not JSON, a number or a nesting that no client can parse
        return arguments


def _as_javascript(value: Any) -> Any:
    """`value` with its numbers as a JavaScript client reads and writes them: doubles, 1.0 without its fraction."""
    if isinstance(value, int) and abs(value) > _EXACT_IN_DOUBLE_MAX:
        return int(float(value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_as_javascript(item) for item in value]
    if isinstance(value, dict):
        return {key: _as_javascript(item) for key, item in value.items()}
    return value


DIGEST_BYTES = 16
ROOT_DIGEST = bytes(DIGEST_BYTES)
"""The predecessor's digest of the first message of a conversation."""

LEADING_ROLES = frozenset({"system", "developer"})
"""Roles whose *leading* run is the client's standing instruction: always forwarded, never hashed, never stored."""

RESULT_ROLES = frozenset({"tool", "function"})
"""Roles of a tool's result; `function` is the older name."""

CALL_CHARACTERS_MAX = 200
"""Of a call, in front of what an earlier chunk has the beginning of."""
CUT = " …]"
"""The end of a line that has not all of a call."""

BLOCK_OPENING = "[memory]"
BLOCK_CLOSING = "[/memory]"
CHUNK_MARKER = "[mem:"

_encoder = msgspec.msgpack.Encoder()


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """One call that an assistant message makes."""

    id: str
    name: str
    arguments: str
    """As the client or model wrote them, usually JSON text."""

    @property
    def form(self) -> tuple[str, ...]:
        """The part that is hashed: a call that has an id is known by that, any other by its arguments."""
        return (self.name, "", self.id) if self.id else (self.name, canonical_arguments(self.arguments))

    @property
    def line(self) -> str:
        """Its beginning on one line, with which the later chunks of its result open."""
        return call_line(str(self))

    def __str__(self) -> str:
        return f"[call {self.name} {self.arguments}]"


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. `content_digest` identifies it apart from its place (see `chain`)."""

    role: str
    text: str
    """Text parts as they came, joined by newlines; a part that is not text stands as `[image]`, `[audio]`, `[file]`."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    attachments: tuple[bytes, ...] = ()
    """16-byte digests of the parts that are not text, in order."""
    interrupted: bool = False
    """An assistant reply whose client or upstream left before its end."""
    own_words: str | UnsetType = UNSET
    """The part of `text` that was said (see `Speech`), where that is not all of it."""

    shown: tuple[bytes, ...] | UnsetType = UNSET
    """Of an assistant's reply: the uuids of the chunks that memory showed in its prompt."""
    said_at: int | UnsetType = UNSET
    """Microseconds since the epoch at which it first arrived, by the clock of the machine or as an import tells."""
    author: str | UnsetType = UNSET
    """The principal whose request first brought it, or was answered by it (`Principal.author`); UNSET: the owner."""
    is_result: bool | UnsetType = UNSET
    """True for a user's message in which a program gives the model the results of its work: of a call that it wrote as
    text, of an edit that failed, or the files as they are now."""

    @property
    def said(self) -> str:
        """The text without what programs wrap around it: what is hashed, stored and asked. Prompts have `text`."""
        return self.text if self.own_words is UNSET else self.own_words

    @property
    def without_text(self) -> Message:
        """The same where nothing was said, without what programs wrote."""
        return msgspec.structs.replace(self, text="")

    @property
    def erased(self) -> Message:
        """The same without all that was said in it: what is left keeps turns, calls and their results together."""
        calls = tuple(ToolCall(call.id, call.name, "{}") for call in self.tool_calls)
        return Message(self.role, "", calls, self.tool_call_id, said_at=self.said_at)

    @property
    def opens_turn(self) -> bool:
        """True where a user speaks; what a program alone wrote, such as a reminder or a result, is part of the turn."""
        return self.role == "user" and not self.is_result and (self.own_words is UNSET or bool(self.own_words.strip()))

    @property
    def content_digest(self) -> bytes:
        """16-byte BLAKE2b of the normal form: what stays the same when a client writes the message back."""
        return self._digest(normal_text(self.said), [call.form for call in self.tool_calls])

    @property
    def former_digest(self) -> bytes:
        """The same of the form before there was a normal one: logs and lists of forbidden messages have such."""
        calls = [(call.name, canonical_arguments(call.arguments)) for call in self.tool_calls]
        return self._digest(self.said.strip(), calls)

    def _digest(self, text: str, calls: Sequence[tuple[str, ...]]) -> bytes:
        form = [self.role, text, list(self.attachments), self.name, calls, self.tool_call_id]
        return hashlib.blake2b(_encoder.encode(form), digest_size=DIGEST_BYTES).digest()


class BlockChunk(msgspec.Struct, frozen=True):
    """A chunk as a memory block shows it."""

    shown_id: str
    uuid: bytes
    topic_id: str
    origin_id: int


class Block(msgspec.Struct, frozen=True):
    """The memory block in front of one user message, computed once a turn. Without chunks nothing stands there."""

    text: str
    tokens: int
    """Raw, counted with the bundled tokenizer."""
    chunks: tuple[BlockChunk, ...] = ()
    reader: str | UnsetType = UNSET
    """The principal in whose prompt it stands (`Principal.author`); UNSET: the owner."""
    is_short: bool | UnsetType = UNSET
    """More was worth showing, and what the model had not read yet took the room for it."""


NO_BLOCK = Block(text="", tokens=0)


def stamped(messages: Iterable[Message], said_at: int | UnsetType, author: str) -> list[Message]:
    """The messages as they arrived at this time from this principal (see `Message`); without a time: as they are."""
    if said_at is UNSET:
        return list(messages)
    return [msgspec.structs.replace(one, said_at=said_at, author=author or UNSET) for one in messages]


def call_line(call: str) -> str:
    """The beginning of a call as it was stored, on one line."""
    line = " ".join(call.split())
    return line if len(line) <= CALL_CHARACTERS_MAX else line[: CALL_CHARACTERS_MAX - len(CUT)] + CUT


def block_digest(text: str) -> bytes:
    """Identifies a block, however the white space at the ends of its lines came back."""
    lines = "\n".join(map(str.rstrip, text.split("\n")))
    return hashlib.blake2b(lines.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def chain(previous: bytes, content_digest: bytes) -> bytes:
    """The digest of a message at its place: BLAKE2b over its predecessor's digest and its own normalised form."""
    return hashlib.blake2b(previous + content_digest, digest_size=DIGEST_BYTES).digest()


def chain_all(content_digests: Iterable[bytes], previous: bytes = ROOT_DIGEST) -> list[bytes]:
    """The digests of consecutive messages, the first chained to `previous`."""
    return list(itertools.accumulate(content_digests, chain, initial=previous))[1:]


def leading_count(messages: Sequence[Message]) -> int:
    """The number of messages at the front that are standing instructions (system or developer)."""
    return next((place for place, one in enumerate(messages) if one.role not in LEADING_ROLES), len(messages))


def stored_text(message: Message) -> str:
    """The message as a chunk has it: what was said, verbatim, and tool calls spelled out."""
    parts = [message.said] if message.said else []
    parts += map(str, message.tool_calls)
    if message.interrupted:
        parts.append("[interrupted]")
    return "\n".join(parts)


def without_memory_blocks(text: str, is_own: Callable[[str], bool] = lambda _: True) -> str:
    """`text` without the memory blocks that memd put into an earlier prompt and a client echoes back.

    A block goes from a line that opens with `[memory]` to the line `[/memory]`, has a line that opens with `[mem:` in
    between, and takes the blank line behind it along. One pass over the lines: text is untrusted and may be long.

    Args:
        is_own: tells memd's own from what only looks like one, which stays: else whoever writes a web page could make
            words vanish from what is stored.
    """
    if BLOCK_OPENING not in text:
        return text
    kept: list[str] = []
    block: list[str] = []  # lines since an opening that is not closed yet
    has_chunk = swallow_blank = False
    for line in text.split("\n"):
        if line.startswith(BLOCK_OPENING):
            kept += block
            block, has_chunk = [line], False
        elif not block:
            if not (swallow_blank and line == ""):
                kept.append(line)
        elif line.rstrip() != BLOCK_CLOSING:
            block.append(line)
            has_chunk = has_chunk or line.startswith(CHUNK_MARKER)
            continue
        else:
            swallow_blank = has_chunk and is_own("\n".join([*block, line]))
            kept += [] if swallow_blank else [*block, line]
            block = []
            continue
        swallow_blank = False
    return "\n".join(kept + block)


def rebuilt(value: Any, change: Callable[[Any, str], Any], field: str = "") -> Any:
    """A value with all that is in it as `change` has it; where nothing changes, the very same object. `change` takes a
    part and the name of the field that it stands in, and returns what takes its place; None: what is within it is
    looked at."""
    if (changed := change(value, field)) is not None:
        return changed
    if isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        kept = {name: rebuilt(one, change, name) for name, one in fields.items()}
        different = {name: one for name, one in kept.items() if one is not fields[name]}
        return msgspec.structs.replace(value, **different) if different else value
    if isinstance(value, dict):
        kept = {key: rebuilt(one, change, field) for key, one in value.items()}
        return value if all(kept[key] is one for key, one in value.items()) else kept
    if isinstance(value, list | tuple):
        several = type(value)(rebuilt(one, change, field) for one in value)
        return value if all(map(operator.is_, value, several)) else several
    return value


SAID_GROUP = "said"
"""Of a pattern with a group of this name the group was said; only what is around it is left out. It is a pattern for
messages, not for results."""
SEARCHED_CHARACTERS_MAX = 1_000_000
"""A longer text is a dump of data and is taken as it is: the user's own patterns may be slower than linear."""


class Speech:
    """Finds what was said, by patterns."""

    def __init__(
        self,
        patterns: Iterable[str] = (),
        message: Iterable[str] = (),
        reply: Iterable[str] = (),
        result: Iterable[str] = (),
    ) -> None:
        """`patterns`: regular expressions of text that was not said (`ingest.strip`); `message`: of whole messages that
        a program wrote in the user's name; `reply`: of those that it wrote in the model's; `result`: of those in the
        user's name in which it gives the model results."""
        self._patterns = [re.compile(pattern) for pattern in patterns]
        self._whole = {
            role: [re.compile(one) for one in ones] for role, ones in (("user", message), ("assistant", reply))
        }
        self._results = [re.compile(one) for one in result]

    def heard(self, message: Message) -> Message:
        """The message with `said` found; the message itself where all of its text was said."""
        said = self.said(message.role, message.text)
        heard = message if said is None else replace(message, own_words=said)
        is_result = heard.role == "user" and _is_whole(self._results, heard.text)
        return replace(heard, is_result=True) if is_result else heard

    def heard_alone(self, message: Message, is_own: Callable[[str], bool]) -> Message:
        """The message heard without the memory blocks that are memd's own; the message itself where it has none."""
        text = without_memory_blocks(message.text, is_own)
        return message if text == message.text else self.heard(replace(message, text=text, own_words=UNSET))

    def said(self, role: str, text: str) -> str | None:
        """The part of a text that was said by `role`; None if that is all of it."""
        rest = without_thinking(text) if role == "assistant" else text
        if role != "assistant" and len(rest) <= SEARCHED_CHARACTERS_MAX:
            for pattern in self._patterns:
                rest = _without_at_ends(pattern, rest) if role in RESULT_ROLES else _without(pattern, rest)
        if role in self._whole and _is_whole(self._whole[role], rest):
            rest = ""
        return None if rest == text else rest


THINKING_ALONE = Speech()
"""Without patterns: nothing but an assistant's thinking is left out."""


def _is_whole(patterns: Iterable[re.Pattern[str]], text: str) -> bool:
    """Whether a pattern fits a text from its first character to its last, outer white space aside."""
    words = text.strip() if len(text) <= SEARCHED_CHARACTERS_MAX else ""
    return bool(words) and any(pattern for pattern in patterns if pattern.fullmatch(words))


def _without(pattern: re.Pattern[str], text: str) -> str:
    """`text` without the matches; what they separated meets with the least white space that keeps lines and words."""
    kept: list[str] = []
    done = 0
    for found in pattern.finditer(text):
        if found.end() == found.start():
            continue
        kept.append(text[done : found.start()])
        if SAID_GROUP in pattern.groupindex and found[SAID_GROUP] is not None:
            kept.append(found[SAID_GROUP])
        done = found.end()
    return _joined([*kept, text[done:]]) if done else text


def _without_at_ends(pattern: re.Pattern[str], text: str) -> str:
    """A result without the matches at its beginning and its end; the result itself where nothing would be left."""
    if SAID_GROUP in pattern.groupindex:
        return text
    found = [match.span() for match in pattern.finditer(text)]
    start, end = 0, len(text)
    for opening, closing in found:
        if text[start:opening].strip():
            break
        start = closing
    for opening, closing in reversed(found):
        if opening < start or text[closing:end].strip():
            break
        end = opening
    rest = text[start:end]
    return text if (start, end) == (0, len(text)) or not rest.strip() else _joined([rest])


def _joined(parts: Iterable[str]) -> str:
    joined: list[str] = []
    space = ""  # the white space since the last word
    for part in parts:
        words = part.strip()
        if not words:
            space += part
            continue
        begins = part.index(words[0]) if part else 0
        space += part[:begins]
        if joined:
            joined.append("\n" if "\n" in space else " " if space else "")
        joined.append(words)
        space = part[begins + len(words) :]
    return "".join(joined)
