"""Scans a source once for new, changed, renamed and removed files, and passes them to the keeper of the documents.

Rule: synchronous, and independent of the keeper. Each file is passed separately and whole: an interrupted scan is
simply repeated. A file is read in a consistent state. Only a file that is known to be gone is removed: documents of an
unreadable root or folder stay.

An exclusion matches whole components of a path, also of a link's target. Files ignored by `.gitignore`, hidden files
and hidden folders are left out. A link out of the source is followed only if the settings ask for it. An unreadable
folder is reported, and the scan continues. A `.gitignore` need not be trusted: no rule takes more time than the square
of a path's length, and lines that git cannot read are ignored.

Claude Code keeps notes (https://code.claude.com/docs/en/memory, "Auto memory") in
`~/.claude/projects/<project>/memory/`: `MEMORY.md` and further Markdown files. `CLAUDE_CONFIG_DIR`, if set, replaces
`~/.claude`. `<project>` is the project's path with `-` for each character except ASCII letters and digits, cut after
200 characters, with a hash appended. This cannot be inverted, but the sessions next to the folder (`*.jsonl`) name
their path in `cwd`. Unreadable ones are ignored.
"""

from __future__ import annotations

import codecs
import errno
import fnmatch
import hashlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from memd.errors import BadDocument, BadQuestion, BadSource
from memd.ingest.readers.files import NOTHING_READ, FileReader, checked
from memd.ingest.readers.text import GivenDocument, format_of, is_readable, suffix_of
from memd.ingest.sources.documents import KnownDocument, TakenDocument
from memd.wire.lenient_json import decode_or_none
from memd.wording import counted

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

GITIGNORE = ".gitignore"
DEPTH_MAX = 200
HEAD_BYTES = 4_096


class Chosen(msgspec.Struct, frozen=True, kw_only=True):
    """Selects files of a folder."""

    exclude: tuple[str, ...] = ()
    """Names, paths of components or patterns (`*.tmp`), of files and folders; or whole paths, beginning with `/`."""
    formats: tuple[str, ...] = ()
    """Suffixes in lower case without a dot; empty for all readable formats."""
    follow_links: bool = False
    """True to follow links out of the folder."""
    zips: bool = False
    """True to include zips, which may be exports of conversations, if no formats are given."""

    def wants(self, name: str) -> bool:
        """Return True if a file of this name is selected; one without a suffix is, if it is text."""
        if self.formats:
            return name.lower().rpartition(".")[2] in self.formats
        return is_readable(name) or (self.zips and suffix_of(name) == ".zip")


class FoundFile(msgspec.Struct, frozen=True):
    """A file to read."""

    path: str
    """Path without links; a component that is a link now was replaced since."""
    below: str
    """Path below the root, with `/` between components; empty for the root itself."""

    @property
    def name(self) -> str:
        """Name of the file, or of the link to it."""
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
        """Unreadable folders: path below the root, and reason."""
        self.passed = Counter[str]()
        """Numbers of files in unreadable formats by suffix, if all readable files are selected."""

    def files(self) -> Iterator[FoundFile]:
        """Yield the files in order of names, or the root itself if it is a file. Raises OSError: the root cannot be
        read."""
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
            return  # removed since it was listed
        except OSError as error:
            self.unread.append((below.rstrip("/"), f"the folder cannot be read ({error.strerror or error})"))
            return
        for entry in entries:
            name = below + entry.name
            if entry.name.startswith(".") or self._excluded.have(entry.path, name):
                continue
            is_folder = _leads_to(entry.is_dir)
            if not is_folder and not (self._chosen.wants(entry.name) and _leads_to(entry.is_file)):
                self.passed[suffix_of(entry.name)] += not self._chosen.formats
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
        """Return True if a resolved folder is entered for the first time: links may repeat it, or form a circle."""
        is_first = folder not in self._entered
        self._entered.add(folder)
        return is_first

    def _may_follow(self, link: os.DirEntry[str], *, is_folder: bool) -> bool:
        """Return True if a link's target is not excluded, and is within the root or links out of it are followed."""
        target = os.path.realpath(link.path)
        is_within = target == self._root or target.startswith(self._root + "/")
        below = target[len(self._root) + 1 :] if is_within else target.strip("/")
        if self._excluded.have(target, below):
            return False
        return not is_folder if is_within else self._chosen.follow_links  # a folder within the root is visited anyway


