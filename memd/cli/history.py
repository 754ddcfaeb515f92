"""`memd log`, `show`, `correct` and `undo`.

Rule: the daemon reads and appends; these commands only show its answers.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from memd.admin.history import ChunkStory, LogEvent, LogPage, checked_digits
from memd.admin.reads import LogRoutes
from memd.admin.writes import Corrected, CorrectionBody, UndoBody
from memd.cli.flags import FOUND_SOMETHING, config_of_existing, origin_words, print_lines, settings_flags, warning_words
from memd.cli.kept import waiting_messages, waiting_note
from memd.cli.operations import Asked, Lines, option_of, shows
from memd.cli.running import RunningDaemon, daemon_for
from memd.errors import BadQuestion, NotFound, WrongKey
from memd.settings.model import Config
from memd.store.encryption.opening import disk_of
from memd.wording import counted, for_terminal, name_for_terminal

INDENT = 2
TEXT_CHARACTERS = 100
"""Of a corrected chunk that are shown, so that it is seen which it was."""
CHUNK_DIGITS = range(4, 13)
"""A decimal number of so many digits is a chunk's id, any other one an entry's, which is a time in microseconds."""
_DONE = {
    "Helpful": "counts for more",
    "Unhelpful": "counts for less",
    "Update": "is no longer shown",
    "replacement": "is shown in its place",
}
"""The outcome of an entry; an undo's depends on the chunk."""
ONE_FLAG = "give one of --helpful, --unhelpful, --update TEXT and --deprecate"


@click.command()
@shows(LogRoutes.log_page)
def log(asked: Asked[LogPage]) -> tuple[Lines, int]:
    """Show what happened to the memory, newest first.

    Example: memd log --topic work
    """
    page, config = asked.answer, asked.config
    lines: Lines = [_event(event) for event in page.events]
    if not lines:
        lines.append("Nothing is stored.")
    with suppress(WrongKey):  # the daemon has the key, this command need not: it says less
        topics = asked.given.get("topic", (None,))
        waiting = [waiting_messages(config.data_dir, disk_of(config), topic) for topic in topics]
        if note := waiting_note(sum(waiting)):
            lines.append(note)
    if page.next is not None:
        lines.append(f"There is more: --before {page.next}")
    return lines, 0


@click.command()
@shows(LogRoutes.chunk, check=checked_digits, id="ID")
def show(asked: Asked[ChunkStory]) -> tuple[Lines, int]:
    """Show the versions of the chunk ID, and where it was shown.

    Example: memd show 9ada
    """
    story = asked.answer
    state = "is live" if story.live else "is taken out"
    if story.versions[-1].event == "erased":
        state = f"was erased {story.versions[-1].reason}; its text is gone"
    if story.versions[-1].event == "pending":
        state = "was said and is not in the log yet: it waits in hot.log until memd stores it"
    lines: Lines = [Text(f"{story.id} ({story.uuid}) in topic {story.topic_id} {state}", style="bold")]
    lines += [f"Said {time_of(story.versions[0].said_at)}", ""]
    lines += [_event(version) for version in story.versions]
    for name, uuids in (("Took the place of", story.replaces), ("Its place was taken by", story.replaced_by)):
        if uuids:
            lines.append(f"{name} {', '.join(uuid[:8] for uuid in uuids)}.")
    for name, event in (("Said before it", story.before), ("Said after it", story.after)):
        if event is not None:
            lines += [f"{name}:", _event(event)]
    if story.turns:
        lines.append(f"Injected in {counted(len(story.turns), 'turn')} (memd turn ID): {' '.join(story.turns)}")
    return lines, 0


@click.command()
@settings_flags
@click.option("--topic", help="The topic of the chunks. Default: the one that has them.")
@click.option("--helpful", is_flag=True, help="It counts for more from now on.")
@click.option("--unhelpful", is_flag=True, help="It counts for less from now on.")
@option_of(CorrectionBody, "steps")
@click.option("--update", "content", metavar="TEXT", help="It is wrong: TEXT takes its place.")
@click.option("--deprecate", is_flag=True, help="It is wrong: it is not shown any more.")
@option_of(CorrectionBody, "reason")
@click.argument("chunk_ids", metavar="ID...", nargs=-1, required=True)
def correct(
    config_path: Path | None,
    data_dir: str | None,
    topic: str | None,
    helpful: bool,
    unhelpful: bool,
    steps: int | None,
    content: str | None,
    deprecate: bool,
    reason: str | None,
    chunk_ids: tuple[str, ...],
) -> int:
    """Mark the chunks ID... as helpful, unhelpful or wrong.

    Example: memd correct 9ada --update "The shop listens on 4443."
    """
    flags = {"--helpful": helpful, "--unhelpful": unhelpful, "--update": content is not None, "--deprecate": deprecate}
    named = [flag for flag, is_given in flags.items() if is_given]
    if len(named) != 1:
        raise BadQuestion(f"{ONE_FLAG}, not {' and '.join(named) or 'none of them'}")
    if content is not None and not content.strip():
        raise BadQuestion("--update needs a text; to take a chunk out without one, say --deprecate")
    if steps not in (None, 1) and not (helpful or unhelpful):
        raise BadQuestion("--steps belongs to --helpful and --unhelpful")
    config = config_of_existing(config_path, data_dir)
    action = "Helpful" if helpful else "Unhelpful" if unhelpful else "Update"
    given = {"chunk_ids": chunk_ids, "action": action, "reason": reason, "steps": steps, "content": content}
    done, appended = _correct(config, topic, {name: value for name, value in given.items() if value is not None})
    if appended:
        print_lines(appended)
    for chunk_id in done.failed:
        why = f"no live chunk has this id here; `memd show {chunk_id}` tells what became of it"
        click.echo(f"{chunk_id}: not corrected: {why}", err=True)
    return FOUND_SOMETHING if done.failed else 0


