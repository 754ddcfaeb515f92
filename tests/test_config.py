"""Settings: what holds when several places give one, and what is said about a wrong one."""

import contextlib
import hashlib
import re
from operator import attrgetter
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from memd.cli.main import main
from memd.entries import TOPIC_ID_PATTERN
from memd.errors import ConfigError
from memd.principals import Principal
from memd.settings.loading import KEYS, REMOVED, load_config, read_settings, variable_of
from memd.settings.model import Config, SourceSettings, TopicName, UpstreamSettings

SHIPPED = Path(__file__).parent.parent / "config.yaml"
DEFAULTS = SHIPPED.parent / "memd" / "settings" / "defaults.yaml"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return tmp_path / "config.yaml"


def loaded(path: Path | None, text: str = "", **env: str) -> Config:
    if path is not None:
        path.write_text(text)
    return load_config(path, env, {})


def complaint(path: Path, text: str, **env: str) -> str:
    with pytest.raises(ConfigError) as caught:
        loaded(path, text, **env)
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), "config.yaml")


# What is shipped


@pytest.mark.parametrize("file", [SHIPPED, DEFAULTS])
def test_the_shipped_files_give_the_defaults(file: Path) -> None:
    config = load_config(file, {}, {})
    assert config == msgspec.structs.replace(Config(), data_dir=file.parent / "memory")


def test_all_settings_stand_once_in_the_order_of_the_structs_and_those_that_people_set_in_config_yaml() -> None:
    assert [setting.key for setting in read_settings(DEFAULTS)] == list(KEYS)
    kept = [setting.key for setting in read_settings(SHIPPED)]
    assert len(kept) == 10 and kept == [key for key in KEYS if key in kept]


@pytest.mark.parametrize("file", [SHIPPED, DEFAULTS])
def test_every_setting_has_a_comment_above_it_and_the_same_in_both_files(file: Path) -> None:
    lines, known = file.read_text().splitlines(), DEFAULTS.read_text()
    for setting in read_settings(file):
        number = int(setting.place.rpartition(" ")[2])
        told = "\n".join(lines[number - 2 : number])
        assert told.lstrip().startswith("# "), f"{setting.key} in line {number} has no comment above it"
        assert told in known


def test_no_two_settings_share_an_environment_variable() -> None:
    names = [variable_of(key) for key in KEYS]
    assert len(set(names)) == len(names)
    assert "MEMD_CONFIG" not in names


# Which place wins


def test_without_a_file_the_defaults_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert loaded(None) == msgspec.structs.replace(Config(), data_dir=tmp_path / "memory")


