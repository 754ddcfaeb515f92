"""The settings of redaction: the names of its patterns, and how words and countries are written.

Rule: names only; `ingest/redaction/` has what they stand for.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

PATTERN_NAME = r"^[A-Za-z0-9_-]{1,40}$"
PATTERN_COUNTRY = "^[A-Z]{2}$"
PATTERN_WORD = r"^[^\x00-/:-@\[-`{-\x7f]([^\x00-\x1f\x7f]*[^\x00-/:-@\[-`{-\x7f])?$"

RedactionName = Literal[
    "private_key", "url_credentials", "jwt", "api_key", "bearer_token", "password", "login", "cookie", "card_number",
    "iban",
]  # fmt: skip
"""The built-in redaction patterns; `assets/redaction.toml` has them."""
PersonName = Literal["email", "national_id", "phone"]
"""The opt-in patterns of `redact_persons`; `ingest/redaction/persons.py` has them."""
LISTED_WORD = "word"
"""The mark of what `redact_words` lists: `[redacted:word]`."""
PatternName = Annotated[str, Meta(pattern=PATTERN_NAME)]
CountryCode = Annotated[str, Meta(pattern=PATTERN_COUNTRY)]
ListedWord = Annotated[str, Meta(min_length=1, max_length=100, pattern=PATTERN_WORD)]
