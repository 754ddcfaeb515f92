"""Reads settings from the file, the environment and flags into a checked `Config`.

Rule: a wrong setting is never guessed at. Anything but a known key with an allowed value raises a `ConfigError`, which
names the place (file and line, variable, command line), the key and the remedy. No message repeats a possible token. A
`Config` from `load_config` needs no further checks. The texts by which well-known programs are recognized are one
table. A list in `ingest.ignore`, `ignore_system` or `strip` replaces its rules of that kind, and `ingest.programs:
false` disables all of them.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import re
import string
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import msgspec
import yaml

from memd.assets import words_of
from memd.errors import ConfigError
from memd.principals import EVERY_TOPIC, OWNER_NAME, RIGHTS, digest_of, overlapping
from memd.settings import model
from memd.settings.model import AuthSettings, Config, IngestSettings, SourceSettings, TokenSettings
from memd.wording import meant

FILE_BYTES_MAX = 1 << 20  # a config file is a page long; anything bigger is the wrong file

FileStamp = tuple[int, int, int] | None
"""Identifies a version of a file: its time, size and inode; None if there is no file."""


class Setting(msgspec.Struct, frozen=True):
    """One value given by a user."""

    key: str
    """Dotted: `listen.port`. A group that is not a mapping has its own name: `listen`."""
    value: Any
    place: str
    """The place where it was given, for messages: `config.yaml, line 12`, `MEMD_LISTEN_PORT`, `the command line`."""
    folder: Path = Path()
    """The folder for relative paths: the file's, else the working directory."""
    item_places: tuple[str, ...] = ()
    """For a list in a file, the place of each item."""
    layer: int = 0
    """0: from the file, 1: the environment, 2: the command line. Higher ones override lower ones."""


def read_settings(path: Path, whole: Collection[str] = ()) -> list[Setting]:
    """Return the settings in a YAML file of groups, in order; none for an empty file.

    Args:
        whole: keys of mappings that are values rather than groups.

    Raises:
        ConfigError: the file cannot be read, is not YAML, is not a mapping, or gives a key twice.
    """
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
        loader = yaml.SafeLoader(data.decode("utf-8-sig"))
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
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8") from None


def stamp_of(path: Path | None) -> FileStamp:
    """Return the stamp of a file, or None."""
    if path is not None:
        with contextlib.suppress(OSError):
            found = path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino
    return None


class SettingsSource:
    """The source of a daemon's settings; `read` reads them again, and raises ConfigError."""

    def __init__(self, path: Path | None, known: Config, read: Callable[[], Config]) -> None:
        """`path`: the file, checked for changes. `known`: the settings that the daemon has."""
        self.path, self.read = path, read
        self._known = self._now = known
        self._seen: FileStamp = None  # it may have changed since it was read

    def changed(self, auth: AuthSettings) -> list[str]:
        """Return the keys that differ between the file and the daemon. A file that is wrong or being written counts as
        unchanged. `auth`: the daemon's present one, which it reloads by itself."""
        if (stamp := stamp_of(self.path or DEFAULT_PATH)) != self._seen:
            with contextlib.suppress(ConfigError):
                self._now = self.read()
            self._seen = stamp
        known = msgspec.structs.replace(self._known, auth=auth)
        return [key for key in KEYS if attrgetter(key)(known) != attrgetter(key)(self._now)]


def _settings(
    loader: yaml.SafeLoader, mapping: yaml.Node, path: Path, group: str, whole: Collection[str] = ()
) -> Iterator[Setting]:
    """Yield the settings of the whole file (`group` is empty) or of one group in it."""
    if not isinstance(mapping, yaml.MappingNode):
        line = mapping.start_mark.line + 1
        raise ConfigError(f"{path}, line {line}: expected settings, one `key: value` per line; see `memd config`")
    for key, line, value_node in _pairs(mapping, path, group):
        if isinstance(value_node, yaml.MappingNode) and value_node.value and not group and key not in whole:
            yield from _settings(loader, value_node, path, f"{key}.")
            continue
        items = value_node.value if isinstance(value_node, yaml.SequenceNode) else []
        for node in (value_node, *items):
            if isinstance(node, yaml.MappingNode):
                list(_pairs(node, path, f"{key}."))  # YAML would silently drop the first of two
        try:
            value = loader.construct_document(value_node)
        except ValueError as error:  # 2026-99-99, or an integer of 5,000 digits
            raise ConfigError(f"{path}, line {line}: {key} cannot be read: {error}; correct it") from None
        places = tuple(f"{path}, line {item.start_mark.line + 1}" for item in items)
        yield Setting(key, value, f"{path}, line {line}", path.parent, places)


