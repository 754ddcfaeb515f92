"""`memd search`, `log`, `show`, `turn`, `digest`, `related`, `entities`, `usage`: stored text, and what memory did.

Rule: the daemon searches, reads and adds up; these commands only print its answers.
"""

from __future__ import annotations

from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from memd.admin import reads, status, turns
from memd.admin.reads import ChunksPage, ChunkStory, Digest, Entities, LogEvent, LogPage, RelatedChunks
from memd.admin.turns import TurnReplay, TurnsPage, UsageByDay
from memd.cli.flags import FOUND_SOMETHING, Number, with_settings
from memd.cli.operations import Lines, RouteAnswer, indented, json_flag, marks_of, shows, table, time_of
from memd.cli.operations import show as show_answer
from memd.cli.running import daemon_for
from memd.errors import BadQuestion
from memd.recall.explained import INJECTED, FoundChunk, SearchAnswer
from memd.receipts import Receipt
from memd.settings.model import Config
from memd.wording import (
    NOTHING_STORED,
    beginning,
    counted,
    day_and_time,
    for_terminal,
    memory_words,
    name_for_terminal,
    waiting_note,
)


@click.command()
@shows(reads.search, listing=reads.chunks, q="[QUESTION]")
@click.option(
    "--explain", is_flag=True, help="Also what would not be shown to the model, with the parts of each score and why."
)
def search(asked: RouteAnswer[SearchAnswer | ChunksPage], *, explain: bool) -> tuple[Lines, int]:
    """Show the chunks that a new chat with QUESTION would get.

    Without QUESTION: all that --from, --contains and the others choose, latest first. Exit code 1 if there are none.

    Example: memd search "Which port does the shop listen on?"
    """
    answer, given = asked.answer, asked.given.keys()
    if isinstance(answer, ChunksPage):
        lines: Lines = [_event(one) for one in sorted(answer.chunks, key=lambda one: -one.said_at)]
        more = [] if answer.next is None else ["There is more: give a higher --limit, or an earlier --to."]
        if not lines:
            return ["Nothing that is stored is like that.", *_unknown(asked)], FOUND_SOMETHING
        return lines + more, 0
    exit_code = 0 if answer.tokens else FOUND_SOMETHING
    if not answer.chunks and not asked.daemon.ask(reads.log_page, limit=1).events:
        return [_waiting(asked) or NOTHING_STORED], exit_code
    ranked = answer.chunks if answer.is_reranked else sorted(answer.chunks, key=lambda chunk: -chunk.score)
    injected = [chunk for chunk in ranked if chunk.verdict == INJECTED]
    others = [chunk for chunk in ranked if chunk.verdict != INJECTED] if explain else []
    names = ("id", "topic"), *((one.id, one.topic_id) for one in injected + others)
    widths = [max(map(len, column)) for column in zip(*names, strict=True)]
    shown: Lines = [_candidate(chunk, *widths, explain=explain) for chunk in injected + others]
    if others:
        shown.insert(len(injected), Text("What would not be shown to the model, and why", "bold"))
    if shown:
        verdict = "              verdict" if explain else ""
        order = "              in the reranker's order" if answer.is_reranked and not explain else ""
        shown.insert(0, Text(f"score  {'id':{widths[0]}}  {'topic':{widths[1]}}  said{verdict}{order}", "dim"))
    if not answer.chunks:
        where = "of what was chosen" if given - {"q", "topic", "as_of", "limit"} else "that is stored"
        shown.append(f"Nothing {where if answer.note is None else 'that is found'} has to do with it.")
    elif not answer.tokens:
        shown.append("Nothing would be shown to the model; --explain shows the candidates and why.")
    else:
        tokens, chunks = f"{answer.tokens:,} of {answer.budget_tokens:,} tokens", counted(len(injected), "chunk")
        of_it = f"{chunks} of what would be shown to the model, {tokens} in all."
        shown.append(of_it if "limit" in given else f"{chunks}, {tokens}, would be shown to the model.")
    shown += [] if answer.note is None else [for_terminal(answer.note)]
    shown += [] if answer.chunks else _unknown(asked)
    if "topic" not in given and len(answer.topics) > 1 and len({chunk.topic_id for chunk in injected}) != 1:
        shown.append(f"All {len(answer.topics):,} topics were searched; --topic names one.")
    return shown, exit_code


