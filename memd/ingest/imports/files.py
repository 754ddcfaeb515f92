"""The files of an import: a file, a folder, a zip as a program sends it, standard input; and what each becomes.

Rule: read block by block, never unpacked to disk, no symbolic link in a folder is followed. What a folder or a zip has
besides conversations is passed over by its name. A format is known by the members of its objects, value by value, so
that files of several programs may be mixed; `--format` says which one is meant, and then nothing else is read. A value
that is of none is named.
"""

from __future__ import annotations

import lzma
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Raw

from memd.errors import BadImport, BadRequestBody, BadTopicId, EmptyImport
from memd.ingest.imports.exports import FORMATS, OPENAI, Export, thread_in, thread_of_elements
from memd.ingest.imports.items import ITEM_BYTES_MAX, Item, bounded_lines, closed, items
from memd.ingest.imports.sessions import (
    AIDER_STARTED,
    ClaudeCodeSession,
    CodexSession,
    aider_threads,
)
from memd.ingest.imports.threads import Dating, Thread
from memd.wire.lenient_json import OBJECT, UNREADABLE

BAD_LINES_MAX = 20
"""Of a file without a good one: then it is a file of something else."""
AIDER, MEMD = "aider", "memd"
_IN_PYTHON_ONLY = re.compile(rb'("(?:[^"\\]|\\.)*+")|-?(?:NaN|Infinity)', re.DOTALL)
"""Strings, which stay, and numbers that are none in JSON."""


SESSIONS: Mapping[str, type[ClaudeCodeSession | CodexSession]] = {
    "claude-code": ClaudeCodeSession,
    "codex": CodexSession,
}
"""The formats whose values are parts of one conversation."""
NAMES = (*(one.name for one in FORMATS), AIDER, MEMD)
TITLES = {**{one.name: one.title for one in FORMATS}, AIDER: "Aider", MEMD: "memd"}


class Found(msgspec.Struct, frozen=True):
    """A value of a file: a conversation, an entry of `memd export`, a problem, or a conversation without a word."""

    place: str
    """Where it stands, for people."""
    thread: Thread | None = None
    entry: bytes = b""
    """A line."""
    problem: str = ""
    """Why it cannot be imported."""
    is_broken: bool = False
    """The file itself is damaged, whatever stood in it."""


def found_in(values: Iterable[Item], dating: Dating, wanted: str | None = None) -> Iterator[Found]:
    """Read the values of one file.

    Args:
        wanted: the name of the only format that is read.
    """
    sessions: dict[str, ClaudeCodeSession | CodexSession] = {}
    messages: list[Item] = []  # that stand by themselves, all of one array, or all lines
    strange: list[Found] = []  # the values in front of the first that is of a conversation
    is_known = False
    for item in values:
        if messages and item.array != messages[0].array:
            yield from _conversation_of(messages, dating)
            messages = []
        try:
            item, members = _members(item)
            export, is_entry = _export_of(members, wanted), wanted in (None, MEMD) and _is_entry(members)
            is_message = wanted in (None, OPENAI.name) and _is_message(members)
            if not (is_entry or export or sessions or is_message):
                raise BadImport(_no_conversation(members, wanted))
        except (*UNREADABLE, BadImport) as error:
            found = Found(item.place, problem=str(error), is_broken=bool(item.problem))
            strange += [] if is_known else [found]
            if is_known:
                yield found
            elif len(strange) >= BAD_LINES_MAX:
                reason = f"{strange[0].place}: {strange[0].problem}"
                reason = f"there is no conversation in its beginning, and it is not read on; {reason}"
                yield Found("the file", problem=reason)
                return
            continue
        yield from strange
        strange, is_known = [], True
        try:
            if is_entry:
                yield Found(item.place, entry=item.data)
            elif export is not None and export.name not in SESSIONS:
                yield Found(item.place, thread_in(export, item.data, dating))
            elif export is not None or sessions:
                # Without a format it is an event of another kind, or an item from before lines had a frame.
                name = next(reversed(sessions)) if export is None else export.name
                sessions.setdefault(name, SESSIONS[name](dating)).add(item.data)
            else:
                messages.append(item)
        except EmptyImport:
            yield Found(item.place)
        except (*UNREADABLE, BadImport, BadRequestBody, BadTopicId) as error:
            yield Found(item.place, problem=str(error))
    yield from strange
    yield from _conversation_of(messages, dating)
    for session in sessions.values():
        try:
            yield Found("session", session.thread())
        except EmptyImport:
            continue
        except (*UNREADABLE, BadImport, BadRequestBody) as error:
            yield Found("session", problem=str(error))


