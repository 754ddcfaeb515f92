"""What is in packaging/ parses, and names only commands, flags and settings that exist."""

import configparser
import json
import plistlib
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from conftest import Serving
from daemon_process import DaemonProcess
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from memd.cli.check.machine import DISTRIBUTION
from memd.cli.main import main
from memd.settings.loading import KEYS, variable_of
from memd.wording import pip_install

ROOT = Path(__file__).parent.parent
PACKAGING = ROOT / "packaging"
VARIABLES = {variable_of(key) for key in KEYS}


def assert_is_a_command_of_memd(words: list[str]) -> None:
    """Parse the words as the command line would, without doing anything; an unknown flag raises."""
    assert Path(words[0]).name == "memd"
    command = main.get_command(None, words[1])
    assert command is not None
    command.make_context(words[1], words[2:])


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)  # strict: a key that is given twice raises
    parser.optionxform = str  # type: ignore[method-assign, assignment]  # as configparser documents it
    parser.read(PACKAGING / "memd.service")
    return parser


def agent() -> dict[str, object]:
    settings: dict[str, object] = plistlib.loads((PACKAGING / "memd.plist").read_bytes())
    return settings


def instructions() -> dict[str, list[str]]:
    """The Dockerfile's instructions with what follows them."""
    text = (PACKAGING / "Dockerfile").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest.strip())
    return found


# the distribution


def test_nothing_leads_to_the_package_of_the_same_name_that_is_somebody_else_s() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("memd/**/*.py")):
        wrong = re.search(r"pip install (-[^ ]+ )*'?memd(?![-\w/])", path.read_text())
        assert wrong is None, f"{path.name}: {wrong and wrong[0]}"


@pytest.mark.process
def test_what_memd_tells_to_install_is_installed_where_this_memd_runs() -> None:
    command = shlex.split(pip_install("--help"))
    assert command[0] == sys.executable
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    told = "\n".join(path.read_text() for path in ROOT.glob("memd/**/*.py") if path.name != "wording.py")
    assert re.findall(r".*pip install.*", told) == [], "it may be the pip of another Python"
    extras = re.findall(r"pip_install\([\"']memd-proxy\[(\w+)\]", told)
    assert {"documents", "llama", "mcp"} <= {*extras}
    assert {*extras} <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()


def test_an_environment_without_pip_is_one_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    assert pip_install("memd-proxy[mcp]").startswith("uv pip install 'memd-proxy[mcp]' --python /")