def test_the_file_in_the_working_directory_is_found(config_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config_file.write_text("listen: {port: 1111}")
    monkeypatch.chdir(config_file.parent)
    assert loaded(None).listen.port == 1111


def test_a_variable_names_the_file_unless_a_flag_does(config_file: Path, tmp_path: Path) -> None:
    config_file.write_text("listen: {port: 1111}")
    assert loaded(None, MEMD_CONFIG=str(config_file)).listen.port == 1111
    assert loaded(tmp_path / "other.yaml", "", MEMD_CONFIG=str(config_file)).listen.port == 8765


def test_flags_override_variables_and_variables_override_the_file(config_file: Path) -> None:
    config_file.write_text("listen: {host: 127.0.0.1, port: 1}\nlog: {level: error}")
    env = {"MEMD_LISTEN_HOST": "127.0.0.2", "MEMD_LISTEN_PORT": "2", "PATH": "ignored"}
    config = load_config(config_file, env, {"listen.host": "::1"})
    assert (config.listen.host, config.listen.port, config.log.level) == ("::1", 2, "error")


PATTERNS = {"ticket": r"TCK-\d+", "b-2": "x"}
WINDOWS = {"qwen3:32b": 32_768, "google/gemma-3": 8_192}
RETENTION = {"support-*": 90, "support-law": 0, "*": 3650}
AS_URL = [f"http://h:1{end}" for end in ("", "/", "/v1", "/v1/v1/", "/chat/completions", "/v1/v1/chat/completions")]
READ: list[tuple[str, dict[str, str], str, object]] = [
    ("listen:\n  # port: 1\n", {}, "listen", Config().listen),
    ("", {"MEMD_INGEST_IGNORE": "[a, 'b c']"}, "ingest.ignore", ("a", "b c")),
    ("", {"MEMD_BACKUP_KEEP_DAYS": "5"}, "backup.keep_days", 5),
    ("", {"MEMD_RETRIEVAL_MIN_SCORE": "0.5"}, "retrieval.min_score", 0.5),
    ("", {"MEMD_TOPICS_HEADER": "X-User"}, "topics.header", "X-User"),
    ("ingest: {redact: true}", {}, "ingest.redact", True),
    ("", {"MEMD_INGEST_REDACT": "true"}, "ingest.redact", True),
    ("ingest: {redact_builtin: [jwt]}", {}, "ingest.redact_builtin", ("jwt",)),
    ("ingest:\n  redact_patterns:\n    ticket: 'TCK-\\d+'\n    b-2: x", {}, "ingest.redact_patterns", PATTERNS),
    ("", {"MEMD_INGEST_REDACT_PATTERNS": r"{ticket: 'TCK-\d+', b-2: x}"}, "ingest.redact_patterns", PATTERNS),
    *(
        (text, env, "upstream.window", window)
        for given, window in (("auto", "auto"), ("32768", 32_768), (str(WINDOWS), WINDOWS))
        for text, env in ((f"upstream:\n  window: {given}", {}), ("", {"MEMD_UPSTREAM_WINDOW": given}))
    ),
    ("retention:\n  support-*: 90\n  support-law: 0\n  '*': 3650", {}, "retention", RETENTION),
    ("retention:", {}, "retention", {}),
    ("", {}, "retention", {}),
    ("", {"MEMD_RETENTION": "{a: 3}"}, "retention", {"a": 3}),
    *(("", {"MEMD_UPSTREAM_URL": url}, "upstream.url", "http://h:1") for url in AS_URL),
    *(("", {"MEMD_UPSTREAM_URL": url.replace("h:1", "v1")}, "upstream.url", "http://v1") for url in AS_URL[:4]),
]


@pytest.mark.parametrize(("text", "env", "key", "value"), READ)
def test_a_setting_is_read_from_the_file_and_from_its_variable(
    config_file: Path, text: str, env: dict[str, str], key: str, value: object
) -> None:
    assert attrgetter(key)(loaded(config_file, text, **env)) == value


def test_sources_are_paths_or_lines_and_what_is_left_out_of_all(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(config_file.parent))
    more = "{path: ~/papers, topic: auto, exclude: [old/, /a/b], formats: [.PDF, md]}"
    text = f"sources:\n  - notes\n  - {more}\n  - '!build'"
    plain, lines = loaded(config_file, text).sources
    folder = config_file.parent
    assert plain == SourceSettings(path=str(folder / "notes"), exclude=("build",))
    assert (lines.path, lines.topic) == (str(folder / "papers"), "auto")
    assert (lines.exclude, lines.formats) == (("old", "/a/b", "build"), ("pdf", "md"))
    assert loaded(config_file, "", MEMD_SOURCES="[/x, '!~/y']").sources[0].exclude == (str(folder / "y"),)


def test_a_source_above_the_settings_is_told_by_the_path_that_it_has(config_file: Path) -> None:
    [source] = loaded(config_file, "sources: [../notes]").sources
    assert source.path == str(config_file.parent.parent / "notes")


def test_topics_are_named_in_the_settings_as_everywhere() -> None:
    [rule] = [part.pattern for part in get_args(TopicName) if hasattr(part, "pattern")]
    assert rule == f"^{TOPIC_ID_PATTERN.pattern}$"


def test_the_data_dir_is_relative_to_its_file_or_the_home_folder(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = config_file.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    config_file.write_text("data_dir: log")
    assert load_config(config_file, {}, {}).data_dir == config_file.parent / "log"
    assert load_config(config_file, {"MEMD_DATA_DIR": "log"}, {}).data_dir == elsewhere / "log"
    assert load_config(config_file, {}, {"data_dir": "log"}).data_dir == elsewhere / "log"
    assert loaded(config_file, "").data_dir == config_file.parent / "memory"
    monkeypatch.setenv("HOME", str(elsewhere))
    assert loaded(config_file, "data_dir: ~/log").data_dir == elsewhere / "log"


def test_several_upstreams_stand_in_place_of_one_and_the_later_source_counts(config_file: Path) -> None:
    both, one = "[http://h:1/v1, http://h:2/]", "http://h:3"
    upstream = loaded(config_file, f"upstream:\n  urls: {both}").upstream
    assert [server.url for server in upstream.each()] == ["http://h:1", "http://h:2"]
    assert all(server.urls == () for server in upstream.each())
    assert loaded(config_file, f"upstream:\n  url: {one}", MEMD_UPSTREAM_URLS=both).upstream.urls == upstream.urls
    assert loaded(config_file, f"upstream:\n  urls: {both}", MEMD_UPSTREAM_URL=one).upstream.each()[0].url == one
    assert load_config(config_file, {"MEMD_UPSTREAM_URLS": both}, {"upstream.url": one}).upstream.urls == ()
    for same in ("upstream: {url: http://h:2, urls: [http://h:1, http://h:2]}", f"upstream: {{urls: {both}}}"):
        assert len(loaded(config_file, same).upstream.each()) == 2
    assert loaded(config_file, f"upstream: {{url: '{one}', urls: []}}").upstream.each()[0].url == one
    assert loaded(config_file, f"upstream: {{urls: ['{one}']}}").upstream == UpstreamSettings(url=one)


# What is said about a wrong setting

WRONG = {
    "listen:\n  prot: 1": "config.yaml, line 2: there is no setting listen.prot; did you mean listen.port?",
    "listn:\n  port: 1": "config.yaml, line 2: there is no setting listn.port; did you mean listen.port?",
    "min_score: 1": "config.yaml, line 1: there is no setting min_score; did you mean retrieval.min_score?",
    "buffer: {budget_tokens: 1}": "did you mean injection.budget_tokens?",
    "store: {bucket: mine}": "there is no setting store.bucket any more; a cluster's log is in PostgreSQL",
    "listen:\n  qqq: 1": "config.yaml, line 2: there is no setting listen.qqq; there are listen.host, listen.port",
    "qqq: 1": "config.yaml, line 1: there is no setting qqq; there are data_dir, sources, retention, admin, audit,",
    "cluster:\n  database: http://me:1": "cluster.database is not the address of a database; give ",
    "cluster:\n  database: postgresql://one@h/two\nbackup:\n  bucket: s3://one/two": (
        "backup.bucket backs up a folder, and with cluster.database that is a copy"
    ),
    "listen:\n  host: 0.0.0.0": "listen.host is '0.0.0.0', which others can reach: set auth.token "
    "(tokens of `memd token` are not enough: the last may be revoked), or use 127.0.0.1",
    "listen: 8765": "listen is a group of settings; write them indented below it: host, port",
    "listen:\n  port: eighty": "line 2: listen.port is 'eighty'; give a whole number from 0 to 65535",
    "listen:\n  port: 1.5": "listen.port is 1.5; give a whole number",
    "listen:\n  port: 65536": "listen.port is 65536; give a whole number from 0 to 65535",
    "listen:\n  port:": "listen.port is empty; give a whole number",
    "admin: {port: lots}": "admin.port is 'lots'; give a whole number from 0 to 65535 or auto",
    "retrieval: {min_score: .nan}": "retrieval.min_score is nan; give a number from 0 to 1",
    "log: {level: loud}": "log.level is 'loud'; give debug or error or info or warning",
    "upstream: {url: yes}": "upstream.url is True; give one line of text (in quotes",
    'upstream: {url: "a\\nb"}': "upstream.url is 'a\\nb'; give one line of text",
    "ingest: {ignore: x}": "ingest.ignore is 'x'; give a list",
    "ingest: {ignore: &a [*a]}": "ingest.ignore is [[...]]; give a list",
    "ingest: {ignore: ['(']}": "ingest.ignore has '(', which is no regular expression",
    "ingest: {strip: ['<a>(']}": "ingest.strip has '<a>(', which is no regular expression",
    "ingest: {redact: maybe}": "ingest.redact is 'maybe'; give true or false",
    "ingest: {redact_builtin: [jwt, cards]}": "ingest.redact_builtin is ['jwt', 'cards']; give a list, each of its",
    "upstream: {window: 100}": "100000000 or auto, or lines `name: value` with such values",
    "upstream: {window: none}": "upstream.window is 'none'; give",
    "upstream: {api_key: [hunter2]}": "upstream.api_key is not a text; give one line of text",
    "ingest: {redact_patterns: [a]}": "ingest.redact_patterns is ['a']; give one `name: value` per line",
    "ingest: {redact_patterns: {'a b': c}}": "a name has letters, digits, _ and -",
    "ingest:\n  redact_patterns:\n    one: '('": "line 2: ingest.redact_patterns has one: '(', which is no regular",
    "ingest: {redact_patterns: {one: 'a*'}}": "has one: 'a*', which matches the empty string",
    "ingest: {redact_patterns: {one: '(?=x)'}}": "which matches the empty string",
    "ingest: {redact_patterns: {jwt: a}}": "has jwt: 'a', but that is the name of a built-in pattern; give it another",
    "ingest:\n  redact_patterns:\n    a: x\n    a: y": "line 4: ingest.redact_patterns.a is given twice, first in",
    "ingest: {redact: true, redact_persons: [phone], redact_patterns: {phone: a}}": "has phone: 'a', but that is",
    "ingest: {redact: true, redact_words: [a], redact_patterns: {word: a}}": "has word: 'a', but that is the name",
    "ingest: {redact_persons: [phone]}": "line 1: ingest.redact_persons replaces nothing while ingest.redact is",
    "ingest: {redact_words: [a]}": "ingest.redact_words replaces nothing while ingest.redact is false",
    "ingest: {redact_persons: [name]}": "ingest.redact_persons is ['name']; give a list, each of its items email",
    "ingest: {redact_words: [Anna, C++]}": "ingest.redact_words is wrong in item 2; give a list of at most 10000",
    "ingest: {redact_countries: [Poland]}": "ingest.redact_countries is ['Poland']; give a list of at most 10",
    "upstream: {url: 'ftp://h'}": "upstream.url is 'ftp://h': not the address of an HTTP server; give http://HOST:PORT",
    "upstream: {url: 'h:8080'}": "not the address of an HTTP server",
    "upstream: {url: 'http://h:99999'}": "Port out of range",
    "upstream: {url: 'http://h/?a=b'}": "more than an address",
    "upstream:\n  urls: [http://h:1, 'h:2']": "line 2: upstream.urls has 'h:2': not the address of an HTTP server",
    "upstream:\n  urls: ['h:2']": "line 2: upstream.url is 'h:2': not the address of an HTTP server; give",
    "upstream: {urls: [http://h:1, http://me:pass@h/v1, http://H:80]}": "upstream.urls has http://H:80 twice",
    "upstream: {urls: http://h}": "upstream.urls is 'http://h'; give a list of at most 64, each of its items one line",
    "upstream:\n  url: http://h:1\n  urls: [http://h:2, http://h:3]": "line 3: upstream.urls is given, and",
    "listen:\n  port: 1\n  port: 2": "line 3: listen.port is given twice, first in line 2; remove one",
    "listen: {port: 1}\nlisten: {host: a}": "line 2: listen is given twice, first in line 1",
    "- listen": "config.yaml, line 1: expected settings, one `key: value` per line",
    "? [a]\n: 1": "config.yaml, line 1: a key must be a word",
    "listen: [port": "config.yaml, line 1: this is not YAML",
    "listen:\n\tport: 1": "config.yaml, line 2: this is not YAML",
    "data_dir: !!python/object:os.system {}": "config.yaml, line 1: this is not YAML",
    "injection:\n  dates: 2026-99-99": "config.yaml, line 2: injection.dates cannot be read",
    "listen:\n  port: " + "9" * 5000: "config.yaml, line 2: listen.port cannot be read",
    "[" * 600: "nested too deeply",
    "a: \x00": "this is not a YAML file",
    "data_dir: {}": "data_dir is {}; give one line of text",
    "retention: 90": "config.yaml, line 1: retention is 90; give one `name: value` per line: a name is a topic's,",
    "retention: {a/b: 3}": "line 1: retention is {'a/b': 3}; give one `name: value` per line",
    "retention: {a: -1}": "a value is a whole number from 0 to 36500",
    "retention:\n  a: 3\n  a: 4": "line 3: retention.a is given twice, first in line 2; remove one",
    "sources: notes": "config.yaml, line 1: sources is 'notes'; give a list, each of its items `- path: FOLDER`",
    "sources: [{topic: a}]": "sources, item 1: it has no path; give the path of a folder",
    "sources: [a, {path: b, topc: c}]": "sources, item 2: there is no setting `topc`; there are path, topic, exclude,",
    "sources: [{path: a, topic: a/b}]": "sources, item 1: topic is not what it should be; give the name of a topic",
    "sources: [{path: a, formats: '*.md'}]": "sources, item 1: formats is not what it should be; give a list of "
    "suffixes such as [md, pdf], not '*.md'",
    "sources:\n  - a\n  - path: b\n    formats: [md, pfd]": "config.yaml, line 3: sources, item 2: formats has "
    "pfd, which memd does not read; did you mean pdf?",
    "sources: [[a]]": "sources, item 1: it is not what it should be; give its path, topic",
    "sources: [memory/notes]": "memory/notes, which is in memd's own data directory",
    "sources: [config.yaml]": "config.yaml, which is a file; name its folder",
    "sources: [a, a/../a]": "twice; remove one",
    "sources: [a/b, a]": "/a/b, which is inside ",
    "sources:\n  - a\n  - path: b\n    topc: c": "config.yaml, line 3: sources, item 2: there is no setting `topc`",
    "sources:\n  - a\n  - path: b\n    path: c": "config.yaml, line 4: sources.path is given twice, first in line 3",
    "sources:\n  - a\n  - b\n  - a": "config.yaml, line 4: sources has ",
    "retrieval: {global_topics: [a/b]}": "retrieval.global_topics is ['a/b']; give a list, each of its items",
    "embedding:\n  model: http\n  name: m": "embedding.url is ''",
    "embedding:\n  model: http\n  url: http://127.0.0.1:1": "embedding.name is empty",
    "embedding:\n  model: http\n  url: 'http://a:hunter2@h:1?x'\n  name: m": "embedding.url is",
    "embedding:\n  model: http\n  api_key: [hunter2]": "embedding.api_key is not a text",
    "rerank: {url: 'localhost:8080'}": "rerank.url is 'localhost:8080': not the address of an HTTP server; give http://",
    "encryption:\n  key: hunter2": "does not belong into a settings file",
    "data_dir: ~nobody-of-this-name/log": "data_dir: '~' has no home folder here; give a full path",
}


@pytest.mark.parametrize(("text", "expected"), WRONG.items(), ids=range(len(WRONG)))
def test_a_wrong_setting_is_named_with_its_place_and_the_remedy(config_file: Path, text: str, expected: str) -> None:
    said = complaint(config_file, text)
    assert expected in said and "hunter2" not in said, "no secret is shown"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("MEMD_LISTEN_PROT", "1", "MEMD_LISTEN_PROT: there is no such setting; did you mean MEMD_LISTEN_PORT?"),
        ("MEMD_STORE_URL", "x", "MEMD_STORE_URL: there is no setting store.url any more; a cluster's log is in"),
        ("MEMD_FOO", "1", "MEMD_FOO: there is no such setting; docs/settings.md lists them all"),
        ("MEMD_QQQ", "1", "MEMD_QQQ: there is no such setting; docs/settings.md lists them all"),
        ("MEMD_LISTEN_PORT", "x", "MEMD_LISTEN_PORT: listen.port is 'x'; give a whole number from 0 to 65535"),
        ("MEMD_LISTEN_PORT", "", "MEMD_LISTEN_PORT: listen.port is empty; give a whole number"),
        ("MEMD_INGEST_IGNORE", "[a", "MEMD_INGEST_IGNORE: '[a' is not a YAML value"),
    ],
)
def test_a_wrong_variable_is_named(config_file: Path, name: str, value: str, expected: str) -> None:
    assert expected in complaint(config_file, "", **{name: value})


