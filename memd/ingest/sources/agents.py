"""Where coding agents keep what they have noted for themselves.

Rule: read only; what cannot be read is taken as not there.

Claude Code (https://code.claude.com/docs/en/memory, "Auto memory"): `~/.claude/projects/<project>/memory/` with
`MEMORY.md` and further Markdown files, `~/.claude` being `CLAUDE_CONFIG_DIR` where that is set. `<project>` is the path
of the project in which every character but ASCII letters and digits is a `-`; one of more than 200 characters is cut
there, with a hash behind it. That cannot be undone, but the sessions beside the folder (`*.jsonl`) say in `cwd` where
they were.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

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
