"""Conversations of other programs, and exports of memd, for `memd add` and for `memd import`, its former name.

Rule: the command reads the files, as its user may; the daemon takes what stands in them. What cannot be read is named
with its file and place, and the rest goes on. Interrupted, the command is simply run again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from memd.cli.flags import FOUND_SOMETHING, config_of, settings_flags
from memd.cli.ingest import progress
from memd.cli.running import RunningDaemon, daemon_for
from memd.entries import checked_topic_id
from memd.errors import BadQuestion
from memd.ingest.dates import Dating
from memd.ingest.imports.files import ImportedFile, files_of, read
from memd.ingest.imports.formats import NAMES, TITLES, Bad
from memd.ingest.imports.sending import Sending
from memd.settings.model import AUTO_TOPIC
from memd.wording import counted, name_for_terminal, tallied

PART_SECONDS_MAX = 3_600.0
"""A megabyte of text takes the model a quarter of a minute."""
PROBLEMS_SHOWN = 50
_AHEAD_US = 86_400_000_000
"""A clock that is a day ahead, or in another time zone, is no reason to lose a date."""


@click.command(name="import")
@settings_flags
@click.option("--topic", help=f"Put everything into this topic; {AUTO_TOPIC}: that of a coding agent's folder.")
@click.option("--format", "wanted", type=click.Choice(NAMES), help="Read nothing else. Default: each value tells.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
def import_(
    config_path: Path | None, data_dir: str | None, topic: str | None, wanted: str | None, paths: tuple[Path, ...]
) -> int:
    """Remember the conversations in the files and folders PATH...; `memd add` does it too."""
    if topic is not None:
        checked_topic_id(topic)
    files = named_files(paths)
    with daemon_for(config_of(config_path, {"data_dir": data_dir})) as daemon:
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
    _show(importing.problems)
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
    def problems(self) -> list[tuple[str, Bad]]:
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
                found_any = found_any or not isinstance(found, Bad)
                self._sending.take(name, found)
            self._sending.end()
        except OSError as error:
            self.problems.append((file.name, Bad("the file", f"it cannot be read ({error.strerror or error})")))
            return
        if not found_any and not file.is_named:  # a folder has other files, too
            self.problems[before:] = [one for one in self.problems[before:] if one[1].is_broken]
            self._foreign += before == len(self.problems)
            return
        self._files += 1
        if not found_any and before == len(self.problems):
            self.problems.append((file.name, Bad("the file", "there is no conversation in it")))

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
            said.append("no conversation was found (`memd add` remembers texts and documents)")
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


def _show(problems: list[tuple[str, Bad]]) -> None:
    for name, bad in problems[:PROBLEMS_SHOWN]:
        click.echo(name_for_terminal(f"{name}, {bad.place}: {bad.reason}"), err=True)
    if len(problems) > PROBLEMS_SHOWN:
        click.echo(f"and {len(problems) - PROBLEMS_SHOWN:,} more", err=True)