def _pairs(mapping: yaml.MappingNode, path: Path, group: str) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield the keys of a mapping with their lines and values. Raises ConfigError: one is no word, or repeated."""
    lines: dict[str, int] = {}
    for name_node, value_node in mapping.value:
        line = name_node.start_mark.line + 1
        if not isinstance(name_node, yaml.ScalarNode):
            raise ConfigError(f"{path}, line {line}: a key must be a word; see `memd config`")
        key = group + name_node.value
        if key in lines:
            raise ConfigError(f"{path}, line {line}: {key} is given twice, first in line {lines[key]}; remove one")
        lines[key] = line
        yield key, line, value_node


Item = TypeVar("Item", SourceSettings, TokenSettings)
ITEMS_MAX = 10_000
_MEMBERS = {
    SourceSettings: {
        "path": "the path of a folder",
        "topic": "the name of a topic (letters, digits, '.', '_', '-', beginning with a letter or digit), or auto",
        "exclude": "a list of names, patterns or paths",
        "formats": "a list of suffixes such as [md, pdf]",
        "follow_links": "true or false",
    },
    TokenSettings: {
        "name": "1 to 64 letters, digits, '.', '_', '@' or '-', beginning with a letter or digit",
        "token_sha256": "the 64 hexadecimal digits of the token's SHA-256 (`memd token add` makes both)",
        "topics": f"a list of one or more names of topics, in which * stands for any characters ({EVERY_TOPIC}: all)",
        "rights": f"a list of one or more of {', '.join(RIGHTS)}",
    },
}
"""For the items of lists, the allowed values of each member, in words."""


def _item(at: str, item: Any, kind: type[Item]) -> Item:
    """Return an item of a list. Raises ConfigError, which names the remedy and quotes no member that may be a token."""
    try:
        return msgspec.convert(item, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        problem, _, place = str(error).partition(" - at `$")
    allowed = _MEMBERS[kind]
    member, _, index = place.strip("`").lstrip(".").partition("[")
    named = problem.rpartition("field ")[2].strip("`")[:60]
    if "unknown field" in problem:
        hint = "; a token itself has no place here, its SHA-256 has" if named == "token" else ""
        raise ConfigError(f"{at}: there is no setting `{named}`; there are {', '.join(allowed)}{hint}")
    if "missing required field" in problem:
        raise ConfigError(f"{at}: it has no {named}; give {allowed[named]}")
    if member not in allowed:
        raise ConfigError(f"{at}: it is not what it should be; give its {', '.join(allowed)}")
    wrong = item[member][int(index[:-1])] if index[:-1].isdecimal() else item[member]
    given = "" if member == "token_sha256" else f", not {wrong!r:.60}"
    raise ConfigError(f"{at}: {member} is not what it should be; give {allowed[member]}{given}")


def _items(setting: Setting, form: str) -> list[tuple[str, Any]]:
    """Return the items of a YAML list, each with the place to name in errors. `form`: what an item looks like."""
    given = [] if setting.value in (None, "") else setting.value
    if not isinstance(given, list | tuple) or len(given) > ITEMS_MAX:
        shown = "no list" if setting.key != "sources" else f"{given!r:.60}"  # anything else may be a token
        what = f"a list, each of its items {form} ({ITEMS_MAX:,} at most)"
        raise ConfigError(f"{setting.place}: {setting.key} is {shown}; give {what}")
    places = setting.item_places or [setting.place] * len(given)
    named = enumerate(zip(places, given, strict=True), 1)
    return [(f"{place}: {setting.key}, item {number}", item) for number, (place, item) in named]


def _read_sources(setting: Setting) -> list[tuple[str, SourceSettings]]:
    """Return the sources in a YAML list, each with the place to name in errors.

    Paths and exclusions become absolute if they name a place. A folder need not exist, because its disk may be mounted
    later, but it must not be a file.
    """
    items: list[tuple[str, SourceSettings]] = []
    excluded: list[str] = []
    for at, item in _items(setting, "`- path: FOLDER`"):
        if isinstance(item, str) and item.startswith("!"):
            excluded.append(_exclusion(setting, item[1:]))
            continue
        source = _item(at, {"path": item} if isinstance(item, str) else item, SourceSettings)
        path = _absolute(setting, source.path)
        source = msgspec.structs.replace(
            source,
            path=str(path.resolve() if ".." in path.parts else path),  # a link keeps its name, which its documents have
            exclude=tuple(_exclusion(setting, part) for part in source.exclude),
            formats=tuple(suffix.lower().removeprefix(".") for suffix in source.formats),
        )
        if unread := next((one for one in source.formats if one not in _suffixes()), None):
            remedy = meant(unread, _suffixes(), "docs/documents.md lists those that it reads")
            raise ConfigError(f"{at}: formats has {unread}, which memd does not read; {remedy}")
        items.append((at.partition(", item")[0], source))
    return [(at, msgspec.structs.replace(one, exclude=(*one.exclude, *excluded))) for at, one in items]


@functools.cache
def _suffixes() -> list[str]:
    """Return the suffixes of files that memd reads, without their dots."""
    return [suffix[1:] for one in words_of("formats")["formats"] for suffix in one["suffixes"].split()]


def _source_problems(sources: tuple[SourceSettings, ...], data_dir: Path) -> Iterator[tuple[int, str]]:
    """Yield the index of a source and its problem: with the other sources, or with memd's own data."""
    places = [(number, one.path, Path(one.path).resolve()) for number, one in enumerate(sources)]
    for number, path, place in places:
        if place.is_relative_to(data_dir.resolve()):
            yield number, f"has {path}, which is in memd's own data directory ({data_dir}); name another folder"
        if place.is_file():
            yield number, f"has {path}, which is a file; name its folder, or remember it once with `memd add {path}`"
    for (before, path, place), (number, other, inside) in itertools.permutations(places, 2):
        if inside == place and before < number:
            yield number, f"has {path} twice; remove one"
        elif inside != place and inside.is_relative_to(place):
            why = f"which is inside {path}: its files would be remembered twice"
            yield number, f"has {other}, {why}; remove one of the two, or name the folders beside it"


