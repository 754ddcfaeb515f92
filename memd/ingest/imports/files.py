"""Reads the files of an import: a file, a folder, a zip as a program sends it, or standard input.

Rule: files are read block by block and never unpacked to disk; symbolic links in a folder are not followed. Other files
of a folder or zip are skipped by name. The format of each value is recognised by its members, so that files of several
programs may be mixed; with `--format` only that one is read. A value of no known format is reported.

Values are the elements of an array, or the lines of JSON Lines. At most one of them and one block are in memory,
whatever the input. Brackets outside strings are counted to find their ends, so that an unreadable value does not hide
later ones. This reads 17 MB a second, for which the model then takes an hour. ijson 3.6 was tried and does neither: it
stops at the first broken value, and holds strings of any length.
"""

from __future__ import annotations

import lzma
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import chain
from pathlib import Path, PurePath
from typing import IO, Any

import msgspec
from msgspec import Raw

from memd.errors import BadImport, BadRequestBody, BadTopicId, EmptyImport
from memd.ingest.imports.exports import (
    AIDER_STARTED,
    FORMATS,
    ITEM_BYTES_MAX,
    ClaudeCodeSession,
    CodexSession,
    Dating,
    Export,
    Thread,
    aider_threads,
    thread_in,
    thread_of_elements,
    with_names,
)
from memd.wire.lenient_json import LIST, OBJECT, UNREADABLE, Decoded, is_list, without_surrogates

HEAD_BYTES = 1 << 20
"""Length of a file's beginning that decides its layout: a longer first line counts as a whole document."""
_BOM = b"\xef\xbb\xbf"
_SIGN = re.compile(rb'["\[\]{},]')
_STRING = re.compile(rb'(?:[^"\\]|\\.)*+("?)', re.DOTALL)
"""The rest of a string, with its closing quote if present."""
_lines_decoder = msgspec.json.Decoder(Raw)


class Item(msgspec.Struct, frozen=True):
    """A value, or the reason why there is none."""

    place: str
    """Its position, for people: `line 3`, `element 3 (byte 1,024)`."""
    data: bytes = b""
    """JSON text; empty if there is a problem."""
    array: int | None = None
    """Number of the array that contains it; None if none does."""
    problem: str = ""


def items(blocks: Iterable[bytes], bytes_max: int = ITEM_BYTES_MAX) -> Iterator[Item]:
    """Yield the values of a file; the elements of an array are separate values."""
    incoming = iter(blocks)
    head = b""
    for block in incoming:
        head += block
        if len(head) >= HEAD_BYTES or b"\n" in head.lstrip():
            break
    head = head.removeprefix(_BOM)
    rest = chain([head], incoming)
    return _values(rest, bytes_max) if _is_document(head) else _lines(rest, bytes_max)


def _is_document(head: bytes) -> bool:
    """Return True if a file, by its beginning, is one JSON text over several lines; else each line is one."""
    first = head.lstrip().partition(b"\n")[0]
    try:
        _lines_decoder.decode(first)
    except UNREADABLE:
        return first[:1] in (b"[", b"{")
    return False


def _lines(blocks: Iterable[bytes], bytes_max: int) -> Iterator[Item]:
    for number, line in enumerate(bounded_lines(blocks, bytes_max), 1):
        place = f"line {number:,}"
        if len(line) > bytes_max:
            yield Item(place, problem=_too_long(bytes_max))
        elif not line.strip():
            continue
        elif is_list(line.lstrip()) and (elements := _elements(line)) is not None:
            for position, raw in enumerate(elements, 1):
                yield Item(f"{place}, element {position:,}", bytes(raw), number)
        else:
            yield Item(place, line.strip())


def _elements(line: bytes) -> list[Raw] | None:
    try:
        return _decoded(LIST, line)[1]
    except UNREADABLE:
        return None


