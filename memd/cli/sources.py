"""`memd add`, `index`, `sources`, `remember` and `import` (the former name of `add`): what is put into memory.

Rule: the command reads the files, as its user may; the daemon takes what stands in them. What cannot be read is named
with its file and place, and the rest goes on. Interrupted, the command is simply run again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from memd.admin import documents
from memd.admin.asking import OwnRoutesClient
from memd.admin.documents import DocumentList, SourceStates
from memd.admin.writes import take_notes
from memd.cli.flags import FOUND_SOMETHING, with_settings
from memd.cli.ingest import progress
from memd.cli.operations import options_of
from memd.cli.running import RunningDaemon, daemon_for
from memd.cli.tables import time_of
from memd.documents import GivenDocument
from memd.entries import DEFAULT_TOPIC_ID, checked_topic_id
from memd.errors import BadNote, BadQuestion, NotFound
from memd.ingest.imports.files import (
    NAMES,
    STANDARD_INPUT,
    TITLES,
    Found,
    ImportedFile,
    files_of,
    has_conversation,
    read,
)
from memd.ingest.imports.parts import Sending
from memd.ingest.imports.threads import Dating
from memd.ingest.sources.documents import KnownDocument, TakenDocument
from memd.ingest.sources.look import Look, Source, is_below, look
from memd.ingest.sources.walk import Chosen, Walk, claude_code_folders
from memd.ingest.sources.watch import SourceState, topic_of
from memd.notes import CHARACTERS_MAX, GivenNote, check_not_ahead
from memd.settings.model import AUTO_TOPIC, Config
from memd.wording import counted, erased_for_good, name_for_terminal, tallied

ASK_AGAIN_SECONDS = 0.1


@click.command()
@with_settings(existing=False)
@click.option("--topic", help=f"Where they belong; auto: the topic called as PATH. Default: {DEFAULT_TOPIC_ID}.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Leave out these files and folders; may be given again.")
@click.option("--as", "name", metavar="NAME", help="What PATH is called. Default: its own name.")
@click.option(
    "--format",
    "formats",
    multiple=True,
    metavar="NAME",
    callback=lambda _, __, given: tuple(one.lower().removeprefix(".") for one in given),
    help=f"Only files with this suffix (md), or only conversations of a program ({', '.join(NAMES)}).",
)
@click.option("--follow-links", is_flag=True, help="Also links that lead out of PATH.")
@click.option("--claude-code", is_flag=True, help="What Claude Code has noted, each project in the topic of its name.")
@click.argument("paths", metavar="PATH...", nargs=-1, type=click.Path(path_type=Path))
def add(
    config: Config,
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
@with_settings()
@click.option("--topic", help="Only this topic.")
@click.option(
    "--remove", "removed", multiple=True, metavar="SOURCE", help="Take out this file or folder; may be given again."
)
@click.option("--json", "as_json", is_flag=True, help="The list as one JSON object.")
def sources(config: Config, topic: str | None, removed: tuple[str, ...], as_json: bool) -> int:
    """List the documents that were added, or take some out.

    What is taken out stays in the log and is not shown any more.

    Example: memd sources --remove notes/old.md
    """
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
@with_settings(existing=False)
@click.option("--force", is_flag=True, help="Read every file again, also those that have not changed.")
@click.option("--json", "as_json", is_flag=True, help="The sources as one JSON object.")
def index(config: Config, *, force: bool, as_json: bool) -> int:
    """Look at the sources of the settings now.

    Example: memd index
    """
    with daemon_for(config) as daemon, progress("indexing") as advanced:
        states = daemon.ask(documents.index, body={"force": force}).sources
        while any(one.state in ("waiting", "looking") for one in states):
            advanced(sum(one.done for one in states), sum(one.files for one in states))
            time.sleep(ASK_AGAIN_SECONDS)
            states = daemon.ask(documents.looks).sources
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


PART_SECONDS_MAX = 3_600.0
"""A megabyte of text takes the model a quarter of a minute."""
PROBLEMS_SHOWN = 50
_AHEAD_US = 86_400_000_000
"""A clock that is a day ahead, or in another time zone, is no reason to lose a date."""


@click.command(name="import")
@with_settings(existing=False)
@click.option("--topic", help=f"Put everything into this topic; {AUTO_TOPIC}: that of a coding agent's folder.")
@click.option("--format", "wanted", type=click.Choice(NAMES), help="Read nothing else. Default: each value tells.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
def import_(config: Config, topic: str | None, wanted: str | None, paths: tuple[Path, ...]) -> int:
    """Remember the conversations in the files and folders PATH...; `memd add` does it too."""
    if topic is not None:
        checked_topic_id(topic)
    files = named_files(paths)
    with daemon_for(config) as daemon:
        return FOUND_SOMETHING if import_files(daemon, files, topic, wanted) else 0


def dating_now() -> Dating:
    """Read times in files; those that are ahead of now are refused."""
    return Dating(time.time_ns() // 1000 + _AHEAD_US)


def import_files(daemon: RunningDaemon, files: Iterable[ImportedFile], topic: str | None, wanted: str | None) -> int:
    """Import files and print what was done; return the number of problems.

    Args:
        topic: for everything; None: the topics of entries, and the default one for conversations.
        wanted: the name of the only format to read.
    """
    importing = _Importing(daemon, topic, wanted, dating_now())
    try:
        importing.take(files)
    except KeyboardInterrupt:
        click.echo(f"memd: interrupted; {importing.said()}; run it again for the rest", err=True)
        raise
    _show_problems(importing.problems)
    click.echo(importing.said())
    return len(importing.problems)


class _Importing:
    """One run."""

    def __init__(self, daemon: RunningDaemon, topic_id: str | None, wanted: str | None, dating: Dating) -> None:
        self._sending = Sending(lambda path, body: daemon.post(path, body, PART_SECONDS_MAX), topic_id)
        self._dating = dating
        self._wanted = wanted
        self._files = self._foreign = 0

    @property
    def problems(self) -> list[tuple[str, Found]]:
        """All that could not be imported, by the name of its file."""
        return self._sending.problems

    def take(self, files: Iterable[ImportedFile]) -> None:
        """Import files one by one."""
        listed = list(files)
        whole, done = sum(file.size for file in listed), 0
        with progress("importing") as advanced:

            def advance(count: int) -> None:
                nonlocal done
                done += count
                advanced(done, max(whole, done))

            for file in listed:
                self._take(file, advance)

    def _take(self, file: ImportedFile, advance: Callable[[int], None]) -> None:
        try:
            before, found_any = len(self.problems), False
            for name, found in read(file, self._dating, self._wanted, advance):
                found_any = found_any or not found.problem
                self._sending.take(name, found)
            self._sending.end()
        except OSError as error:
            self.problems.append(
                (file.name, Found("the file", problem=f"it cannot be read ({error.strerror or error})"))
            )
            return
        if not found_any and not file.is_named:  # a folder has other files, too
            self.problems[before:] = [one for one in self.problems[before:] if one[1].is_broken]
            self._foreign += before == len(self.problems)
            return
        self._files += 1
        if not found_any and before == len(self.problems):
            self.problems.append((file.name, Found("the file", problem="there is no conversation in it")))

    def said(self) -> str:
        """Say what was done."""
        counts = self._sending.counts
        said = [f"{counted(self._files, 'file')} read"]
        if counts.entries or counts.entries_known:
            said.append(f"{counted(counts.entries, 'entry')} imported, {counts.entries_known:,} there already")
        if total := counts.conversations.total():
            titled = tallied({TITLES[name]: number for name, number in counts.conversations.items()})
            said.append(
                f"{counted(total, 'conversation')} ({titled}) imported as {counted(counts.chunks, 'chunk')}, "
                f"{counted(counts.messages_known, 'message')} there already or empty"
            )
        if counts.branches:
            said.append(f"with {counted(counts.branches, 'other branch')} of them")
        if counts.empty:
            said.append(f"{counted(counts.empty, 'conversation')} without a word")
        if self._dating.refused:
            said.append(
                f"{counted(self._dating.refused, 'time')} in the future, before 1980 or unreadable: dated by the "
                "message before, or as said now"
            )
        if counts.redacted:
            said.append(f"redacted: {tallied(counts.redacted)}")
        if self._foreign:
            said.append(f"{counted(self._foreign, 'file')} without conversations passed over")
        if self.problems:
            said.append(f"{counted(len(self.problems), 'problem')}, named above")
        if not (total or counts.entries or counts.entries_known or counts.empty):
            said.append("no conversation was found (`memd add PATH` remembers documents, `memd remember -` piped text)")
        return "; ".join(said)


def named_files(paths: Iterable[Path]) -> list[ImportedFile]:
    """The files at and below some paths.

    Raises:
        BadQuestion: one cannot be read.
    """
    try:
        return list(files_of(paths))
    except OSError as error:
        raise BadQuestion(f"{error.filename}: cannot be read ({error.strerror})") from None


def _show_problems(problems: list[tuple[str, Found]]) -> None:
    for name, found in problems[:PROBLEMS_SHOWN]:
        click.echo(name_for_terminal(f"{name}, {found.place}: {found.problem}"), err=True)
    if len(problems) > PROBLEMS_SHOWN:
        click.echo(f"and {len(problems) - PROBLEMS_SHOWN:,} more", err=True)


DOCUMENT_SECONDS_MAX = 600.0


class RoutesKeeper:
    """See Keeper. Its daemon is asked over HTTP."""

    def __init__(self, daemon: OwnRoutesClient, topic_id: str) -> None:
        self._daemon = daemon
        self._topic_id = topic_id

    def known(self) -> Sequence[KnownDocument]:
        """See Keeper."""
        try:
            return known_by(self._daemon, [self._topic_id])
        except BadQuestion:  # there is no such topic yet
            return ()

    def take(self, document: GivenDocument) -> TakenDocument:
        """See Keeper."""
        return self._ask(documents.take_document, document=document)

    def remove(self, sources: Sequence[str], *, below: bool = False) -> TakenDocument:
        """See Keeper; `below`: also all documents below them."""
        return self._ask(documents.remove_documents, sources=sources, below=below)

    def _ask(self, operation: Callable[..., Awaitable[TakenDocument]], **body: object) -> TakenDocument:
        return self._daemon.ask(operation, body={"topic_id": self._topic_id, **body}, seconds=DOCUMENT_SECONDS_MAX)


def known_by(daemon: OwnRoutesClient, topics: Sequence[str]) -> tuple[KnownDocument, ...]:
    """Return the documents of these topics; of all if there are none."""
    return daemon.ask(documents.documents, topic=list(topics)).documents


_BYTES_MAX = 4 * CHARACTERS_MAX  # UTF-8 has at most four bytes for a character
DASH = "-"


@click.command()
@with_settings(existing=False)
@click.option("--topic", default=DEFAULT_TOPIC_ID, help=f"Where it belongs. Default: {DEFAULT_TOPIC_ID}.")
@options_of(GivenNote, leave_out=["content"], tags="--tag")
@click.option("--json", "as_json", is_flag=True, help="The answer as one JSON object.")
@click.argument("text", metavar="[TEXT]", default=DASH)
def remember(config: Config, topic: str, as_json: bool, text: str, **given: Any) -> int:
    """Remember TEXT, without a chat.

    Without TEXT, or where it is -, standard input is read.

    Example: memd remember "The office is in Bergen."
    """
    content = _standard_input() if text == DASH else text
    note = GivenNote(content=content, **given)
    try:
        check_not_ahead(note.checked(), time.time_ns() // 1000)
    except BadNote as error:
        raise BadQuestion(f"the note cannot be taken: its {error}") from None
    body = {"topic_id": checked_topic_id(topic), "notes": [note]}
    with daemon_for(config) as daemon:
        answer = daemon.ask(take_notes, body=body)
    if as_json:
        click.echo(msgspec.json.encode(answer))
        return 0
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
