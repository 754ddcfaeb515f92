"""The files of a folder that are to be read.

Rule: an exclusion matches whole components of a path. What `.gitignore` leaves out is left out, and so are hidden files
and folders. A link that leads out of the folder is not followed.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from pathspec import GitIgnoreSpec

from memd.ingest.sources.reading import is_readable

GITIGNORE = ".gitignore"


class FoundFile(msgspec.Struct, frozen=True):
    """A file to read."""

    path: Path
    source: str
    """Its path below the root, behind the root's name, with `/` between components."""


def files_of(root: Path, name: str, exclude: Sequence[str] = ()) -> Iterator[FoundFile]:
    """Yield the files below a folder, or the file itself, in the order of their names.

    Args:
        name: what the root is called.
        exclude: names, paths of components or patterns (`*.tmp`), of files and folders.

    Raises:
        OSError: the root cannot be read.
    """
    if root.is_file():
        yield FoundFile(root, name)
        return
    yield from _below(root.resolve(strict=True), root.resolve(), name, exclude, [])


def _below(
    top: Path, folder: Path, name: str, exclude: Sequence[str], ignored: list[tuple[Path, GitIgnoreSpec]]
) -> Iterator[FoundFile]:
    rules = folder / GITIGNORE
    if rules.is_file():
        lines = filter(_is_rule, rules.read_text("utf-8", "replace").splitlines())
        ignored = [*ignored, (folder, GitIgnoreSpec.from_lines(lines))]
    with os.scandir(folder) as listed:
        entries = sorted(listed, key=lambda entry: entry.name)
    for entry in entries:
        path = Path(entry.path)
        below = path.relative_to(top).as_posix()
        if entry.name.startswith(".") or is_excluded(below, exclude):
            continue
        if entry.is_symlink() and not _stays(path, top, exclude):
            continue
        is_folder = entry.is_dir()
        given = "/" if is_folder else ""
        if any(spec.match_file(path.relative_to(base).as_posix() + given) for base, spec in ignored):
            continue
        if is_folder and not entry.is_symlink():
            yield from _below(top, path, name, exclude, ignored)
        elif entry.is_file() and is_readable(entry.name):
            yield FoundFile(path, f"{name}/{below}")


def _is_rule(line: str) -> bool:
    """Whether git would take a line of `.gitignore` for a rule; it passes over others (`!`, `[z-a]`)."""
    try:
        GitIgnoreSpec.from_lines([line])
    except (ValueError, re.error):
        return False
    return True


def is_excluded(below: str, exclude: Sequence[str]) -> bool:
    """Whether whole components of a path, one after the other, match one of the exclusions."""
    parts = below.split("/")
    for one in exclude:
        wanted = one.strip("/").split("/")
        starts = range(len(parts) - len(wanted) + 1)
        if any(all(map(fnmatch.fnmatchcase, parts[start : start + len(wanted)], wanted)) for start in starts):
            return True
    return False


def _stays(link: Path, top: Path, exclude: Sequence[str]) -> bool:
    """Whether a link leads to something that is not excluded within the folder."""
    try:
        target = link.resolve(strict=True)
    except (OSError, RuntimeError):  # it leads nowhere, or in a circle
        return False
    return target.is_relative_to(top) and not is_excluded(target.relative_to(top).as_posix(), exclude)
