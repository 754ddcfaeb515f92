"""Chat messages, independent of the API they came through: the words said in them, and the digests that identify them.

Rule: pure values. `wire` parses bytes into `Message`s, `conversation` works on them; only `wire` knows JSON shapes.
Digests are computed from a normal form. It levels only changes that clients make without meaning another message.
Prompts and the log have the original text. Known changes by clients:

    line ends                 CRLF comes back as LF: aider, Zed and whatever keeps chats in text files on Windows
    white space at line ends  removed by editors' chats (Continue, Zed) and Markdown renderers; models write it
    Unicode                   NFC comes back as NFD, or the reverse: files and clipboards of macOS
    thinking                  `<think>…</think>`, and the like, comes back as `<details type="reasoning">…</details>`
                              (Open WebUI), or not at all (see `without_thinking`)
    links                     bare ones come back as `[link](link)` or `<link>`: rich-text editors (LobeChat, Notion)
    a call's arguments        reordered, reformatted, with defaults added (claude-code's `replace_all: false`); so a
                              call with an id is identified by the id
    numbers in arguments      as JavaScript reads and writes them

`Speech` removes text that programs wrap around a user's words, in time linear in the text, which is untrusted. From a
model's text it removes only thinking. From a tool's result, which may be any file, it removes only matches at the ends,
and never all of it. A message that a program wrote entirely, as user or as model, counts as saying nothing. A user
message in which a program reports results is stored like a tool's result, and asks nothing.
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

from memd.caching import ENGINE

_EXACT_IN_DOUBLE_MAX = 2**53
_LINK = re.compile(r"\[([^\[\]\n]{1,2000})\]\((?:https?://|mailto:)?\1/?\)|<(https?://[^\s<>]{1,2000})>")
_THINKING = {
    '<details type="reasoning"': "</details>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "◁think▷": "◁/think▷",
    "[THINK]": "[/THINK]",
    **{f"<{tag}>": f"</{tag}>" for tag in ("think", "thinking", "reason", "reasoning", "thought", "Thought")},
}
"""Opening and closing marks of thinking: those of DeepSeek-R1, Qwen 3 and others, and Open WebUI's rewrite of them."""
_THINKING_OPENED = re.compile(rf"\s*({'|'.join(map(re.escape, _THINKING))})")


def with_line_feeds(text: str) -> str:
    """Return the text with LF line ends."""
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def normal_text(text: str) -> str:
    """Return the normal form of a text; fast if nothing changes."""
    text = with_line_feeds(text)
    if " \n" in text or "\t\n" in text:
        text = "\n".join([line.rstrip(" \t") for line in text.split("\n")])  # a regex takes six times as long
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    if "](" in text or "<http" in text:
        text = _LINK.sub(lambda found: found[1] or found[2], text)
    return text.strip()


def without_thinking(text: str) -> str:
    """Return an answer without its leading thinking. Unclosed thinking comes from an interrupted reply, and stays."""
    done = 0
    while opened := _THINKING_OPENED.match(text, done):
        closing = _THINKING[opened[1]]
        end = text.find(closing, opened.end())
        if end < 0:
            break
        done = end + len(closing)
    return text[done:].strip() if done else text


def canonical_arguments(arguments: str) -> str:
    """Return the canonical serialisation of tool arguments (`{}` if empty); unchanged if they are not JSON."""
    try:
        value = _as_javascript(json.loads(arguments.strip() or "{}"))
        return json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (ValueError, OverflowError, RecursionError):  # not JSON, a number or a nesting that no client can parse
        return arguments


def _as_javascript(value: Any) -> Any:
    """Return `value` with numbers as a JavaScript client reads and writes them: doubles, and 1.0 as 1."""
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
"""Leading messages of these roles are the client's standing instructions: always forwarded, never hashed or stored."""

RESULT_ROLES = frozenset({"tool", "function"})
"""Roles of a tool's result; `function` is the older name."""

CALL_CHARACTERS_MAX = 200
"""Limit for a call that is repeated on one line in front of the rest of its result."""
CUT = " …]"
"""The end of a call line that was shortened."""

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
        """The part that is hashed: name and id, or name and arguments if there is no id."""
        return (self.name, "", self.id) if self.id else (self.name, canonical_arguments(self.arguments))

    @property
    def line(self) -> str:
        """Its beginning on one line; later chunks of its result begin with it."""
        return call_line(str(self))

    def __str__(self) -> str:
        return f"[call {self.name} {self.arguments}]"