@pytest.mark.parametrize("key", REMOVED)
def test_every_setting_of_an_earlier_version_is_read_and_changes_nothing(config_file: Path, key: str) -> None:
    group, _, name = key.partition(".")
    config_file.write_text(f"{group}:\n  # {name}: 7\n")
    unchanged = load_config(config_file, {}, {})
    config_file.write_text(f"{group}:\n  {name}: 7\n")
    told: list[str] = []
    assert load_config(config_file, {variable_of(key): "7"}, {}, tell=told.append) == unchanged
    assert [line.partition(" has no effect any more: ")[0] for line in told] == [
        f"{config_file}, line 2: {key}",
        f"{variable_of(key)}: {key}",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "latin1.yaml").write_bytes(b"data_dir: caf\xe9")
    (tmp_path / "huge.yaml").write_text("#" * 2_000_000)
    for name, reason in {
        "missing.yaml": "there is no such config file",
        "": "cannot be read: Is a directory",
        "latin1.yaml": "not UTF-8 text (byte 13)",
        "huge.yaml": "so not a config file",
    }.items():
        path = tmp_path / name
        with pytest.raises(ConfigError, match=re.escape(reason)) as caught:
            load_config(path, {}, {})
        assert str(caught.value).startswith(f"{path}:")


YAML_LIKE = st.text(alphabet="abc:-[]{}&*!|>'\"#? \n\t0159.~%@`", max_size=80)


