"""`memd add`, `index` and `sources`: documents, and exports of conversations among them.

Rule: the command reads the files, as its user may; the daemon takes what stands in them. A file that cannot be read is
named with the reason, and the rest goes on. Interrupted, the command is simply run again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import click
import msgspec

from memd.admin.documents import DocumentList
from memd.admin.kept_documents import RoutesKeeper, known_by
from memd.admin.sources import SourceStates
from memd.cli.flags import FOUND_SOMETHING, config_of, config_of_existing, settings_flags
from memd.cli.history import time_of
from memd.cli.imports import dating_now, import_files, named_files
from memd.cli.ingest import progress
from memd.cli.running import RunningDaemon, daemon_for
from memd.entries import DEFAULT_TOPIC_ID, checked_topic_id
from memd.errors import BadQuestion, NotFound
from memd.ingest.imports.files import STANDARD_INPUT, ImportedFile, has_conversation
from memd.ingest.imports.formats import NAMES
from memd.ingest.sources.agents import claude_code_folders
from memd.ingest.sources.documents import KnownDocument
from memd.ingest.sources.looking import Look, Source, is_below, look
from memd.ingest.sources.tending import SourceState, topic_of
from memd.ingest.sources.walking import Chosen, Walk
from memd.settings.model import AUTO_TOPIC
from memd.wording import counted, name_for_terminal

ASK_AGAIN_SECONDS = 0.1


def _suffixes(_: click.Context, __: click.Parameter, given: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(one.lower().removeprefix(".") for one in given)


@click.command()
@settings_flags
@click.option("--topic", help=f"Where they belong; auto: the topic called as PATH. Default: {DEFAULT_TOPIC_ID}.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Leave out these files and folders; may be given again.")
@click.option("--as", "name", metavar="NAME", help="What PATH is called. Default: its own name.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    callback=_suffixes,
    help=f"Only files with this suffix (md), or only conversations of a program ({', '.join(NAMES)}).",
)
@click.option("--follow-links", is_flag=True, help="Also links that lead out of PATH.")
@click.option("--claude-code", is_flag=True, help="What Claude Code has noted, each project in the topic of its name.")
@click.argument("paths", metavar="PATH...", nargs=-1, type=click.Path(path_type=Path))
def add(
    config_path: Path | None,
    data_dir: str | None,
    topic: str | None,
    exclude: tuple[str, ...],
    name: str | None,
    formats: tuple[str, ...],
    paths: tuple[Path, ...],
    *,
    follow_links: bool,
    claude_code: bool,
) -> int:
    """Remember what stands in the files and folders PATH...

    Documents and exported conversations; - is an export on standard input. Added again, only what changed is stored.

    Example: memd add notes conversations.json
    """
    if name is not None and (len(paths) > 1 or not name.strip("/") or claude_code):
        raise BadQuestion("--as names one PATH: give one, and a name for it")
    if not paths and not claude_code:
        raise BadQuestion("give the PATH of a file or folder, or --claude-code")
    for path in paths:
        if path != STANDARD_INPUT and not path.exists():
            raise BadQuestion(f"{name_for_terminal(str(path))}: there is no such file or folder")
    config = config_of(config_path, {"data_dir": data_dir})
    if topic not in (None, AUTO_TOPIC):
        checked_topic_id(topic)
    wanted = next((one for one in formats if one in NAMES), None)
    if wanted is not None and len(formats) > 1:
        raise BadQuestion(f"--format {wanted} reads conversations alone: give no other --format beside it")
    apart = str(config.data_dir.resolve())  # memd's own files are no documents
    chosen = Chosen(exclude=(*exclude, apart), formats=formats, follow_links=follow_links)
    if wanted is not None:
        exports, paths = named_files(paths), ()
    else:
        exports = [] if name is not None or formats else _exports(paths, chosen)
        chosen = msgspec.structs.replace(chosen, exclude=(*chosen.exclude, *(str(one.path) for one in exports)))
        paths = tuple(path for path in paths if path != STANDARD_INPUT and str(path.resolve()) not in chosen.exclude)
    found = [
        (topic_of(path) if topic == AUTO_TOPIC else topic or DEFAULT_TOPIC_ID, Source(path=path.absolute(), name=named))
        for path, named in dict.fromkeys((path, (name or "").strip("/")) for path in paths)
    ]
    found += _claude_code(topic) if claude_code else []
    totals: dict[str, Look] = {}
    problems = 0
    with daemon_for(config) as daemon:
        for topic_id, source in found:
            told = _look(daemon, topic_id, msgspec.structs.replace(source, chosen=chosen))
            totals.setdefault(topic_id, Look()).add(told)
        for topic_id, told in totals.items():
            _say(topic_id, told)
            problems += len(told.problems)
        if exports:
            problems += import_files(daemon, exports, topic, wanted)
    return FOUND_SOMETHING if problems else 0


def _exports(paths: Sequence[Path], chosen: Chosen) -> list[ImportedFile]:
    """Exports of conversations among the files that are to be added, and standard input."""
    dating, found = dating_now(), dict[Path, ImportedFile]()
    for path in paths:
        if path == STANDARD_INPUT:
            found[path] = ImportedFile(path, 0)
            continue
        with suppress(OSError):  # it is named with the reason where documents are looked at
            for file in (Path(one.path) for one in Walk(path.resolve(), chosen).files()):
                with suppress(OSError):
                    if file not in found and has_conversation(file, dating):
                        found[file] = ImportedFile(file, file.stat().st_size)
    return list(found.values())


def _look(daemon: RunningDaemon, topic_id: str, source: Source) -> Look:
    """Look at a folder or file for a daemon."""
    told = Look()
    with progress("adding") as advanced:
        look(source, RoutesKeeper(daemon, topic_id), {}, told, step=lambda: advanced(told.done, told.files))
    return told


def _say(topic_id: str, told: Look) -> None:
    """Print what was done in a topic."""
    for source, reason in told.problems:
        click.echo(f"{name_for_terminal(source.encode(errors='replace').decode())}: left out: {reason}")
    files = f"{counted(told.done, 'file')} looked at, {told.unchanged:,} of them unchanged"
    files += f", {len(told.problems):,} left out" if told.problems else ""
    click.echo(f"topic {topic_id}: {files}; {counted(told.written, 'chunk')} written, {told.taken_out:,} taken out")


def _claude_code(topic: str | None) -> list[tuple[str, Source]]:
    """The folders in which Claude Code keeps what it has noted, each with its topic."""
    found = claude_code_folders(os.environ)
    if not found:
        raise BadQuestion(
            "Claude Code has noted nothing here (~/.claude/projects/*/memory/, or below CLAUDE_CONFIG_DIR)"
        )
    return [
        (topic_of(one.project) if topic in (None, AUTO_TOPIC) else topic, Source(path=one.memory, name=one.name))
        for one in found
    ]


@click.command()
@settings_flags
@click.option("--topic", help="Only this topic.")
@click.option(
    "--remove", "removed", multiple=True, metavar="SOURCE", help="Take out this file or folder; may be given again."
)
@click.option("--json", "as_json", is_flag=True, help="The list as one JSON object.")
def sources(
    config_path: Path | None, data_dir: str | None, topic: str | None, removed: tuple[str, ...], as_json: bool
) -> int:
    """List the documents that were added, or take some out.

    What is taken out stays in the log and is not shown any more.

    Example: memd sources --remove notes/old.md
    """
    config = config_of_existing(config_path, data_dir)
    with daemon_for(config) as daemon:
        known = known_by(daemon, [] if topic is None else [topic])
        for source in removed:
            click.echo(_remove(daemon, known, source.rstrip("/")), err=as_json)
        if removed:
            known = known_by(daemon, [] if topic is None else [topic])
    if as_json:
        click.echo(msgspec.json.encode(DocumentList(known)))
    elif not removed:
        for one in known:
            named = f"{one.topic_id}  {name_for_terminal(one.source)}"
            click.echo(f"{named}  {counted(one.chunks, 'chunk')}, {time_of(one.at)}")
        click.echo(f"{counted(len(known), 'document')}, {counted(sum(one.chunks for one in known), 'chunk')}")
    return 0


@click.command()
@settings_flags
@click.option("--force", is_flag=True, help="Read every file again, also those that have not changed.")
@click.option("--json", "as_json", is_flag=True, help="The sources as one JSON object.")
def index(config_path: Path | None, data_dir: str | None, *, force: bool, as_json: bool) -> int:
    """Look at the sources of the settings now.

    Example: memd index
    """
    config = config_of(config_path, {"data_dir": data_dir})
    with daemon_for(config) as daemon, progress("indexing") as advanced:
        states = msgspec.json.decode(daemon.post("/memd/index", {"force": force}), type=SourceStates).sources
        while any(one.state in ("waiting", "looking") for one in states):
            advanced(sum(one.done for one in states), sum(one.files for one in states))
            time.sleep(ASK_AGAIN_SECONDS)
            states = msgspec.json.decode(daemon.get("/memd/index"), type=SourceStates).sources
    if as_json:
        click.echo(msgspec.json.encode(SourceStates(states)))
    elif not states:
        click.echo("the settings have no sources; `memd add PATH` remembers a folder once")
    else:
        for one in states:
            _show(one)
    return FOUND_SOMETHING if any(one.error or one.problem_count for one in states) else 0


def _show(one: SourceState) -> None:
    """Print how a source stands."""
    for problem in one.problems:
        click.echo(f"{name_for_terminal(problem.source)}: left out: {problem.reason}")
    if one.problem_count > len(one.problems):
        click.echo(f"and {one.problem_count - len(one.problems):,} more files were left out")
    done = f"{counted(one.files, 'file')}; {counted(one.written, 'chunk')} written, {one.taken_out:,} taken out"
    click.echo(f"topic {one.topic_id}: {name_for_terminal(one.error or f'{one.path}: {done}')}")


def _remove(daemon: RunningDaemon, known: Sequence[KnownDocument], source: str) -> str:
    """Take out the documents below a source; returns what was done."""
    found = [one for one in known if is_below(one.source, source)]
    topics = sorted({one.topic_id for one in found})
    if not found:
        raise NotFound(f"there is no document {source[:200]!r}; `memd sources` lists them")
    if len(topics) > 1:
        raise BadQuestion(f"several topics have {source[:200]!r} ({', '.join(topics)}): name one (--topic)")
    RoutesKeeper(daemon, topics[0]).remove([source], below=True)
    return f"topic {topics[0]}: {counted(len(found), 'document')} taken out"