class Message(msgspec.Struct, frozen=True, gc=False):
    """One message. `content_digest` identifies it regardless of its position (see `chain`)."""

    role: str
    text: str
    """The text parts, joined by newlines; other parts are `[image]`, `[audio]` or `[file]`."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    attachments: tuple[bytes, ...] = ()
    """16-byte digests of the non-text parts, in order."""
    interrupted: bool = False
    """An assistant reply that was cut off because its client or upstream disconnected."""
    own_words: str | UnsetType = UNSET
    """The part of `text` that was said (see `Speech`); UNSET: all of it."""

    shown: tuple[bytes, ...] | UnsetType = UNSET
    """For an assistant's reply, the uuids of the chunks that memory showed in its prompt."""
    said_at: int | UnsetType = UNSET
    """Microseconds since the epoch at which it first arrived, or the time given by an import."""
    author: str | UnsetType = UNSET
    """The principal whose request first contained it, or was answered by it (`Principal.author`); UNSET: the owner."""
    is_result: bool | UnsetType = UNSET
    """True for a user message in which a program reports results to the model: of a call that the model wrote as text,
    of a failed edit, or the present state of files."""

    @property
    def said(self) -> str:
        """The text without programs' wrapping: hashed, stored and used as question. Prompts have `text`."""
        return self.text if self.own_words is UNSET else self.own_words

    @property
    def without_text(self) -> Message:
        """A copy with empty text, for a message in which nothing was said."""
        return msgspec.structs.replace(self, text="")

    @property
    def erased(self) -> Message:
        """A copy without text and arguments that still keeps turns, calls and their results together."""
        calls = tuple(ToolCall(call.id, call.name, "{}") for call in self.tool_calls)
        return Message(self.role, "", calls, self.tool_call_id, said_at=self.said_at)

    @property
    def opens_turn(self) -> bool:
        """True if a user speaks. A message written by a program, such as a reminder or a result, opens no turn."""
        return self.role == "user" and not self.is_result and (self.own_words is UNSET or bool(self.own_words.strip()))

    @property
    def content_digest(self) -> bytes:
        """16-byte BLAKE2b of the normal form; unchanged when a client sends the message back."""
        return self._digest(normal_text(self.said), [call.form for call in self.tool_calls])

    @property
    def former_digest(self) -> bytes:
        """The digest of versions without a normal form, found in old logs and forbidden lists."""
        calls = [(call.name, canonical_arguments(call.arguments)) for call in self.tool_calls]
        return self._digest(self.said.strip(), calls)

    def _digest(self, text: str, calls: Sequence[tuple[str, ...]]) -> bytes:
        form = [self.role, text, list(self.attachments), self.name, calls, self.tool_call_id]
        return hashlib.blake2b(_encoder.encode(form), digest_size=DIGEST_BYTES).digest()


class BlockChunk(msgspec.Struct, frozen=True):
    """A chunk in a memory block."""

    shown_id: str
    uuid: bytes
    topic_id: str
    origin_id: int


class Block(msgspec.Struct, frozen=True):
    """The memory block in front of one user message, computed once per turn. Without chunks nothing is inserted."""

    text: str
    tokens: int
    """Raw, counted with the bundled tokenizer."""
    chunks: tuple[BlockChunk, ...] = ()
    reader: str | UnsetType = UNSET
    """The principal whose prompt it was made for (`Principal.author`); UNSET: the owner."""
    is_short: bool | UnsetType = UNSET
    """Relevant chunks were left out, because new messages took the room for them."""


NO_BLOCK = Block(text="", tokens=0)


def stamped(messages: Iterable[Message], said_at: int | UnsetType, author: str) -> list[Message]:
    """Return the messages with this time and principal (see `Message`); unchanged if `said_at` is UNSET."""
    if said_at is UNSET:
        return list(messages)
    return [msgspec.structs.replace(one, said_at=said_at, author=author or UNSET) for one in messages]


def call_line(call: str) -> str:
    """Return the beginning of a stored call on one line."""
    line = " ".join(call.split())
    return line if len(line) <= CALL_CHARACTERS_MAX else line[: CALL_CHARACTERS_MAX - len(CUT)] + CUT


