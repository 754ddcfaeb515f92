"""`memd correct`, `undo` and `erase`: changes to the memory.

Rule: the daemon appends and erases; these commands only print its answers. Before an erasure they show what would be
erased, and ask.
"""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from memd.admin import reads, writes
from memd.admin.reads import ChunkStory, LogEvent
from memd.admin.writes import Corrected, CorrectionBody, ErasureAnswer, ErasureBody, UndoBody
from memd.cli.flags import FOUND_SOMETHING, removed_files, say, with_settings
from memd.cli.operations import Lines, options_of, print_lines, show
from memd.cli.running import RunningDaemon, daemon_for
from memd.errors import BadQuestion, NotFound
from memd.settings.model import Config
from memd.wording import beginning, counted, day_and_time, for_terminal, name_for_terminal

TEXT_CHARACTERS = 100
"""Characters of a corrected chunk that are printed, so that the user recognizes it."""
CHUNK_DIGITS = range(4, 13)
"""A decimal number with so many digits is a chunk's id; any other number is an entry's, a time in microseconds."""
_DONE = {
    "Helpful": "counts for more",
    "Unhelpful": "counts for less",
    "Update": "is no longer shown",
    "replacement": "is shown in its place",
}
"""Outcome by kind of entry; that of an undo depends on the chunk."""
UNDOES = "undo takes a chunk's id (9ada), or the number behind `entry` in `memd log`"
ONE_FLAG = "give one of --helpful, --unhelpful, --update TEXT and --deprecate{}; `memd correct --help` tells them"


@click.command()
@with_settings()
@click.option("--topic", help="The topic of the chunks. Default: the one that has them.")
@click.option("--helpful", is_flag=True, help="It counts for more from now on.")
@click.option("--unhelpful", is_flag=True, help="It counts for less from now on.")
@options_of(CorrectionBody, only=["steps"])
@click.option("--update", "content", metavar="TEXT", help="It is wrong: TEXT takes its place.")
@click.option("--deprecate", is_flag=True, help="It is wrong: it is not shown any more.")
@options_of(CorrectionBody, only=["reason"])
@click.argument("chunk_ids", metavar="ID...", nargs=-1, required=True)
def correct(config: Config, topic: str | None, *, helpful: bool, unhelpful: bool, deprecate: bool, **given: Any) -> int:
    """Mark the chunks ID... as helpful, unhelpful or wrong.

    Example: memd correct 9ada --update "The shop listens on 4443."
    """
    chunk_ids, content = given["chunk_ids"], given["content"]
    flags = {"--helpful": helpful, "--unhelpful": unhelpful, "--update": content is not None, "--deprecate": deprecate}
    named = [flag for flag, is_given in flags.items() if is_given]
    if len(named) != 1:
        raise BadQuestion(ONE_FLAG.format(f", not {' and '.join(named)}" if named else ""))
    if content is not None and not content.strip():
        raise BadQuestion("--update needs a text; to take a chunk out without one, say --deprecate")
    action = "Helpful" if helpful else "Unhelpful" if unhelpful else "Update"
    with daemon_for(config) as daemon:
        if topic is None:
            topics = {_chunk(daemon, chunk_id).topic_id for chunk_id in chunk_ids}
            if len(topics) > 1:
                raise BadQuestion(f"these chunks are in several topics ({', '.join(sorted(topics))}): name one")
            [topic] = topics
        body = {name: value for name, value in given.items() if value is not None}
        done = daemon.ask(writes.correct, body=body | {"topic_id": topic, "action": action})
        _tell_appended(daemon, topic, done)
    for chunk_id in done.failed:
        say(f"{chunk_id} is not corrected: no live chunk has this id; `memd show {chunk_id}` tells what became of it")
    return FOUND_SOMETHING if done.failed else 0


@click.command()
@with_settings()
@click.option("--topic", help="The topic of the chunk or entry. Default: the one that has it.")
@options_of(UndoBody, only=["reason"])
@click.argument("id_", metavar="ID")
def undo(config: Config, topic: str | None, reason: str | None, id_: str) -> int:
    """Take back the latest correction of the chunk ID.

    ID may also be the number of an entry; `memd log` shows them.

    Example: memd undo 9ada
    """
    with daemon_for(config) as daemon:
        if id_.isascii() and id_.isdigit() and len(id_) not in CHUNK_DIGITS:
            before = int(id_) + 1
            page = daemon.ask(reads.log_page, topic=[topic] if topic else [], before=before, limit=1)
            if not page.events or page.events[0].canonical_id != int(id_):
                raise NotFound(f"there is no entry {id_}; {UNDOES}")
            [undone] = page.events
        else:
            story = _chunk(daemon, id_, topic)
            undone = story.versions[-1]
            if len(story.versions) == 1 and story.replaces:
                one = story.replaces[0][:8]
                raise BadQuestion(f"chunk {story.id} took the place of {one}: `memd undo {one}` takes that back")
            if undone.event in ("told", "pending", "re-embedded"):
                raise BadQuestion(f"chunk {story.id} was not corrected, so there is nothing to take back")
        body = {"topic_id": undone.topic_id, "canonical_id": undone.canonical_id, "reason": reason or ""}
        _tell_appended(daemon, undone.topic_id, daemon.ask(writes.undo, body=body), undone)
    return 0


def _chunk(daemon: RunningDaemon, chunk_id: str, topic: str | None = None) -> ChunkStory:
    return daemon.ask(reads.chunk, chunk_id, topic=topic)


