"""The list `sources` in the settings: folders, each as lines or its path alone, and `!PATH` for what is left out.

Rule: as in `loading.py`, which calls this: nothing is guessed at. Whether a folder is there is not asked, for its disk
may be mounted later; that it is no file is.
"""

from __future__ import annotations

import difflib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from memd.assets import words_of
from memd.errors import ConfigError
from memd.settings.file import Setting, item_problem
from memd.settings.model import SourceSettings

Expand = Callable[[str], Path]
"""A path as it is written, made absolute."""
_ALLOWED = {
    "path": "the path of a folder",
    "topic": "the name of a topic (letters, digits, '.', '_', '-', beginning with a letter or digit), or auto",
    "exclude": "a list of names, patterns or paths",
    "formats": "a list of suffixes such as [md, pdf]",
    "follow_links": "true or false",
}


def read_sources(setting: Setting, expand: Expand) -> list[tuple[str, SourceSettings]]:
    """Return the sources of a list as YAML has it, each behind the place that errors about it name.

    Their paths and exclusions are absolute where they name a place.

    Raises:
        ConfigError: the list or one of its items is not what it should be.
    """
    given = setting.value
    if given in (None, ""):
        return []
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{setting.place}: sources is {given!r:.60}; give a list, each of its items `- path: FOLDER`")
    items: list[tuple[str, SourceSettings]] = []
    excluded: list[str] = []
    places = setting.item_places or [setting.place] * len(given)
    for number, (place, item) in enumerate(zip(places, given, strict=True), 1):
        if isinstance(item, str) and item.startswith("!"):
            excluded.append(_exclusion(item[1:], expand))
            continue
        try:
            source = msgspec.convert({"path": item} if isinstance(item, str) else item, SourceSettings)
        except msgspec.ValidationError as error:
            problem = item_problem(error, item, SourceSettings, _ALLOWED)
            raise ConfigError(f"{place}: sources, item {number}: {problem}") from None
        source = _whole(source, expand)
        if unread := next((one for one in source.formats if one not in _suffixes()), None):
            near = difflib.get_close_matches(unread, _suffixes(), n=1)
            remedy = f"did you mean {near[0]}?" if near else "docs/documents.md lists those that it reads"
            raise ConfigError(
                f"{place}: sources, item {number}: formats has {unread}, which memd does not read; {remedy}"
            )
        items.append((place, source))
    return [(place, msgspec.structs.replace(one, exclude=(*one.exclude, *excluded))) for place, one in items]


@functools.cache
def _suffixes() -> list[str]:
    """The ends of the names of files that memd reads, without their dots."""
    return [suffix[1:] for one in words_of("formats")["formats"] for suffix in one["suffixes"].split()]


def _whole(one: SourceSettings, expand: Expand) -> SourceSettings:
    return msgspec.structs.replace(
        one,
        path=str(_without_dots(expand(one.path))),
        exclude=tuple(_exclusion(part, expand) for part in one.exclude),
        formats=tuple(suffix.lower().removeprefix(".") for suffix in one.formats),
    )


def _without_dots(path: Path) -> Path:
    """A path as people know it: `..` is followed; a link keeps its name where it can, which is its documents'."""
    return path.resolve() if ".." in path.parts else path


def source_problems(sources: tuple[SourceSettings, ...], data_dir: Path) -> Iterator[tuple[int, str]]:
    """Yield the index of a source and what is wrong with it, beside the others and beside memd's own data."""
    places = [(one, Path(one.path).resolve()) for one in sources]
    for number, (one, place) in enumerate(places):
        if place.is_relative_to(data_dir.resolve()):
            yield number, f"has {one.path}, which is in memd's own data directory ({data_dir}); name another folder"
        if place.is_file():
            yield (
                number,
                f"has {one.path}, which is a file; name its folder, or remember it once with `memd add {one.path}`",
            )
    for (before, (one, place)), (number, (other, inside)) in itertools.permutations(enumerate(places), 2):
        if inside == place and before < number:
            yield number, f"has {one.path} twice; remove one"
        elif inside != place and inside.is_relative_to(place):
            yield (
                number,
                f"has {other.path}, which is inside {one.path}: its files would be remembered twice; remove one of the "
                "two, or name the folders beside it",
            )


def _exclusion(text: str, expand: Expand) -> str:
    return str(expand(text)) if text.startswith(("/", "~")) else text.strip("/")
