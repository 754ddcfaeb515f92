"""Formats log records as lines: short ones on a terminal, with fields, or as JSON.

Rule: words of a conversation appear only if `log.content` is true; a terminal also shows its owner the beginning of
their own question. The message of a record is a constant in the source; variable parts are fields (`extra`), and a
field that may quote a conversation is a `Content`. Messages of libraries (errors and log records) are left out, because
they quote what they could not parse. A record is one line, whatever it contains; the traceback of an unexpected error
follows below it, or is a member of the JSON.

    log.warning("storing failed", extra={"topic": topic.id, "error": error})

    2026-03-01 09:30:00,123 WARNING storing failed topic=default error="hot.log: the disk is full; free …"
    {"time":"2026-03-01T08:30:00.123Z","level":"warning","event":"storing failed","topic":"default","error":"…"}

On a terminal a request is a line like

    02:08:50  shop  2 memories (17 ms)  "On which port does the shop …"
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

from memd.errors import MemdError
from memd.settings.model import LogSettings
from memd.wording import memory_words

OWN = "memd"
LINE_END = "\n"
MEMORY_STEPS = ("receive", "correct", "room", "recall")
"""Steps of a turn in which the request waits for memory."""
LEFT_OUT = "(left out, see log.content)"
_OF_EVERY_RECORD = frozenset({*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"})
_BARE = re.compile(r"[\w.:/@+-]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class Content:
    """A text that may quote a conversation."""

    def __init__(self, text: object) -> None:
        self.text = str(text)

    def __str__(self) -> str:
        return LEFT_OUT

    __repr__ = __str__


def configure_logging(settings: LogSettings, redact: Callable[[str], str] = str) -> None:
    """Send this process's log to stderr, all of its texts through `redact`."""
    handler = logging.StreamHandler(sys.stderr)
    shape = {"json": JsonLines, "console": ConsoleLines}.get(settings.format) or (
        TerminalLines if sys.stderr.isatty() else ConsoleLines
    )
    handler.setFormatter(shape(content=settings.content, redact=redact))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler])
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # memd itself logs that a database is away


class _LineFormatter(logging.Formatter):
    """Base class of the formats."""

    def __init__(self, *, content: bool, redact: Callable[[str], str] = str) -> None:
        super().__init__()
        self._content = content
        self._redact = redact

    def _event(self, record: logging.LogRecord) -> str:
        """Return the message. A library's is cut to its first line, because asyncio's other lines quote values."""
        args = record.args
        if self._content and isinstance(args, tuple):
            args = tuple(arg.text if isinstance(arg, Content) else arg for arg in args)
        text = str(record.msg) % args if args else str(record.msg)
        if record.name != OWN:
            text = f"{record.name}: {text if self._content else text.partition(LINE_END)[0]}"
        return self._redact(text)

    def _fields(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        """Yield the fields in the given order, except those that are None."""
        for name, value in vars(record).items():
            if name in _OF_EVERY_RECORD or value is None:
                continue
            if isinstance(value, Content) and not self._content:
                continue
            if isinstance(value, float):
                yield name, round(value, 3)
            elif isinstance(value, int):
                yield name, value
            else:
                shown = value.text if isinstance(value, Content) else value
                yield name, self._redact(self._error(value) if isinstance(value, BaseException) else str(shown))

    def _error(self, error: BaseException) -> str:
        """Return the message of an error of memd or the system; of other errors only the class."""
        if isinstance(error, MemdError):
            return str(error)
        quotes_nothing = self._content or isinstance(error, OSError)
        return f"{type(error).__qualname__}: {error if quotes_nothing else LEFT_OUT}"

    def _trace(self, record: logging.LogRecord) -> str | None:
        """Return the traceback of an error and its causes as Python prints it, the first cause first."""
        error = record.exc_info[1] if record.exc_info else None
        parts: list[str] = []
        seen: set[int] = set()
        while error is not None and id(error) not in seen:
            seen.add(id(error))
            frames = "".join(traceback.format_tb(error.__traceback__))
            parts.insert(0, f"Traceback (most recent call last):\n{frames}{self._error(error)}")
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        return self._redact("\n\n".join(parts)) or None


class ConsoleLines(_LineFormatter):
    """For people: local time, level, message, `name=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = "".join(f" {name}={_quoted_if_needed(value)}" for name, value in self._fields(record))
        trace = self._trace(record)
        line = f"{self.formatTime(record)} {record.levelname} {_in_one_line(self._event(record))}{fields}"
        return line if trace is None else f"{line}\n{trace}"


class TerminalLines(ConsoleLines):
    """For the person at the terminal: the time of day, what memory did for a request, and the question's beginning."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  (the base's name)
        """See `logging.Formatter.formatTime`."""
        return super().formatTime(record, datefmt or "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`; cut to the terminal's width."""
        one = vars(record)
        if record.name != OWN or record.msg != "answered":
            return super().format(record)
        words = memory_words(one["status"], one["injected"], is_kept=one["stored"], http_status=one["http_status"])
        spent = sum(one.get(f"{step}_ms") or 0.0 for step in MEMORY_STEPS)
        asked = " ".join(str(getattr(one.get("asked"), "text", "")).split())
        said = f'  "{asked}"' if asked else ""
        line = f"{self.formatTime(record)}  {one['topic'] or '-'}  {words[0]} ({spent:.0f} ms){said}"
        line, width = _in_one_line(self._redact(line)), shutil.get_terminal_size().columns
        return line if len(line) <= width else f'{line[: width - 2]}…"'


class JsonLines(_LineFormatter):
    """For programs: one JSON object per line, with `time` (UTC), `level`, `event` and the fields."""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`; in ASCII."""
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        head = {"time": moment.replace("+00:00", "Z"), "level": record.levelname.lower(), "event": self._event(record)}
        fields = dict(self._fields(record))
        trace = self._trace(record)
        more = {} if trace is None else {"traceback": trace}
        return json.dumps({**head, **fields, **more}, separators=(",", ":"))


def _quoted_if_needed(value: object) -> str:
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_in_one_line(escaped)}"'


def _in_one_line(text: str) -> str:
    """Escape control characters, so that none can end the line or control a terminal."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
