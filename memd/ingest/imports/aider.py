"""Aider's history: `.aider.chat.history.md`, all chats of a folder in one Markdown file.

    # aider chat started at 2024-05-03 10:00:00
    #### what the user said, each line with two spaces at its end
    what the model said
    > what Aider itself said, each line with two spaces at its end

As aider/io.py of Aider-AI/aider writes it (`append_chat_history`, `user_input`, `ai_output`, `tool_output`) and
`split_chat_history_markdown` in aider/utils.py reads it; the two spaces are looked at here, too, because a model's
answer may have headings and quotations of its own.

Rule: pure. Aider's own words and its commands are left out, but for what a user
says behind /ask, /code, /architect and /context. The only time in it is that of each start, by the machine's clock.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from memd.errors import BadImport
from memd.ingest.dates import Dating
from memd.ingest.imports.items import ITEM_BYTES_MAX
from memd.ingest.imports.threads import Thread, said, straight, thread_of
from memd.messages import Message

STARTED = "# aider chat started at "
_USER, _OWN = "#### ", ">"
_COMMAND = re.compile(r"\s*(?:/(?:ask|code|architect|context)\s+(?P<said>.*)|[/!].*)", re.DOTALL)
_BLANK = "<blank>"


def is_history(head: bytes) -> bool:
    """Whether a file that begins so is a history of Aider."""
    return head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(STARTED.encode())


def threads(lines: Iterable[str], folder: str, dating: Dating) -> Iterator[Thread]:
    """Read a history, chat by chat; one in which nothing was said gives none.

    Args:
        folder: the name of the folder that it lies in.
    """
    started, chat = "", _AiderChat()
    for line in lines:
        if line.startswith(STARTED):
            yield from _thread(started, chat, folder, dating)
            started, chat = line.removeprefix(STARTED).strip(), _AiderChat()
        else:
            chat.add(line.rstrip("\n"))
    yield from _thread(started, chat, folder, dating)


def _thread(started: str, chat: _AiderChat, folder: str, dating: Dating) -> Iterator[Thread]:
    messages = chat.messages()
    if messages:
        name = "/".join(part for part in (folder.rstrip("/").rpartition("/")[2], started) if part)
        yield thread_of("aider", name, straight(messages), begun=dating.first_time([started]), folder=folder)


class _AiderChat:
    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._role = ""
        self._lines: list[str] = []
        self._size = 0

    def add(self, line: str) -> None:
        ends = line.endswith("  ")
        role = "user" if line.startswith(_USER) and ends else "" if line.startswith(_OWN) and ends else "assistant"
        if role != self._role and (line.strip() or self._role != "assistant"):
            self._flush()
            self._role = role
        text = line.rstrip() if role == "assistant" else line.removeprefix(_USER).rstrip()
        self._size += len(text) + 1
        if self._size > ITEM_BYTES_MAX:
            raise BadImport(f"a message of it has more than {ITEM_BYTES_MAX:,} characters")
        self._lines.append(text)

    def messages(self) -> list[Message]:
        self._flush()
        return self._messages

    def _flush(self) -> None:
        text = "\n".join(self._lines).strip()
        if self._role == "user":
            command = _COMMAND.fullmatch(text)
            text = (command["said"] or "") if command else "" if text == _BLANK else text
        if self._role:
            self._messages += said(self._role, text)
        self._lines, self._size = [], 0
