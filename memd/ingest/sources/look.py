"""One look at a source: which files it has, which of them are new, changed, renamed or gone, and what of them is handed
over.

Rule: synchronous, and knows nothing of who keeps the documents. Each file is handed over by itself and whole: whoever
is interrupted looks again. A file is taken as it was at one moment, and only a file that is known not to be there is
taken out: where a root or a folder cannot be read, its documents stay.

An exclusion matches whole components of a path, those of a link's target too. What `.gitignore` leaves out is left out,
and so are hidden files and folders. A link that leads out of the source is not followed unless that is asked for. A
folder that cannot be read is named, and the rest goes on. Whoever wrote a `.gitignore` need not be trusted: no rule
takes longer than the square of a path's length, and what git cannot read is no rule.

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
        self.passed = Counter[str]()
        """Files of formats that nobody reads, where all are wanted that can be: by their suffixes."""

    def files(self) -> Iterator[FoundFile]:
        """Yield the files, or the root itself if it is one, in the order of their names. Raises OSError: the root
        cannot be read."""
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
            all(map(fnmatch.fnmatchcase, parts[start : start + len(excluded)], excluded))
            for excluded in self._components
            for start in range(len(parts) - len(excluded) + 1)
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
    """Read a `.gitignore`. Raises OSError: it cannot be read, or is too long for one."""
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


_SAID_WHERE = msgspec.json.Decoder(_SaidWhere)


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
                for line in islice(lines, LINES_READ_MAX):
                    said = decode_or_none(_SAID_WHERE, line)
                    if said is not None and project_name(said.cwd) == folder.name[:NAME_CHARACTERS_MAX]:
                        return Path(said.cwd)
        except OSError:
            continue
    return folder


FILES_MAX = 200_000
"""Of one source: what is known of them is in memory (60 MB)."""
SETTLED_SECONDS = 0.2
"""A file that changed more recently may be half written: that is waited for, and then it is read as it is."""
TRUSTED_SECONDS = 2.0
"""Only a file that was older when it was read is known by its size and time: until then it may have been written again
within one tick of its file system's clock (of FAT, 2 s)."""
NO_STAMP = (0, 0, 0)
ATTEMPTS = 3
REMOVED_AT_ONCE = 100


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """A file or folder whose text is remembered."""

    path: Path
    name: str = ""
    """Stands in front of its files' names; empty: its folder's."""
    chosen: Chosen = Chosen()


class Seen(msgspec.Struct, frozen=True):
    """A file as it was read last."""

    stamp: tuple[int, int, int]
    """Its inode, size and time of change (ns); zeros: it may have changed again within that time."""
    hash: str
    kept_as: str
    """The source of its document; empty: it has no text."""
    problem: str = ""


class Keeper(Protocol):
    """Who keeps the documents of one topic."""

    def known(self) -> Sequence[KnownDocument]:
        """The documents that have live chunks."""

    def take(self, document: GivenDocument) -> TakenDocument:
        """Remember a document as it is now."""

    def remove(self, sources: Sequence[str]) -> TakenDocument:
        """Take out documents."""


class Look(msgspec.Struct):
    """How far a look is."""

    name: str = ""
    files: int = 0
    """Those that are looked at."""
    done: int = 0
    unchanged: int = 0
    written: int = 0
    taken_out: int = 0
    """Chunks."""
    problems: list[tuple[str, str]] = msgspec.field(default_factory=list)
    """Files and folders that were left out, and why."""
    passed: Counter[str] = msgspec.field(default_factory=Counter)
    """Files that nobody reads, by their suffixes."""

    def add(self, other: Look) -> None:
        """Count what another look has done too."""
        for name in ("files", "done", "unchanged", "written", "taken_out", "problems", "passed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def count(self, taken: TakenDocument) -> None:
        """Count what was appended."""
        self.written += taken.written
        self.taken_out += taken.taken_out


def root_digits(path: Path | str) -> str:
    """Return the digits that tell a root from others of its name."""
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
    """Look at a source once, and make the documents those that it has. `seen`: the files by their paths below the root,
    as they were read last; brought up to date. `progress`: counts what is done, as it is done. `force`: read every file
    again, also those that have not changed. `step`: called before each file; what it raises ends the look. Raises
    BadSource: the source cannot be looked at, and nothing was taken out; MemdError: the keeper failed."""
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
    present = {one.kept_as for one in before_now if one is not None}  # where it is redacted
    present |= {_source(progress.name, file.below) for file in files}
    # The documents that have no file any more: one of those may be what a new file was called.
    missing = {name: one for name, one in own.items() if name not in present}
    formers = {one.hash: name for name, one in missing.items()}
    # Files that were added by themselves are sources whose root is the file.
    alone = {one.root: one.source for one in documents if one.root not in ("", digits)}

    def is_as_it_was(file: FoundFile, before: Seen) -> bool:
        """Whether a file, and the document that it became, are as they were when it was read last."""
        if _stamp(os.stat(file.path)) != before.stamp:
            return False
        known = own.get(before.kept_as)
        return not before.kept_as or before.problem != "" or (known is not None and known.hash == before.hash)

    def read_anew(file: FoundFile, named: str, reader: FileReader) -> Seen:
        """Read a file and hand it over, unless its document has its hash."""
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
        """Hand a file over if it changed."""
        named, before = _source(progress.name, file.below), seen.get(file.below)
        try:
            if before is None or force or not is_as_it_was(file, before):
                before = seen[file.below] = read_anew(file, named, reader)
            else:
                progress.unchanged += not before.problem
        except FileNotFoundError:  # since it was listed
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
    """Return a file that others may write to as it was at one moment: its SHA-256, its stamp as in `Seen`, and its
    content if it is text. Raises BadDocument: it is not read (see `checked`), no file, or written to all the time;
    OSError: it cannot be read."""
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
    """Open a file that was found below a root, or the root itself, without following a link that was put there since.
    Raises OSError: it cannot be opened, or is such a link."""
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
    """The source's name and the digits of its root. The name is its folder's, and where another one has that, with the
    name of a folder around it. A file of a folder that was added is what it is called there. Raises BadSource: another
    one has the name that it was given."""
    digits = root_digits(root)
    by_name: dict[str, set[str]] = {}  # the roots of documents by their source and all folders around it
    for one in documents:
        parts = one.source.split("/")
        for end in range(1, len(parts) + 1):
            by_name.setdefault("/".join(parts[:end]), set()).add(one.root)

    def is_others(name: str) -> bool:
        return bool(by_name.get(name, set()) - {digits, ""})

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
    return next((name for name in free if digits in by_name.get(name, ())), free[0]), digits


def _source(name: str, below: str) -> str:
    return f"{name}/{below}" if below else name


def is_below(source: str, folder: str) -> bool:
    """Whether a document's source is a folder's, or of something in it."""
    return source == folder or source.startswith(f"{folder}/")
