"""What a caller's corrections do to the log: which entries are appended, and which ids could not be corrected.

Rule: memd never judges; it does what it is told to the chunks that it showed recently, and says where it could not.
Corrections are applied in order, each seeing the effect of those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from memd.entries import Correction, Draft, Entry, Status, clamp_utility_steps

STEPS = {"Helpful": 1, "Unhelpful": -1}
"""What the actions that do not replace a chunk do to its utility."""


class Outcome(msgspec.Struct, frozen=True):
    """The entries to append as one group, and the ids for which `correction_failed` is signalled."""

    drafts: tuple[Draft, ...]
    failed: tuple[str, ...]


def plan(
    corrections: Sequence[Correction],
    *,
    find: Callable[[str], Entry | None],
    embed: Callable[[str], bytes],
    new_uuid: Callable[[], bytes],
    now_us: int,
) -> Outcome:
    """Turn corrections into entries.

    Args:
        find: the present entry of a chunk by the id that was shown or its full uuid, live in this topic or, for a
            chunk of a related topic that was never corrected here, live there; None if the id may not be corrected.
        embed: the vector of a text, little-endian float32.
        now_us: microseconds since the epoch.
    """
    present: dict[bytes, Draft] = {}  # chunks as the corrections before leave them
    drafts: list[Draft] = []
    failed: list[str] = []
    for correction in corrections:
        named: dict[bytes, Draft] = {}
        for chunk_id in dict.fromkeys(correction.chunk_ids):
            entry = find(chunk_id)
            state = None if entry is None else present.get(entry.uuid, entry.as_draft())
            if state is None or state.status is not Status.ACTIVE:
                failed.append(chunk_id)
            else:
                named[state.uuid] = state
        for state in named.values():
            changed = _corrected(state, correction)
            present[changed.uuid] = changed
            drafts.append(changed)
        content = correction.content or ""
        if correction.action == "Update" and content.strip() and named:
            drafts.append(_replacement(correction, content, list(named.values()), embed, new_uuid(), now_us))
    return Outcome(tuple(drafts), tuple(failed))


UNDO = "Undo"
"""The action of an entry that gives a chunk an earlier state back."""


def undone(entry: Entry, before: Entry | None, *, reason: str) -> Draft:
    """The entry that gives a chunk an earlier state back.

    Args:
        entry: the chunk's present entry.
        before: the state to go back to; None: there was none, the chunk is taken out.
    """
    why = {"action": UNDO, "reason": reason}
    if before is None or before.status is not Status.ACTIVE:
        return msgspec.structs.replace(entry.as_draft(), status=Status.DEPRECATED, vector=b"", content="", **why)
    return msgspec.structs.replace(before.as_draft(), **why)


def _corrected(state: Draft, correction: Correction) -> Draft:
    why = {"action": correction.action, "reason": correction.reason}
    if correction.action == "Update":
        return msgspec.structs.replace(state, status=Status.DEPRECATED, vector=b"", content="", **why)
    steps = clamp_utility_steps(state.utility_steps + STEPS[correction.action])
    return msgspec.structs.replace(state, utility_steps=steps, **why)


def _replacement(
    correction: Correction,
    content: str,
    replaced: Sequence[Draft],
    embed: Callable[[str], bytes],
    uuid: bytes,
    now_us: int,
) -> Draft:
    # No digests: the text came from no message, so no message in a prompt makes it redundant.
    return Draft(
        uuid=uuid,
        content=content,
        vector=embed(content),
        created_at=now_us,
        roles=tuple(dict.fromkeys(role for state in replaced for role in state.roles)),
        supersedes=tuple(state.uuid for state in replaced),
        action=correction.action,
        reason=correction.reason,
    )
