"""The form of a message that is hashed: what stays the same however a client writes the message back.

Rule: two texts have one form if a client that means no other message makes one of the other; nothing else. Prompts and
what is stored have the text as it was said. What is known of clients:

    line ends                 CRLF comes back as LF: aider, Zed and whatever keeps chats in text files on Windows
    white space at line ends  gone: editors' chats (Continue, Zed), Markdown renderers; models end lines with blanks
    Unicode                   NFC comes back as NFD, and the other way round: files and clipboards of macOS
    thinking                  `<think>…</think>` comes back as `<details type="reasoning">…</details>` (Open WebUI), or
                              not at all (see `without_thinking`)
    links                     bare ones come back as `[link](link)` or `<link>`: rich-text editors (LobeChat, Notion)
    a call's arguments        reordered, reformatted, with defaults added (claude-code's `replace_all: false`): a call
                              that has an id is known by that
    numbers in arguments      as JavaScript reads and writes them
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

_EXACT_IN_DOUBLE_MAX = 2**53
_LINK = re.compile(r"\[([^\[\]\n]{1,2000})\]\((?:https?://|mailto:)?\1/?\)|<(https?://[^\s<>]{1,2000})>")
_THINKING = re.compile(r"\s*<(?:(think)>|(details) type=\"reasoning\")")
"""The marks of DeepSeek-R1, Qwen 3 and others, and what Open WebUI makes of them."""


def normal_text(text: str) -> str:
    """The text in its form; quick where there is nothing to change."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
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
    while opened := _THINKING.match(text, done):
        closing = f"</{opened[1] or opened[2]}>"
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
