"""The files of a source that are to be read.

Rule: an exclusion matches whole components of a path, those of a link's target too. What `.gitignore` leaves out is
left out, and so are hidden files and folders. A link that leads out of the source is not followed unless that is asked
for. A folder that cannot be read is named, and the rest goes on.
"""

from __future__ import annotations

import fnmatch
import functools
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from memd.ingest.readers.text import is_readable

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

GITIGNORE = ".gitignore"
DEPTH_MAX = 200


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a folder that are wanted."""

    exclude: tuple[str, ...] = ()
    """Names, paths of components or patterns (`*.tmp`), of files and folders; or whole paths, beginning with `/`."""
    formats: tuple[str, ...] = ()
    """Suffixes, without a dot and in lower case; none: all that can be read."""
    follow_links: bool = False
    """Also links that lead out of the folder."""

    def wants(self, name: str) -> bool:
        """Whether a file of this name is wanted where a whole folder is."""
        return name.lower().rpartition(".")[2] in self.formats if self.formats else is_readable(name)


class FoundFile(msgspec.Struct, frozen=True):
    """A file to read."""

    path: str
    """None of its components was a link; one that is now has been put there since."""
    below: str
    """Its path below the root, with `/` between components; empty for the root itself."""

    @property
    def name(self) -> str:
        """Its own, or that of the link to it."""
        return (self.below or self.path).rpartition("/")[2]


class Walk:
    """One walk through a root."""

    def __init__(self, root: Path, chosen: Chosen) -> None:
        """`root` is resolved: none of its components is a link."""
        self._root = str(root)
        self._chosen = chosen
        self._absolute = [os.path.realpath(one) for one in chosen.exclude if one.startswith("/")]
        self._relative = [one for one in chosen.exclude if not one.startswith("/")]
        self._entered: set[str] = set()
        self.unread: list[tuple[str, str]] = []
        """Folders that could not be read: their paths below the root, and why."""

    def files(self) -> Iterator[FoundFile]:
        """Yield the files, or the root itself if it is one, in the order of their names.

        Raises:
            OSError: the root cannot be read.
        """
        if stat.S_ISDIR(os.stat(self._root).st_mode):
            os.scandir(self._root).close()
            self._is_first_time_in(self._root)
            yield from self._below(self._root, "", ())
        else:
            yield FoundFile(self._root, "")

    def _below(self, folder: str, below: str, ignored: tuple[tuple[str, GitIgnoreSpec], ...]) -> Iterator[FoundFile]:
        if below.count("/") > DEPTH_MAX:
            self.unread.append((below.rstrip("/"), f"it is more than {DEPTH_MAX} folders deep"))
            return
        try:
            with os.scandir(folder) as listed:
                entries = sorted(listed, key=lambda entry: entry.name)
            if any(entry.name == GITIGNORE and entry.is_file() for entry in entries):
                from memd.ingest.sources.ignoring import rules_of  # its package takes long to import

                ignored = (*ignored, (below, rules_of(f"{folder}/{GITIGNORE}")))
        except FileNotFoundError:
            return  # it has gone since it was listed
        except OSError as error:
            self.unread.append((below.rstrip("/"), f"the folder cannot be read ({error.strerror or error})"))
            return
        for entry in entries:
            name = below + entry.name
            if entry.name.startswith(".") or is_excluded(name, self._relative) or self._is_apart(entry.path):
                continue
            is_folder = _leads_to(entry.is_dir)
            if not is_folder and not (self._chosen.wants(entry.name) and _leads_to(entry.is_file)):
                continue
            if entry.is_symlink() and not self._may_follow(entry, is_folder=is_folder):
                continue
            if _is_ignored(name + "/" if is_folder else name, ignored):
                continue
            if not is_folder:
                yield FoundFile(os.path.realpath(entry.path) if entry.is_symlink() else entry.path, name)
            elif self._is_first_time_in(inner := os.path.realpath(entry.path)):
                yield from self._below(inner, name + "/", ignored)

    def _is_apart(self, path: str) -> bool:
        return any(path == one or path.startswith(one + "/") for one in self._absolute)

    def _is_first_time_in(self, folder: str) -> bool:
        """Whether a folder, resolved, is entered for the first time: links may lead to it too, or in a circle."""
        is_first = folder not in self._entered
        self._entered.add(folder)
        return is_first

    def _may_follow(self, link: os.DirEntry[str], *, is_folder: bool) -> bool:
        """Whether a link leads to something that is not excluded, within the root or wherever that is asked for."""
        target = os.path.realpath(link.path)
        if self._is_apart(target):
            return False
        if target == self._root or target.startswith(self._root + "/"):  # a folder is seen where it is
            return not is_folder and not is_excluded(target[len(self._root) + 1 :], self._relative)
        return self._chosen.follow_links and not is_excluded(target.strip("/"), self._relative)


def _leads_to(is_one: Callable[[], bool]) -> bool:
    try:
        return is_one()
    except OSError:  # a link in a circle
        return False


def is_excluded(below: str, exclude: Sequence[str]) -> bool:
    """Whether whole components of a path, one after the other, match one of the exclusions."""
    if not exclude:
        return False
    parts = below.split("/")
    for one in exclude:
        wanted = _components(one)
        starts = range(len(parts) - len(wanted) + 1)
        if any(all(map(fnmatch.fnmatchcase, parts[start : start + len(wanted)], wanted)) for start in starts):
            return True
    return False


@functools.lru_cache(maxsize=256)
def _components(exclusion: str) -> list[str]:
    return exclusion.strip("/").split("/")


def _is_ignored(below: str, ignored: tuple[tuple[str, GitIgnoreSpec], ...]) -> bool:
    return any(spec.match_file(below[len(base) :]) for base, spec in ignored)
