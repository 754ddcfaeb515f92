"""The files of an import: a file, a folder, a zip as a program sends it, standard input.

Rule: read block by block, never unpacked to disk, no symbolic link in a folder is followed. What a folder or a zip has
besides conversations is passed over by its name.
"""

from __future__ import annotations

import io
import lzma
import os
import re
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec

from memd.errors import BadImport
from memd.ingest.dates import Dating
from memd.ingest.imports import aider
from memd.ingest.imports.formats import AIDER, Bad, Found, found_in
from memd.ingest.imports.items import items

BLOCK_BYTES = 1 << 20
STANDARD_INPUT = Path("-")
_NAMES = re.compile(r".*\.(json|jsonl|zip)|\.aider\.chat\.history\.md")
_IN_ZIP = re.compile(r"(?:.*/)?(?:conversations[^/]*\.jsonl?|\.aider\.chat\.history\.md|rollout-[^/]*\.jsonl)")
_ANY_JSON = re.compile(r".*\.jsonl?")
_ZIP_MAGIC = b"PK\x03\x04"
_BROKEN = (zipfile.BadZipFile, RuntimeError, NotImplementedError, zlib.error, lzma.LZMAError, EOFError, ValueError)
"""Damaged, encrypted, with names that are no text, or packed in a way that this Python does not know."""


class ImportedFile(msgspec.Struct, frozen=True):
    """One file to be imported."""

    path: Path
    size: int
    """0: not known."""
    is_named: bool = True
    """By the user; else it was found in a folder, and may be another program's."""

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
            yield ImportedFile(path, path.stat().st_size)
        else:
            for folder, folders, names in os.walk(path):
                folders.sort()
                for file in (Path(folder, name) for name in sorted(names) if _NAMES.fullmatch(name)):
                    if file.is_file() and not file.is_symlink():
                        yield ImportedFile(file, file.stat().st_size, is_named=False)


def has_conversation(path: Path, dating: Dating) -> bool:
    """Whether a file is an export: its first value that can be read is a conversation or an exported entry.

    Raises:
        OSError: it cannot be read.
    """
    if not _NAMES.fullmatch(path.name):
        return False
    found = read(ImportedFile(path, 0), dating, None, lambda _: None)
    return any(not isinstance(one, Bad) for _, one in found)


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
        head = opened.read(len(_ZIP_MAGIC))
        if head == _ZIP_MAGIC and file.path != STANDARD_INPUT:
            yield from _in_zip(file, opened, dating, wanted, advanced)
            return
        blocks = chain([head], _blocks(opened, advanced))
        yield from ((file.name, found) for found in _found(blocks, file.path.absolute().parent, dating, wanted))


def _in_zip(
    file: ImportedFile, opened: IO[bytes], dating: Dating, wanted: str | None, advanced: Callable[[int], None]
) -> Iterator[tuple[str, Found]]:
    try:
        with zipfile.ZipFile(opened) as archive:
            listed = [one for one in archive.infolist() if not one.is_dir()]
            chosen = [one for one in listed if _IN_ZIP.fullmatch(one.filename)]
            chosen = chosen or [one for one in listed if _ANY_JSON.fullmatch(one.filename)]
            if not chosen:
                yield file.name, Bad("the file", "there is no conversations.json in this zip, nor another JSON file")
            for member in chosen:
                name = f"{file.name}: {member.filename}"
                try:
                    with archive.open(member) as inner:
                        for found in _found(_blocks(inner, lambda _: None), Path(), dating, wanted):
                            yield name, found
                except (*_BROKEN, OSError) as error:  # bz2 says the latter
                    yield name, Bad("the file", f"it cannot be unpacked: {error}")
                advanced(member.compress_size)
    except _BROKEN as error:
        yield file.name, Bad("the file", f"it is no whole zip: {error}")


def _found(blocks: Iterable[bytes], folder: Path, dating: Dating, wanted: str | None) -> Iterator[Found]:
    incoming = iter(blocks)
    head = b"".join(_first(incoming, len(aider.STARTED) + 80))
    whole = chain([head], incoming)
    if wanted == AIDER or (wanted is None and aider.is_history(head)):
        try:
            for thread in aider.threads(_text_lines(whole), str(folder), dating):
                yield thread.id, thread
        except BadImport as error:
            yield Bad("the file", str(error))
        return
    yield from found_in(items(whole), dating, wanted)


def _first(blocks: Iterator[bytes], size: int) -> Iterator[bytes]:
    for block in blocks:
        yield block
        size -= len(block)
        if size <= 0:
            return


def _blocks(opened: IO[bytes], advanced: Callable[[int], None]) -> Iterator[bytes]:
    while block := opened.read(BLOCK_BYTES):
        yield block
        advanced(len(block))


class _Blocks(io.RawIOBase):
    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._left = self._left or next(self._blocks, b"")
        taken, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(taken)] = taken
        return len(taken)


def _text_lines(blocks: Iterable[bytes]) -> Iterator[str]:
    return io.TextIOWrapper(io.BufferedReader(_Blocks(blocks)), encoding="utf-8-sig", errors="replace", newline="\n")
