"""How much text that looks like an instruction to a model is labelled, and how much honest text.

    python -m bench.instructions [FOLDER of real text …]

Labelled are the sentences of bench/data/instructions.json, which were written before anything was measured with them.
Real text is this repository's documentation and code and what is named, in pieces as long as a chunk.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from memd.recall.untrusted import instructing

HERE = Path(__file__).parent
TEXT = {".py", ".md", ".json", ".yaml", ".toml", ".ts", ".js", ".html", ".txt", ".rst", ".pyi"}
LEFT_OUT = {"node_modules", ".git", ".venv"}
PIECE_CHARACTERS = 1_500


def sentences() -> None:
    """Print how many of each list are labelled, and which should not or should have been."""
    lists = json.loads((HERE / "data" / "instructions.json").read_text())
    missed = [text for text in lists["found"] if not instructing(text)]
    wrong = [(text, instructing(text)) for text in lists["left"] if instructing(text)]
    print(f"  labelled: {len(lists['found']) - len(missed)} of {len(lists['found'])}; missed: {missed}")
    print(f"  look-alikes labelled: {len(wrong)} of {len(lists['left'])}: {wrong}")


def pieces(folder: Path) -> Iterator[tuple[Path, str]]:
    """The text below a folder in pieces as long as a chunk."""
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
        is_about = "instructions" in path.name or "neutralising" in path.name
        if (
            path.is_file()
            and path.suffix in TEXT
            and not is_about
            and not LEFT_OUT & set(path.relative_to(folder).parts)
        ):
            text = path.read_text(errors="replace")
            for at in range(0, len(text), PIECE_CHARACTERS):
                yield path, text[at : at + PIECE_CHARACTERS]


def real_text(folder: Path) -> None:
    """Print how many pieces of a folder's text are labelled, as what, and how long that takes."""
    read = list(pieces(folder))
    started = time.process_time()
    labelled = [(path, piece, labels) for path, piece in read if (labels := instructing(piece))]
    took = (time.process_time() - started) / max(1, len(read))
    counts = Counter(label for _, _, labels in labelled for label in labels)
    print(f"  {folder.name}: {len(labelled)} of {len(read):,} pieces, {dict(counts)}, {took * 1e6:.0f} µs each")
    for path, piece, labels in labelled[:20]:
        print(f"    {path.name} {labels}: {' '.join(piece.split())[:120]}")


if __name__ == "__main__":
    sentences()
    for argument in [str(HERE.parent / "docs"), str(HERE.parent / "memd"), *sys.argv[1:]]:
        real_text(Path(argument))
