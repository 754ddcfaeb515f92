"""The commands that look into the memory and correct it.

Rule: as in cli.py. The daemon does the work: the one that holds the folder, or one for the time of the command.
"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from memd.cli.flags import FOUND_SOMETHING, config_of, existing_data_dir, print_lines, settings_flags
from memd.errors import BadQuestion

NO_FLAG = "say what: --helpful, --unhelpful, --update TEXT or --deprecate"


@click.command()
@settings_flags
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be given again. Default: all topics.")
@click.option("--as-of", metavar="TIME", help="Search what was stored up to a time (2026-11-20T14:30) or canonical_id.")
@click.option("--explain", is_flag=True, help="Also what would not be injected, with the parts of each score and why.")
@click.option("--json", "as_json", is_flag=True, help="All candidates as one JSON object.")
@click.argument("question", metavar="QUESTION")
def search(
    config_path: Path | None,
    data_dir: str | None,
    topics: tuple[str, ...],
    as_of: str | None,
    explain: bool,
    as_json: bool,
    question: str,
) -> int:
    """Show what memory would put into a prompt that asks QUESTION in a new chat.

    Works with and without a daemon; exit code 1 if nothing would be injected.
    """
    existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.cli.search import lines, searched

    answer = searched(config, question, topics, as_of)
    if as_json:
        click.echo(msgspec.json.encode(answer))
    else:
        print_lines(lines(answer, explain=explain))
    return 0 if answer.tokens else FOUND_SOMETHING


@click.command()
@settings_flags
@click.option("--replay", is_flag=True, help="Also what the same question would bring up now, and what is different.")
@click.option("--topic", help="Without ID: only turns of this topic.")
@click.option("--limit", type=click.IntRange(1, 500), default=20, help="Without ID: how many turns. Default: 20.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.argument("turn_id", metavar="[ID]", required=False)
def turn(
    config_path: Path | None,
    data_dir: str | None,
    replay: bool,
    topic: str | None,
    limit: int,
    as_json: bool,
    turn_id: str | None,
) -> int:
    """Show what memory did in a turn: what it was asked, what it showed and why, and what that cost.

    ID is the answer's header X-Memory-Turn; without [ID] the latest turns are listed.
    """
    existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.cli import turns

    if turn_id is None:
        told, lines = turns.latest(config, topic, limit)
    elif replay:
        told, lines = turns.replayed(config, turn_id)
    else:
        told, lines = turns.receipt(config, turn_id)
    click.echo(told) if as_json else print_lines(lines)
    return 0


@click.command()
@settings_flags
@click.option("--topic", "topics", multiple=True, help="Only this topic; may be given again. Default: all topics.")
@click.option("--before", metavar="TIME", help="Only what was before a time (2026-11-20T14:30) or canonical_id.")
@click.option("--limit", type=click.IntRange(1, 500), default=50, help="How many events. Default: 50.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def log(
    config_path: Path | None,
    data_dir: str | None,
    topics: tuple[str, ...],
    before: str | None,
    limit: int,
    as_json: bool,
) -> int:
    """Show what happened to the memory, newest first: what was told, what was corrected and why."""
    existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.cli import history

    told, lines = history.log(config, topics, before, limit)
    click.echo(told) if as_json else print_lines(lines)
    return 0


@click.command()
@settings_flags
@click.option("--topic", help="The topic of the chunk, where several have it.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.argument("chunk_id", metavar="ID")
def show(config_path: Path | None, data_dir: str | None, topic: str | None, as_json: bool, chunk_id: str) -> int:
    """Show all versions of the chunk ID, what was said before and after it, and in which turns it was shown."""
    existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.cli import history

    told, lines = history.show(config, chunk_id, topic)
    click.echo(told) if as_json else print_lines(lines)
    return 0


@click.command()
@settings_flags
@click.option("--topic", help="The topic of the chunks. Default: the one that has them.")
@click.option("--helpful", "action", flag_value="Helpful", help="It counts for more from now on.")
@click.option("--unhelpful", "action", flag_value="Unhelpful", help="It counts for less from now on.")
@click.option("--update", "content", metavar="TEXT", help="It is wrong: TEXT takes its place.")
@click.option("--deprecate", is_flag=True, help="It is wrong: it is not shown any more.")
@click.option("--reason", default="", help="Why; kept in the log.")
@click.argument("chunk_ids", metavar="ID...", nargs=-1, required=True)
def correct(
    config_path: Path | None,
    data_dir: str | None,
    topic: str | None,
    action: str | None,
    content: str | None,
    deprecate: bool,
    reason: str,
    chunk_ids: tuple[str, ...],
) -> int:
    """Correct the chunks ID...: what is wrong is marked and kept, never erased, and `memd undo` takes it back."""
    if sum((action is not None, content is not None, deprecate)) != 1:
        raise BadQuestion(NO_FLAG)
    if content is not None and not content.strip():
        raise BadQuestion("--update needs a text; to take a chunk out without one, say --deprecate")
    existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.cli import history

    done = history.correct(config, chunk_ids, topic, action or "Update", content, reason)
    for canonical_id in done.applied:
        click.echo(f"appended entry {canonical_id}")
    for chunk_id in done.failed:
        click.echo(f"{chunk_id}: not corrected: no such chunk counts in this topic")
    return FOUND_SOMETHING if done.failed else 0


@click.command()
@settings_flags
@click.option("--topic", help="The topic of the entry. Default: the one that has it.")
@click.option("--reason", default="", help="Why; kept in the log.")
@click.argument("canonical_id", metavar="CANONICAL_ID", type=click.IntRange(min=1))
def undo(config_path: Path | None, data_dir: str | None, topic: str | None, reason: str, canonical_id: int) -> int:
    """Append the state before the entry CANONICAL_ID (see `memd log`); before an Update, of all that it changed."""
    existing_data_dir(config_path, data_dir)
    config = config_of(config_path, {"data_dir": data_dir})
    from memd.cli import history

    for appended in history.undo(config, canonical_id, topic, reason).applied:
        click.echo(f"appended entry {appended}")
    return 0


COMMANDS = (search, turn, log, show, correct, undo)