def begins_with_text(path: str) -> bool:
    """Return True if a file begins like text, or cannot be opened, which is reported when it is read."""
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
    """Files and folders excluded from a source; see `Chosen.exclude`."""

    def __init__(self, exclude: Sequence[str]) -> None:
        self._whole = [os.path.realpath(one) for one in exclude if one.startswith("/")]
        self._components = [one.strip("/").split("/") for one in exclude if not one.startswith("/")]

    def have(self, path: str, below: str) -> bool:
        """Return True if a path or a folder above it is excluded; `below`: the part of it that patterns match."""
        if any(path == one or path.startswith(one + "/") for one in self._whole):
            return True
        parts = below.split("/") if self._components else []
        return any(
            all(map(fnmatch.fnmatchcase, parts[start : start + len(excluded)], excluded))
            for excluded in self._components
            for start in range(len(parts) - len(excluded) + 1)
        )


BYTES_MAX = 100_000
"""Limit of a `.gitignore`; those of large projects have a tenth of it."""
_STAR = r"\[\^/\]\*"
_FIXED = r"(?:\[\^?\]?[^\]/]*\]|\[\^/\](?!\*)|\\.|[^/\\(\[])*"
"""Between two stars of a component: brackets, `?`, escaped and plain characters."""
_STAR_BEFORE_ANOTHER = re.compile(f"{_STAR}({_FIXED})(?={_STAR})")
_LEADING, _INNER = "^(?:.+/)?", "(?:/.+)?"
"""The expressions of `**/` and `/**/`. No component has a `/`, so a rule's own text cannot contain them or a star's."""


def rules_of(path: str) -> GitIgnoreSpec:
    """Read a `.gitignore`. Raises OSError: it cannot be read, or is too long."""
    from pathspec import GitIgnoreSpec  # it takes long to import
    from pathspec.patterns.gitignore.spec import GitIgnoreSpecPattern

    class Steady(GitIgnoreSpecPattern):
        """A rule whose wildcards do not backtrack once the text up to the next one matched."""

        @classmethod
        def pattern_to_regex(cls, pattern: Any) -> tuple[Any, bool | None]:
            regex, include = super().pattern_to_regex(pattern)
            return regex and _steady(regex), include

    def is_rule(line: str) -> bool:
        """Return True if git would accept a line as a rule; it skips others (`!`, `[z-a]`)."""
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
    """Return the expression with atomic groups, like those of `fnmatch.translate`: the first match of the text between
    two wildcards leaves most to the rest, so no other has to be tried."""
    first, *others = _STAR_BEFORE_ANOTHER.sub(r"(?>[^/]*?\1)", regex).split(_INNER)
    if not others:
        return first
    if first.startswith(_LEADING):
        first = f"^(?>(?:[^/]+/)*?{first.removeprefix(_LEADING)}(?=/))"
    inner = "".join(f"(?>(?:/[^/]+)*?{one}(?=/))" for one in others[:-1])
    return f"{first}{inner}{_INNER}{others[-1]}"


NAME_CHARACTERS_MAX = 200
LINES_READ_MAX = 50
"""Lines of a session that are searched for its folder."""


class AgentFolder(msgspec.Struct, frozen=True):
    """The notes of an agent on one project."""

    memory: Path
    project: Path
    """The project's folder; if unknown, the folder named after it."""
    name: str
    """Name of the notes as a source."""


class _SaidWhere(msgspec.Struct):
    """The relevant part of a session's line."""

    cwd: str = ""


_SAID_WHERE = msgspec.json.Decoder(_SaidWhere)