@given(data=st.binary(max_size=200) | YAML_LIKE.map(str.encode))
def test_any_file_is_loaded_or_refused_with_a_config_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "arbitrary.yaml"
    path.write_bytes(data)
    with contextlib.suppress(ConfigError):
        load_config(path, {}, {})


def test_the_command_prints_the_settings_file_with_all_defaults(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["config"])
    assert (result.exit_code, result.stdout) == (0, DEFAULTS.read_text())
    file = tmp_path / "config.yaml"
    file.write_text(result.stdout)
    assert load_config(file, {}, {"data_dir": "/memory"}) == load_config(None, {}, {"data_dir": "/memory"})


# Tokens


def item(name: str = "ann", sha: str = "a" * 64, topics: str = "[a]", rights: str = "[read]") -> str:
    return f"    - {{name: {name}, token_sha256: {sha}, topics: {topics}, rights: {rights}}}\n"


def test_tokens_are_read_from_the_file_and_from_a_variable(config_file: Path) -> None:
    [ann] = (auth := loaded(config_file, f"auth:\n  tokens:\n{item()}").auth).tokens
    assert ann.principal == Principal("ann", ("a",), frozenset({"read"}))
    assert loaded(None, MEMD_AUTH_TOKENS=f"[{item().strip().removeprefix('- ')}]").auth == auth


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (
            item(topics='["team-*", team-a]'),
            "line 3: auth.tokens, item 1: the topics of ann have team-* and team-a, which",
        ),
        (item(topics="[a, a]"), "the topics of ann have a twice; remove one"),
        (item(topics="[]"), "topics is not what it should be; give a list of one or more names of topics"),
        (item(topics="[../a]"), "topics is not what it should be"),
        (item(topics='["a\\n"]'), "topics is not what it should be"),
        (item(name='"owner\\n"'), "name is not what it should be"),
        (
            item(rights="[]"),
            "rights is not what it should be; give a list of one or more of read, write, correct, admin",
        ),
        (item(rights="[read, wriet]"), "give a list of one or more of read, write, correct, admin, not 'wriet'"),
        (item(rights="[read, read]"), "ann has a right twice"),
        (item() + item("bob"), "line 4: auth.tokens, item 2: bob has the same token as ann"),
        (item() + item(sha="f" * 64), "there is another token with the name ann"),
        (item(sha=hashlib.sha256(b"the owner's").hexdigest()), "(item 1): ann has the token that auth.token is"),
        (item("owner"), "the name owner is that of auth.token"),
        (item(sha="abc"), "token_sha256 is not what it should be; give the 64 hexadecimal digits"),
        ("    - {name: ann, topics: [a], rights: [read]}\n", "it has no token_sha256; give the 64"),
        ("    - {name: ann, token: s3cr3t}\n", "a token itself has no place here, its SHA-256 has"),
        ("    - s3cr3t\n", "it is not what it should be; give its name, token_sha256, topics, rights"),
    ],
)
def test_a_wrong_token_is_refused_with_its_place_and_the_reason(config_file: Path, tokens: str, reason: str) -> None:
    refused = complaint(config_file, f"auth:\n  tokens:\n{tokens}", MEMD_AUTH_TOKEN="the owner's")
    assert reason in refused and "s3cr3t" not in refused