def block_digest(text: str) -> bytes:
    """Return a block's 16-byte digest, which ignores white space at line ends."""
    lines = "\n".join(map(str.rstrip, text.split("\n")))
    return hashlib.blake2b(lines.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


def chain(previous: bytes, content_digest: bytes) -> bytes:
    """Return a message's digest at its position: BLAKE2b of its predecessor's digest and its own content digest."""
    return hashlib.blake2b(previous + content_digest, digest_size=DIGEST_BYTES).digest()


def chain_all(content_digests: Iterable[bytes], previous: bytes = ROOT_DIGEST) -> list[bytes]:
    """Return the chained digests of consecutive messages, the first chained to `previous`."""
    return list(itertools.accumulate(content_digests, chain, initial=previous))[1:]


def leading_count(messages: Sequence[Message]) -> int:
    """Return the number of leading messages that are standing instructions (system or developer)."""
    return next((place for place, one in enumerate(messages) if one.role not in LEADING_ROLES), len(messages))


def spoken_end(messages: Sequence[Message]) -> int:
    """Return the number of messages up to the last non-instruction. Later ones (SillyTavern's author's note, aider's
    reminder) are added to each request; they count as standing until a client sends one back in its place."""
    return len(messages) - leading_count(messages[::-1])


def stored_text(message: Message) -> str:
    """Return the message as chunks store it: its own words verbatim, then its tool calls as text."""
    parts = [message.said] if message.said else []
    parts += map(str, message.tool_calls)
    if message.interrupted:
        parts.append("[interrupted]")
    return "\n".join(parts)


def without_memory_blocks(text: str, is_own: Callable[[str], bool] = lambda _: True) -> str:
    """Return `text` without memory blocks that memd put into an earlier prompt and a client echoes back.

    A block begins with a line starting `[memory]`, has a line starting `[mem:`, and ends with the line `[/memory]`. The
    blank line after it is removed too. One pass over the lines: text is untrusted and may be long. `is_own`: returns
    True for blocks that memd wrote. Others stay, or else the author of a web page could make words vanish from the log.
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
    """Rebuild a nested value with `change` applied to its parts; returns the same object if nothing changes.

    `change` gets a part and the name of its field, and returns the replacement, or None to descend into the part."""
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
"""If a pattern has a group of this name, the group's text is kept and only the rest of the match is removed. Such a
pattern applies to messages, not to results."""
SEARCHED_CHARACTERS_MAX = 1_000_000
"""Longer texts are data dumps and not searched: the user's own patterns may take more than linear time."""


class Speech:
    """Finds a message's own words by patterns."""

    def __init__(
        self,
        patterns: Iterable[str] = (),
        message: Iterable[str] = (),
        reply: Iterable[str] = (),
        result: Iterable[str] = (),
    ) -> None:
        """Args are regular expressions. `patterns`: text to remove (`ingest.strip`). The others match whole messages
        that a program wrote: `message` as the user, `reply` as the model, `result` as the user to report results."""
        self._patterns = [ENGINE.compile(pattern) for pattern in patterns]
        self._whole = {
            role: [ENGINE.compile(one) for one in ones] for role, ones in (("user", message), ("assistant", reply))
        }
        self._results = [ENGINE.compile(one) for one in result]

    def heard(self, message: Message) -> Message:
        """Return the message with `own_words` and `is_result` set; the same object if neither applies."""
        said = self.said(message.role, message.text)
        heard = message if said is None else replace(message, own_words=said)
        is_result = heard.role == "user" and _is_whole(self._results, heard.text)
        return replace(heard, is_result=True) if is_result else heard

    def heard_alone(self, message: Message, is_own: Callable[[str], bool]) -> Message:
        """Remove memd's own memory blocks and apply `heard` to the rest; returns the same object if there are none."""
        text = without_memory_blocks(message.text, is_own)
        return message if text == message.text else self.heard(replace(message, text=text, own_words=UNSET))

    def said(self, role: str, text: str) -> str | None:
        """Return the part of a text that `role` said, or None if that is all of it."""
        rest = without_thinking(text) if role == "assistant" else text
        if role != "assistant" and len(rest) <= SEARCHED_CHARACTERS_MAX:
            for pattern in self._patterns:
                rest = _without_at_ends(pattern, rest) if role in RESULT_ROLES else _without(pattern, rest)
        if role in self._whole and _is_whole(self._whole[role], rest):
            rest = ""
        return None if rest == text else rest


THINKING_ALONE = Speech()
"""Removes only an assistant's thinking."""


def _is_whole(patterns: Iterable[re.Pattern[str]], text: str) -> bool:
    """Return whether a pattern matches the whole text, outer white space aside."""
    words = text.strip() if len(text) <= SEARCHED_CHARACTERS_MAX else ""
    return bool(words) and any(pattern for pattern in patterns if pattern.fullmatch(words))


def _without(pattern: re.Pattern[str], text: str) -> str:
    """Return `text` without the matches. The pieces left are joined by a newline or space where they had one."""
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
    """Return a result without matches at its beginning and end; unchanged if nothing would be left."""
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
