"""PPTX, by python-pptx: a slide is a section below its title, with its tables and the speaker's notes.

Rule: shapes in the order of the file, which is that in which they were laid on each other; no place is guessed from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pptx

from memd.documents import GivenSection
from memd.ingest.readers.archive import archive
from memd.ingest.readers.tables import table_text
from memd.ingest.readers.text import Headings, joined

NESTED_MAX = 20


def sections(path: Path) -> Iterator[GivenSection]:
    """Yield the slides of a presentation; a slide's number is its page.

    Raises:
        BadDocument: it is none, is encrypted, has macros or unpacks to too much.
    """
    with archive(path, "PPTX"):
        presentation = pptx.Presentation(str(path))
    above = Headings(presentation.core_properties.title)
    for number, slide in enumerate(presentation.slides, 1):
        title = slide.shapes.title
        above.enter(1, "" if title is None else title.text_frame.text)
        said = list(_texts(slide.shapes, None if title is None else title.shape_id))
        if slide.has_notes_slide and slide.notes_slide.notes_text_frame is not None:
            said.append(slide.notes_slide.notes_text_frame.text)
        yield GivenSection(above.path, joined(said) or " ".join(above.path[-1:]), page=number)


def _texts(shapes: Iterable[Any], title_id: int | None, depth: int = 0) -> Iterator[str]:
    for shape in shapes:
        if hasattr(shape, "shapes"):
            yield from _texts(shape.shapes, title_id, depth + 1) if depth < NESTED_MAX else ()
        elif getattr(shape, "has_table", False):
            yield table_text([cell.text for cell in row.cells] for row in shape.table.rows)
        elif shape.has_text_frame and shape.shape_id != title_id:
            yield shape.text_frame.text