def _exclusion(setting: Setting, text: str) -> str:
    return str(_absolute(setting, text)) if text.startswith(("/", "~")) else text.strip("/")


def read_tokens(setting: Setting) -> tuple[TokenSettings, ...]:
    """Return the tokens in a YAML list. Raises ConfigError: the list or one of its items is malformed."""
    items = _items(setting, "lines `name: …`, `token_sha256: …`, `topics: […]`, `rights: […]`")
    tokens = tuple(_item(at, item, TokenSettings) for at, item in items)
    for number, problem in token_problems(tokens):
        raise ConfigError(f"{items[number][0]}: {problem}")
    return tokens


def token_problems(tokens: Sequence[TokenSettings], owner_token: str = "") -> Iterator[tuple[int, str]]:
    """Yield the index of a token and its problem, by itself or with the others."""
    for number, one in enumerate(tokens):
        if one.name == OWNER_NAME:
            yield number, f"the name {OWNER_NAME} is that of auth.token; give another one"
        if len(set(one.rights)) < len(one.rights):
            yield number, f"{one.name} has a right twice; remove one"
        if found := overlapping(one.topics):
            first, second = found
            same = "twice; remove one" if first == second else f"and {second}, which overlap; leave the narrower out"
            yield number, f"the topics of {one.name} have {first} {same}"
        if owner_token and bytes.fromhex(one.token_sha256) == digest_of(owner_token):
            yield number, f"{one.name} has the token that auth.token is; a token belongs to one principal"
    names: set[str] = set()
    digests: dict[str, str] = {}
    for number, one in enumerate(tokens):
        if one.name in names:
            yield number, f"there is another token with the name {one.name}; give each its own name"
        if (digest := one.token_sha256.lower()) in digests:
            yield number, f"{one.name} has the same token as {digests[digest]}; a token belongs to one principal"
        names.add(one.name)
        digests[digest] = one.name