def _export_of(members: Mapping[str, Raw], wanted: str | None = None) -> Export | None:
    return next((one for one in FORMATS if wanted in (None, one.name) and one.fits(members)), None)


def _is_entry(members: Mapping[str, Raw]) -> bool:
    return "uuid" in members and "canonical_id" in members


def _is_message(members: Mapping[str, Raw]) -> bool:
    return "role" in members and "payload" not in members


def _members(item: Item) -> tuple[Item, dict[str, Raw]]:
    """The members of a value, and the value in JSON proper, without the NaN that Python's `json` may write."""
    if item.problem:
        raise BadImport(item.problem)
    try:
        try:
            return item, OBJECT.decode(item.data)
        except msgspec.MsgspecError:
            item = msgspec.structs.replace(item, data=_IN_PYTHON_ONLY.sub(lambda found: found[1] or b"null", item.data))
            return item, OBJECT.decode(item.data)
    except RecursionError:
        raise BadImport("it is nested too deep to be read; export it flat (LibreChat: not recursive)") from None
    except UNREADABLE as error:
        raise BadImport(f"it is no JSON object: {error}") from None


def _no_conversation(members: Mapping[str, Raw], wanted: str | None) -> str:
    has = ", ".join(name[:40] for name in list(members)[:6]) or "none at all"
    return f"it is not {'a conversation' if wanted is None else f'of {TITLES[wanted]}'}; its members are {has}"


def _conversation_of(messages: Sequence[Item], dating: Dating) -> Iterator[Found]:
    if messages:
        elements = [("", Raw(one.data)) for one in messages]
        try:
            yield Found(messages[0].place, thread_of_elements(OPENAI, elements, dating))
        except BadImport as error:
            yield Found(messages[0].place, problem=str(error))


BLOCK_BYTES = 1 << 20
STANDARD_INPUT = Path("-")
_NAMES = re.compile(r".*\.(json|jsonl|zip)|\.aider\.chat\.history\.md")
_IN_ZIP = re.compile(r"(?:.*/)?(?:conversations[^/]*\.jsonl?|\.aider\.chat\.history\.md|rollout-[^/]*\.jsonl)")
_ANY_JSON = re.compile(r".*\.jsonl?")
_ZIP_MAGIC = b"PK\x03\x04"
_BEGINNING = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:[{\[]|" + re.escape(AIDER_STARTED.encode()) + rb")|" + re.escape(_ZIP_MAGIC)
)
"""Of an export, whatever its file is called."""
_CUT_OFF_BYTES = 10_000
"""Of a file's beginning: what its first value is, if that has no end."""
_BROKEN = (zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError, EOFError, ValueError)
"""Damaged, encrypted, with names that are no text, or packed in a way that this Python does not know."""


class ImportedFile(msgspec.Struct, frozen=True):
    """One file to be imported."""

    path: Path
    size: int
    """0: not known."""
    is_named: bool = True
    """By the user; else it was found in a folder, and may be another program's."""
    called: str = ""
    """The name of the path that the user gave, without a file's suffix."""

    @classmethod
    def at(cls, path: Path, given: Path) -> ImportedFile:
        """The file at a path, which is the given one or below it."""
        named, is_named = given.resolve(), not given.is_dir()
        return cls(path, path.stat().st_size, is_named, named.stem if is_named else named.name)

    @property
    def name(self) -> str:
        """As people know it."""
        return "standard input" if self.path == STANDARD_INPUT else str(self.path)


def files_of(paths: Iterable[Path]) -> Iterator[ImportedFile]:
    """Yield the files at and below some paths, by name.

    Raises:
        OSError: one cannot be read.
    """
    for path in paths:
        if path == STANDARD_INPUT:
            yield ImportedFile(path, 0)
        elif not path.is_dir():
            yield ImportedFile.at(path, path)
        else:
            for folder, folders, names in os.walk(path):
                folders.sort()
                for file in (Path(folder, name) for name in sorted(names) if _NAMES.fullmatch(name)):
                    if file.is_file() and not file.is_symlink():
                        yield ImportedFile.at(file, path)


