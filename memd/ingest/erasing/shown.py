"""The memory blocks of topics that have read another one as a related one, once something is erased in that.

Rule: such a block goes as the chunk does: out of the next prompt, and out of the journal.
"""

from __future__ import annotations

from collections.abc import Iterable

from memd.conversation.hot_buffer import HotBuffer
from memd.store.erasure.ledger import Erasure


def erased_in(buffer: HotBuffer, erasures: Iterable[Erasure]) -> frozenset[bytes]:
    """Return the uuids of the chunks in a topic's memory blocks that were erased where they came from."""
    blocks = (block for conversation in buffer.conversations() for block in conversation.blocks.values())
    shown = {chunk for block in blocks for chunk in block.chunks}
    if not shown:
        return frozenset()
    return frozenset(
        chunk.uuid
        for one in erasures
        for chunk in shown
        if chunk.topic_id == one.topic_id
        # A topic of the same name that was begun later has higher ids.
        and (chunk.origin_id <= max(one.id, one.highest_id) if one.kind == "topic" else chunk.uuid in one.chunk_uuids)
    )