DEFAULT_PATH = Path("config.yaml")
ENVIRONMENT_PREFIX = "MEMD_"
CONFIG_VARIABLE = "MEMD_CONFIG"


CONSTANTS_VARIABLE = "MEMD_CONSTANTS"
"""If set, as in tests, settings that are constants in the code are read and take effect."""
_NO_BOUNDARIES = "chunks end where they have 50 tokens"
_GONE = {
    "retrieval.min_evidence": "where nothing stored is near a question, one fixed threshold decides",
    "retrieval.min_share": "retrieval.min_score alone decides what is too weak",
    "buffer.handover_ms": "a new conversation waits for none",
    "buffer.journal_fsync_seconds": "with `interval` the journal is synced every second",
    "chunking.similarity": _NO_BOUNDARIES,
    "chunking.budget_ms": _NO_BOUNDARIES,
    "chunking.window_tokens": _NO_BOUNDARIES,
    "chunking.overlap_tokens": _NO_BOUNDARIES,
    "upstream.keepalive_seconds": "idle connections are dropped after 3 s, before llama-server closes its own",
    "upstream.connect_timeout_seconds": "connecting may take 10 s",
    "compaction.fraction": "half of the buffer leaves in one compaction",
    "corrections.window_turns": "a chunk can be corrected in 64 turns of its topic",
    "limits.header_bytes_max": "headers have at most 64 KB",
    "limits.corrections_max": "one request corrects 1,000 chunks at most",
    "limits.related_topics_max": "one request has 64 related topics at most",
    "rerank.candidates": "the reranker is asked about the 32 best chunks",
    "processor.one_core": "threads take the cores that there are",
    "utility.step_ratio": "a step of Helpful counts 1.5 times, one of Unhelpful 1 / 1.5",
    "utility.max_helpful_steps": "more than 10 steps of Helpful change nothing",
    "utility.max_unhelpful_steps": "more than 4 steps of Unhelpful change nothing",
    "embedding.timeout_seconds": "a batch of texts may take 30 s",
    "injection.role": "memory stands in front of the user's message: many templates drop a message of its own",
    "injection.header": "the block's first line is always the same",
    "injection.dates": "a block states today's date and the day of each chunk: a model without them takes old for new",
}
_FORMER_CLUSTER = ("url", "bucket", "endpoint", "region", "access_key", "secret_key", "own_url", "lease_seconds")
FORMER = {f"store.{name}": "a cluster's log is in PostgreSQL: cluster.database" for name in _FORMER_CLUSTER}
"""Settings of earlier versions that selected another memory, and their replacement. memd refuses to start with them."""


def _fields() -> dict[str, Any]:
    """Return the dotted key of every field of `Config` with its type, including constants."""
    keys: dict[str, Any] = {}
    for field in msgspec.structs.fields(Config):
        if field.name in _GROUPS:
            keys |= {f"{field.name}.{inner.name}": inner.type for inner in msgspec.structs.fields(field.type)}
        else:
            is_path = field.name == "data_dir"  # a type that msgspec does not support
            keys[field.name] = model.Text if is_path else field.type
    return keys


_SINGLE = ("data_dir", "sources", "retention")
_IN_NO_FILE = "encryption.key"
"""A field that no settings file may give."""
_GROUPS = frozenset(field.name for field in msgspec.structs.fields(Config) if field.name not in _SINGLE)
_FIELDS = _fields()
REMOVED = _GONE | {
    key: reason
    for key, kind in _FIELDS.items()
    for reason in getattr(kind, "__metadata__", ())
    if isinstance(reason, str)
}
"""Settings of earlier versions, and why they are gone. memd starts in spite of them."""
KEYS = {key: kind for key, kind in _FIELDS.items() if key not in REMOVED and key != _IN_NO_FILE}
"""The dotted key of every setting with its type, in the order of `defaults.yaml`."""
_MAY_BE_EMPTY = _GROUPS | {"retention"} | {key.partition(".")[0] for key in REMOVED}


def variable_of(key: str) -> str:
    """Return the environment variable of a setting: `listen.port` is `MEMD_LISTEN_PORT`."""
    return ENVIRONMENT_PREFIX + key.replace(".", "_").upper()


