"""The files of a source that are to be read.

Rule: an exclusion matches whole components of a path, those of a link's target too. What `.gitignore` leaves out is
left out, and so are hidden files and folders. A link that leads out of the source is not followed unless that is asked
for. A folder that cannot be read is named, and the rest goes on. Whoever wrote a `.gitignore` need not be trusted: no
rule takes longer than the square of a path's length, and what git cannot read is no rule.

Claude Code has notes of its own (https://code.claude.com/docs/en/memory, "Auto memory"), in
`~/.claude/projects/<project>/memory/`: `MEMORY.md` and further Markdown files, `~/.claude` being `CLAUDE_CONFIG_DIR`
where that is set. `<project>` is the path of the project in which every character but ASCII letters and digits is a
`-`; one of more than 200 characters is cut there, with a hash behind it. That cannot be undone, but the sessions beside
the folder (`*.jsonl`) say in `cwd` where they were; what cannot be read is taken as not there.
"""

from __future__ import annotations

import codecs
import errno
import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from memd.ingest.readers.text import is_readable, suffix_of

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

GITIGNORE = ".gitignore"
DEPTH_MAX = 200
HEAD_BYTES = 4_096


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a folder that are wanted."""

    exclude: tuple[str, ...] = ()
    """Names, paths of components or patterns (`*.tmp`), of files and folders; or whole paths, beginning with `/`."""
    formats: tuple[str, ...] = ()
    """Suffixes, without a dot and in lower case; none: all that can be read."""
    follow_links: bool = False
    """Also links that lead out of the folder."""
    zips: bool = False
    """Also those that could be exports of conversations, where no formats are given."""

    def wants(self, name: str) -> bool:
        """Whether a file of this name is wanted where a whole folder is; without a suffix, if it is text."""
        if self.formats:
            return name.lower().rpartition(".")[2] in self.formats
        return is_readable(name) or (self.zips and suffix_of(name) == ".zip")


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
        self._excluded = Exclusions(chosen.exclude)
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
                ignored = (*ignored, (below, rules_of(f"{folder}/{GITIGNORE}")))
        except FileNotFoundError:
            return  # it has gone since it was listed
        except OSError as error:
            self.unread.append((below.rstrip("/"), f"the folder cannot be read ({error.strerror or error})"))
            return
        for entry in entries:
            name = below + entry.name
            if entry.name.startswith(".") or self._excluded.have(entry.path, name):
                continue
            is_folder = _leads_to(entry.is_dir)
            if not is_folder and not (self._chosen.wants(entry.name) and _leads_to(entry.is_file)):
                continue
            if entry.is_symlink() and not self._may_follow(entry, is_folder=is_folder):
                continue
            matched = name + "/" if is_folder else name
            if any(rules.match_file(matched[len(base) :]) for base, rules in ignored):
                continue
            if not is_folder:
                path = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
                if suffix_of(entry.name) or begins_with_text(path):
                    yield FoundFile(path, name)
            elif self._is_first_time_in(inner := os.path.realpath(entry.path)):
                yield from self._below(inner, name + "/", ignored)

    def _is_first_time_in(self, folder: str) -> bool:
        """Whether a folder, resolved, is entered for the first time: links may lead to it too, or in a circle."""
        is_first = folder not in self._entered
        self._entered.add(folder)
        return is_first

    def _may_follow(self, link: os.DirEntry[str], *, is_folder: bool) -> bool:
        """Whether a link leads to something that is not excluded, within the root or wherever that is asked for."""
        target = os.path.realpath(link.path)
        is_within = target == self._root or target.startswith(self._root + "/")
        below = target[len(self._root) + 1 :] if is_within else target.strip("/")
        if self._excluded.have(target, below):
            return False
        return not is_folder if is_within else self._chosen.follow_links  # a folder is seen where it is


def begins_with_text(path: str) -> bool:
    """Whether a file has the beginning of a text; one that cannot be opened is named where it is read."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return True
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return bool(head) and b"\0" not in head


def _leads_to(is_one: Callable[[], bool]) -> bool:
    try:
        return is_one()
    except OSError:  # a link in a circle
        return False


class Exclusions:
    """The files and folders that are left out of a source; see `Chosen.exclude`."""

    def __init__(self, exclude: Sequence[str]) -> None:
        self._whole = [os.path.realpath(one) for one in exclude if one.startswith("/")]
        self._components = [one.strip("/").split("/") for one in exclude if not one.startswith("/")]

    def have(self, path: str, below: str) -> bool:
        """Whether a path, or what leads to it, is left out; `below`: its components that count."""
        if any(path == one or path.startswith(one + "/") for one in self._whole):
            return True
        parts = below.split("/") if self._components else []
        return any(
            all(map(fnmatch.fnmatchcase, parts[start : start + len(wanted)], wanted))
            for wanted in self._components
            for start in range(len(parts) - len(wanted) + 1)
        )


