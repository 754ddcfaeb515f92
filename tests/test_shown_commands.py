"""Every command that the documentation shows is run, page by page, or stands below with the reason why not."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import forked_memd
import pytest
import yaml
from conftest import Serving
from daemon_process import DaemonProcess, clean_environment
from recording_upstream import RecordingUpstream

from memd.cli.main import main

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packaging/*.md"), *ROOT.glob("examples/*.md")]
)
PAGES += sorted(ROOT.glob("clients/*/README.md"))
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)

NOT_RUN = {
    r"make (demo|quick|test|help)": "they install; test_demo.py plays the demo, and the others run this test",
    r"python3 -m venv .*|pip install .*|pipx install .*": "they install; test_packaging.py looks after the name",
    r"npm install.*": "test_typescript_package.py packs and installs it",
    r"memd serve.*": "it runs until it is ended: the daemon beside which the other lines run",
    r"memd model add .*": "it fetches 91 MB; test_embedding_models.py adds a tiny one",
    r"memd token add .* --data-dir ~.*": "the daemon here has not the owner's token of that page; test_rights.py",
    r"memd audit .*": "an audit begins with the token of somebody else; test_audit.py has some",
    r"memd check --live": "it asks a model that understands; test_check.py has one",
    r"llama-server .*": "tests/support/llama_server.py starts one",
    r"claude mcp add .*": "Claude Code's own command",
    r"docker .*": "there is no container here; test_packaging.py reads the Dockerfile",
    r"(cp packaging/cluster/|export (MEMD_CLUSTER|AWS)_|sudo |sed .*memd1).*": "test_cluster_packaging.py has nginx",
    r"(systemctl|loginctl|journalctl|launchctl) .*|tail -f .*": "services of a whole machine",
    r"curl .*https://memd\.example\.com.*": "another machine; test_reverse_proxy.py asks through nginx",
    r"git pull|(ss|lsof) .*": "a checkout's remote, and programs that not every machine has",
    r"memd check --data-dir ~/memory-of-work": "the folder of a memd that is started in the line before",
    r"python bench/.*": "they measure for minutes",
    r"memd export \| jq .*": "jq is not on every machine",
    r"pass show .*": "nobody here has a password store; test_encryption.py gives a key on standard input",
    r"memd erase --(dry-run|forbid) --chunk .*": "the ids of somebody's chunks; test_erasing.py",
    r"memd restore .*|memd verify memory": "no bucket here; test_bucket.py loses a disk and restores it",
    r"memd move .*": "no cluster here; test_shared_daemons.py has one",
    r"mv memory/work memory/office .*": "while no daemon runs; test_topics.py has it",
}
"""What is not run: a pattern of whole lines, and why. Those that begin with `memd` are parsed all the same."""

REAL = {
    "memd backup DIR": "memd backup copies",
    'memd remember "…"': 'memd remember "The office is in Bergen."',
    "memd add PATH…": "memd add notes",
    'memd search "…"': 'memd search "On which port does the booking API listen?"',
}
"""What is typed in place of a line with a placeholder."""


def blocks(page: Path, *languages: str) -> list[str]:
    text = re.sub(r"<!-- recording -->.*<!-- /recording -->", "", page.read_text(), flags=re.DOTALL)
    return [
        re.sub(rf"^{found[1]}", "", found[3], flags=re.MULTILINE)
        for found in BLOCK.finditer(text)
        if found[2] in languages
    ]


def shown(page: Path) -> list[str]:
    """The commands of a page, without comments and without the folder of the program."""
    text = "\n".join(blocks(page, "sh", "bash", "console")).replace("\\\n", " ")
    lines = (re.sub(r"(^|\s\s)#.*$", "", line).strip() for line in text.splitlines())
    return [re.sub(r"(?<![\w/])\.venv/bin/", "", line) for line in lines if line]


def is_run(line: str) -> bool:
    return not any(re.fullmatch(pattern, line) for pattern in NOT_RUN)


WITH_COMMANDS = [page for page in PAGES if any(map(is_run, shown(page)))]


def test_what_is_not_run_is_still_shown_somewhere() -> None:
    lines = [line for page in PAGES for line in shown(page)]
    assert [pattern for pattern in NOT_RUN if not any(re.fullmatch(pattern, line) for line in lines)] == []
    assert set(REAL) <= set(lines)


def test_commands_stand_in_blocks_that_say_so() -> None:
    for page in PAGES:
        for block in blocks(page, ""):
            assert not re.search(r"^(memd|curl|pip|\.venv/bin/\w+) ", block, re.MULTILINE), f"{page.name}: {block}"


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in shown(page) if line.startswith("memd ")}))
def test_a_command_of_memd_can_be_parsed(line: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    _, name, *arguments = shlex.split(re.split(r" [|<>] ", REAL.get(line, line))[0])
    command = main.get_command(None, name)
    assert command is not None, line
    if "--model" not in arguments:  # whose file has to exist
        command.make_context(name, arguments)


def test_flags_that_prose_names_exist() -> None:
    """Of commands in backticks, which may have placeholders and dots."""
    for page in PAGES:
        prose = BLOCK.sub("", page.read_text())
        for code in re.findall(r"`(?:\.venv/bin/)?memd ([a-z][^`]*)`", prose):
            command = main.get_command(None, code.split()[0])
            assert command is not None, f"{page.name}: memd {code}"
            several = (command, *getattr(command, "commands", {}).values())
            known = {flag for one in several for parameter in one.params for flag in parameter.opts}
            assert set(re.findall(r"--[a-z][a-z-]*", code)) <= known, f"{page.name}: memd {code}"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """What the pages take for granted: programs, files to import, a configuration folder."""
    home = tmp_path / "home"
    for folder in ("bin", ".config", ".claude/projects/-x", ".codex/sessions", ".local/state/memd", "notes"):
        (home / folder).mkdir(parents=True)
    memd = home / "bin" / "memd"
    memd.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m memd "$@"\n')
    memd.chmod(0o755)
    exports = ROOT / "tests" / "exports"
    for name, source in {
        "conversations.json": "chatgpt.json",
        "chat-export.json": "open-webui.json",
        "messages.jsonl": "openai.jsonl",
        "sharegpt.json": "sharegpt.json",
        ".aider.chat.history.md": "aider.chat.history.md",
        ".claude/projects/-x/session.jsonl": "claude-code.jsonl",
        ".codex/sessions/rollout-1.jsonl": "codex.jsonl",
    }.items():
        shutil.copy(exports / source, home / name)
    (home / "notes" / "office.md").write_text("# Office\n\nThe office is in Bergen.\n")
    (home / "2024-03-04.md").write_text("Today Klara began to work for us.\n")
    shutil.copytree(ROOT / "packaging", home / "packaging")
    return home


@pytest.fixture
def daemon(serving: Serving, home: Path) -> DaemonProcess:
    """A daemon whose folder is the home's: the commands find its settings and its memory there without being told."""
    daemon = serving()
    said = "Decision: the booking API listens on port 7340. The spare key is with Ann."
    daemon.chat([{"role": "user", "content": said}])
    daemon.wait_stored(said)
    shutil.copy(daemon.config, home / "config.yaml")
    (home / "memory").symlink_to(daemon.data_dir)
    (home / ".local" / "state" / "memd" / "memory").symlink_to(daemon.data_dir)
    return daemon


