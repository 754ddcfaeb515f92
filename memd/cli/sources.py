"""`memd add`, `index`, `sources`, `remember` and `import` (the former name of `add`): commands that store text.

Rule: the command reads the files with its user's permissions; the daemon receives their content. Unreadable input is
reported with file and place, and the rest continues. After an interruption the command can be run again.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import msgspec

from memd.admin import documents
from memd.admin.documents import DocumentList, IndexBody, SourceStates
from memd.admin.writes import take_notes
from memd.cli.flags import FOUND_SOMETHING, OneOf, config_of_existing, config_to_begin, say, with_settings
from memd.cli.operations import Lines, options_of, progress, show, time_of
from memd.cli.running import RunningDaemon, daemon_for
from memd.entries import DEFAULT_TOPIC_ID, checked_topic_id
from memd.errors import BadNote, BadQuestion, NotFound
from memd.ingest.imports.exports import Dating
from memd.ingest.imports.files import (
    NAMES,
    STANDARD_INPUT,
    TITLES,
    Found,
    ImportedFile,
    files_of,
    format_in,
    left_out_of,
    read,
    unpacked_export,
)
from memd.ingest.imports.parts import ImportCounts, Sending
from memd.ingest.readers.text import FORMATS, GivenDocument, suffix_of
from memd.ingest.sources.documents import KnownDocument, TakenDocument
from memd.ingest.sources.look import Chosen, Look, Source, Walk, claude_code_folders, is_below, look
from memd.ingest.sources.watch import topic_of
from memd.notes import CHARACTERS_MAX, GivenNote, check_not_ahead
from memd.settings.model import AUTO_TOPIC, Config
from memd.wording import counted, erased_for_good, meant, name_for_terminal, tallied

ASK_AGAIN_SECONDS = 0.1
DOCUMENT_SECONDS_MAX = 600.0
PART_SECONDS_MAX = 3_600.0
"""Limit for one request of an import: the model takes a quarter of a minute for a megabyte of text."""
PROBLEMS_SHOWN = 50
EXPORT_FILES_SHOWN = 4
_AHEAD_US = 86_400_000_000
"""Tolerance for clocks that are ahead and for time zones, so that no date is lost."""
_BYTES_MAX = 4 * CHARACTERS_MAX  # UTF-8 has at most four bytes for a character
DASH = "-"
GOES_ON = "the same command goes on with the rest"
_NOT_PIPED = "this is no exported conversation (JSON, JSON Lines, Aider's history), as - has to be; add others as files"


@click.command()
@with_settings(config_to_begin)
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
    config: Config, topic: str | None, name: str | None, paths: tuple[Path, ...], *, claude_code: bool, **given: Any
) -> int:
    """Remember what stands in the files and folders PATH...

    Documents and exported conversations; - is an export on standard input. Added again, only what changed is stored.

    Example: memd add notes conversations.json
    """
    formats: tuple[str, ...] = given["formats"]
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
    own = str(config.data_dir.resolve())  # memd's own files are not documents
    chosen = Chosen(exclude=(*given["exclude"], own), formats=formats, follow_links=given["follow_links"])
    if wanted is not None:
        exports, paths = named_files(paths), ()
    else:
        _check_formats([path for path in paths if path != STANDARD_INPUT], chosen)
        if STANDARD_INPUT in paths and (formats or name is not None):
            raise BadQuestion("- is an export of conversations: give it without --as and the --format of documents")
        are_told = name is not None or bool(formats)
        exports, whole = ([], {}) if are_told else _exports(paths, chosen)
        taken = (*(one.path for one in exports), *whole)
        chosen = msgspec.structs.replace(chosen, exclude=(*chosen.exclude, *map(str, taken)))
        paths = tuple(path for path in paths if path != STANDARD_INPUT and str(path.resolve()) not in chosen.exclude)
        _tell_taken(whole, () if are_told else paths)
    found = [
        (topic_of(path) if topic == AUTO_TOPIC else topic or DEFAULT_TOPIC_ID, Source(path=path.absolute(), name=named))
        for path, named in dict.fromkeys((path, (name or "").strip("/")) for path in paths)
    ]
    if claude_code:
        noted = claude_code_folders(os.environ)
        if not noted:
            where = "~/.claude/projects/*/memory/, or below CLAUDE_CONFIG_DIR"
            raise BadQuestion(f"Claude Code has noted nothing here ({where})")
        for one in noted:
            its_topic = topic_of(one.project) if topic in (None, AUTO_TOPIC) else topic
            found.append((its_topic, Source(path=one.memory, name=one.name)))
    totals: dict[str, Look] = {}
    with daemon_for(config) as daemon:
        try:
            for topic_id, source in found:
                source = msgspec.structs.replace(source, chosen=chosen)
                _look(daemon, topic_id, source, totals.setdefault(topic_id, Look()))
        except KeyboardInterrupt:
            _tell_documents(totals)
            raise KeyboardInterrupt(GOES_ON) from None
        problems = _tell_documents(totals)
        if exports or wanted:
            problems += import_files(daemon, exports, topic, wanted)
    return FOUND_SOMETHING if problems else 0


def _check_formats(paths: Sequence[Path], chosen: Chosen) -> None:
    """Reject an unknown format (suffixes of given files are known), and a named file that has none of the formats."""

    def has(path: Path, formats: tuple[str, ...]) -> bool:
        its = msgspec.structs.replace(chosen, formats=formats)
        with suppress(OSError):  # reported when the documents are read
            return any(its.wants(file.name) for file in Walk(path.resolve(), its).files())
        return True

    for one in chosen.formats:
        if f".{one}" not in FORMATS and not any(has(path, (one,)) for path in paths):
            near = meant(one, [*NAMES, *(suffix[1:] for suffix in FORMATS)])
            all_of_them = f"{f'{near} There' if near else 'there'} are {', '.join(NAMES)}, and suffixes (md, pdf)"
            raise BadQuestion(f"--format {one}: there is no such format; {all_of_them}")
    for path in paths:
        if chosen.formats and not path.is_dir() and not has(path, chosen.formats):
            raise BadQuestion(f"{name_for_terminal(str(path))} is not of --format {', '.join(chosen.formats)}")


def _look(daemon: RunningDaemon, topic_id: str, source: Source, totals: Look) -> None:
    """Read a source and add its counts to `totals`, even if interrupted."""
    told = Look()
    try:
        with progress("adding") as advanced:
            look(source, _Keeper(daemon, topic_id), {}, told, step=lambda: advanced(told.done, told.files))
    finally:
        totals.add(told)


def _tell_documents(totals: Mapping[str, Look]) -> int:
    """Print the outcome of documents by topic; return the number of files left out."""
    for topic_id, told in totals.items():
        for where, reason in told.problems:
            click.echo(name_for_terminal(f"{where.encode(errors='replace').decode()}: left out: {reason}"))
        kind = "a document" if told.done == 1 else "documents"
        files = f"{counted(told.done, 'file')} looked at as {kind}, {told.unchanged:,} of them unchanged"
        files += f", {len(told.problems):,} left out" if told.problems else ""
        changed = f"{counted(told.written, 'chunk')} written, {told.taken_out:,} taken out"
        click.echo(f"topic {topic_id}: {files}; {changed}")
        if told.passed:
            click.echo(f"passed over, as memd does not read such files: {name_for_terminal(tallied(told.passed))}")
    return sum(len(told.problems) for told in totals.values())


def _tell_taken(exports: Mapping[Path, tuple[str, list[str]]], paths: Iterable[Path]) -> None:
    """Print which folders and zips are exports, with their programs and the files left out, and which other named files
    look like exports but are not."""
    for path, (program, others) in exports.items():
        more = [*others[:EXPORT_FILES_SHOWN], *([f"{len(others):,} in all"] if others[EXPORT_FILES_SHOWN:] else [])]
        left_out = f" and nothing else (left out: {', '.join(more)})" if others else ""
        told = f"{path}: an export of {TITLES[program]}, of which the conversations are taken{left_out}"
        click.echo(name_for_terminal(told))
    for path in paths:
        if suffix_of(path.name) in (".json", ".jsonl"):
            told = f"{path}: taken for a document, as it has no conversation of a program that memd knows"
            click.echo(name_for_terminal(told))


def _exports(paths: Sequence[Path], chosen: Chosen) -> tuple[list[ImportedFile], dict[Path, tuple[str, list[str]]]]:
    """Find the exports of conversations among the named files, and standard input. Also return the zips and unpacked
    folders that are whole exports, each with its program and the names of its other files."""
    dating, found, whole = _dating_now(), dict[Path, ImportedFile](), dict[Path, tuple[str, list[str]]]()
    others, chosen = dict[Path, None](), msgspec.structs.replace(chosen, zips=True)
    for path in paths:
        if path == STANDARD_INPUT:
            found[path] = ImportedFile(path, 0)
            continue
        with suppress(OSError):  # reported when the documents are read
            for file in (Path(one.path) for one in Walk(path.resolve(), chosen).files()):
                with suppress(OSError):
                    if (program := format_in(file, dating)) is not None:
                        found.setdefault(file, ImportedFile.at(file, path))
                        if path.is_dir() and (unpacked := unpacked_export(file, program)) is not None:
                            whole[unpacked] = program, []
                        elif program and suffix_of(file.name) == ".zip" and (left_out := left_out_of(file)):
                            whole[file] = program, left_out
                        continue
                others[file] = None
    for folder, (_, beside) in whole.items():
        beside.extend(file.name for file in others if folder in file.parents)
    return list(found.values()), whole


class _Keeper:
    """See `ingest.sources.look.Keeper`; asks the daemon over HTTP."""

    def __init__(self, daemon: RunningDaemon, topic_id: str) -> None:
        self._daemon = daemon
        self._topic_id = topic_id

    def known(self) -> Sequence[KnownDocument]:
        try:
            return self._daemon.ask(documents.documents, topic=[self._topic_id]).documents
        except BadQuestion:  # the topic does not exist yet
            return ()

    def take(self, document: GivenDocument) -> TakenDocument:
        body = {"topic_id": self._topic_id, "document": document}
        return self._daemon.ask(documents.take_document, body=body, seconds=DOCUMENT_SECONDS_MAX)

    def remove(self, sources: Sequence[str], *, below: bool = False) -> TakenDocument:
        """See Keeper; `below`: also remove all documents below them."""
        body = {"topic_id": self._topic_id, "sources": sources, "below": below}
        return self._daemon.ask(documents.remove_documents, body=body, seconds=DOCUMENT_SECONDS_MAX)


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
        topics = [] if topic is None else [topic]
        known = daemon.ask(documents.documents, topic=topics).documents
        for source in (one.rstrip("/") for one in removed):
            found = [one for one in known if is_below(one.source, source)]
            theirs = sorted({one.topic_id for one in found})
            if not found:
                raise NotFound(f"there is no document {source[:200]!r}; `memd sources` lists them")
            if len(theirs) > 1:
                raise BadQuestion(f"several topics have {source[:200]!r} ({', '.join(theirs)}): name one (--topic)")
            _Keeper(daemon, theirs[0]).remove([source], below=True)
            click.echo(f"topic {theirs[0]}: {counted(len(found), 'document')} taken out", err=as_json)
        if removed:
            known = daemon.ask(documents.documents, topic=topics).documents
    if as_json:
        click.echo(msgspec.json.encode(DocumentList(known)))
    elif not removed:
        for one in known:
            named = f"{one.topic_id}  {name_for_terminal(one.source)}"
            click.echo(f"{named}  {counted(one.chunks, 'chunk')}, {time_of(one.at)}")
        click.echo(f"{counted(len(known), 'document')}, {counted(sum(one.chunks for one in known), 'chunk')}")
    return 0


def _config_to_index(path: Path | None, given: dict[str, Any]) -> Config:
    """See `config_to_begin`; a folder given on the command line must exist, because it may be misspelt."""
    return (config_to_begin if given["data_dir"] is None else config_of_existing)(path, given)


@click.command()
@with_settings(_config_to_index)
@options_of(IndexBody)
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
        is_outdated = "sources" in daemon.health().get("changed_settings", ())  # `daemon_for` has reported it
    lines: Lines = (
        [] if states or is_outdated else ["the settings have no sources; `memd add PATH` remembers a folder once"]
    )
    for one in states:
        lines += [name_for_terminal(f"{problem.source}: left out: {problem.reason}") for problem in one.problems]
        if one.problem_count > len(one.problems):
            lines.append(f"and {one.problem_count - len(one.problems):,} more files were left out")
        done = f"{counted(one.files, 'file')}; {counted(one.written, 'chunk')} written, {one.taken_out:,} taken out"
        lines.append(f"topic {one.topic_id}: {name_for_terminal(one.error or f'{one.path}: {done}')}")
    show(SourceStates(states), lines, as_json=as_json)
    return FOUND_SOMETHING if is_outdated or any(one.error or one.problem_count for one in states) else 0


@click.command(name="import")
@with_settings(config_to_begin)
@click.option(
    "--topic", help=f"Put everything into this topic; {AUTO_TOPIC}: that of a coding agent's folder, else PATH's."
)
@click.option("--format", "wanted", type=OneOf(NAMES), help="Read nothing else. Default: each value tells.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
def import_(config: Config, topic: str | None, wanted: str | None, paths: tuple[Path, ...]) -> int:
    """Remember the conversations in the files and folders PATH...; `memd add` does it too."""
    if topic is not None:
        checked_topic_id(topic)
    files = named_files(paths)
    with daemon_for(config) as daemon:
        return FOUND_SOMETHING if import_files(daemon, files, topic, wanted) else 0


def named_files(paths: Iterable[Path]) -> list[ImportedFile]:
    """Return the files at and below some paths. Raises BadQuestion: one cannot be read."""
    try:
        return list(files_of(paths))
    except OSError as error:
        raise BadQuestion(f"{error.filename}: cannot be read ({error.strerror})") from None


def _dating_now() -> Dating:
    """Return how to read times in files; times in the future are rejected."""
    return Dating(time.time_ns() // 1000 + _AHEAD_US)


def import_files(daemon: RunningDaemon, files: Sequence[ImportedFile], topic: str | None, wanted: str | None) -> int:
    """Import files and print the outcome; return the number of problems, at least one if nothing is of the format
    `wanted`, the only one that is read. `topic`: for everything; None: entries keep their topics, and conversations use
    the default one."""
    sending = Sending(lambda path, body: daemon.answer(path, body, PART_SECONDS_MAX), topic)
    dating, problems, of = _dating_now(), sending.problems, "" if wanted is None else f" of {TITLES[wanted]}"
    whole, done, begun = sum(file.size for file in files), 0, 0
    read_files, foreign = 0, list[str]()  # files with conversations, and those without in folders

    def outcome() -> str:
        return _imported(sending.counts, read_files, foreign, dating.refused, len(problems), of)

    try:
        with progress("importing") as advanced:

            def advance(count: int) -> None:
                nonlocal done, begun
                done, begun = done + begun, count  # a block that was read has not been sent yet
                advanced(done, max(whole, done + begun))

            for file in files:
                before, found_any = len(problems), False
                try:
                    for name, found in read(file, dating, wanted, advance):
                        found_any = found_any or not found.problem
                        sending.take(name, found, file.called)
                    sending.end()
                except OSError as error:
                    why = f"it cannot be read ({error.strerror or error})"
                    problems.append((file.name, Found("the file", problem=why)))
                    continue
                if not found_any and not file.is_named:  # a folder may have unrelated files
                    problems[before:] = [one for one in problems[before:] if one[1].is_broken]
                    foreign += [file.name] if before == len(problems) else []
                    continue
                read_files += 1
                if not found_any and file.path == STANDARD_INPUT:
                    why = "".join(f" ({one.place}: {one.problem})" for _, one in problems[before:][:1])
                    problems[before:] = [(file.name, Found("all of it", problem=_NOT_PIPED + why))]
                elif not found_any and before == len(problems):
                    problems.append((file.name, Found("the file", problem="there is no conversation in it")))
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{outcome()}; {GOES_ON}") from None
    for name, found in problems[:PROBLEMS_SHOWN]:
        click.echo(name_for_terminal(f"{name}, {found.place}: {found.problem}"), err=True)
    if len(problems) > PROBLEMS_SHOWN:
        click.echo(f"and {len(problems) - PROBLEMS_SHOWN:,} more", err=True)
    has_any, is_piped = sending.counts.has_any, any(file.path == STANDARD_INPUT for file in files)
    instead = " (`memd remember -` remembers piped text)" if is_piped else ""
    click.echo(outcome() + ("" if has_any else f"; no conversation{of} was found, and none stored{instead}"))
    return len(problems) or int(wanted is not None and not has_any)


def _imported(counts: ImportCounts, files: int, foreign: Sequence[str], undated: int, problems: int, of: str) -> str:
    said = [f"{counted(files, 'file')} read"]
    if counts.entries or counts.entries_known:
        said.append(f"{counted(counts.entries, 'entry')} imported, {counts.entries_known:,} there already")
    if total := counts.conversations.total():
        titled = tallied({TITLES[name]: number for name, number in counts.conversations.items()})
        conversations = f"{counted(total, 'conversation')} ({titled})"
        where = f"{len(counts.topics):,} topics" if len(counts.topics) > 1 else f"topic {next(iter(counts.topics))}"
        numbers = f" as {counted(counts.chunks, 'chunk')}" if counts.is_told else ""
        said.append(f"{conversations} imported{numbers}; they are in {where}")
    if counts.branches:
        said.append(f"with {counted(counts.branches, 'other branch')} of them")
    if known := counts.messages_known:
        said.append(f"{counted(known, 'message')} added nothing: there already, erased for good or empty")
    if counts.empty:
        said.append(f"{counted(counts.empty, 'conversation')} without a word")
    if undated:
        why = "in the future, before 1980 or unreadable: dated by the message before, or as said now"
        said.append(f"{counted(undated, 'time')} {why}")
    if counts.redacted:
        said.append(f"redacted: {tallied(counts.redacted)}")
    if foreign:
        names = ", ".join(map(name_for_terminal, foreign[:EXPORT_FILES_SHOWN]))
        more = f" and {len(foreign) - EXPORT_FILES_SHOWN:,} more" if foreign[EXPORT_FILES_SHOWN:] else ""
        said.append(f"{counted(len(foreign), 'file')} without conversations{of} passed over ({names}{more})")
    if problems:
        said.append(f"{counted(problems, 'problem')}, named above")
    return "; ".join(said)


@click.command()
@with_settings(config_to_begin)
@click.option("--topic", default=DEFAULT_TOPIC_ID, help=f"Where it belongs. Default: {DEFAULT_TOPIC_ID}.")
@options_of(GivenNote, leave_out=["content"], tags="--tag")
@click.option("--json", "as_json", is_flag=True, help="The answer as one JSON object.")
@click.argument("text", metavar="[TEXT]", default=DASH)
def remember(config: Config, topic: str, as_json: bool, text: str, **given: Any) -> int:
    """Remember TEXT, without a chat.

    Without TEXT, or where it is -, standard input is read.

    Example: memd remember "The office is in Bergen."
    """
    if text == DASH:
        if sys.stdin.isatty():
            click.echo("Write what is to be remembered; Ctrl-D on a line of its own ends it.", err=True)
        piped = sys.stdin.buffer.read(_BYTES_MAX + 1)
        if len(piped) > _BYTES_MAX:
            raise BadQuestion(f"standard input has more than {_BYTES_MAX:,} bytes; cut it up")
        try:
            text = piped.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise BadQuestion(f"standard input is no UTF-8 text (byte {error.start:,}); a note is text") from None
    note = GivenNote(content=text, **given)
    try:
        check_not_ahead(note.checked(), time.time_ns() // 1000)
    except BadNote as error:
        raise BadQuestion(f"the note cannot be taken: its {error}") from None
    body = {"topic_id": checked_topic_id(topic), "notes": [note]}
    with daemon_for(config) as daemon:
        answer = daemon.ask(take_notes, body=body)
    [taken] = answer.notes  # at least a part is stored, or an error was raised
    ids = " ".join(f"[mem:{chunk_id}]" for chunk_id in taken.chunk_ids)
    done = "is remembered already" if taken.duplicate else "remembered"
    show(answer, [f"{done} in topic {answer.topic_id}: {ids}"], as_json=as_json)
    if taken.error and not as_json:
        say(f"a part of it is not stored: {erased_for_good(answer.topic_id)}")
    return 0