def claude_code_folders(env: Mapping[str, str]) -> list[AgentFolder]:
    """Return the folders with notes of Claude Code, in order of their projects' names."""
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
    """Return Claude Code's name for a project's folder, without the hash after a long one."""
    return re.sub(r"[^a-zA-Z0-9]", "-", path)[:NAME_CHARACTERS_MAX]


def _project(folder: Path) -> Path:
    """Return the project's folder as named by its sessions, else the given folder."""
    for session in sorted(folder.glob("*.jsonl")):
        try:
            with session.open("rb") as lines:
                for line in islice(lines, LINES_READ_MAX):
                    said = decode_or_none(_SAID_WHERE, line)
                    if said is not None and project_name(said.cwd) == folder.name[:NAME_CHARACTERS_MAX]:
                        return Path(said.cwd)
        except OSError:
            continue
    return folder


FILES_MAX = 200_000
"""Limit of one source, whose file states are in memory (60 MB)."""
SETTLED_SECONDS = 0.2
"""A file changed more recently may be half written: it is read after this time."""
TRUSTED_SECONDS = 2.0
"""Least age at which a file read is later recognised by size and time: a younger one may have changed again within one
tick of its file system's clock (2 s for FAT)."""
NO_STAMP = (0, 0, 0)
ATTEMPTS = 3
REMOVED_AT_ONCE = 100


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder whose text is stored."""

    path: Path
    name: str = ""
    """Prefix of its files' names; empty for the folder's name."""
    chosen: Chosen = Chosen()


class Seen(msgspec.Struct, frozen=True):
    """The state of a file when it was last read."""

    stamp: tuple[int, int, int]
    """Inode, size and time of change (ns); zeros if it may have changed again within the same time."""
    hash: str
    kept_as: str
    """The source of its document; empty if it has no text."""
    problem: str = ""


class Keeper(Protocol):
    """The keeper of a topic's documents."""

    def known(self) -> Sequence[KnownDocument]:
        """Return the documents that have live chunks."""

    def take(self, document: GivenDocument) -> TakenDocument:
        """Store the present state of a document."""

    def remove(self, sources: Sequence[str]) -> TakenDocument:
        """Remove documents."""