def typed(line: str, daemon: DaemonProcess, home: Path) -> subprocess.CompletedProcess[str]:
    """Type a line at a prompt in the home folder."""
    for documented, real in (("127.0.0.1:8765", daemon.base_url), ("127.0.0.1:8766", daemon.own_url)):
        line = line.replace(documented, real.partition("//")[2])
    environment = clean_environment()
    if re.fullmatch(r"memd [^~$<>|&;`]*", line) and DaemonProcess.forks and forked_memd.can_fork(environment):
        return forked_memd.run([sys.executable, "-m", *shlex.split(line)], environment)
    paths = os.pathsep.join([str(home / "bin"), environment.get("PATH", "")])
    environment |= {"HOME": str(home), "PATH": paths, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        ["sh", "-ec", line], cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=300
    )


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_a_page_do_what_they_say(
    page: Path, daemon: DaemonProcess, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(home)
    for line in filter(is_run, shown(page)):
        done = typed(REAL.get(line, line), daemon, home)
        imported = done.returncode == 1 and " imported as " in done.stdout  # the exports have elements that are broken
        assert done.returncode == 0 or imported, f"{page.name}: {line}\n{done.stdout}{done.stderr}"


def test_what_pages_show_of_files_can_be_read() -> None:
    for page in PAGES:
        for block in blocks(page, "json"):
            json.loads(block)
        for block in blocks(page, "toml"):
            tomllib.loads(block)
        for block in blocks(page, "yaml"):
            assert isinstance(yaml.safe_load(block), dict), page


def program(language: str, daemon: DaemonProcess) -> str:
    [block] = blocks(ROOT / "docs" / "start" / "program.md", language)
    assert "http://127.0.0.1:8765" in block
    return block.replace("http://127.0.0.1:8765", daemon.base_url)


def assert_was_reminded(upstream: RecordingUpstream) -> None:
    asked = upstream.prompts[-1]
    assert "[mem:" in asked and "port 7340" in asked.partition("On which port")[0]


def test_the_python_of_the_first_page_is_reminded(daemon: DaemonProcess, upstream: RecordingUpstream) -> None:
    pytest.importorskip("openai")
    done = subprocess.run(
        [sys.executable, "-c", program("python", daemon)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "Noted.\nNoted.\n"), done.stderr
    assert_was_reminded(upstream)


@pytest.mark.node
def test_the_typescript_of_the_first_page_is_reminded(
    daemon: DaemonProcess, upstream: RecordingUpstream, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("typescript")  # its packages are installed
    from typescript_client import CLIENTS, node

    (tmp_path / "node_modules").symlink_to(CLIENTS / "node_modules")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "program.ts").write_text(program("ts", daemon))
    assert node("program.ts", folder=tmp_path) == "Noted.\nNoted.\n"
    assert_was_reminded(upstream)
