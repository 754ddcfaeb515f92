"""Finds the words that were said in a message: its text without what programs wrap around it and what models think.

Rule: pure, and linear in the text, which is untrusted. The prompt has the text as it came; the digest, the stored text
and the question asked of memory have what was said. A text in which nothing is found is said as it stands. Programs
wrap a user's words; what a model wrote is its own, and a tool's result, which may be any file, loses no more than what
stands at its ends, and never all of it. A whole message that a program wrote in the name of the user or of the model
was said by neither; one in which it gives the model results is stored like those of tools, and asks nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from msgspec import UNSET
from msgspec.structs import replace

from memd.messages import RESULT_ROLES, Message, without_memory_blocks, without_thinking

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
        """
        Args:
            patterns: regular expressions of text that was not said (`ingest.strip`).
            message: of whole messages that a program wrote in the user's name.
            reply: of those that it wrote in the model's.
            result: of those in the user's name in which it gives the model results.
        """
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
    return bool(words) and any(pattern.fullmatch(words) for pattern in patterns)


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
