"""The end of a turn: its reply goes into the buffer, its receipt is kept, and a full buffer is compacted.

Rule: this runs in the background after the answer, also if the client left; nobody waits for it, and an error in the
receipt loses only the receipt. Exception: in a cluster, with `journal_fsync: always`, or if the client keeps no
history, question and block are in the journal before the answer begins, and the reply before it ends (`is_promised`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
from msgspec import UNSET

from memd.clock import steady_now
from memd.conversation.conversation import Conversation, Counted
from memd.conversation.hot_buffer import APART
from memd.conversation.tokens import TokenCounter
from memd.entries import SHOWN_MAX
from memd.ingest.archiver import Archiver
from memd.ingest.topic import Topic
from memd.messages import Speech, stamped
from memd.proxy.memory import Prepared, PromptRoom, SettledPrompt, count, degraded
from memd.proxy.prompt import Received
from memd.recall.explained import scored_chunks
from memd.receipts import Receipt, Receipts, without_texts
from memd.telemetry.logging import MEMORY_STEPS
from memd.telemetry.tasks import Tasks
from memd.wire.reply import Reply

log = logging.getLogger("memd")

JOURNAL_SECONDS_MAX = 1.0
"""Limit on the wait of a promised answer for the journal, so that a hanging disk blocks nobody."""


class Answered(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a forwarded request."""

    shown: SettledPrompt
    has_memory: bool
    """True if the prompt that the upstream accepted contained its blocks."""
    reply: Reply
    http_status: int | None
    """None if no answer came."""
    kept: Conversation | None = None
    """The conversation, if the reply is already in it."""


