"""`memd setup`: what it writes into the agents of a home folder, shows and takes back."""

import json
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from conftest import Serving
from daemon_process import DaemonProcess, token_setting
from recording_upstream import RecordingUpstream, Response
from reserved_port import reserved_port

from memd.cli import setup
from memd.cli.main import main
from memd.cli.running import THE_RIGHT_ONE

Run = Callable[..., Result]
FOLDERS = (".pi/agent", ".config/opencode", ".codex", ".claude", ".qwen", ".continue", ".cline")
TOML = """# mine
model = "gpt-x" # the good one
notify = [
  "bell",
]

# servers
[mcp_servers.docs]
command = "docs"
"""
YAML = """name: Mine
version: 0.0.1
schema: v1
# my models
models:
  # the big one
  - name: big
    provider: ollama
    model: big
"""
AIDER = "# mine\nmodel: sonnet  # for now\ndark-mode: true\n"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home folder, with nothing on PATH."""
    home = tmp_path / "home"
    (home / "bin").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("PATH", str(home / "bin"))
    for row in setup.AGENTS:
        monkeypatch.delenv(row.variable or "NOT_SET", raising=False)
    monkeypatch.chdir(home)
    return home


@pytest.fixture
def address() -> Iterator[str]:
    """Where memd would listen, and a model server: nobody does."""
    with reserved_port() as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def run(home: Path, address: str, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command, where no model server answers at its usual port."""
    port = address.rpartition(":")[2]
    monkeypatch.setattr(setup, "SERVERS", {"Ollama": int(port)})
    monkeypatch.setenv("MEMD_LISTEN_PORT", port)
    monkeypatch.setenv("MEMD_UPSTREAM_URL", address)

    def run(*arguments: str, answer: str = "") -> Result:
        return CliRunner().invoke(main, ["setup", *arguments], input=answer, prog_name="memd", catch_exceptions=False)

    return run


def installed(home: Path) -> dict[Path, str]:
    """Every agent, with settings of its user's own; returns them by file."""
    for folder in FOLDERS:
        (home / folder).mkdir(parents=True)
    files = {
        ".pi/agent/settings.json": '{\n\t"theme": "dark",\n\t"defaultModel": "mine"\n}\n',
        ".config/opencode/opencode.json": '{ "theme": "dark", "provider": {"own": {"npm": "x"}} }',
        ".codex/config.toml": TOML,
        ".claude/settings.json": '{"env": {"ANTHROPIC_AUTH_TOKEN": "my-own", "A": "b"}, "permissions": {}}\n',
        ".qwen/settings.json": '{"modelProviders": {"openai": [{"id": "own", "name": "own"}]}}\n',
        ".continue/config.yaml": YAML,
        ".aider.conf.yml": AIDER,
    }
    for name, text in files.items():
        (home / name).write_text(text)
    return {home / name: text for name, text in files.items()}


def all_files(home: Path) -> dict[str, bytes]:
    return {str(path.relative_to(home)): path.read_bytes() for path in home.rglob("*") if path.is_file()}


def read(path: Path) -> Any:
    readers = {".json": json.loads, ".toml": tomllib.loads}
    return readers.get(path.suffix, yaml.safe_load)(path.read_text())


def test_a_topic_that_is_replaced_is_named(home: Path, run: Run) -> None:
    installed(home)
    first = run("--yes", "--topic", "my-project", "--model", "qwen3").stdout
    again = run("--yes", "--topic", "my-project", "--model", "other").stdout
    assert "replaces" not in first + again
    told = run("--yes", "--topic", "other", "--model", "other").stdout
    assert told.count("this replaces topic my-project, in all projects of this user.") == len(setup.NAMES)
    assert "replaces topic other, " in run("--yes", "--model", "other").stdout
    assert "replaces" not in run("--yes", "--undo").stdout