def _unknown(asked: RouteAnswer[Any]) -> list[str]:
    """Return a message for each value of a filter that no chunk has."""
    given, told = asked.given, list[str]()
    filters = ((name, given.get(name, ())) for name in ("source", "tag", "role", "author"))
    for name, value in ((one, value) for one, values in filters for value in values):
        having = {"topic": given.get("topic", ()), name: [value]}
        if not asked.daemon.ask(reads.chunks, limit=1, all=True, **having).chunks:
            told.append(name_for_terminal(f"No chunk has {name} {value!r}; `memd log` shows what chunks have."))
    return told


def _plain(verdict: str) -> str:
    """Return a verdict or status in the page's words."""
    return {INJECTED: "shown to the model", "none": "nothing from memory"}.get(verdict, verdict)


def _candidate(chunk: FoundChunk, id_width: int, topic_width: int, *, explain: bool) -> Group:
    topic, said = (f"{chunk.topic_id:{topic_width}}", "cyan"), f"  {day_and_time(chunk.said_at)}"
    score = f"{chunk.score:.3f}", "bold"
    head = Text.assemble(score, f"  {chunk.id:{id_width}}  ", topic, said, *marks_of(chunk))
    parts: Lines = [head]
    if explain:
        head.append(f"  {_plain(chunk.verdict)}", "green" if chunk.verdict == INJECTED else "yellow")
        echo = "" if chunk.echo == 1 else f", times {chunk.echo:.2f} as the model's words"
        echo += "" if chunk.time == 1 else f", times {chunk.time:g} for its time"
        summed = (
            f"meaning {chunk.meaning:.3f} (cosine {chunk.cosine:.3f}) + words {chunk.words:.3f} + feedback "
            f"{chunk.feedback:.3f} + neighbours {chunk.neighbours:.3f}, times {chunk.multiplier:g}{echo}; "
            f"{counted(chunk.tokens, 'token')}"
        )
        parts.append(indented(summed))
    return Group(*parts, indented(chunk.content, below=1))


@click.command()
@shows(reads.digest, nothing="Nothing was said then.")
def digest(asked: RouteAnswer[Digest]) -> tuple[Lines, int]:
    """Show what was said, by day or week.

    Exit code 1 if there is nothing.

    Example: memd digest --from 2026-11-20
    """
    lines: Lines = []
    for period in asked.answer.periods:
        days = period.first if asked.answer.by == "day" else f"{period.first} to {period.last}"
        lines.append(Text.assemble((days, "bold"), f"  {counted(period.chunks, 'chunk')}"))
        lines += [indented(", ".join(period.words), "cyan")] if period.words else []
        lines += [*(indented(f"{one.id}  {one.text}") for one in period.sentences), ""]
    return lines, 0


@click.command()
@shows(reads.related, id="ID", nothing="Nothing else has to do with it.")
def related(asked: RouteAnswer[RelatedChunks]) -> tuple[Lines, int]:
    """Show what belongs to the chunk ID without being said beside it.

    Chunks near in meaning, with the same rare names, or of the same half hour; exit code 1 if there are none.

    Example: memd related 9ada
    """
    lines: Lines = []
    for one in asked.answer.chunks:
        why = [] if one.cosine is None else [f"cosine {one.cosine:.2f}"]
        why += [f"shares {for_terminal(', '.join(one.shared))}"] if one.shared else []
        why += [] if one.seconds_apart is None else [f"{counted(one.seconds_apart // 60, 'minute')} apart"]
        said = f"  {day_and_time(one.said_at)}  "
        head = Text.assemble((f"{one.score:.3f}", "bold"), f"  {one.id}  ", (one.topic_id, "cyan"), said)
        lines.append(Group(head.append("; ".join(why), "green"), indented(one.content), ""))
    return lines, 0


