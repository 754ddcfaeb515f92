"""`memd add` and `memd sources`: documents.

Rule: the command reads the files, as its user may; the daemon takes what stands in them. A file that cannot be read is
named with the reason, and the rest goes on. Interrupted, the command is simply run again.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from memd.admin.documents import DocumentList, DocumentTaken
from memd.cli.flags import FOUND_SOMETHING, config_of, config_of_existing, settings_flags
from memd.cli.history import time_of
from memd.cli.ingest import progress
from memd.cli.running import RunningDaemon, daemon_for
from memd.documents import GivenDocument
from memd.entries import DEFAULT_TOPIC_ID, checked_topic_id
from memd.errors import BadDocument, BadQuestion, NotFound
from memd.ingest.sources.documents import KnownDocument
from memd.ingest.sources.reading import FILE_BYTES_MAX, sections_of
from memd.ingest.sources.walking import FoundFile, files_of
from memd.wording import counted, name_for_terminal

DOCUMENT_SECONDS_MAX = 600.0


@click.command()
@settings_flags
@click.option("--topic", default=DEFAULT_TOPIC_ID, help=f"Where they belong. Default: {DEFAULT_TOPIC_ID}.")
@click.option("--exclude", multiple=True, metavar="NAME", help="Leave out these files and folders; may be given again.")
@click.option("--as", "name", metavar="NAME", help="What PATH is called. Default: its own name.")
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def add(
    config_path: Path | None,
    data_dir: str | None,
    topic: str,
    exclude: tuple[str, ...],
    name: str | None,
    paths: tuple[Path, ...],
) -> int:
    """Remember what stands in the files and folders PATH...

    Text, Markdown and source code. Added again, only what changed is stored; what is gone is taken out.
    """
    if name is not None and (len(paths) > 1 or not name.strip("/")):
        raise BadQuestion("--as names one PATH: give one, and a name for it")
    named = {path.resolve(): name.strip("/") if name else path.resolve().name or "root" for path in paths}
    doubled = [one for one, times in Counter(named.values()).items() if times > 1]
    if doubled:
        raise BadQuestion(f"several PATHs are called {doubled[0]}: add each by itself, with a name of its own (--as)")
    config = config_of(config_path, {"data_dir": data_dir})
    checked_topic_id(topic)
    with daemon_for(config) as daemon:
        adding = _Adding(daemon, topic)
        for path, called in named.items():
            adding.add(path, called, exclude)
    for source, reason in adding.problems:
        click.echo(f"{name_for_terminal(source.encode(errors='replace').decode())}: left out: {reason}")
    click.echo(f"topic {topic}: {adding.said()}")
    return FOUND_SOMETHING if adding.problems else 0


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
    """
    config = config_of_existing(config_path, data_dir)
    with daemon_for(config) as daemon:
        known = _known(daemon, [] if topic is None else [topic])
        for source in removed:
            click.echo(_remove(daemon, known, source.rstrip("/")), err=as_json)
        if removed:
            known = _known(daemon, [] if topic is None else [topic])
    if as_json:
        click.echo(msgspec.json.encode(DocumentList(known)))
    elif not removed:
        for one in known:
            named = f"{one.topic_id}  {name_for_terminal(one.source)}"
            click.echo(f"{named}  {counted(one.chunks, 'chunk')}, {time_of(one.at)}")
        click.echo(f"{counted(len(known), 'document')}, {counted(sum(one.chunks for one in known), 'chunk')}")
    return 0


