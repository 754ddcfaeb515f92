"""`memd log`, `show`, `correct` and `undo`.

Rule: the daemon reads and appends; here it is only asked, and its answer shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memd.admin.history import ChunkStory, Event, Page
from memd.cli.running import RunningDaemon, asked
from memd.errors import BadQuestion
from memd.settings.model import Config
from memd.wording import counted, for_terminal

INDENT = 2
Lines = list[RenderableType]


class Done(msgspec.Struct, frozen=True):
    """What a correction or an undo appended, and the ids that it could not be applied to."""

    applied: tuple[int, ...]
    failed: tuple[str, ...] = ()


def log(config: Config, topics: Sequence[str], before: str | None, limit: int) -> tuple[bytes, Lines]:
    """The latest events, as JSON and for a person."""
    with asked(config) as daemon:
        told = daemon.get("/memd/log", topic=list(topics), before=before, limit=limit)
    page = msgspec.json.decode(told, type=Page)
    lines: Lines = [_event(event) for event in page.events]
    if not lines:
        lines.append("Nothing is stored.")
    if page.next is not None:
        lines.append(f"There is more: --before {page.next}")
    return told, lines


def show(config: Config, chunk_id: str, topic: str | None) -> tuple[bytes, Lines]:
    """All about a chunk, as JSON and for a person."""
    with asked(config) as daemon:
        told = daemon.get(f"/memd/chunks/{_path(chunk_id)}", topic=topic)
    story = msgspec.json.decode(told, type=ChunkStory)
    state = "counts" if story.live else "is taken out"
    lines: Lines = [Text(f"{story.id} ({story.uuid}) in topic {story.topic_id} {state}", style="bold"), ""]
    lines += [_event(version) for version in story.versions]
    for name, uuids in (("Took the place of", story.replaces), ("Its place was taken by", story.replaced_by)):
        if uuids:
            lines.append(f"{name} {', '.join(uuid[:8] for uuid in uuids)}.")
    for name, event in (("Said before it", story.before), ("Said after it", story.after)):
        if event is not None:
            lines += [f"{name}:", _event(event)]
    if story.turns:
        lines.append(f"Injected in {counted(len(story.turns), 'turn')} (memd turn ID): {' '.join(story.turns)}")
    return told, lines


def correct(
    config: Config, chunk_ids: Sequence[str], topic: str | None, action: str, content: str | None, reason: str
) -> Done:
    """Apply one correction to chunks of one topic."""
    with asked(config) as daemon:
        if topic is None:
            topics = {_topic_of_chunk(daemon, chunk_id) for chunk_id in chunk_ids}
            if len(topics) > 1:
                raise BadQuestion(f"these chunks are in several topics ({', '.join(sorted(topics))}): name one")
            [topic] = topics
        body = {"topic_id": topic, "chunk_ids": chunk_ids, "action": action, "reason": reason}
        told = daemon.post("/memd/corrections", body if content is None else body | {"content": content})
    return msgspec.json.decode(told, type=Done)


def undo(config: Config, canonical_id: int, topic: str | None, reason: str) -> Done:
    """Take back what an entry did."""
    with asked(config) as daemon:
        if topic is None:
            page = msgspec.json.decode(daemon.get("/memd/log", before=canonical_id + 1, limit=1), type=Page)
            if not page.events or page.events[0].canonical_id != canonical_id:
                raise BadQuestion(f"there is no entry {canonical_id}; `memd log` lists them")
            topic = page.events[0].topic_id
        told = daemon.post("/memd/undo", {"topic_id": topic, "canonical_id": canonical_id, "reason": reason})
    return msgspec.json.decode(told, type=Done)


def time_of(microseconds: int) -> str:
    """In this machine's time zone."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _topic_of_chunk(daemon: RunningDaemon, chunk_id: str) -> str:
    return msgspec.json.decode(daemon.get(f"/memd/chunks/{_path(chunk_id)}"), type=ChunkStory).topic_id


def _path(chunk_id: str) -> str:
    digits = "".join(chunk_id.split()).removeprefix("[mem:").removesuffix("]")
    if not digits.replace("-", "").isalnum():
        raise BadQuestion(f"{chunk_id[:60]!r} is no chunk's id: those are hexadecimal digits, as in [mem:a3f9]")
    return digits


def _event(event: Event) -> RenderableType:
    head = Text.assemble(
        f"{time_of(event.at)}  ",
        (event.event, "bold green" if event.live else "bold"),
        f"  {event.id}  ",
        (event.topic_id, "cyan"),
        f"  entry {event.canonical_id}",
        "" if event.multiplier == 1 else f"  times {event.multiplier:g}",
        no_wrap=True,
    )
    parts: list[RenderableType] = [head]
    if event.reason:
        parts.append(Padding(Text(f"because: {for_terminal(event.reason)}"), (0, 0, 0, INDENT), expand=False))
    content = Text(for_terminal(event.content), style="" if event.live else "dim")
    parts.append(Padding(content, (0, 0, 1, INDENT), expand=False))
    return Group(*parts)