@click.command()
@shows(reads.entities, name="[NAME]", nothing="No such name is stored.")
def entities(asked: RouteAnswer[Entities]) -> tuple[Lines, int]:
    """Show the names in what is stored, or the chunks that have NAME.

    Exit code 1 if there are none.

    Example: memd entities --kind path
    """
    lines: Lines = []
    for one in asked.answer.entities:
        ids = " ".join(chunk.id for chunk in one.chunks) + ("" if len(one.chunks) == one.count else " …")
        name = (for_terminal(one.name), "bold")
        lines.append(Text.assemble(f"{one.count:>6}  ", name, f"  {one.kind}  ", (ids, "dim")))
    if asked.answer.total > len(lines):
        lines.append(f"{len(lines):,} of {counted(asked.answer.total, 'name')}; --limit shows more.")
    return lines, 0


_COLUMNS = {
    "requests": "requests",
    "prompt": "prompt_tokens",
    "cached": "cached_tokens",
    "answer": "completion_tokens",
    "memory": "memory_tokens",
}


@click.command()
@shows(turns.usage)
def usage(asked: RouteAnswer[UsageByDay]) -> tuple[Lines, int]:
    """Show the tokens that requests took, by day, topic and model.

    Exit code 1 if no receipt is kept.

    Example: memd usage --from 2026-11-01
    """
    rows, topics, oldest = asked.answer.rows, asked.given.get("topic"), asked.answer.since
    if not rows:
        if topics:
            asked.daemon.ask(reads.log_page, topic=topics, limit=1)  # raises BadQuestion if the topic does not exist
        if oldest is None:
            return ["No request has a receipt: none came yet, or receipts.enabled is false."], FOUND_SOMETHING
        told = f"No request that was asked for has a receipt; the oldest that is kept is of {time_of(oldest)}."
        return [told], FOUND_SOMETHING
    models = {row.model for row in rows}
    which = ("topic", "model") if len(models) > 1 else ("topic",)
    shown = table("day", *which, *_COLUMNS, right=_COLUMNS, whole=("day", *_COLUMNS), show_footer=True)
    totals = [f"{sum(getattr(row, name) for row in rows):,}" for name in _COLUMNS.values()]
    for column, footer in zip(shown.columns, ("all", *("" for _ in which), *totals), strict=True):
        column.footer = footer
    for row in rows:
        cells = (row.topic_id, Text(name_for_terminal(row.model)))[: len(which)]
        shown.add_row(row.day, *cells, *(f"{getattr(row, name):,}" for name in _COLUMNS.values()))
    lines: Lines = [shown]
    if len(models) == 1 and rows[0].model:
        lines.append(f"Each request named the model {name_for_terminal(rows[0].model)}.")
    if estimated := sum(row.estimated for row in rows):
        lines.append(f"Of {counted(estimated, 'request')} the model server told no tokens: memd estimated them.")
    lines += [] if oldest is None else [f"The oldest receipt that is kept is of {time_of(oldest)}."]
    return lines, 0


def _waiting(asked: RouteAnswer[Any]) -> str:
    """Say how much of the requested topics is not in the log yet; empty if nothing."""
    topics = asked.daemon.ask(status.topics).topics  # only readable topics
    given = asked.given.get("topic", ())
    return waiting_note(sum(one.unstored for one in topics if not given or one.topic_id in given))


@click.command()
@shows(reads.log_page)
def log(asked: RouteAnswer[LogPage]) -> tuple[Lines, int]:
    """Show what happened to the memory, newest first.

    Example: memd log --topic work
    """
    page = asked.answer
    lines: Lines = [_event(event) for event in page.events]
    waiting = _waiting(asked)
    if not lines and "before" in asked.given:
        lines.append(f"Nothing before {asked.given['before']}.")
    elif not (lines or waiting):
        lines.append(NOTHING_STORED)
    lines += [waiting] if waiting else []
    if page.next is not None:
        lines.append(f"There is more: --before {page.next}")
    return lines, 0