def _decoded(decoder: msgspec.json.Decoder[Decoded], data: bytes) -> tuple[bytes, Decoded]:
    """Return a value and its text in valid JSON: without NaN, which Python's `json` may write, and without half emojis,
    which JavaScript leaves when it cuts a string."""
    try:
        return data, decoder.decode(data)
    except ValueError:
        data = without_surrogates(_IN_PYTHON_ONLY.sub(lambda found: found[1] or b"null", data))
        return data, decoder.decode(data)


def bounded_lines(blocks: Iterable[bytes], bytes_max: int) -> Iterator[bytes]:
    """Yield lines; one that is too long is cut after `bytes_max` + 1 bytes."""
    held = bytearray()
    for block in blocks:
        *ended, begun = block.split(b"\n")
        for part in ended:
            held += part[: bytes_max + 1 - len(held)]
            yield bytes(held)
            held = bytearray()
        held += begun[: bytes_max + 1 - len(held)]
    yield bytes(held)


def _values(blocks: Iterable[bytes], bytes_max: int) -> Iterator[Item]:
    """Yield the values of one or more consecutive JSON texts; for an array, its elements."""
    held, at, done = bytearray(), 0, 0  # bytes not dropped yet, position of reading in them, number of bytes dropped
    start = begun = count = arrays = depth = 0
    in_array = in_string = is_long = False

    def ended(end: int) -> Iterator[Item]:
        nonlocal count, is_long
        place, size = f"element {count + 1:,} (byte {begun:,})", end - start
        if is_long or size > bytes_max:
            yield Item(place, problem=_too_long(bytes_max))
        elif value := bytes(held[start:end]).strip():
            yield Item(place, value, arrays if in_array else None)
        else:
            return  # an empty array, or a comma too many
        count, is_long = count + 1, False

    for block in blocks:
        held += block
        while at < len(held):
            found = (_STRING.match if in_string else _SIGN.search)(held, at)
            at = found.end() if found else len(held)
            if in_string or found is None:
                if found is None or not found[1]:
                    break
                in_string = False
                continue
            sign = found[0]
            if sign == b'"':
                in_string = True
            elif sign in b"[{":
                depth += 1
                if depth == 1:
                    in_array = sign == b"["
                    arrays += in_array
                    start = found.start() + in_array
                    begun = done + start
            elif sign in b"]}":
                depth -= 1
                if depth < 0:
                    yield Item(f"byte {done + at - 1:,}", problem="a bracket closes that was never opened")
                    return
                if depth == 0:
                    yield from ended(at - in_array)
                    start = at
            elif in_array and depth == 1:
                yield from ended(at - 1)
                start, begun = at, done + at
        is_long = is_long or (depth > 0 and len(held) - start > bytes_max)
        kept = at if is_long or not depth else start
        del held[:kept]
        at, done, start = at - kept, done + kept, 0
    if depth or in_string:
        taken = (
            "Only what stands before it is taken" if count else "Nothing is taken; --format json adds it as a document"
        )
        reason = f"the file ends in the middle of it: it was cut off. Get it again. {taken}"
        yield Item(f"element {count + 1:,} (byte {begun:,})", problem=reason)


def _too_long(bytes_max: int) -> str:
    return f"it has more than {bytes_max:,} bytes and is left out"


BAD_LINES_MAX = 20
"""A file that begins with so many bad values, and no good one, is not read further."""
_IN_PYTHON_ONLY = re.compile(rb'("(?:[^"\\]|\\.)*+")|-?(?:NaN|Infinity)', re.DOTALL)
"""Strings, which stay, and numbers that JSON does not have."""


SESSIONS: Mapping[str, type[ClaudeCodeSession | CodexSession]] = {
    "claude-code": ClaudeCodeSession,
    "codex": CodexSession,
}
"""The formats whose values are parts of one conversation."""
TITLES = {one.name: one.title for one in FORMATS}
NAMES = tuple(TITLES)
OPENAI, SLACK = (next(one for one in FORMATS if one.name == name) for name in ("openai", "slack"))
"""Formats whose messages may be separate values."""
AIDER, MEMD = "aider", "memd"


