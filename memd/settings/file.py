"""Reading YAML settings together with the line of each.

Rule: this module knows YAML, not settings: it turns a file, or a variable's text, into dotted keys with values and
places. `loading.py` decides their meaning.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from memd.errors import ConfigError

FILE_BYTES_MAX = 1 << 20  # a config file is a page long; anything bigger is the wrong file

FileStamp = tuple[int, int, int] | None
"""By what a file is told from itself before: its time, size and number; None: there is none."""


class Setting(msgspec.Struct, frozen=True):
    """One value that a user gave."""

    key: str
    """Dotted: `listen.port`. A group that is not a mapping stands under its own name: `listen`."""
    value: Any
    place: str
    """Where it was given, for messages: `config.yaml, line 12`, `MEMD_LISTEN_PORT`, `the command line`."""
    folder: Path = Path()
    """The folder that relative paths start from: the file's, else the working directory."""
    item_places: tuple[str, ...] = ()
    """Of a list in a file: where each of its items was given."""


def read_settings(path: Path, whole: Collection[str] = ()) -> list[Setting]:
    """Return the settings in a YAML file of groups, in order; none for an empty file.

    Args:
        whole: keys of mappings that are no groups but values.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is not a mapping, or gives a key twice.
    """
    text = _read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        return [] if root is None else list(_settings(loader, root, path, "", whole))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}, line {mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{place}: this is not YAML: {error.problem or error.context}; correct the line") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: this is not a YAML file: {str(error).splitlines()[0]}; correct it") from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply; `memd config` shows the format of a settings file") from None


def parse_value(text: str, place: str) -> Any:
    """Return the value that `text` would have after a key in the file: `8080`, `auto`, `[a, b]`.

    Raises:
        ConfigError: not YAML.
    """
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ConfigError(f"{place}: {text[:60]!r} is not a YAML value; put text in quotes") from None


def item_problem(
    error: Exception, item: Any, kind: type[msgspec.Struct], allowed: Mapping[str, str], hidden: str = ""
) -> str:
    """Say why an item of a list is no `kind`, and what to write instead.

    Args:
        error: msgspec's.
        allowed: by its name what each member may be.
        hidden: a member that may have what must not be repeated.
    """
    told, _, at = str(error).partition(" - at `$")
    named, member = told.rpartition("field ")[2].strip("`")[:60], at.strip("`").lstrip(".").partition("[")[0]
    if "unknown field" in told:
        return f"there is no setting `{named}`; there are {', '.join(one.name for one in msgspec.structs.fields(kind))}"
    if "missing required field" in told:
        return f"it has no {named}; give {allowed[named]}"
    if member not in allowed:
        return f"it is not what it should be; give its {', '.join(allowed)}"
    given = "" if member == hidden else f", not {item[member]!r:.60}"
    return f"{member} is not what it should be; give {allowed[member]}{given}"


def stamp_of(path: Path | None) -> FileStamp:
    """Return the stamp of a file, if there is one."""
    if path is not None:
        with contextlib.suppress(OSError):
            found = path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino
    return None


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such config file; leave it out to run with the defaults") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: the config file cannot be read: {reason}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {FILE_BYTES_MAX:,} bytes, so not a config file; name another one")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def _settings(
    loader: yaml.SafeLoader, mapping: yaml.Node, path: Path, group: str, whole: Collection[str] = ()
) -> Iterator[Setting]:
    """Yield the settings of the whole file (`group` is empty) or of one group in it."""
    if not isinstance(mapping, yaml.MappingNode):
        line = mapping.start_mark.line + 1
        raise ConfigError(f"{path}, line {line}: expected settings, one `key: value` per line; see `memd config`")
    lines: dict[str, int] = {}
    for name_node, value_node in mapping.value:
        line = name_node.start_mark.line + 1
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(f"{path}, line {line}: a key must be a word; see `memd config`")
        key = group + name_node.value
        if key in lines:
            raise ConfigError(f"{path}, line {line}: {key} is given twice, first in line {lines[key]}; remove one")
        lines[key] = line
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not group and key not in whole:
            yield from _settings(loader, value_node, path, f"{key}.")
        else:
            items = value_node.value if isinstance(value_node, yaml.SequenceNode) else []
            for node in (value_node, *items):
                _reject_repeated_keys(node, path, key)
            try:
                value = loader.construct_document(value_node)
            except ValueError as error:  # 2026-99-99, or an integer of 5,000 digits
                raise ConfigError(f"{path}, line {line}: {key} cannot be read: {error}; correct it") from None
            places = tuple(f"{path}, line {item.start_mark.line + 1}" for item in items)
            yield Setting(key, value, f"{path}, line {line}", path.parent, places)


def _reject_repeated_keys(node: yaml.Node, path: Path, key: str) -> None:
    """Reject a mapping (as a value) with a repeated key: YAML would silently drop the first."""
    lines: dict[str, int] = {}
    for name_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        line, name = name_node.start_mark.line + 1, str(name_node.value)
        if name in lines:
            raise ConfigError(
                f"{path}, line {line}: {key}.{name} is given twice, first in line {lines[name]}; remove one"
            )
        lines[name] = line