@click.command()
@shows(reads.chunk, id="ID")
def show(asked: RouteAnswer[ChunkStory]) -> tuple[Lines, int]:
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
        turns = f"{counted(len(story.turns), 'turn')} (memd turn ID): {' '.join(story.turns)}"
        lines.append(f"Shown to the model in {turns}")
    return lines, 0


def _event(event: LogEvent) -> RenderableType:
    at, said = time_of(event.at), day_and_time(event.said_at)
    head = Text.assemble(
        f"{at}  ",
        (event.event, "bold green" if event.live else "bold"),
        f"  {event.id}  ",
        (event.topic_id, "cyan"),
        f"  entry {event.canonical_id}",
        "" if at.startswith(said[:10]) else f"  said {said}",
        *marks_of(event),
        "" if event.multiplier == 1 else f"  times {event.multiplier:g}",
        "  taken out" if event.takes_out else "",  # the text printed below is the removed one
        (f"  done by {name_for_terminal(event.by)}" if event.by != event.author and event.by else "", "magenta"),
    )
    why = "" if event.event == "erased" else "because: "
    reason = [indented(why + event.reason)] if event.reason else []
    return Group(head, *reason, indented(event.content, "" if event.live else "dim", below=1))


QUESTION_CHARACTERS = 60


@click.command()
@with_settings()
@click.option("--replay", is_flag=True, help="Also the chunks that the question would find now, and the difference.")
@click.option("--then", is_flag=True, help="The same out of what was stored when the turn began.")
@click.option("--topic", help="Without ID: only turns of this topic.")
@click.option("--limit", type=Number(1, 500), default=20, help="Without ID: how many turns. Default: 20.")
@click.option("--steps", is_flag=True, help="Without ID: also each step of a tool loop.")
@json_flag
@click.argument("turn_id", metavar="[ID]", required=False)
def turn(
    config: Config, turn_id: str | None, topic: str | None, *, replay: bool, then: bool, as_json: bool, **listed: int
) -> int:
    """Show what memory did in a turn, and why.

    ID is in the header X-Memory-Turn of the answer; without it the latest turns are listed.

    Example: memd turn 5e0c9f1a2b3c4d5e
    """
    if turn_id is None and (replay or then):
        raise BadQuestion("--replay and --then are of one turn: give its ID; `memd turn` lists the latest")
    if not set(turn_id or "") <= set("0123456789abcdef"):
        said = f"{str(turn_id)[:60]!r} is no turn's id: those are 16 hexadecimal digits"
        raise BadQuestion(f"{said}; `memd turn` lists them")
    with daemon_for(config) as daemon:
        if turn_id is None:
            page = daemon.ask(turns.turns, topic=topic, limit=listed["limit"], steps=bool(listed["steps"]))
            if topic is not None and not page.turns:
                daemon.ask(reads.log_page, topic=topic, limit=1)  # raises BadQuestion if the topic does not exist
            show_answer(page, _latest(page), as_json=as_json)
        elif replay or then:
            again = daemon.ask(turns.replay, turn_id, then=then)
            differences = _differences(again, "out of what was stored then" if then else "now")
            show_answer(again, [*_turn_lines(again.turn), *differences], as_json=as_json)
        else:
            one = daemon.ask(turns.turn, turn_id)
            show_answer(one, _turn_lines(one), as_json=as_json)
    return 0