class _Adding:
    """One run of `memd add` into a topic."""

    def __init__(self, daemon: RunningDaemon, topic_id: str) -> None:
        self._daemon = daemon
        self._topic_id = topic_id
        self._counts: Counter[str] = Counter()
        self.problems: list[tuple[str, str]] = []

    def said(self) -> str:
        """Say what was done."""
        done = self._counts
        files = f"{counted(done['files'], 'file')} read, {done['unchanged']:,} of them unchanged"
        return f"{files}; {counted(done['written'], 'chunk')} written, {done['gone']:,} taken out"

    def add(self, root: Path, name: str, exclude: Sequence[str]) -> None:
        """Add a file or folder, and take out what it had before and has no longer."""
        try:
            listed = _known(self._daemon, [self._topic_id])
        except BadQuestion:  # there is no such topic yet
            listed = ()
        known = {one.source: one for one in listed if one.source == name or one.source.startswith(f"{name}/")}
        try:
            files = list(files_of(root, name, exclude))
        except OSError as error:
            raise BadQuestion(f"{root}: cannot be read ({error.strerror or error})") from None
        present = {file.source for file in files}
        missing = {source: one for source, one in known.items() if source not in present}
        formers = {one.hash: one.source for one in missing.values()}
        if known and len(missing) == len(known):
            self._refuse_another(root, name, files, formers)
        taken_over: set[str | None] = set()
        with progress("adding") as advanced:
            for number, file in enumerate(files, 1):
                taken_over |= self._take(file, known.get(file.source), formers)
                advanced(number, len(files))
        for source in missing.keys() - taken_over:
            self._count(self._post("/memd/documents/remove", {"source": source}))

    def _refuse_another(self, root: Path, name: str, files: Sequence[FoundFile], formers: dict[str, str]) -> None:
        """Raise BadQuestion if the folder has nothing of what is known under its name: it is another one, or empty."""
        if not any(_hash(file) in formers for file in files):
            raise BadQuestion(
                f"{root} has nothing of what topic {self._topic_id} has as {name}: give it another name (--as), or "
                f"take that out first (memd sources --remove {name})"
            )

    def _take(self, file: FoundFile, known: KnownDocument | None, formers: dict[str, str]) -> set[str | None]:
        """Hand a file over if it changed; returns the sources that it is kept as and was before."""
        try:
            content = _content(file)
            digest = hashlib.sha256(content).hexdigest()
            self._counts["files"] += 1
            if known is not None and known.hash == digest:
                self._counts["unchanged"] += 1
                return set()
            former = formers.pop(digest, None) if known is None else None
            sections = sections_of(file.path.name, content)
            document = GivenDocument(source=file.source, hash=digest, sections=sections, renamed_from=former)
            told = self._post("/memd/documents", {"document": document})
            self._count(told)
            return {told.source, former}
        except OSError as error:
            self.problems.append((file.source, f"it cannot be read ({error.strerror or error})"))
        except (BadDocument, BadQuestion) as error:
            self.problems.append((file.source, str(error)))
        return set()

    def _post(self, path: str, body: dict[str, object]) -> DocumentTaken:
        told = self._daemon.post(path, {"topic_id": self._topic_id, **body}, DOCUMENT_SECONDS_MAX)
        return msgspec.json.decode(told, type=DocumentTaken)

    def _count(self, taken: DocumentTaken) -> None:
        self._counts.update(written=taken.written, gone=taken.taken_out)


def _known(daemon: RunningDaemon, topics: Sequence[str]) -> tuple[KnownDocument, ...]:
    return msgspec.json.decode(daemon.get("/memd/documents", topic=list(topics)), type=DocumentList).documents


def _remove(daemon: RunningDaemon, known: Sequence[KnownDocument], source: str) -> str:
    """Take out the documents below a source; returns what was done."""
    found = [one for one in known if one.source == source or one.source.startswith(f"{source}/")]
    topics = sorted({one.topic_id for one in found})
    if not found:
        raise NotFound(f"there is no document {source[:200]!r}; `memd sources` lists them")
    if len(topics) > 1:
        raise BadQuestion(f"several topics have {source[:200]!r} ({', '.join(topics)}): name one (--topic)")
    for one in found:
        daemon.post("/memd/documents/remove", {"topic_id": one.topic_id, "source": one.source})
    return f"topic {topics[0]}: {counted(len(found), 'document')} taken out"


def _content(file: FoundFile) -> bytes:
    size = file.path.stat().st_size
    if size > FILE_BYTES_MAX:
        raise BadDocument(f"it has {size:,} bytes, and a file may have {FILE_BYTES_MAX:,}")
    try:
        file.source.encode()
    except UnicodeEncodeError:
        raise BadDocument("its name is no text") from None
    return file.path.read_bytes()


def _hash(file: FoundFile) -> str:
    try:
        return hashlib.sha256(_content(file)).hexdigest()
    except (OSError, BadDocument):
        return ""