class Found(msgspec.Struct, frozen=True):
    """A value of a file: a conversation, an entry of `memd export`, a problem, or an empty conversation."""

    place: str
    """Its position, for people."""
    thread: Thread | None = None
    entry: bytes = b""
    problem: str = ""
    is_broken: bool = False
    """True if the file itself is damaged."""


def found_in(values: Iterable[Item], dating: Dating, only: str | None = None, called: str = "") -> Iterator[Found]:
    """Read the values of one file. `only`: the name of the only format to read. `called`: Slack's name for the messages
    in it: channel and day."""
    sessions: dict[str, ClaudeCodeSession | CodexSession] = {}
    messages: list[Item] = []  # separate ones, all of one array, or all lines
    strange: list[Found] = []  # the values before the first of a conversation
    is_known, spoken_as = False, OPENAI
    for item in values:
        if messages and item.array != messages[0].array:
            yield from _conversation_of(messages, dating, spoken_as, called)
            messages = []
        try:
            item, members = _members(item)
            export = next((one for one in FORMATS if only in (None, one.name) and one.fits(members)), None)
            if not (export or sessions):
                has = ", ".join(name[:40] for name in list(members)[:6]) or "none at all"
                kind = "a conversation" if only is None else f"of {TITLES[only]}"
                raise BadImport(f"it is not {kind}; its members are {has}")
        except (*UNREADABLE, BadImport) as error:
            found = Found(item.place, problem=str(error), is_broken=bool(item.problem))
            strange += [] if is_known else [found]
            if is_known:
                yield found
            elif len(strange) >= BAD_LINES_MAX:
                break
            continue
        yield from strange
        strange, is_known = [], True
        try:
            if (export and export.name) != MEMD:  # a damaged entry of memd must not replace an intact one
                item = msgspec.structs.replace(item, data=without_surrogates(item.data))
            is_message = export is SLACK or (export is OPENAI and OPENAI.messages not in members)
            name = export.name if export else ""
            if sessions and (is_message or not name):
                # An event of another kind, or an item from before lines had a frame.
                is_message, name = False, next(reversed(sessions))
            if is_message and export is not None:
                spoken_as = export
                messages.append(item)
            elif name == MEMD:
                yield Found(item.place, entry=item.data)
            elif name in SESSIONS:
                sessions.setdefault(name, SESSIONS[name](dating)).add(item.data)
            elif export is not None:
                yield Found(item.place, thread_in(export, item.data, dating))
        except EmptyImport:
            yield Found(item.place)
        except (*UNREADABLE, BadImport, BadRequestBody, BadTopicId) as error:
            yield Found(item.place, problem=str(error))
    if len(strange) > 1:
        where = "it" if len(strange) < BAD_LINES_MAX else "its beginning, and it is not read on"
        first = next((one for one in strange if one.is_broken), strange[0])
        reason = f"there is no conversation in {where}; {first.place}: {first.problem}"
        strange = [Found("the file", problem=reason, is_broken=first.is_broken)]
    yield from strange
    yield from _conversation_of(messages, dating, spoken_as, called)
    for session in sessions.values():
        try:
            yield Found("session", session.thread())
        except EmptyImport:
            continue
        except (*UNREADABLE, BadImport, BadRequestBody) as error:
            yield Found("session", problem=str(error))


def _members(item: Item) -> tuple[Item, dict[str, Raw]]:
    """Return the value in valid JSON, and its members."""
    if item.problem:
        raise BadImport(item.problem)
    try:
        data, members = _decoded(OBJECT, item.data)
        return msgspec.structs.replace(item, data=data), members
    except RecursionError:
        raise BadImport("it is nested too deep to be read; export it flat (LibreChat: not recursive)") from None
    except UNREADABLE as error:
        raise BadImport(f"it is no JSON object: {error}") from None


def _conversation_of(messages: Sequence[Item], dating: Dating, export: Export, called: str) -> Iterator[Found]:
    if messages:
        elements, name = [("", Raw(one.data)) for one in messages], called if export is SLACK else ""
        try:
            thread = thread_of_elements(export, elements, dating, name, title=name.rpartition("/")[0])
            yield Found(messages[0].place, thread)
        except EmptyImport:
            yield Found(messages[0].place)
        except BadImport as error:
            yield Found(messages[0].place, problem=str(error))