def load_config(
    path: Path | None,
    env: Mapping[str, str],
    overrides: Mapping[str, object],
    tell: Callable[[str], None] = lambda line: None,
) -> Config:
    """Return the settings: the defaults, overridden by the file, the environment and the command line, in this order.

    Args:
        path: The config file; None takes the one in MEMD_CONFIG, else `./config.yaml` if it exists.
        env: The environment; only names that begin with `MEMD_` are used.
        overrides: Values from the command line by dotted key.
        tell: Called with a sentence for each setting that no longer has an effect.

    Raises:
        ConfigError: a file that cannot be read, or a setting that is unknown or not allowed.
    """
    path = _settings_file(path, env)
    given: dict[str, Setting] = {}
    sources: list[tuple[str, SourceSettings]] = []
    for setting in _layers(path, env, overrides):
        if setting.key in _MAY_BE_EMPTY and setting.value in (None, {}):
            continue  # a group whose lines are all commented out
        if setting.key in REMOVED and not (env.get(CONSTANTS_VARIABLE) and setting.key in _FIELDS):
            tell(f"{setting.place}: {setting.key} has no effect any more: {REMOVED[setting.key]}; remove it")
            continue
        if setting.key == "sources":
            sources = _read_sources(setting)
            continue
        if setting.key in _SERVERS and setting.value != []:
            for other in (one for one in _SERVERS if one in given and given[one].layer < setting.layer):
                del given[other]
        given[setting.key] = msgspec.structs.replace(setting, value=_read(setting))
    url, urls = (given[key].value if key in given else () for key in _SERVERS)
    if url and urls and all(model.base_of(url) != model.base_of(one) for one in urls):
        said = f"upstream.urls is given, and upstream.url too, which is {model.without_credentials(url):.60}"
        raise ConfigError(f"{given['upstream.urls'].place}: {said}; remove one of the two")
    data_dir = (path.parent if path else Path()) / Config().data_dir
    values = {"data_dir": data_dir.absolute(), **{key: one.value for key, one in given.items()}}
    config = _built(values | {"sources": tuple(source for _, source in sources)})
    for key, problem in _contradictions(config):
        place = next(given[name].place for name in (key, *_PARTNERS.get(key, ())) if name in given)
        raise ConfigError(f"{place}: {key} {problem}")
    for number, problem in _source_problems(config.sources, config.data_dir):
        raise ConfigError(f"{sources[number][0]} {problem}")
    return config


def places_of_settings(
    path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]
) -> tuple[Path | None, dict[str, str]]:
    """Return the settings file that `load_config` would read, and where each effective setting was given. Raises
    ConfigError: see `load_config`, which checks more."""
    path = _settings_file(path, env)
    return path, {setting.key: setting.place for setting in _layers(path, env, overrides) if setting.key not in REMOVED}


_WRITTEN = {
    model.PATTERN_COUNTRY: "a country in two capital letters (ISO 3166: DE, GB)",
    model.PATTERN_WORD: "a word or phrase of at most 100 characters, without signs and spaces at its ends",
}
"""Patterns described in words."""
_SECRET = ("auth.token", "upstream.api_key", "embedding.api_key", "rerank.api_key", "backup.secret_key", _IN_NO_FILE)
_PATHS = frozenset({"listen.tls_cert", "listen.tls_key", "encryption.key_file"})
_NO_KEY_HERE = "a key does not belong into a settings file; give encryption.key_file, or MEMD_ENCRYPTION_KEY"
_PATH = "path:"  # of embedding.model
_SERVERS = ("upstream.url", "upstream.urls")  # alternatives
_PARTNERS = {
    "listen.tls_cert": ("listen.tls_key",),
    "upstream.url": ("upstream.urls",),  # a list of one
    "backup.access_key": ("backup.secret_key",),
    "embedding.url": ("embedding.model",),
    "embedding.name": ("embedding.model",),
    "admin.port": ("listen.port",),
}
"""Settings that must fit each other: the error names the place of the one that was given."""


def _settings_file(path: Path | None, env: Mapping[str, str]) -> Path | None:
    """Return the given file, else the environment's, else the one in the working directory."""
    if path is None and env.get(CONFIG_VARIABLE):
        return Path(env[CONFIG_VARIABLE])
    if path is None and DEFAULT_PATH.exists():
        return DEFAULT_PATH
    return path


