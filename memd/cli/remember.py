"""`memd remember`: a note, without a chat.

Rule: the daemon takes the note; the command only reads it and shows the answer.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click
import msgspec

from memd.admin.writes import NotesTaken
from memd.cli.flags import config_of, settings_flags
from memd.cli.running import daemon_for
from memd.entries import DEFAULT_TOPIC_ID, checked_topic_id
from memd.errors import BadNote, BadQuestion
from memd.notes import CHARACTERS_MAX, GivenNote, check_not_ahead
from memd.wording import erased_for_good

_BYTES_MAX = 4 * CHARACTERS_MAX  # UTF-8 has at most four bytes for a character
STANDARD_INPUT = "-"


@click.command()
@settings_flags
@click.option("--topic", default=DEFAULT_TOPIC_ID, help=f"Where it belongs. Default: {DEFAULT_TOPIC_ID}.")
@click.option("--title", help="What it is about; it is found by this too.")
@click.option("--tag", "tags", multiple=True, help="A tag, for --tag of `memd search`; may be given again.")
@click.option("--source", help="Where it came from: a URL, a path, a name.")
@click.option("--said-at", metavar="TIME", help="When it was said (2026-11-20T14:30). Default: now.")
@click.option("--json", "as_json", is_flag=True, help="The answer as one JSON object.")
@click.argument("text", metavar="[TEXT]", default=STANDARD_INPUT)
def remember(
    config_path: Path | None,
    data_dir: str | None,
    topic: str,
    title: str | None,
    tags: tuple[str, ...],
    source: str | None,
    said_at: str | None,
    as_json: bool,
    text: str,
) -> int:
    """Remember TEXT, without a chat.

    Without TEXT, or where it is -, standard input is read.

    Example: memd remember "The office is in Bergen."
    """
    config = config_of(config_path, {"data_dir": data_dir})
    content = _standard_input() if text == STANDARD_INPUT else text
    note = GivenNote(content=content, title=title, tags=tags, said_at=said_at, source=source)
    try:
        check_not_ahead(note.checked(), time.time_ns() // 1000)
    except BadNote as error:
        raise BadQuestion(f"the note cannot be taken: its {error}") from None
    body = {"topic_id": checked_topic_id(topic), "notes": [note]}
    with daemon_for(config) as daemon:
        told = daemon.post("/memd/notes", body)
    if as_json:
        click.echo(told)
        return 0
    answer = msgspec.json.decode(told, type=NotesTaken)
    for taken in answer.notes:  # one, and a part of it at least is stored; else that is an error
        ids = " ".join(f"[mem:{chunk_id}]" for chunk_id in taken.chunk_ids)
        done = "is remembered already" if taken.duplicate else "remembered"
        click.echo(f"{done} in topic {answer.topic_id}: {ids}")
        if taken.error:
            click.echo(f"memd: not stored of it is what has no id: {erased_for_good(answer.topic_id)}", err=True)
    return 0


def _standard_input() -> str:
    if sys.stdin.isatty():
        click.echo("Write what is to be remembered; Ctrl-D on a line of its own ends it.", err=True)
    read = sys.stdin.buffer.read(_BYTES_MAX + 1)
    if len(read) > _BYTES_MAX:
        raise BadQuestion(f"standard input has more than {_BYTES_MAX:,} bytes; cut it up")
    try:
        return read.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadQuestion(f"standard input is no UTF-8 text (byte {error.start:,}); a note is text") from None