def format_in(path: Path, dating: Dating) -> str | None:
    """The format of a file: that of its first value that can be read, or of one that was cut off. Empty: it has only
    conversations without a word, or is a zip, of which nothing but exports is read; None: it is no export.

    Raises:
        OSError: it cannot be read.
    """
    if path.suffix.lower() == ".zip":
        return ""
    with path.open("rb") as file:
        if not _BEGINNING.match(beginning := file.read(_CUT_OFF_BYTES)):
            return None
    for _, found in read(ImportedFile(path, 0), dating, None, lambda _: None):
        if not found.problem:
            return found.thread.program if found.thread is not None else MEMD if found.entry else ""
        if found.is_broken and (cut_off := _begun_format(beginning)) is not None:
            return cut_off
    return None


def _begun_format(beginning: bytes) -> str | None:
    try:
        members = OBJECT.decode(closed(beginning))
    except UNREADABLE:
        return None
    if (export := _export_of(members)) is not None:
        return export.name
    return MEMD if _is_entry(members) else OPENAI.name if _is_message(members) else None


def is_unpacked_export(folder: Path, name: str, program: str) -> bool:
    """Whether a folder with this file of a format is a zip that the program sent, unpacked."""
    beside = next((one.beside for one in FORMATS if one.name == program), ())
    return _IN_ZIP.fullmatch(name) is not None and any((folder / one).is_file() for one in beside)


def read(
    file: ImportedFile, dating: Dating, wanted: str | None, advanced: Callable[[int], None]
) -> Iterator[tuple[str, Found]]:
    """Read one file; yields the name of what was found, which is longer in a zip, and that.

    Args:
        advanced: is called with the number of bytes that were read.

    Raises:
        OSError: it cannot be read.
    """
    with nullcontext(sys.stdin.buffer) if file.path == STANDARD_INPUT else file.path.open("rb") as opened:
        blocks = _blocks(opened, advanced)
        first = next(blocks, b"")
        is_zip = file.path.suffix.lower() == ".zip" and not _BEGINNING.match(first)
        if (is_zip or first.startswith(_ZIP_MAGIC)) and file.path != STANDARD_INPUT:
            yield from _in_zip(file, opened, dating, wanted, advanced)
            return
        whole, folder = chain([first], blocks), file.path.absolute().parent
        yield from ((file.name, found) for found in _found(whole, folder, dating, wanted))


def _in_zip(
    file: ImportedFile, opened: IO[bytes], dating: Dating, wanted: str | None, advanced: Callable[[int], None]
) -> Iterator[tuple[str, Found]]:
    try:
        with zipfile.ZipFile(opened) as archive:
            listed = [one for one in archive.infolist() if not one.is_dir()]
            chosen = [one for one in listed if _IN_ZIP.fullmatch(one.filename)]
            chosen = chosen or [one for one in listed if _ANY_JSON.fullmatch(one.filename)]
            if not chosen:
                reason = "there is no conversations.json in this zip, nor another JSON file"
                yield file.name, Found("the file", problem=reason)
            for member in chosen:
                name = f"{file.name}: {member.filename}"
                try:
                    with archive.open(member) as inner:
                        for found in _found(_blocks(inner, lambda _: None), Path(), dating, wanted):
                            yield name, found
                except (*_BROKEN, OSError) as error:  # bz2 says the latter
                    yield name, Found("the file", problem=f"it cannot be unpacked: {error}", is_broken=True)
                advanced(member.compress_size)
    except _BROKEN as error:
        yield file.name, Found("the file", problem=f"it is no whole zip: {error}", is_broken=True)


def _found(blocks: Iterator[bytes], folder: Path, dating: Dating, wanted: str | None) -> Iterator[Found]:
    head = next(blocks, b"")
    whole = chain([head], blocks)
    is_aider = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(AIDER_STARTED.encode())
    if wanted == AIDER or (wanted is None and is_aider):
        try:
            for thread in aider_threads(bounded_lines(whole, ITEM_BYTES_MAX), str(folder), dating):
                yield Found(thread.id, thread)
        except BadImport as error:
            yield Found("the file", problem=str(error))
        return
    yield from found_in(items(whole), dating, wanted)


def _blocks(opened: IO[bytes], advanced: Callable[[int], None]) -> Iterator[bytes]:
    while block := opened.read(BLOCK_BYTES):
        yield block
        advanced(len(block))