class Rememberer(msgspec.Struct, frozen=True):
    """Keeps a turn's reply and receipt, and starts compaction."""

    counter: TokenCounter
    archiver: Archiver
    receipts: Receipts
    speech: Speech
    """Finds the words said in a reply."""
    tasks: Tasks
    is_synced: bool
    """The whole turn is on disk when the answer ends."""
    is_shared: bool
    """The turn is stored where other daemons find it: they may get the next request."""

    async def remember(
        self,
        received: Received,
        prepared: Prepared,
        answered: Answered,
        spans_ms: Mapping[str, float],
        holding: ExitStack,
    ) -> None:
        """Keep the receipt and the reply, then close `holding`. `spans_ms`: duration of each step in ms."""
        with holding:
            try:
                receipt = self._receipt(received, prepared, answered, spans_ms)  # before the reply changes anything
            except Exception:  # a bug here must not cost the reply
                log.exception("a turn has no receipt", extra={"topic": received.topic.id})
                receipt = None
            # In a task of its own, started first, so that receipts keep the order of turns.
            kept = None if receipt is None else self.tasks.spawn(self.receipts.keep(receipt), "receipt")
            await self._remember_reply(received, prepared.room, answered)
            if kept is not None:
                await kept

    def is_promised(self, received: Received) -> bool:
        """Return whether the question and its block must be in the journal before the answer begins, so that whoever
        goes on with the conversation has the prompt that was answered, and the reply before it ends."""
        return received.is_traced and (self.is_synced or received.asked.is_thin)

    async def as_saved(self, received: Received, shown: SettledPrompt, saving: asyncio.Task[bool]) -> SettledPrompt:
        """Wait until the question is in the journal if that is promised; if that fails, the status says so."""
        if not self.is_promised(received):
            return shown
        await asyncio.wait([saving], timeout=JOURNAL_SECONDS_MAX)
        trouble = received.topic.write_trouble
        has_ended = saving.done() and not saving.cancelled() and saving.exception() is None
        is_saved = has_ended and saving.result()
        if trouble is None and is_saved:
            return shown
        return msgspec.structs.replace(shown, status="degraded:store" if trouble is None else degraded(trouble))

    async def save_asked(self, topic: Topic) -> bool:
        """Write the question to the journal; False if it had to be durable and is not. Another request's write may
        include it; `make_durable` waits for that too."""
        if self.is_synced:
            return await topic.make_durable()
        await topic.save()
        return True

    async def save(self, received: Received) -> None:
        """Write the reply to the journal, and to disk if `journal_fsync` asks for it; a failed write is retried. If the
        client keeps the reply, a database that does not answer delays the end of an answer no longer than a disk."""
        topic = received.topic
        work = topic.make_durable() if self.is_synced else topic.save()
        if not self.is_shared or received.asked.is_thin:
            await work
        else:
            await asyncio.wait([self.tasks.spawn(work, "journal")], timeout=JOURNAL_SECONDS_MAX)

    def keep_reply(self, received: Received, shown: SettledPrompt, reply: Reply) -> Conversation:
        """Put the reply into the buffer, once; returns the conversation that it is in."""
        conversation, buffer = received.prompt.conversation, received.topic.buffer
        last = None if received.key is None else received.key.last_digest
        arrival = received.arrival if last is None else buffer.rejoined(received.arrival, last)
        if reply.message is None or arrival is None or not buffer.is_open(arrival.conversation):
            return conversation
        message = self.speech.heard(self.speech.heard_alone(reply.message, buffer.has_placed))
        uuids = tuple([chunk.uuid for chunk in shown.chunks[:SHOWN_MAX]])
        [message] = stamped([message], time.time_ns() // 1000, received.asked.who.author)
        message = msgspec.structs.replace(message, shown=uuids or UNSET)
        tokens = self.counter.message(message, message.content_digest)
        return buffer.reply(arrival, message, tokens, steady_now())

    async def _remember_reply(self, received: Received, room: PromptRoom, answered: Answered) -> None:
        prompt, topic, reply = received.prompt, received.topic, answered.reply
        drift, model = self.counter.drift, received.request.model
        shown = answered.shown
        if reply.usage is not None and shown.prompt_tokens:
            counted = Counted(model, shown.prompt_tokens, reply.usage.prompt_tokens, shown.attachments)
            count(drift, prompt.conversation, counted)
        if not received.is_traced:
            return
        conversation = answered.kept or self.keep_reply(received, answered.shown, reply)
        self.archiver.cut_later(topic)
        await topic.save(sync=self.is_synced)
        visible = conversation.visible_tokens()  # without blocks: those of earlier turns leave before history does
        if drift.drifted(model, visible) > room.thresholds.soft:
            self.archiver.compact_later(topic, conversation)

    def _told(self, reply: Reply) -> dict[str, Any]:
        """Return the fields of a receipt that come from the reply."""
        told: dict[str, Any] = {} if reply.usage is None else msgspec.structs.asdict(reply.usage)
        if reply.message is not None:
            message = self.speech.heard(reply.message)
            told["reply"], told["calls"] = message.said, tuple(call.name for call in message.tool_calls)
        return {**told, "interrupted": reply.message is not None and reply.message.interrupted, "error": reply.error}

    def _receipt(
        self, received: Received, prepared: Prepared, answered: Answered, spans_ms: Mapping[str, float]
    ) -> Receipt:
        recalled, asked, prompt = prepared.recalled, received.asked, received.prompt
        found, shown, reply = recalled.retrieved, answered.shown, answered.reply
        model, memory_in = received.request.model, received.request.memory_in
        block = prompt.turn_block if shown.chunks else None

        def drifted(raw_tokens: int) -> int:
            return self.counter.drift.drifted(model, raw_tokens)

        timings_ms = {**spans_ms, "memory": sum(spans_ms.get(step, 0.0) for step in MEMORY_STEPS)}
        receipt = Receipt(
            turn_id=asked.turn_id,
            at=received.at,
            topic_id=received.topic.id,
            api=asked.api.path,
            mode=asked.mode,
            model=model,
            author=asked.who.author,
            related=tuple(topic.id for topic in received.related),
            status=shown.status,
            http_status=answered.http_status,
            is_step=received.is_step,
            is_retry=received.is_retry,
            **_place(received),
            asked=next(prompt.user_texts(), ""),
            **self._told(reply),
            question=None if found is None else found.question,
            step=recalled.step,
            filter=received.request.wanted,
            note="\n".join(filter(None, (shown.problem, None if found is None else found.note))) or None,
            candidates=() if found is None else scored_chunks(found),
            budget_tokens=0 if found is None else found.budget.tokens,
            room_tokens=0 if found is None else found.budget.block,
            block=None if block is None else block.text,
            block_tokens=0 if block is None else drifted(block.tokens),
            shown=tuple([chunk.shown_id for chunk in shown.chunks]),
            shown_from=tuple({one.topic_id: None for one in shown.chunks if one.topic_id != received.topic.id}),
            memory_tokens=drifted(shown.block_tokens),
            forwarded_tokens=drifted(shown.prompt_tokens),
            placement="merged" if answered.has_memory else None,
            left_out=prompt.left_out(),
            replaced=prompt.replaced(),
            freed_tokens=drifted(prepared.freed_tokens),
            corrections=() if memory_in is None else tuple(memory_in.corrections),
            signals=tuple(msgspec.to_builtins(signal) for signal in shown.signals),
            timings_ms={name: round(value, 3) for name, value in timings_ms.items()},
        )
        forbidden = received.topic.log.forbidden
        return without_texts(receipt) if prompt.asks_erased(forbidden) else receipt


def _place(received: Received) -> dict[str, Any]:
    """Return the receipt's fields for the turn's place; a detached copy is reported as its original conversation."""
    prompt, conversation = received.prompt, received.prompt.conversation
    name, branched = conversation.id, conversation.origin
    if not received.is_traced:
        name, branched = name if name != APART else "" if branched is None else branched[0], None
    return {"conversation": name, "position": prompt.turn_position or 0, "branched": branched}
