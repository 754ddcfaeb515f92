"""The files of `sources.py`: the documents of `data/documents.json` in the formats of their names, and large ones."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]  # the writers of documents are shared with the tests

import made_documents as made  # noqa: E402

DATA = ROOT / "bench" / "data" / "documents.json"
LINE_CHARACTERS = 88
PAGE_LINES = 50


class Asked(NamedTuple):
    """A question, what has to be shown for it, and the format of the file that answers."""

    text: str
    wants: tuple[str, ...]
    format: str
    fact: str
    """The section that answers it; empty for a row."""


def documents() -> dict[str, Any]:
    """What stands in the files, and what is asked of them."""
    return json.loads(DATA.read_text())  # type: ignore[no-any-return]


def write_all(folder: Path) -> list[Asked]:
    """Write the documents, and memd's own pages beside them, which are asked nothing."""
    asked = []
    told = documents()
    for one in told["documents"]:
        path = folder / one["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, one["title"], one["sections"])
        for section in one["sections"]:
            asked += [Asked(text, (want,), path.suffix, section["text"]) for text, want in section["questions"]]
    for one in told["workbooks"]:
        path = folder / one["name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        made.workbook(path, {one["sheet"]: one["rows"]})
        asked += [Asked(text, (row, cell), path.suffix, "") for text, row, cell in one["questions"]]
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        (folder / "memd").mkdir(exist_ok=True)
        (folder / "memd" / page.name).write_text(page.read_text())
    return asked


def _write(path: Path, title: str, sections: list[dict[str, Any]]) -> None:
    if path.suffix == ".md":
        parts = (f"## {one['heading']}\n\n{one['text']}\n" for one in sections)
        path.write_text("\n".join([f"# {title}\n", *parts]))
    elif path.suffix == ".docx":
        blocks = [block for one in sections for block in (f"## {one['heading']}", one["text"])]
        made.word(path, [f"# {title}", *blocks])
    else:
        lines = [line for one in sections for line in (f"# {one['heading']}", *_wrapped(one["text"]), "")]
        made.pdf(path, ["\n".join(lines[at : at + 14]) for at in range(0, len(lines), 14)], title)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, LINE_CHARACTERS)


def prose(count: int) -> Iterator[str]:
    """Paragraphs of real text: what the packages that are installed here say of themselves."""
    found = 0
    packages = Path(np.__file__).parent, Path(json.__file__).parents[1]
    for folder in packages:
        for file in sorted(folder.rglob("*.py")):
            for quoted in file.read_text("utf-8", "replace").split('"""')[1::2]:
                for paragraph in textwrap.dedent(quoted).split("\n\n"):
                    if 200 < len(paragraph) < 1200:
                        yield paragraph.strip()
                        found += 1
                        if found == count:
                            return


def large(folder: Path, paragraphs: list[str]) -> dict[str, tuple[Path, int]]:
    """One large file of each format, with its pages: `format → (path, pages)`."""
    lines = [line for one in paragraphs for line in (*_wrapped(" ".join(one.replace("#", "").split())), "")]
    ascii_lines = ["".join(c if c.isascii() else "?" for c in line) for line in lines]
    pages = ["\n".join(ascii_lines[at : at + PAGE_LINES]) for at in range(0, len(lines), PAGE_LINES)]
    rows = [["name", "town", "number", "price"]]
    rows += [[one.split()[0], one.split()[1], str(at), str(at / 4)] for at, one in enumerate(paragraphs * 10)]
    page = "".join(f"<h2>{at}</h2><p>{one.replace('<', '&lt;')}</p>" for at, one in enumerate(paragraphs))
    text = "\n\n".join(paragraphs)
    (folder / "a.txt").write_text(text[:1_900_000])
    (folder / "a.md").write_text("\n\n".join(f"# {at}\n\n{one}" for at, one in enumerate(paragraphs))[:1_900_000])
    (folder / "a.csv").write_text("\n".join(",".join(f'"{cell}"' for cell in row).replace("\n", " ") for row in rows))
    (folder / "a.html").write_text(f"<html><body>{page}</body></html>")
    made.pdf(folder / "a.pdf", pages)
    made.word(
        folder / "a.docx",
        [block for at, one in enumerate(paragraphs) for block in (f"# {at}", _plain(one).lstrip("#"))],
    )
    made.slides(folder / "a.pptx", [(str(at), _plain(one)) for at, one in enumerate(paragraphs[:300])])
    made.workbook(folder / "a.xlsx", {"rows": rows})
    made.book(folder / "a.epub", "Book", [page])
    per_page = max(1, len(text) // len(pages))
    told = {path.suffix[1:]: (path, path.stat().st_size) for path in sorted(folder.glob("a.*"))}
    counts = {"pdf": len(pages), "pptx": 300}
    return {
        name: (path, counts.get(name, max(1, len(text) // per_page) if name not in ("csv", "xlsx") else 0))
        for name, (path, _) in told.items()
    }


def _plain(text: str) -> str:
    """Text that XML can hold."""
    return "".join(one for one in text if one.isprintable() or one in "\n\t")


def many(folder: Path, count: int, paragraphs: list[str]) -> None:
    """That many small files, of five formats in turn; forty of each are different."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(min(count, 200)):
        body = [_plain(one) for one in paragraphs[number % 50 : number % 50 + 20]]
        name = folder / f"{number:05}"
        if number % 5 == 0:
            lines = [line for one in body for line in _wrapped(one.replace("#", ""))]
            pages = ["\n".join(lines[at : at + PAGE_LINES]) for at in range(0, len(lines), PAGE_LINES)]
            made.pdf(name.with_suffix(".pdf"), ["".join(c if c.isascii() else "?" for c in page) for page in pages])
        elif number % 5 == 1:
            made.word(name.with_suffix(".docx"), [block for one in body for block in ("# Part", one)])
        elif number % 5 == 2:
            made.workbook(name.with_suffix(".xlsx"), {"a": [[one[:20], one[20:60], at] for at, one in enumerate(body)]})
        elif number % 5 == 3:
            name.with_suffix(".html").write_text("".join(f"<p>{one.replace('<', '&lt;')}</p>" for one in body))
        else:
            made.slides(name.with_suffix(".pptx"), [(one[:30], one) for one in body])
    originals = sorted(folder.iterdir())
    for number in range(len(originals), count):
        original = originals[number % len(originals)]
        (folder / f"{number:05}{original.suffix}").write_bytes(original.read_bytes())
