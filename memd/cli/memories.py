"""The data directories of a user: by default one is in the working folder, so that another folder has another one.

Rule: a note for people, in `memd/memories` below `$XDG_STATE_HOME` (`~/.local/state`), a path a line, the latest first.
No command reads a memory because it stands there, and where the note cannot be read or written nothing is said.
"""

from __future__ import annotations

import os
from pathlib import Path

from memd.errors import StoreError
from memd.settings.model import Config

KEPT_MAX = 20
NAMED_MAX = 3


def note_memory(data_dir: Path) -> None:
    """Note that a daemon has this data directory."""
    try:
        known, path = _noted(), _path()
        if known[:1] != [data_dir]:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = [data_dir, *(one for one in known if one != data_dir and one.is_dir())][:KEPT_MAX]
            path.write_text("".join(f"{one}\n" for one in kept if "\n" not in str(one)))
    except (OSError, ValueError, RuntimeError):
        return


def memory_elsewhere(config: Config) -> str:
    """Where else something is remembered, if nothing is yet in the working folder's memory and nobody named another."""
    data_dir = config.data_dir
    if config.cluster.is_on or data_dir != Config().data_dir.absolute() or _has_topics(data_dir):
        return ""
    try:
        others = [str(one) for one in _noted() if one != data_dir and _has_topics(one)]
    except (OSError, ValueError, RuntimeError):
        return ""
    if not others:
        return ""
    return (
        f"nothing is remembered yet in {data_dir}, the memory of this folder. If you meant another one "
        f"({', '.join(others[:NAMED_MAX])}), name it: --data-dir {others[0]}, or MEMD_DATA_DIR, or in a settings file"
    )


def _path() -> Path:
    """Raises RuntimeError: the user has no home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "memd" / "memories"


def _noted() -> list[Path]:
    path = _path()
    return [Path(line) for line in path.read_text().splitlines()] if path.exists() else []


def _has_topics(data_dir: Path) -> bool:
    from memd.store.disk import LocalDisk  # with the layout comes numpy, which --help does without
    from memd.store.layout import topic_ids_in

    try:
        return bool(topic_ids_in(LocalDisk(), data_dir))
    except (OSError, StoreError):
        return False