BYTES_MAX = 100_000
"""Of one `.gitignore`; those of large projects have a tenth of it."""
_STAR = r"\[\^/\]\*"
_FIXED = r"(?:\[\^?\]?[^\]/]*\]|\[\^/\](?!\*)|\\.|[^/\\(\[])*"
"""Between two stars of a component: brackets, `?`, escaped and plain characters."""
_STAR_BEFORE_ANOTHER = re.compile(f"{_STAR}({_FIXED})(?={_STAR})")
_LEADING, _INNER = "^(?:.+/)?", "(?:/.+)?"
"""The expressions of `**/` and `/**/`. No component has a `/`: neither they nor a star can be a rule's own words."""


def rules_of(path: str) -> GitIgnoreSpec:
    """Read a `.gitignore`.

    Raises:
        OSError: it cannot be read, or is too long for one.
    """
    from pathspec import GitIgnoreSpec  # it takes long to import
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    class Steady(GitIgnoreSpecPattern):
        """A rule whose wildcards are never tried anew once what follows them, up to the next one, was found."""

        @classmethod
        def pattern_to_regex(cls, pattern: Any) -> tuple[Any, bool | None]:
            regex, include = super().pattern_to_regex(pattern)
            return regex and _steady(regex), include

    def is_rule(line: str) -> bool:
        """Whether git would take a line for a rule; it passes over others (`!`, `[z-a]`)."""
        try:
            Steady(line)
        except (ValueError, re.error):
            return False
        return True

    with open(path, "rb") as file:
        content = file.read(BYTES_MAX + 1)
    if len(content) > BYTES_MAX:
        raise OSError(errno.EFBIG, f"its .gitignore has more than {BYTES_MAX:,} bytes", path)
    lines = content.decode("utf-8", errors="replace").splitlines()
    return GitIgnoreSpec.from_lines(filter(is_rule, lines), Steady)


def _steady(regex: str) -> str:
    """The expression with atomic groups, as those of `fnmatch.translate`: the first place where the words between two
    wildcards stand leaves most to the rest, so no other has to be tried."""
    first, *others = _STAR_BEFORE_ANOTHER.sub(r"(?>[^/]*?\1)", regex).split(_INNER)
    if not others:
        return first
    if first.startswith(_LEADING):
        first = f"^(?>(?:[^/]+/)*?{first.removeprefix(_LEADING)}(?=/))"
    inner = "".join(f"(?>(?:/[^/]+)*?{one}(?=/))" for one in others[:-1])
    return f"{first}{inner}{_INNER}{others[-1]}"


NAME_CHARACTERS_MAX = 200
LINES_READ_MAX = 50
"""Of a session, until one says where it was."""


class AgentFolder(msgspec.Struct, frozen=True):
    """The notes of an agent on one project."""

    memory: Path
    project: Path
    """The project's own folder, or the folder of its name where nobody says which it was."""
    name: str
    """Of the notes, as a source."""


class _SaidWhere(msgspec.Struct):
    """A line of a session, as far as it matters here."""

    cwd: str = ""


def claude_code_folders(env: Mapping[str, str]) -> list[AgentFolder]:
    """Return the folders in which Claude Code has noted something, in the order of their projects' names."""
    projects = Path(env.get("CLAUDE_CONFIG_DIR") or Path.home() / ".claude") / "projects"
    found = []
    for folder in sorted(projects.glob("*/memory")):
        if folder.is_dir() and any(folder.rglob("*.md")):
            project = _project(folder.parent)
            found.append(AgentFolder(folder, project, f"claude-code/{project.name.lstrip('-') or 'project'}"))
    doubled = {one.name for one in found if [other.name for other in found].count(one.name) > 1}
    return [
        msgspec.structs.replace(one, name=f"claude-code/{one.memory.parent.name.lstrip('-')}")
        if one.name in doubled
        else one
        for one in found
    ]


def project_name(path: str) -> str:
    """Return the name that Claude Code gives the folder of a project, without the hash behind a long one."""
    return re.sub(r"[^a-zA-Z0-9]", "-", path)[:NAME_CHARACTERS_MAX]


def _project(folder: Path) -> Path:
    """Where the project was, as its sessions say."""
    for session in sorted(folder.glob("*.jsonl")):
        try:
            with session.open("rb") as lines:
                for line, _ in zip(lines, range(LINES_READ_MAX), strict=False):
                    where = _where(line)
                    if where and project_name(where) == folder.name[:NAME_CHARACTERS_MAX]:
                        return Path(where)
        except OSError:
            continue
    return folder


def _where(line: bytes) -> str:
    try:
        return msgspec.json.decode(line, type=_SaidWhere).cwd
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