def _layers(path: Path | None, env: Mapping[str, str], overrides: Mapping[str, object]) -> Iterator[Setting]:
    """Yield the settings that users gave; later ones override earlier ones."""
    if path is not None:
        yield from read_settings(path, _SINGLE)
    key_of = {variable_of(key): key for key in (*_FIELDS, *REMOVED)}
    for name in sorted(env):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in (CONFIG_VARIABLE, CONSTANTS_VARIABLE):
            continue
        if former := {variable_of(key): key for key in FORMER}.get(name):
            raise ConfigError(f"{name}: {_unknown(former)} (or unset the variable)")
        if name not in key_of:
            known = [one.removeprefix(ENVIRONMENT_PREFIX) for one in (*map(variable_of, KEYS), CONFIG_VARIABLE)]
            near = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), known, n=1)
            remedy = f"did you mean {ENVIRONMENT_PREFIX}{near[0]}?" if near else "docs/settings.md lists them all"
            raise ConfigError(f"{name}: there is no such setting; {remedy} (or unset the variable)")
        key = key_of[name]
        is_text = key in REMOVED or isinstance(msgspec.inspect.type_info(_FIELDS[key]), msgspec.inspect.StrType)
        try:  # written as in the file: `8080`, `auto`, `[a, b]`
            value = env[name] if is_text else yaml.safe_load(env[name])
        except (yaml.YAMLError, ValueError, RecursionError):
            raise ConfigError(f"{name}: {env[name][:60]!r} is not a YAML value; put text in quotes") from None
        yield Setting(key, value, name, layer=1)
    for key, value in overrides.items():
        yield Setting(key, value, "the command line", layer=2)


def _read(setting: Setting) -> Any:
    """Return the value of a setting; paths in it become absolute. Raises ConfigError: it is not allowed."""
    if setting.key not in _FIELDS:
        raise ConfigError(f"{setting.place}: {_unknown(setting.key)}")
    if setting.key == _IN_NO_FILE and setting.value and not setting.layer:
        raise ConfigError(f"{setting.place}: {_NO_KEY_HERE}")
    if setting.key == "auth.tokens":
        return read_tokens(setting)
    expected = _FIELDS[setting.key]
    try:
        value = msgspec.convert(setting.value, expected)
    except (msgspec.ValidationError, RecursionError) as error:  # RecursionError: a YAML list that contains itself
        shown = "empty" if setting.value in (None, "") else f"{model.without_credentials(repr(setting.value)):.60}"
        if setting.key in _SECRET and shown != "empty":
            shown = "not a text"  # messages end up in logs and bug reports
        if setting.key == "ingest.redact_words":
            item = re.search(r"\$\[(\d+)\]", str(error))
            shown = f"wrong in item {int(item[1]) + 1}" if item else "not such a list"
        allowed = _allowed(msgspec.inspect.type_info(expected))
        raise ConfigError(f"{setting.place}: {setting.key} is {shown}; give {allowed}") from None
    if setting.key == "data_dir":
        return _absolute(setting, value)
    if setting.key == "embedding.model" and value.startswith(_PATH):
        return f"{_PATH}{_absolute(setting, value.removeprefix(_PATH))}"
    return str(_absolute(setting, value)) if setting.key in _PATHS and value else value


def _unknown(key: str) -> str:
    if key in FORMER:
        return f"there is no setting {key} any more; {FORMER[key]}"
    if key in _GROUPS:
        inner = ", ".join(known.removeprefix(f"{key}.") for known in KEYS if known.startswith(f"{key}."))
        return f"{key} is a group of settings; write them indented below it: {inner}"
    group, _, name = key.rpartition(".")
    siblings = {known.rpartition(".")[2]: known for known in KEYS if known.startswith(f"{group}.")}
    near = [known for known in KEYS if known.rpartition(".")[2] == name]
    if siblings:
        near = near or [siblings[close] for close in difflib.get_close_matches(name, siblings, n=1)]
    else:
        near = near or difflib.get_close_matches(key, KEYS if group else [*KEYS, *_GROUPS], n=1)
    if near:
        return f"there is no setting {key}; did you mean {near[0]}?"
    return f"there is no setting {key}; there are {', '.join(siblings.values() or [*_SINGLE, *sorted(_GROUPS)])}"


