"""`memd erase`: erases a topic, single chunks, or what is old.

Rule: the daemon erases; the command shows what would go, asks, and shows what went and where the words may still be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from memd.admin.writes import ErasureAnswer, ErasureBody
from memd.cli.flags import config_of_existing, settings_flags
from memd.cli.operations import options_of
from memd.cli.running import RunningDaemon, daemon_for
from memd.errors import BadQuestion
from memd.ingest.erasing.planning import PlannedErasure
from memd.wording import counted, day_and_time, for_terminal

SECONDS_MAX = 3_600.0
"""How long an erasure may take: a large topic is overwritten at the speed of its disk."""
OVERWRITTEN = (
    "Its files were overwritten and removed. A disk that writes elsewhere than it read (an SSD, a file system with "
    "snapshots or copy on write) may keep old blocks until it needs them."
)
FILES_TOLD = 10


@click.command()
@settings_flags
@options_of(ErasureBody, leave_out=["topic_id"], chunk_ids="--chunk")
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--json", "as_json", is_flag=True, help="The outcome as one JSON object; nothing is asked.")
@click.argument("topic", metavar="[TOPIC]", required=False)
def erase(
    config_path: Path | None,
    data_dir: str | None,
    chunk_ids: tuple[str, ...],
    before: str | None,
    retention: bool,
    resume: bool,
    forbid: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
    topic: str | None,
) -> int:
    """Erase a topic, or single chunks, for good.

    With TOPIC alone all of it. What is erased cannot be brought back; backups keep what they have.

    Example: memd erase --dry-run work
    """
    given = {"TOPIC": bool(topic and not chunk_ids), "--chunk": bool(chunk_ids), "--retention": retention}
    named = [name for name, is_given in (given | {"--resume": resume}).items() if is_given]
    if len(named) != 1 or (topic and (retention or resume)):
        raise BadQuestion(
            f"say what to erase: TOPIC, --chunk ID, --retention or --resume, not {' and '.join(named) or 'none'}"
        )
    if before and named != ["TOPIC"]:
        raise BadQuestion("--before belongs to a TOPIC")
    if as_json and not (yes or dry_run or resume):
        raise BadQuestion("--json asks nothing: say --yes too, or --dry-run")
    config = config_of_existing(config_path, data_dir)
    body = {"topic_id": topic, "chunk_ids": chunk_ids, "before": before, "forbid": forbid}
    body |= {"retention": retention, "resume": resume}
    with daemon_for(config) as daemon:
        if not resume and not as_json:
            plan = _asked(daemon, body, dry_run=True)
            whole_topic = topic if not before and not chunk_ids else None  # also without a chunk, or unreadable
            _show_plan(plan, whole_topic)
            if retention and not config.retention:
                click.echo("The settings keep everything: they have no `retention`.")
            if dry_run or not (whole_topic or any(one.chunks for one in plan.plans)):
                return 0
            if not yes and not click.confirm("Erase this for good?"):
                click.echo("Nothing was erased.")
                return 0
        answer = _asked(daemon, body, dry_run=dry_run)
    if as_json:
        click.echo(msgspec.json.encode(answer))
    else:
        _show_done(answer)
    return 0


def _asked(daemon: RunningDaemon, body: dict[str, Any], *, dry_run: bool) -> ErasureAnswer:
    told = daemon.post("/memd/erase", body | {"dry_run": dry_run}, seconds=SECONDS_MAX)
    return msgspec.json.decode(told, type=ErasureAnswer)


def _show_plan(answer: ErasureAnswer, whole_topic: str | None) -> None:
    """`whole_topic`: the topic that goes with its folder, whatever is in it."""
    if not whole_topic and not any(plan.chunks for plan in answer.plans):
        click.echo("There is nothing to erase.")
    if whole_topic and not answer.plans:
        click.echo(f"topic {whole_topic}, with its folder")
    for plan in answer.plans:
        for line in _planned(plan):
            click.echo(line)
    if (whole_topic or answer.plans) and answer.remains:
        click.echo("What this does not reach:")
        for one in answer.remains:
            click.echo(f"  {for_terminal(one)}")


def _planned(plan: PlannedErasure) -> list[str]:
    size = f"{counted(plan.chunks, 'chunk')} ({counted(plan.entries, 'entry')})"
    said = ""
    if plan.oldest is not None and plan.newest is not None:
        said = f", said from {day_and_time(plan.oldest)} to {day_and_time(plan.newest)}"
    whole = ", with its folder" if plan.kind == "topic" else ""
    lines = [f"topic {plan.topic_id}{whole}: {size}{said}"]
    lines += [f"  {for_terminal(words)}" for words in plan.first_words]
    more = plan.chunks - len(plan.first_words)
    lines += [f"  and {more:,} more"] if more > 0 and plan.first_words else []
    if plan.kept_documents:
        lines.append(f"  {counted(plan.kept_documents, 'chunk')} of documents stay: they go when their files go")
    if plan.kept_live:
        lines.append(f"  {counted(plan.kept_live, 'chunk')} of live conversations stay for now")
    return lines


def _show_done(answer: ErasureAnswer) -> None:
    for one in answer.done:
        what = f"topic {one.topic_id}" if one.kind == "topic" else f"in topic {one.topic_id}"
        size = f"{counted(one.chunks, 'chunk')} ({counted(one.entries, 'entry')})"
        click.echo(f"Erased {what}: {size}, in {one.seconds:.1f} s.")
    if not answer.done:
        click.echo("Nothing was left to erase.")
        return
    click.echo(OVERWRITTEN)
    left = [path for one in answer.done for path in one.not_overwritten]
    if left:
        click.echo(
            f"{counted(len(left), 'file')} could not be overwritten, because a backup shares them or a reader had them:"
        )
        for path in left[:FILES_TOLD]:
            click.echo(f"  {for_terminal(path)}")
        if len(left) > FILES_TOLD:
            click.echo(f"  and {len(left) - FILES_TOLD:,} more")
