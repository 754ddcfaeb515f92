"""Numbers, counts and recurring sentences as people read them.

Rule: only for people; no program parses these texts.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date, datetime
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec

NAMED_MAX = 5
_SECONDS_MAX = 253_402_128_000
"""The last but one day of the year 9999, which is valid in every time zone."""
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_PLURALS = {"entry": "entries", "memory": "memories", "other branch": "other branches"}


def counted(number: int, noun: str) -> str:
    """`1 topic`, `2 topics`, `1,000 entries`."""
    return f"{number:,} {noun if number == 1 else _PLURALS.get(noun, noun + 's')}"


def sized(bytes_: int) -> str:
    """`812 B`, `76 KB`, `4.2 MB`, `1,300 MB`."""
    if bytes_ < 1e6:
        return f"{bytes_} B" if bytes_ < 1e3 else f"{bytes_ / 1e3:.0f} KB"
    return f"{bytes_ / 1e6:,.0f} MB" if bytes_ >= 1e8 else f"{bytes_ / 1e6:.1f} MB"


def day_of(at_us: int) -> date:
    """Return the day of a time in microseconds since the epoch, any number, in this machine's time zone."""
    return date.fromtimestamp(min(max(at_us, 0) // 1_000_000, _SECONDS_MAX))


def day_words(at_us: int) -> str:
    """Return the day of a time in microseconds since the epoch as `Tuesday 2026-11-03`."""
    return _words(day_of(at_us))


@lru_cache(maxsize=4096)
def _words(day: date) -> str:
    return f"{_WEEKDAYS[day.weekday()]} {day.isoformat()}"


def day_and_time(microseconds: int) -> str:
    """Format a time, in microseconds since the epoch, in this machine's time zone: `2026-11-23 14:05`."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def with_remedy(text: str) -> tuple[str, str]:
    """Return what happened and, if the text says it behind its last semicolon, what to do now."""
    happened, _, remedy = text.rpartition("; ")
    return (happened, remedy) if happened else (text, "")


def outdated(keys: Sequence[str]) -> str:
    """Say that a daemon still runs with older values of these settings, and what to do."""
    return f"the running daemon has former settings, without the change of {', '.join(keys)}; start it again"


def unread_topics(refused: Mapping[str, Exception]) -> str | None:
    """Name the unreadable topics, with the reason for one of them; None if there are none."""
    if not refused:
        return None
    [first, *others] = refused
    more = f"; nor can {', '.join(others[:NAMED_MAX])}{', …' if others[NAMED_MAX:] else ''}" if others else ""
    return f"Topic {first} cannot be read: {refused[first]}{more}."


def unsearched(chunks: int) -> str:
    """Say how many chunks were embedded with another model, and what to do."""
    was, are = ("was", "is") if chunks == 1 else ("were", "are")
    return (
        f"{counted(chunks, 'chunk')} {was} embedded with another model and {are} not searched by meaning; "
        "stop the daemon and run `memd reembed`, or set embedding.model back"
    )


NOTHING_STORED = (
    "Nothing is stored yet. What is said through memd will be, and `memd add PATH` and `memd remember` store at once."
)


def waiting_note(messages: int) -> str:
    """Say how many messages are not in the log yet; empty if none."""
    if not messages:
        return ""
    are, wait = ("is", "waits") if messages == 1 else ("are", "wait")
    told = f"{counted(messages, 'message')} {are} not in the log yet and {wait} in the journal (hot.log)"
    return (
        f"{told}: memd stores them while it runs. `memd search` and `memd show` find what is answered already, "
        "and what is not when its conversation has rested for five minutes"
    )


def pip_install(*what: str) -> str:
    """Return the command that installs packages into the environment of this memd, whichever `pip` is on the PATH:
    `…/.venv/bin/python -m pip install 'memd-proxy[mcp]'`. An environment without pip was made by uv."""
    if find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", *what, "--python", sys.executable])
    return shlex.join([sys.executable, "-m", "pip", "install", *what])


def meant(name: str, known: Collection[str], otherwise: str = "") -> str:
    """Ask whether the nearest known name was meant; `otherwise` if none is near."""
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else otherwise


def no_topic(name: str) -> str:
    """Say that there is no topic of this name."""
    return f"there is no topic {name!r}; `memd stats` lists them"


def erased_for_good(topic_id: str) -> str:
    """Say that a text is not stored because it was erased with `--forbid`, and how to allow it again."""
    return (
        f"this was erased from topic {topic_id!r} for good (memd erase --forbid). To let it be stored again, stop memd "
        f"and remove the file {topic_id}/forbidden in its data directory (docs/erasure.md)"
    )


# Control characters except line breaks and tabs, and characters that change the writing direction.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def for_terminal(text: str) -> str:
    """Return untrusted text with the characters that control a terminal replaced by their codes."""
    return _ACTS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def name_for_terminal(name: str) -> str:
    """Return an untrusted name on one line, because a second line would look like memd's own words."""
    return for_terminal(name).replace("\n", "\\x0a")


def beginning(text: str, characters: int) -> str:
    """Return the beginning of a text, on one line: `We moved the …`."""
    line = " ".join(text.split())
    return line if len(line) <= characters else f"{line[: characters - 2].rstrip()} …"


def tallied(counts: Mapping[str, int]) -> str:
    """`api_key 2, password 1`."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items())


def memory_words(status: str, shown: int, *, is_kept: bool, http_status: int | None) -> list[str]:
    """Say what memory did in a turn, most important first: `["2 memories", "kept"]`.

    Args:
        status: the value of `X-Memory-Status`.
        shown: number of chunks in the prompt.
        is_kept: True if the messages are stored or in the journal.
        http_status: status of the answer; None: there was no answer.
    """
    words = ["no answer" if http_status is None else f"HTTP {http_status}"] if http_status != 200 else []
    words += [status.replace(":", ": ")] if status not in ("none", "injected") else []
    words += [counted(shown, "memory")] if shown else []
    is_well = http_status == 200 and status in ("none", "injected")
    return [*words, "kept"] if is_kept and is_well else words or ["no memory"]


def not_english(language: str) -> tuple[str, str]:
    """Say that the bundled model does not know the language of most stored text, and what to do."""
    words = (
        f"most of what was said last is in {language}, and the bundled model knows English: by meaning it finds little"
    )
    return words, "run `memd model add multilingual`, set embedding.model: multilingual, and run `memd reembed`"


def instructing_words(signs: Sequence[str]) -> str:
    """Return the label of a chunk that looks like an instruction to a model, by its signs; empty without signs."""
    return f"looks like an instruction to a model ({', '.join(signs)})" if signs else ""