def test_every_agent_gets_the_url_and_keeps_what_its_user_wrote(home: Path, run: Run, address: str) -> None:
    written = installed(home)
    told = run("--yes", "--topic", "work", "--model", "qwen3")
    assert told.exit_code == 0, told.output
    for path in (path for path in written if path.suffix != ".json"):
        comments = [line[line.index("#") :] for line in written[path].splitlines() if "#" in line]
        assert comments and all(one in path.read_text() for one in comments), path.read_text()
    url = f"{address}/t/work"
    pi, pi_settings = read(home / ".pi/agent/models.json"), read(home / ".pi/agent/settings.json")
    assert pi["providers"]["memd"]["baseUrl"] == f"{url}/v1" and pi["providers"]["memd"]["models"][0]["id"] == "qwen3"
    assert pi_settings == {"theme": "dark", "defaultModel": "qwen3", "defaultProvider": "memd"}
    opencode = read(home / ".config/opencode/opencode.json")
    assert opencode["provider"]["memd"]["options"]["baseURL"] == f"{url}/v1" and opencode["model"] == "memd/qwen3"
    assert opencode["provider"]["own"] == {"npm": "x"} and opencode["theme"] == "dark"
    codex = read(home / ".codex/config.toml")
    assert codex["model_providers"]["memd"]["base_url"] == f"{url}/v1" and codex["model_provider"] == "memd"
    assert codex["notify"] == ["bell"] and codex["mcp_servers"] == {"docs": {"command": "docs"}}
    claude = read(home / ".claude/settings.json")
    assert claude["env"]["ANTHROPIC_BASE_URL"] == url and claude["env"]["ANTHROPIC_AUTH_TOKEN"] == "my-own"
    qwen = read(home / ".qwen/settings.json")
    assert [one["name"] for one in qwen["modelProviders"]["openai"]] == ["memd", "own"]
    assert qwen["modelProviders"]["openai"][0]["baseUrl"] == f"{url}/v1" and qwen["env"] == {"MEMD_KEY": "-"}
    models = read(home / ".continue/config.yaml")["models"]
    assert [one["name"] for one in models] == ["memd", "big"] and models[0]["apiBase"] == f"{url}/v1"
    cline = read(home / ".cline/data/settings/providers.json")
    assert cline["providers"]["openai-compatible"]["settings"]["baseUrl"] == f"{url}/v1" and cline["version"] == 1
    aider = read(home / ".aider.conf.yml")
    assert aider["openai-api-base"] == f"{url}/v1" and aider["model"] == "openai/qwen3" and aider["dark-mode"] is True


def test_the_difference_is_shown_and_nothing_is_written_without_a_yes(home: Path, run: Run) -> None:
    installed(home)
    before = all_files(home)
    told = run("codex", answer="n\n")
    assert told.exit_code == 0 and '+model_provider = "memd"' in told.output and "Change codex?" in told.output
    assert all_files(home) == before
    told = run("codex", answer="y\n")
    assert "codex asks memd now" in told.output
    assert {name for name, data in all_files(home).items() if data != before.get(name)} == {
        ".codex/config.toml", ".codex/config.toml.before-memd",
    }  # fmt: skip


def test_of_an_agent_that_it_does_not_know_it_says_where_to_look(run: Run) -> None:
    told = run("cursor")
    assert told.exit_code == 2
    assert "there is no 'cursor'; there are pi, " in told.stderr
    assert told.stderr.endswith(", aider; docs/clients.md says how others are connected\n")


def test_a_second_run_changes_nothing_and_another_topic_takes_the_place_of_the_first(home: Path, run: Run) -> None:
    installed(home)
    run("--yes", "--topic", "one")
    once = all_files(home)
    told = run("--topic", "one")
    assert told.exit_code == 0 and told.output.count("nothing to change") == len(setup.NAMES), told.output
    assert all_files(home) == once
    assert run("--yes", "--topic", "two").exit_code == 0
    files = {name: data.decode() for name, data in all_files(home).items() if not name.endswith(setup.COPY)}
    assert not [name for name, text in files.items() if "/t/one" in text]