def _allowed(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.UnionType():
            members = [member for member in kind.types if not isinstance(member, msgspec.inspect.NoneType)]
            lines = [member for member in members if isinstance(member, msgspec.inspect.DictType)]
            single = [_allowed(member) for member in reversed(members) if member not in lines]
            return ", or ".join([" or ".join(single), *("lines `name: value` with such values" for _ in lines)])
        case msgspec.inspect.LiteralType():
            return " or ".join(str(value) for value in kind.values)
        case msgspec.inspect.IntType():
            return f"a whole number from {kind.ge} to {kind.le}"
        case msgspec.inspect.FloatType():
            return f"a number from {kind.ge} to {kind.le}"
        case msgspec.inspect.VarTupleType():
            bound = f" of at most {kind.max_length}" if kind.max_length else ""
            return f"a list{bound}, each of its items {_allowed(kind.item_type)}"
        case msgspec.inspect.StrType(pattern=pattern) if pattern in _WRITTEN:
            return _WRITTEN[pattern]
        case msgspec.inspect.BoolType():
            return "true or false"
        case msgspec.inspect.DictType(key_type=msgspec.inspect.StrType(pattern=pattern)):
            names = "a name has letters, digits, _ and -, " if pattern == model.PATTERN_NAME else ""
            names = "a name is a topic's, or its beginning and *, " if pattern == model.BEGINNING_OF_TOPIC else names
            return f"one `name: value` per line: {names}a value is {_allowed(kind.value_type)}"
        case _:
            return "one line of text (in quotes if YAML would take it for something else)"


def _absolute(setting: Setting, text: str) -> Path:
    """Return a path as absolute; relative ones start from the settings file's folder, `~` is the home folder."""
    try:
        return (setting.folder / Path(text).expanduser()).absolute()
    except RuntimeError:
        raise ConfigError(f"{setting.place}: {setting.key}: '~' has no home folder here; give a full path") from None


def _built(values: Mapping[str, Any]) -> Config:
    groups: dict[str, Any] = {key: values[key] for key in _SINGLE if key in values}
    for field in msgspec.structs.fields(Config):
        if field.name in _GROUPS:
            prefix = f"{field.name}."
            inner = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
            groups[field.name] = field.type(**inner)
    config = Config(**groups)
    bases = [model.base_of(url) for url in config.upstream.urls or (config.upstream.url,)]
    upstream = msgspec.structs.replace(config.upstream, url=bases[0], urls=tuple(bases) if len(bases) > 1 else ())
    return msgspec.structs.replace(config, upstream=upstream)


def _contradictions(config: Config) -> Iterator[tuple[str, str]]:
    """Yield errors that the type of a single setting cannot express: the key, and the problem."""
    for one in config.upstream.each():
        if problem := model.url_problem(one.url):
            key, verb = ("upstream.urls", "has") if config.upstream.urls else ("upstream.url", "is")
            yield key, f"{verb} {one.address!r}: {problem}; give http://HOST:PORT"
    servers = [model.place_of(url) for url in config.upstream.urls]
    for number, url in enumerate(config.upstream.urls):
        if servers[number] in servers[:number]:
            yield "upstream.urls", f"has {model.without_credentials(url)} twice; name each server once"
    backup, is_http = config.backup, config.embedding.model == "http"
    urls = {"rerank.url": config.rerank.url, "backup.endpoint": backup.endpoint}
    urls = {key: url for key, url in urls.items() if url} | ({"embedding.url": config.embedding.url} if is_http else {})
    for key, url in urls.items():
        if problem := model.url_problem(url):
            yield key, f"is {model.without_credentials(url)!r}: {problem}; give http://HOST:PORT"
    if is_http and not config.embedding.name:
        yield "embedding.name", "is empty; give the name of the model at embedding.url (llama-server takes any)"
    if bool(backup.access_key) != bool(backup.secret_key):
        yield "backup.access_key", "and backup.secret_key belong together: set both, or neither to use AWS's variables"
    if config.cluster.is_on:
        if not re.fullmatch(r"postgres(?:ql)?://[^\s\x00-\x1f]+", config.cluster.database):
            yield "cluster.database", "is not the address of a database; give postgresql://USER@HOST/DATABASE"
        if config.backup.is_on:
            yield "backup.bucket", "backs up a folder, and with cluster.database that is a copy: back up the database"
    if not config.auth.is_closed and not model.is_this_machine(config.listen.host):
        remedy = "set auth.token (tokens of `memd token` are not enough: the last may be revoked), or use 127.0.0.1"
        yield "listen.host", f"is {config.listen.host!r}, which others can reach: {remedy}"
    for number, problem in token_problems(config.auth.tokens, config.auth.token):
        yield "auth.tokens", f"(item {number + 1}): {problem}"
    if config.admin.port == config.listen.port != 0:
        yield "admin.port", f"is {config.admin.port}, as listen.port is; memd's own routes need a port of their own"
    if bool(config.listen.tls_cert) != bool(config.listen.tls_key):
        yield "listen.tls_cert", "and listen.tls_key belong together: set both, or neither for plain HTTP"
    for key in ("ignore", "ignore_system", "strip"):
        for pattern in getattr(config.ingest, key) or ():
            if problem := _pattern_problem(pattern, may_be_empty=True):
                yield f"ingest.{key}", f"has {pattern[:60]!r}, {problem}"
    ingest = config.ingest
    taken = {
        *get_args(model.RedactionName),
        *ingest.redact_persons,
        *([model.LISTED_WORD] if ingest.redact_words else []),
    }
    for name, pattern in ingest.redact_patterns.items():
        problem = _pattern_problem(pattern, may_be_empty=False)
        if name in taken:
            problem = "but that is the name of a built-in pattern; give it another name"
        if problem:
            yield "ingest.redact_patterns", f"has {name}: {pattern[:60]!r}, {problem}"
    for key in ("redact_persons", "redact_words"):
        if getattr(ingest, key) and not ingest.redact:
            yield f"ingest.{key}", "replaces nothing while ingest.redact is false; set that to true, or remove this"


def _pattern_problem(pattern: str, *, may_be_empty: bool) -> str:
    """Return what is wrong with a regular expression; empty if nothing is. `may_be_empty`: it may match no text."""
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"which is no regular expression ({error}); correct it"
    found = (match for probe in ("", string.printable) for match in compiled.finditer(probe))
    if may_be_empty or all(match[0] for match in found):
        return ""
    return "which matches the empty string, so there is nothing to replace; say what has to be there (+ for *)"


Kind = Literal["ignore", "ignore_system", "message", "reply", "result", "strip", "sub_agent"]
_STANDS_FOR = {"TO_ITS_END": r"[^<]*+(?:<(?!/?\1>)[^<]*+)*+</\1>", "REST": r"[\s\S]*", "OPENS_LINE": r"<(?<![^\n]<)"}
"""Placeholders in patterns of the table, which explains them."""


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the table."""

    kind: Kind
    of: str
    """Source of its words: program, version and file; several are separated by `;`."""
    pattern: str


class Programs(msgspec.Struct, frozen=True):
    """The patterns in force, by kind (see the table)."""

    ignore: tuple[str, ...] = ()
    ignore_system: tuple[str, ...] = ()
    message: tuple[str, ...] = ()
    reply: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
    strip: tuple[str, ...] = ()
    sub_agent: tuple[str, ...] = ()


@cache
def rules() -> tuple[Rule, ...]:
    """Return the table in order. Raises OSError: the package was installed without its data files."""
    found = msgspec.convert(words_of("programs")["rules"], list[Rule])
    for word, meaning in _STANDS_FOR.items():
        found = [msgspec.structs.replace(rule, pattern=rule.pattern.replace(word, meaning)) for rule in found]
    return tuple(found)


def programs_of(settings: IngestSettings) -> Programs:
    """Return the patterns in force with these settings."""
    own = {kind: getattr(settings, kind, None) for kind in Programs.__struct_fields__}
    known = rules() if settings.programs else ()
    return Programs(
        **{
            kind: tuple(rule.pattern for rule in known if rule.kind == kind) if given is None else given
            for kind, given in own.items()
        }
    )