def _tell_appended(daemon: RunningDaemon, topic: str, answer: Corrected, undone: LogEvent | None = None) -> None:
    """Print the outcome of each appended entry. They form one group, so that they are adjacent in the topic's log."""
    if not answer.applied:
        return
    page = daemon.ask(reads.log_page, topic=[topic], before=max(answer.applied) + 1, limit=len(answer.applied))
    lines: Lines = []
    for one in reversed(page.events):
        was_shown = undone is not None and undone.live and undone.uuid == one.uuid
        times = "once" if one.multiplier == 1 else f"{one.multiplier:.3g} times"
        again = f"counts {times} now" if was_shown else "is shown again"
        done = _DONE.get(one.event, again if one.live else "is no longer shown")
        takes_back = "" if one.event == "replacement" else f"; memd undo {one.id} takes it back"
        text = name_for_terminal(beginning(one.content, TEXT_CHARACTERS))
        lines += [Text(f"{one.id} {done} in topic {one.topic_id}{takes_back}"), Text(f"  {text}")]
    print_lines(lines)


IDS_TOLD = 100
SECONDS_MAX = 3_600.0
"""Limit for an erasure: a large topic is overwritten at the speed of its disk."""


@click.command()
@with_settings()
@options_of(ErasureBody, leave_out=["topic_id"], chunk_ids="--chunk")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="The outcome as one JSON object; nothing is asked.")
@click.argument("topic_id", metavar="[TOPIC]", required=False)
def erase(config: Config, *, dry_run: bool, yes: bool, as_json: bool, topic_id: str | None, **chosen: Any) -> int:
    """Erase a topic, or single chunks, for good.

    With TOPIC alone all of it. What is erased cannot be brought back; a backup has it until its next round.

    Example: memd erase --dry-run work
    """
    before, retention, resume = (chosen[name] for name in ("before", "retention", "resume"))
    author, source = chosen["author"], chosen["source"]
    is_of_chunks = bool(chosen["chunk_ids"] or author or source)
    if as_json and not (yes or dry_run or resume):
        raise BadQuestion("--json asks nothing: say --yes too, or --dry-run")
    body = {"topic_id": topic_id, **chosen}
    with daemon_for(config) as daemon:
        if (dry_run or not resume) and not as_json:
            plan = daemon.ask(writes.erase, body=body | {"dry_run": True}, seconds=SECONDS_MAX)
            whole_topic = topic_id if not before and not is_of_chunks else None  # even if empty or unreadable
            click.echo("\n".join(_planned(plan, whole_topic)))
            if retention and not config.retention:
                click.echo("The settings keep everything: they have no `retention`.")
            if author and not any(one.chunks for one in plan.plans):
                click.echo(f"Nothing is by {for_terminal(author)}; `memd token list` names who has a token.")
            if source and not any(one.chunks for one in plan.plans):
                click.echo(f"Nothing is from {for_terminal(source)}; `memd show ID` says where a chunk is from.")
            if dry_run or not (whole_topic or any(one.chunks for one in plan.plans)):
                return 0
            if not yes and not click.confirm("Erase this for good?"):
                click.echo("Nothing was erased.")
                return 0
        answer = daemon.ask(writes.erase, body=body | {"dry_run": dry_run}, seconds=SECONDS_MAX)
    lines: Lines = []
    for one in answer.done:
        what = f"topic {one.topic_id}" if one.kind == "topic" else f"in topic {one.topic_id}"
        size = f"{counted(one.chunks, 'chunk')} ({counted(one.entries, 'entry')})"
        lines.append(f"Erased {what}: {size}, in {one.seconds:.1f} s.")
    left = [path for one in answer.done for path in one.not_overwritten]
    removed = removed_files(left, "a backup shares them or a reader had them")
    show(answer, [*lines, removed] if lines else ["Nothing was left to erase."], as_json=as_json)
    return 0


def _planned(answer: ErasureAnswer, whole_topic: str | None) -> list[str]:
    """`whole_topic`: the topic erased with its folder and all its content; None if only chunks are erased."""
    is_any = bool(whole_topic) or any(plan.chunks or plan.unnamed for plan in answer.plans)
    lines = [] if is_any else ["There is nothing to erase."]
    if whole_topic and not answer.plans:
        lines.append(f"topic {whole_topic}, with its folder")
    for plan in answer.plans:
        size = f"{counted(plan.chunks, 'chunk')} ({counted(plan.entries, 'entry')})"
        said = ""
        if plan.oldest is not None and plan.newest is not None:
            said = f", said from {day_and_time(plan.oldest)} to {day_and_time(plan.newest)}"
        lines.append(f"topic {plan.topic_id}{', with its folder' if plan.kind == 'topic' else ''}: {size}{said}")
        lines += [f"  {for_terminal(words)}" for words in plan.first_words]
        lines += [f"  ids: {' '.join(plan.ids[:IDS_TOLD])}"] if plan.ids else []
        told = len(plan.ids[:IDS_TOLD]) or len(plan.first_words)  # a topic that the caller may not read shows nothing
        if told and (more := plan.chunks - told) > 0:
            how = "--dry-run --json" if plan.ids else f"memd export --topic {plan.topic_id} --live"
            lines.append(f"  and {more:,} more, which `{how}` has")
        if plan.unnamed:
            lines.append(f"  the call goes from {counted(plan.unnamed, 'other chunk')} of its result, too")
        if plan.kept_documents:
            lines.append(f"  {counted(plan.kept_documents, 'chunk')} of documents stay: they go when their files go")
        if plan.kept_live:
            lines.append(f"  {counted(plan.kept_live, 'chunk')} of live conversations stay for now")
    if is_any and answer.remains:
        lines += ["What this does not reach:", *(f"  {for_terminal(one)}" for one in answer.remains)]
    return lines