@pytest.mark.parametrize("runs", [1, 2])
def test_undo_brings_back_every_byte(home: Path, run: Run, runs: int) -> None:
    installed(home)
    before = all_files(home)
    for number in range(runs):
        run("--yes", "--topic", f"topic-{number}")
    told = run("--undo", answer="y\n" * len(setup.NAMES))
    assert told.exit_code == 0, told.output
    assert all_files(home) == before
    assert "nothing to take back" in run("--undo").output


@pytest.mark.parametrize(
    "none", ["models: []", "models: null", "models: {}", '"models": [ ]', "'models': ~  # none yet"]
)
def test_an_empty_list_is_replaced_and_comes_back(home: Path, run: Run, none: str) -> None:
    (home / ".continue").mkdir()
    (path := home / ".continue/config.yaml").write_text(before := f"name: Local Config\n{none}\nschema: v1\n")
    assert run("--yes").exit_code == 0
    assert path.read_text().count("models") == 1 and read(path)["models"][0]["name"] == "memd"
    path.write_text(path.read_text() + "rules: []\n")
    assert run("--undo", "--yes").exit_code == 0
    assert read(path) == yaml.safe_load(before) | {"models": [], "rules": []}


def test_undo_keeps_what_was_changed_since(home: Path, run: Run) -> None:
    installed(home)
    run("--yes")
    since = {".codex/config.toml": '[projects.x]\ntrust_level = "trusted"\n', ".aider.conf.yml": "vim: true\n"}
    for name, text in since.items():
        (home / name).write_text((home / name).read_text() + text)
    claude = read(home / ".claude/settings.json")
    (home / ".claude/settings.json").write_text(json.dumps(claude | {"theme": "light"}))
    assert run("--undo", "--yes").exit_code == 0
    assert read(home / ".codex/config.toml") == tomllib.loads(TOML) | {"projects": {"x": {"trust_level": "trusted"}}}
    assert "# the good one" in (home / ".codex/config.toml").read_text()
    assert read(home / ".aider.conf.yml") == yaml.safe_load(AIDER) | {"vim": True}
    own = {"ANTHROPIC_AUTH_TOKEN": "my-own", "A": "b"}
    assert read(home / ".claude/settings.json") == {"env": own, "permissions": {}, "theme": "light"}


def test_only_what_is_installed_is_touched(home: Path, run: Run) -> None:
    told = run()
    assert told.exit_code == 0 and "Not installed: pi, opencode" in told.output and all_files(home) == {}
    aider = home / "bin" / "aider"
    aider.write_text("#!/bin/sh\n")
    aider.chmod(0o755)
    assert run("--yes").exit_code == 0
    assert set(all_files(home)) == {"bin/aider", ".aider.conf.yml", ".aider.conf.yml.before-memd"}
    assert run("--undo", "--yes").exit_code == 0 and set(all_files(home)) == {"bin/aider"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (".claude/settings.json", '{ // mine\n"env": {}}'),
        (".codex/config.toml", "model = \n"),
        (".codex/config.toml", 'model_providers = { own = { name = "own" } }\n'),
        (".continue/config.yaml", "models: [{name: big}]\n"),
        (".continue/config.yaml", "models: {\n"),
        (".continue/config.yaml", "models: [\n]\n"),
        (".continue/config.yaml", "? models\n: []\n"),
        (".aider.conf.yml", "- a list\n"),
        (".aider.conf.yml", '"model": sonnet\n'),
        (".continue/config.json", "{}"),
    ],
)
def test_a_file_that_cannot_be_changed_safely_is_left_alone_and_its_lines_are_said(
    home: Path, run: Run, name: str, text: str
) -> None:
    (home / name).parent.mkdir(exist_ok=True)
    (home / name).write_text(text)
    before = all_files(home)
    told = run("--yes")
    assert told.exit_code == 1 and "is left alone" in told.stderr and "by hand" in told.stderr
    assert "http://127.0.0.1:" in told.stderr
    assert all_files(home) == before


