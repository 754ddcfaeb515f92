"""The demo's conversation, and the questions about it.

Rule: an answer that a question expects stands in the conversation exactly once, so that it can only be known by
remembering that place; `load_turns` checks it.
"""

from __future__ import annotations

from importlib.resources import files

import msgspec

SYSTEM_PROMPT = "You are a careful coding assistant. Answer briefly."


class Exchange(msgspec.Struct, frozen=True):
    """One exchange between the developer and the assistant."""

    user: str
    assistant: str


class Question(msgspec.Struct, frozen=True):
    """Something the developer asks long after it was said."""

    text: str
    expects: str
    """The words that a right answer contains."""


QUESTIONS = (
    Question("Which error code does the API answer when a stand is already taken?", "ERR_7421"),
    Question("After how many hours do the login tokens expire?", "36 hours"),
    Question("Which database are we using instead of SQLite?", "PostgreSQL 16"),
    Question("How does Marta want to get her messages?", "text messages and never e-mail"),
)
"""Asked at the end of the long conversation."""

QUESTION_IN_NEW_CHAT = Question("On which port should the API listen?", "7340")

CHANGED = Question("When does the reminder for customers go out?", "18:00 on the evening before")
"""Asked before the decision changes."""
CHANGED_AGAIN = "And when exactly does the reminder for customers go out now?"
CORRECTION = "Decision changed: the reminder for customers goes out three hours before the appointment."
CORRECTION_REASON = "customers forgot the appointment overnight"
CORRECTED_EXPECTS = "three hours before the appointment"


def load_turns() -> list[Exchange]:
    """The conversation, oldest turn first."""
    text = files("memd.demo").joinpath("bike_workshop.txt").read_text(encoding="utf-8")
    _, *exchanges = text.split("\n> ")
    turns = []
    for exchange in exchanges:
        user, _, assistant = exchange.partition("\n< ")
        turns.append(Exchange(user.strip(), assistant.strip()))
    for question in (*QUESTIONS, QUESTION_IN_NEW_CHAT, CHANGED):
        assert text.count(question.expects) == 1, f"{question.expects!r} must be said exactly once"
    return turns
