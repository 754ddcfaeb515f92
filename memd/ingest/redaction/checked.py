"""Where redaction meets the disk: the last look at every entry of the log.

Rule: nothing reaches the log but through `checked_by` (the store calls it in every append), and nothing the journal but
through `Redactor.event` (topics.py). Whoever cuts text into chunks redacts it before: a secret may lie across a cut.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from memd.entries import Draft, Vector
from memd.ingest.redaction.redactor import Redactor


def checked_by(redactor: Redactor, embed: Callable[[str], Vector]) -> Callable[[Draft], Draft]:
    """What the store lets every draft go through: redacted, with the vector of what is left of its content.

    A correction copies a chunk that may have been stored before redaction was on.
    """

    def checked(draft: Draft) -> Draft:
        kept = redactor.draft(draft)
        if kept is draft:
            return draft
        redactor.tell(redactor.replaced(draft, kept))
        if draft.vector and kept.content != draft.content:
            kept = msgspec.structs.replace(kept, vector=embed(kept.content).astype("<f4").tobytes())
        return kept

    return checked