class Look(msgspec.Struct):
    """Progress of a scan."""

    name: str = ""
    files: int = 0
    """Number of files to look at."""
    done: int = 0
    unchanged: int = 0
    written: int = 0
    taken_out: int = 0
    """Number of chunks removed; `written`: added."""
    problems: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Files and folders that were left out, with reasons."""
    passed: Counter[str] = msgspec.field(default_factory=Counter)
    """Numbers of files in unreadable formats, by suffix."""

    def add(self, other: Look) -> None:
        """Add the counts of another scan."""
        for name in ("files", "done", "unchanged", "written", "taken_out", "problems", "passed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count(self, taken: TakenDocument) -> None:
        """Count the entries of a document."""
        self.written += taken.written or 0
        self.taken_out += taken.taken_out or 0


def root_digits(path: Path | str) -> str:
    """Return digits that distinguish a root from others of its name."""
    return hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()


def look(
    source: Source,
    keeper: Keeper,
    seen: dict[str, Seen],
    progress: Look,
    *,
    force: bool = False,
    step: Callable[[], None] = lambda: None,
) -> None:
    """Scan a source once, and bring its documents up to date. `seen`: states of the files when last read, by path below
    the root; updated. `progress`: updated during the scan. `force`: read unchanged files, too. `step`: called before
    each file; may raise to stop. Raises BadSource: the source cannot be scanned, and nothing was removed; MemdError:
    the keeper failed."""
    try:
        root = source.path.resolve(strict=True)
        walk = Walk(root, source.chosen)
        files = list(islice(walk.files(), FILES_MAX + 1))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadSource(f"{source.path}: cannot be read ({reason}); what is known of it stays") from None
    if len(files) > FILES_MAX:
        raise BadSource(f"{source.path}: has more than {FILES_MAX:,} files; exclude some, or name its subfolders")
    documents = keeper.known()
    progress.name, digits = _place(source, root, documents)
    own = {one.source: one for one in documents if one.root in (digits, "") and is_below(one.source, progress.name)}
    if own and not files:
        raise BadSource(
            f"{source.path}: has no file any more that can be read, but {counted(len(own), 'document')} from before, "
            f"which stay: is its disk mounted? If they are to go: memd sources --remove {progress.name}"
        )
    progress.files = len(files)
    progress.problems += [(_source(progress.name, below), reason) for below, reason in walk.unread]
    progress.passed += +walk.passed
    before_now = (seen.get(file.below) for file in files)
    present = {one.kept_as for one in before_now if one is not None}  # the name, if redacted
    present |= {_source(progress.name, file.below) for file in files}
    # Documents without a file: one of them may be the former name of a new file.
    missing = {name: one for name, one in own.items() if name not in present}
    formers = {one.hash: name for name, one in missing.items()}
    # Files that were added separately are sources whose root is the file.
    alone = {one.root: one.source for one in documents if one.root not in ("", digits)}

    def is_as_it_was(file: FoundFile, before: Seen) -> bool:
        """Return True if a file and its document are unchanged since it was last read."""
        if _stamp(os.stat(file.path)) != before.stamp:
            return False
        known = own.get(before.kept_as)
        return not before.kept_as or before.problem != "" or (known is not None and known.hash == before.hash)

    def read_anew(file: FoundFile, named: str, reader: FileReader) -> Seen:
        """Read a file and pass it to the keeper, unless its document has its hash."""
        try:
            digest, stamp, content = read_at_one_moment(file, str(root))
        except BadDocument as error:
            return Seen(NO_STAMP, "", named, str(error))
        known, former = own.get(named), None
        if known is not None and known.hash == digest and not force:
            progress.unchanged += 1
            return Seen(stamp, digest, named)
        if known is None:
            by_itself = alone.get(root_digits(file.path))
            former = by_itself if by_itself == file.name else formers.get(digest)
        try:
            named.encode()
            if content is not None:
                sections = reader.sections_of(file.name, content)
            else:
                sections = reader.sections(Path(file.path), file.name)
                if read_at_one_moment(file, str(root))[0] != digest:
                    return Seen(NO_STAMP, "", named, "it changed while it was read; it is read the next time")
            if not sections and known is None:
                return Seen(stamp, digest, "", NOTHING_READ if format_of(file.name).is_apart else "")
            document = GivenDocument(source=named, hash=digest, sections=sections, root=digits, renamed_from=former)
            done = keeper.take(document)
        except UnicodeEncodeError:
            return Seen(stamp, digest, "", "its name is no text")
        except (BadDocument, BadQuestion) as error:
            return Seen(stamp, digest, named, str(error))
        progress.count(done)
        progress.unchanged += not (done.written or done.taken_out)
        if former is not None:
            formers.pop(digest, None)
            missing.pop(former, None)
        return Seen(stamp, digest, done.source if sections else "")

    def visit(file: FoundFile, reader: FileReader) -> None:
        """Pass a file to the keeper if it changed."""
        named, before = _source(progress.name, file.below), seen.get(file.below)
        try:
            if before is None or force or not is_as_it_was(file, before):
                before = seen[file.below] = read_anew(file, named, reader)
            else:
                progress.unchanged += not before.problem
        except FileNotFoundError:  # removed since it was listed
            seen.pop(file.below, None)
            if named in own:
                missing[named] = own[named]
            return
        except OSError as error:
            progress.problems.append((named, f"it cannot be read ({error.strerror or error})"))
            return
        if before.problem:
            progress.problems.append((named, before.problem))
        missing.pop(before.kept_as, None)

    with FileReader() as reader:
        for file in files:
            step()
            visit(file, reader)
            progress.done += 1
    for below in seen.keys() - {file.below for file in files}:
        del seen[below]
    unread = [_source(progress.name, below) for below, _ in walk.unread]
    gone = [name for name in missing if not any(is_below(name, folder) for folder in unread)]
    for start in range(0, len(gone), REMOVED_AT_ONCE):
        progress.count(keeper.remove(gone[start : start + REMOVED_AT_ONCE]))


def read_at_one_moment(found: FoundFile, root: str) -> tuple[str, tuple[int, int, int], bytes | None]:
    """Read a file in a consistent state, though others may write to it. Return its SHA-256, its stamp as in `Seen`, and
    its content if it is text. Raises BadDocument: it is refused (see `checked`), not a regular file, or constantly
    changing; OSError: it cannot be read."""
    for _ in range(ATTEMPTS):
        with open(_opened(found.path, root), "rb") as file:
            before = os.fstat(file.fileno())
            if not stat.S_ISREG(before.st_mode):
                raise BadDocument("it is no file with a content")
            is_text = not checked(found.name, before.st_size).is_apart
            age = time.time() - before.st_mtime
            if 0 <= age < SETTLED_SECONDS:
                time.sleep(SETTLED_SECONDS - age)
                before = os.fstat(file.fileno())
            content = file.read() if is_text else None
            hashed = hashlib.file_digest(file, "sha256") if content is None else hashlib.sha256(content)
            is_same = _stamp(before) == _stamp(os.fstat(file.fileno())) == _stamp(os.stat(found.path))
        if is_same:
            is_trusted = age >= TRUSTED_SECONDS
            return hashed.hexdigest(), _stamp(before) if is_trusted else NO_STAMP, content
    raise BadDocument("it is being written to: it changed each time that it was read; it is read the next time")


def _opened(path: str, root: str) -> int:
    """Open a file found below a root, or the root itself, without following links that were created since. Raises
    OSError: it cannot be opened, or has such a link in its path."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
    if not is_below(path, root.rstrip("/")) or path == root:
        return os.open(path, flags | os.O_NONBLOCK)
    *folders, name = path[len(root) :].strip("/").split("/")
    folder = os.open(root, flags | os.O_DIRECTORY)
    try:
        for inner in folders:
            outer, folder = folder, os.open(inner, flags | os.O_DIRECTORY, dir_fd=folder)
            os.close(outer)
        return os.open(name, flags | os.O_NONBLOCK, dir_fd=folder)
    finally:
        os.close(folder)