def _latest(page: TurnsPage) -> Lines:
    if not page.turns:
        return ["Nothing was asked through memd yet (or receipts.enabled is false)."]
    shown = table("turn", "when", "topic", "memory", "asked", whole=("turn", "when"))
    for one in page.turns:
        asked = "(a step of its turn)" if one["is_step"] else one["asked"] or one["note"] or ""
        words = memory_words(
            one["status"], len(one["shown"]), is_kept=one["mode"] == "full", http_status=one["http_status"]
        )
        words += [counted(one["steps"], "step")] if one.get("steps") else []
        asked = for_terminal(beginning(asked, QUESTION_CHARACTERS))
        shown.add_row(one["turn_id"], time_of(one["at"])[5:-3], one["topic_id"], ", ".join(words), Text(asked))
    return [shown]


def _differences(replay: TurnReplay, when: str) -> Lines:
    texts = {chunk.id: chunk.content for chunk in replay.now.chunks}
    lines: Lines = [Text(f"The same question {when}", style="bold")]
    lines.append(f"  the same: {' '.join(replay.kept) or 'nothing'}")
    lines += [Text(f"- {id_}", style="red") for id_ in replay.lost]
    for id_ in replay.gained:
        lines += [Text(f"+ {id_}", style="green"), indented(texts.get(id_, ""), below=1)]
    return lines if replay.lost or replay.gained else [*lines, "  nothing is different"]


def _turn_lines(one: Receipt) -> Lines:
    kind = " (a step of its turn)" if one.is_step else " (a retry)" if one.is_retry else ""
    answered = "no answer" if one.http_status is None else f"HTTP {one.http_status}"
    by = f"  by {name_for_terminal(one.author)}" if one.author else ""
    topic = (one.topic_id, "cyan")
    lines: Lines = [
        Text.assemble((one.turn_id, "bold"), f"  {time_of(one.at)}  ", topic, f"  {_plain(one.status)}{kind}{by}"),
        Text(f"{one.api}, mode {one.mode}, model {for_terminal(one.model) or '-'}, {answered}"),
    ]
    if one.forwarded_tokens:  # 0 for a request that went on without memory
        taken = f"memory took {one.memory_tokens:,} tokens ({one.block_tokens:,} of them new)"
        read = "" if one.cached_tokens is None else f", {one.cached_tokens:,} of them in its cache"
        told = "" if one.prompt_tokens is None else f"; the model counts {one.prompt_tokens:,}{read}"
        lines.append(f"{taken} of about {one.forwarded_tokens:,}{told}")
    left = [f"{counted(one.left_out, 'message')} not in the prompt"] if one.left_out else []
    left += [f"a line in place of {counted(one.replaced, 'result')}"] if one.replaced else []
    left += [f"{counted(one.freed_tokens, 'token')} taken out of the prompt"] if one.freed_tokens else []
    lines += [", ".join(left)] if left else []
    if one.timings_ms:
        lines.append("milliseconds: " + ", ".join(f"{name} {value:.1f}" for name, value in one.timings_ms.items()))
    if one.error:
        lines.append(Text(f"error: {for_terminal(one.error)}", style="red"))
    if one.question is not None:
        lines += [Text("Asked", style="bold"), indented(f"{one.question}\n\n{one.step}".strip(), below=1)]
    if one.note is not None:
        lines.append(for_terminal(one.note))
    if one.candidates:
        numbers = ("score", "cosine", "meaning", "words", "feedback", "neighbours", "times", "tokens")
        title = f"Candidates for a budget of {counted(one.budget_tokens, 'token')}"
        shown = table("id", "said", *numbers, "verdict", right=numbers, whole=("id", "said", *numbers), title=title)
        for chunk in one.candidates:
            said = time_of(chunk.said_at)[:10] if chunk.said_at else ""
            cells = [f"{getattr(chunk, name):.3f}" for name in numbers[:6]]
            times = f"{chunk.multiplier * chunk.echo * chunk.time:.3g}"
            shown.add_row(chunk.id, said, *cells, times, str(chunk.tokens), _plain(chunk.verdict))
        lines.append(shown)
    if one.block is not None:
        lines += [Text("The block, as the model saw it", style="bold"), indented(one.block, below=1)]
    return lines