@click.command()
@settings_flags
@click.option("--topic", help="The topic of the chunk or entry. Default: the one that has it.")
@option_of(UndoBody, "reason")
@click.argument("id_", metavar="ID")
def undo(config_path: Path | None, data_dir: str | None, topic: str | None, reason: str | None, id_: str) -> int:
    """Take back the latest correction of the chunk ID.

    ID may also be the number of an entry; `memd log` shows them.

    Example: memd undo 9ada
    """
    print_lines(_undo(config_of_existing(config_path, data_dir), id_, topic, reason))
    return 0


def _correct(config: Config, topic: str | None, body: dict[str, Any]) -> tuple[Corrected, Lines]:
    """Apply one correction to chunks of one topic; return the answer, and the appended entries as text."""
    with daemon_for(config) as daemon:
        if topic is None:
            topics = {_topic_of_chunk(daemon, chunk_id) for chunk_id in body["chunk_ids"]}
            if len(topics) > 1:
                raise BadQuestion(f"these chunks are in several topics ({', '.join(sorted(topics))}): name one")
            [topic] = topics
        told = daemon.post("/memd/corrections", {"topic_id": topic} | body)
        answer = msgspec.json.decode(told, type=Corrected)
        return answer, _appended(daemon, topic, answer)


def _undo(config: Config, id_: str, topic: str | None, reason: str | None) -> Lines:
    """Take back what an entry did, or the latest one of a chunk; return the appended entries as text."""
    with daemon_for(config) as daemon:
        if id_.isascii() and id_.isdigit() and len(id_) not in CHUNK_DIGITS:
            canonical_id = int(id_)
            topic = topic or _topic_of_entry(daemon, canonical_id)
        else:
            told = daemon.get(f"/memd/chunks/{checked_digits(id_)}", topic=topic)
            story = msgspec.json.decode(told, type=ChunkStory)
            topic, canonical_id = story.topic_id, story.versions[-1].canonical_id
            if len(story.versions) == 1:
                raise BadQuestion(f"chunk {story.id} was not corrected, so there is nothing to take back")
        told = daemon.post("/memd/undo", {"topic_id": topic, "canonical_id": canonical_id, "reason": reason or ""})
        return _appended(daemon, topic, msgspec.json.decode(told, type=Corrected))


def _appended(daemon: RunningDaemon, topic: str, answer: Corrected) -> Lines:
    """Return the outcome of each appended entry: one group, so nothing lies between them in the topic's log."""
    if not answer.applied:
        return []
    told = daemon.get("/memd/log", topic=[topic], before=max(answer.applied) + 1, limit=len(answer.applied))
    events = reversed(msgspec.json.decode(told, type=LogPage).events)
    lines: Lines = []
    for one in events:
        done = _DONE.get(one.event, "is shown again" if one.live else "is no longer shown")
        takes_back = "" if one.event == "replacement" else f"; memd undo {one.id} takes it back"
        text = name_for_terminal(" ".join(one.content.split())[:TEXT_CHARACTERS])
        lines += [Text(f"{one.id} {done} in topic {one.topic_id}{takes_back}"), Text(f"  {text}")]
    return lines


def time_of(microseconds: int) -> str:
    """Return a time in this machine's time zone."""
    return datetime.fromtimestamp(microseconds / 1e6, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _topic_of_chunk(daemon: RunningDaemon, chunk_id: str) -> str:
    return msgspec.json.decode(daemon.get(f"/memd/chunks/{checked_digits(chunk_id)}"), type=ChunkStory).topic_id


def _topic_of_entry(daemon: RunningDaemon, canonical_id: int) -> str:
    page = msgspec.json.decode(daemon.get("/memd/log", before=canonical_id + 1, limit=1), type=LogPage)
    if not page.events or page.events[0].canonical_id != canonical_id:
        raise NotFound(f"there is no entry {canonical_id}; `memd log` lists them")
    return page.events[0].topic_id


def _event(event: LogEvent) -> RenderableType:
    head = Text.assemble(
        f"{time_of(event.at)}  ",
        (event.event, "bold green" if event.live else "bold"),
        f"  {event.id}  ",
        (event.topic_id, "cyan"),
        f"  entry {event.canonical_id}",
        (origin_words(event), "magenta"),
        (warning_words(event), "yellow"),
        "" if event.multiplier == 1 else f"  times {event.multiplier:g}",
        "  taken out" if event.event == "Update" else "",  # the text below it is the one that went
        (f"  done by {name_for_terminal(event.by)}" if event.by != event.author and event.by else "", "magenta"),
    )
    parts: list[RenderableType] = [head]
    if event.reason:
        why = "" if event.event == "erased" else "because: "
        parts.append(Padding(Text(why + for_terminal(event.reason)), (0, 0, 0, INDENT), expand=False))
    content = Text(for_terminal(event.content), style="" if event.live else "dim")
    parts.append(Padding(content, (0, 0, 1, INDENT), expand=False))
    return Group(*parts)
