"""The page at `/memd/`: what a browser is given, as files of the package. `memd/daemon/page.py` serves them."""

from __future__ import annotations

from pathlib import Path

_HERE = Path(__file__).parent


def files() -> dict[str, bytes]:
    """Name → contents of every file that belongs to the page.

    Raises:
        OSError: the package was installed without its data files.
    """
    return {path.name: path.read_bytes() for path in sorted(_HERE.iterdir()) if path.suffix in (".html", ".css", ".js")}