BLOCK_BYTES = 1 << 20
STANDARD_INPUT = Path("-")
PEOPLE = "users.json"
"""Slack's file of people by id."""
_NAMES = re.compile(r".*\.(json|jsonl|zip)|\.aider\.chat\.history\.md")
_OF_A_DAY = r"\d{4}-\d\d-\d\d\.json"
_IN_ZIP = re.compile(
    rf"(?:.*/)?(?:conversations[^/]*\.jsonl?|\.aider\.chat\.history\.md|rollout-[^/]*\.jsonl|{_OF_A_DAY})"
)
_ANY_JSON = re.compile(r".*\.jsonl?")
_ZIP_MAGIC = b"PK\x03\x04"
_BEGINNING = re.compile(
    rb"(?:\xef\xbb\xbf)?\s*(?:[{\[]|" + re.escape(AIDER_STARTED.encode()) + rb")|" + re.escape(_ZIP_MAGIC)
)
"""The beginning of an export with any file name."""
_CUT_OFF_BYTES = 10_000
"""Length of a file's beginning that decides the format of a truncated first value."""
_BROKEN = (zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError, EOFError, ValueError)
"""Errors of a damaged or encrypted zip, of names that are no text, or of an unknown compression."""


class ImportedFile(msgspec.Struct, frozen=True):
    """A file to be imported."""

    path: Path
    size: int
    """Size in bytes; 0 if unknown."""
    is_named: bool = True
    """True if the user named it; else it was found in a folder, and may be another program's."""
    called: str = ""
    """Name of the path given by the user, without a file's suffix."""

    @classmethod
    def at(cls, path: Path, given: Path) -> ImportedFile:
        """Return the file at a path, which is the given path or below it."""
        named, is_named = given.resolve(), not given.is_dir()
        return cls(path, path.stat().st_size, is_named, named.stem if is_named else named.name)

    @property
    def name(self) -> str:
        """Name for people."""
        return "standard input" if self.path == STANDARD_INPUT else str(self.path)


def files_of(paths: Iterable[Path]) -> Iterator[ImportedFile]:
    """Yield the files at and below paths, by name. Raises OSError: one cannot be read."""
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
    """Return the format of a file: that of its first readable value, or of a truncated one by its names. Empty: it has
    only empty conversations, or is a zip without any, as nothing else is read from zips; None: it is no export. Raises
    OSError: it cannot be read."""
    is_zip = path.suffix.lower() == ".zip"
    with path.open("rb") as file:
        if not (_BEGINNING.match(beginning := file.read(_CUT_OFF_BYTES)) or is_zip):
            return None
    for _, found in read(ImportedFile(path, 0), dating, None, lambda _: None):
        if not found.problem:
            return found.thread.program if found.thread is not None else MEMD if found.entry else ""
        if found.is_broken and (begun := next((one.name for one in FORMATS if one.may_begin(beginning)), None)):
            return begun
    return "" if is_zip else None


def left_out_of(packed: Path) -> list[str]:
    """Return the files of a zip that an import skips. Raises OSError: it cannot be read."""
    try:
        with zipfile.ZipFile(packed) as archive:
            return [one.filename for one in _parted(archive)[1]]
    except _BROKEN:
        return []


def _parted(archive: zipfile.ZipFile) -> tuple[list[zipfile.ZipInfo], list[zipfile.ZipInfo]]:
    """Return the files of a zip that may have conversations, and the others."""
    listed = [one for one in archive.infolist() if not one.is_dir()]
    pattern = _IN_ZIP if any(_IN_ZIP.fullmatch(one.filename) for one in listed) else _ANY_JSON
    chosen = [one for one in listed if pattern.fullmatch(one.filename)]
    return chosen, [one for one in listed if not pattern.fullmatch(one.filename)]