def test_a_link_stays_a_link_and_rights_and_line_ends_stay(home: Path, run: Run) -> None:
    (home / ".codex").mkdir()
    real = home / "dotfiles.toml"
    real.write_bytes(b'model = "x"\r\n')
    real.chmod(0o640)
    (home / ".codex/config.toml").symlink_to(real)
    assert run("--yes").exit_code == 0
    assert (home / ".codex/config.toml").is_symlink() and real.stat().st_mode & 0o777 == 0o640
    assert b'"memd"\r\n' in real.read_bytes() and b"\n" not in real.read_bytes().replace(b"\r\n", b"")


def test_a_token_of_memd_s_own_is_given_to_the_agent(home: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(home)
    monkeypatch.setenv("MEMD_AUTH_TOKEN", "the-token")
    run("--yes", "claude-code")
    assert read(home / ".claude/settings.json")["env"]["ANTHROPIC_AUTH_TOKEN"] == "the-token"


def test_a_running_model_server_is_named_and_its_model_is_taken(
    home: Path, run: Run, address: str, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "No model server answers" in run().output
    monkeypatch.setenv("MEMD_UPSTREAM_URL", f"{upstream.url}/v1")
    upstream.answer = lambda _: Response((b"{}",), 401)
    at_another_port = run().output
    assert f"A model server answers at {upstream.url}; upstream.url is set to it" in at_another_port
    assert "No model server" not in at_another_port
    monkeypatch.setenv("MEMD_UPSTREAM_URL", address)
    (home / ".claude").mkdir()
    upstream.answer = lambda _: Response((b'{"data": [{"id": "qwen3"}]}',))
    monkeypatch.setattr(setup, "SERVERS", {"LM Studio": int(upstream.url.rpartition(":")[2])})
    told = run("--yes").output
    assert f"A model server answers at {upstream.url}" in told and f"upstream.url: {upstream.url}" in told
    assert read(home / ".claude/settings.json")["env"]["ANTHROPIC_DEFAULT_OPUS_MODEL"] == "qwen3"


def test_the_model_server_of_the_running_daemon_is_asked_and_not_that_of_the_settings(
    home: Path, run: Run, served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    (home / ".codex").mkdir()
    upstream.answer = lambda _: Response((b'{"data": [{"id": "qwen3"}]}',))
    told = run("--yes", "--data-dir", str(served.data_dir)).output
    assert f"A model server answers at {upstream.url} with qwen3; the running memd asks it" in told
    assert "No model server" not in told


@pytest.mark.parametrize("others", [False, True])
def test_where_the_running_daemon_wants_a_token_nothing_is_written_without_one(
    home: Path, run: Run, serving: Serving, monkeypatch: pytest.MonkeyPatch, *, others: bool
) -> None:
    (home / ".claude").mkdir()
    tokens = [token_setting("ann", "a" * 40, "read")]
    daemon = serving({"auth": {"tokens": tokens} if others else {"token": "a" * 40}})
    before = all_files(home)
    told = run("--yes", "--data-dir", str(daemon.data_dir))
    assert told.exit_code == 1 and told.stdout == "" and all_files(home) == before
    assert told.stderr == f"memd: the daemon at {daemon.own_url} wants a token; {THE_RIGHT_ONE}\n"
    assert "nothing to take back" in run("--undo", "--data-dir", str(daemon.data_dir)).output
    monkeypatch.setenv("MEMD_AUTH_TOKEN", "a" * 40)
    assert "asks memd now" in run("--yes", "--data-dir", str(daemon.data_dir), "--model", "tiny").output
    env = read(home / ".claude/settings.json")["env"]
    assert (env["ANTHROPIC_BASE_URL"], env["ANTHROPIC_AUTH_TOKEN"]) == (daemon.base_url, "a" * 40)


def test_a_question_that_nobody_can_answer_ends_its_line_and_says_what_to_do(home: Path, run: Run) -> None:
    (home / ".codex").mkdir()
    left = run("codex", "--model", "tiny")
    assert left.exit_code == 1 and not (home / ".codex" / "config.toml").exists()
    assert left.stderr == "\nmemd: nobody is here to answer, so this was not done; --yes does it without asking\n"