@pytest.mark.process
def test_no_package_of_an_extra_is_imported_before_somebody_wants_what_it_is_for() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    optional = {
        canonicalize_name(Requirement(line).name)
        for extra in ("llama", "mcp", "bucket", "cluster", "documents", "encryption", "persons")
        for line in groups[extra]
    }
    names = {
        name
        for name, owners in metadata.packages_distributions().items()
        if not optional.isdisjoint(canonicalize_name(owner) for owner in owners)
    }
    assert names >= {"cryptography", "phonenumbers", "stdnum", "lxml", "docx", "mcp"}
    program = """
import importlib, pathlib, sys
sys.modules.update(dict.fromkeys(sys.argv[1:]))  # importing one of these raises ModuleNotFoundError
cli = pathlib.Path(importlib.import_module("memd.cli.main").__file__).parent
for path in cli.rglob("*.py"):
    importlib.import_module(".".join(("memd.cli", *path.relative_to(cli).with_suffix("").parts)))
importlib.import_module("memd.demo")  # the daemon's parts among them
"""
    done = subprocess.run([sys.executable, "-c", program, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# systemd


def test_the_systemd_unit_starts_a_command_that_exists_and_may_write_where_its_data_directory_is() -> None:
    service = unit()["Service"]
    assert_is_a_command_of_memd(shlex.split(service["ExecStart"]))
    assert service["RestartPreventExitStatus"] == "2", "the exit code of wrong settings"
    assert unit()["Install"]["WantedBy"] == "default.target", "a user's manager has no multi-user.target"
    words = shlex.split(service["ExecStart"])
    data_dir = Path(words[words.index("--data-dir") + 1])
    assert Path(service["ReadWritePaths"]) in data_dir.parents
    assert service["ReadWritePaths"] == f"%S/{service['StateDirectory']}"
    assert (service["ProtectSystem"], service["ProtectHome"], service["NoNewPrivileges"]) == (
        "strict",
        "read-only",
        "yes",
    )
    assert service["UMask"] == "0077"


# launchd


@pytest.mark.process
def test_the_launchd_agent_starts_a_command_that_exists_with_settings_that_exist(tmp_path: Path) -> None:
    home = tmp_path / "a home"
    program = home / ".local" / "bin" / "memd"
    program.parent.mkdir(parents=True)
    (home / "Library" / "Logs").mkdir(parents=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$0" "$@"\necho started >&2\n')
    program.chmod(0o755)
    arguments = agent()["ProgramArguments"]
    assert isinstance(arguments, list)
    done = subprocess.run(arguments, env={"HOME": str(home)}, capture_output=True, text=True, check=True)
    assert_is_a_command_of_memd(done.stdout.splitlines())
    assert (home / "Library" / "Logs" / "memd.log").read_text() == "started\n"
    variables = agent()["EnvironmentVariables"]
    assert isinstance(variables, dict) and set(variables) <= VARIABLES
    assert agent()["Umask"] == 0o077


# The container


def test_the_container_runs_a_command_that_exists_and_not_as_root() -> None:
    found = instructions()
    assert_is_a_command_of_memd(json.loads(found["CMD"][0]))
    assert found["USER"] == ["memd"] and any("useradd" in line and " memd" in line for line in found["RUN"])
    settings = dict(word.split("=", 1) for line in found["ENV"] for word in line.split())
    assert {name for name in settings if name.startswith("MEMD_")} <= VARIABLES
    assert found["VOLUME"] == [settings["MEMD_DATA_DIR"]]


def test_the_health_check_of_the_container_tells_a_running_daemon_from_none(serving: Serving) -> None:
    daemon = serving({"auth": {"token": "the-token-of-the-container"}})
    assert health(daemon, "the-token-of-the-container") == 0
    assert health(daemon, "another") != 0
    daemon.terminate()
    assert health(daemon, "the-token-of-the-container") != 0


def health(daemon: DaemonProcess, token: str) -> int:
    """The exit code of the Dockerfile's HEALTHCHECK, asked of the daemon's port."""
    told = instructions()["HEALTHCHECK"][0]
    program, *arguments = json.loads(told[told.index("[") :])
    assert program == "python" and ":8765/" in arguments[-1]
    arguments[-1] = arguments[-1].replace("127.0.0.1:8765", daemon.base_url.partition("//")[2])
    command = ["python3", *arguments]
    environment = {"MEMD_AUTH_TOKEN": token, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


def test_the_container_is_built_from_all_that_an_installation_needs() -> None:
    let_in = re.findall(r"^!(\S+)$", (PACKAGING / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    assert all((ROOT / name).exists() for name in let_in)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in ("pyproject.toml", project["readme"], *project["license-files"], "memd/cli/main.py"):
        assert name.partition("/")[0] in let_in, name


# Completion


@pytest.mark.process
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("memd ver", "verify"),
        ("memd check --li", "--live"),
        ("memd encrypt rek", "rekey"),
        ("memd doctor --vers", "--version"),
    ],
)
def test_bash_completes_commands_and_flags(typed: str, completed: str, tmp_path: Path) -> None:
    program = tmp_path / "memd"
    program.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -c "from memd.cli.main import main; main(prog_name=\'memd\')" "$@"\n'
    )
    program.chmod(0o755)
    script = (
        'eval "$(memd completion bash)"; '
        f"COMP_WORDS=({typed}); COMP_CWORD={len(typed.split()) - 1}; _memd_completion memd; "
        'echo "${COMPREPLY[*]}"'
    )
    environment = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [completed] and done.stderr == ""