def unpacked_export(file: Path, program: str) -> Path | None:
    """Return the folder of an unpacked zip of the program, if this file is from one; else None."""
    beside = next((one.beside for one in FORMATS if one.name == program), ())
    found = (Path(os.path.normpath(file.parent / one)) for one in beside if _IN_ZIP.fullmatch(file.name))
    return next((one.parent for one in found if one.is_file()), None)


def read(
    file: ImportedFile, dating: Dating, only: str | None, advanced: Callable[[int], None]
) -> Iterator[tuple[str, Found]]:
    """Read one file; yield each value with the file's name, which in a zip includes the member. `advanced`: called with
    the number of bytes read. Raises OSError: it cannot be read."""
    with nullcontext(sys.stdin.buffer) if file.path == STANDARD_INPUT else file.path.open("rb") as opened:
        blocks = _blocks(opened, advanced)
        first = next(blocks, b"")
        is_zip = file.path.suffix.lower() == ".zip" and not _BEGINNING.match(first)
        if (is_zip or first.startswith(_ZIP_MAGIC)) and file.path != STANDARD_INPUT:
            yield from _in_zip(file, opened, dating, only, advanced)
            return
        whole, path = chain([first], blocks), file.path.absolute()
        for found in _found(whole, path.parent, dating, only, _called(path)):
            yield file.name, _named(found, path.parent.parent / PEOPLE)


def _in_zip(
    file: ImportedFile, opened: IO[bytes], dating: Dating, only: str | None, advanced: Callable[[int], None]
) -> Iterator[tuple[str, Found]]:
    try:
        with zipfile.ZipFile(opened) as archive:
            chosen, _ = _parted(archive)
            if not chosen:
                reason = "of a zip only an export of conversations is read: unpack it, and add its folder"
                yield file.name, Found("the file", problem=reason)
            for member in chosen:
                name = f"{file.name}: {member.filename}"
                try:
                    with archive.open(member) as inner:
                        called = _called(PurePath(member.filename))
                        for found in _found(_blocks(inner, lambda _: None), Path(), dating, only, called):
                            yield name, _named(found, zipfile.Path(archive, PEOPLE))
                except (*_BROKEN, OSError) as error:  # bz2 raises the latter
                    yield name, Found("the file", problem=f"it cannot be unpacked: {error}", is_broken=True)
                advanced(member.compress_size)
    except _BROKEN as error:
        yield file.name, Found("the file", problem=f"it is no whole zip: {error}", is_broken=True)


def _called(path: PurePath) -> str:
    """Return a file's folder and name without suffix: `general/2024-03-01`."""
    return f"{path.parent.name}/{path.stem}"


def _named(found: Found, people: Path | zipfile.Path) -> Found:
    """Return a value with the names of people, if it is Slack's. `people`: the file with the names."""
    if found.thread is None or found.thread.program != SLACK.name:
        return found
    names: dict[str, str] = {}
    with suppress(OSError, KeyError, *UNREADABLE):  # missing or unreadable: the ids stay
        for one in msgspec.json.decode(people.read_bytes(), type=list[_Person]):
            names[one.id] = one.profile.get("real_name") or one.name or one.id
    return msgspec.structs.replace(found, thread=with_names(found.thread, names))


class _Person(msgspec.Struct):
    id: str
    name: str = ""
    profile: dict[str, Any] = {}


def _found(blocks: Iterator[bytes], folder: Path, dating: Dating, only: str | None, called: str) -> Iterator[Found]:
    head = next(blocks, b"")
    whole = chain([head], blocks)
    is_aider = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(AIDER_STARTED.encode())
    if only == AIDER or (only is None and is_aider):
        try:
            for thread in aider_threads(bounded_lines(whole, ITEM_BYTES_MAX), str(folder), dating):
                yield Found(thread.id, thread)
        except BadImport as error:
            yield Found("the file", problem=str(error))
        return
    yield from found_in(items(whole), dating, only, called)


def _blocks(opened: IO[bytes], advanced: Callable[[int], None]) -> Iterator[bytes]:
    while block := opened.read(BLOCK_BYTES):
        yield block
        advanced(len(block))