def _stamp(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _place(source: Source, root: Path, documents: Sequence[KnownDocument]) -> tuple[str, str]:
    """Return the source's name and the digits of its root. The name is its folder's; if another source has that, the
    name of a folder above is added. A file of a folder that is a source keeps its name there. Raises BadSource: another
    source has the given name."""
    digits = root_digits(root)

    def roots_of(name: str) -> set[str]:
        return {one.root for one in documents if is_below(one.source, name)}

    def is_others(name: str) -> bool:
        return bool(roots_of(name) - {digits, ""})

    if source.name:
        if is_others(source.name):
            raise BadSource(
                f"{source.path}: another folder is called {source.name}: give it another name (--as), or take that "
                f"one out first (memd sources --remove {source.name})"
            )
        return source.name, digits
    folders = (
        {root_digits(one): f"/{root.relative_to(one).as_posix()}" for one in root.parents} if root.is_file() else {}
    )
    for one in documents:
        if one.source.endswith(folders.get(one.root, "/")) and one.root in folders:
            return one.source, one.root
    own = root.name or "root"
    names = [own, *(f"{own}@{parent.name}" for parent in root.parents if parent.name), f"{own}@{digits}"]
    free = [name for name in names if not is_others(name)]
    return next((name for name in free if digits in roots_of(name)), free[0]), digits


def _source(name: str, below: str) -> str:
    return f"{name}/{below}" if below else name


def is_below(source: str, folder: str) -> bool:
    """Return True if a document's source is a folder's own or below it."""
    return source == folder or source.startswith(f"{folder}/")
