"""The command line: exit codes, one line for what goes wrong, no more imported than needed, and who hears the token."""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from conftest import MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, run_memd
from drafts import draft, open_store
from msgspec.structs import replace
from recording_upstream import RecordingUpstream, Request, Response, recording_upstream
from rich import box
from rich.console import Console
from rich.table import Table

from memd import __version__
from memd.cli.main import COMMANDS, FORMER, GROUPS, OTHERS_CALL_IT, main
from memd.cli.operations import fitting
from memd.cli.running import RunningDaemon
from memd.settings.loading import CONSTANTS_VARIABLE
from memd.store.disk import LocalDisk, Lock

ENTRIES = 2_000  # more than a pipe holds
CONTENT = "user: a sentence about bicycles, naïve cafés and 自行车"


def memd(*arguments: str | Path) -> Result:
    """Run a command within this process."""
    return CliRunner().invoke(main, [str(argument) for argument in arguments], prog_name="memd")


def one_line(result: Result) -> str:
    """What a failed command said on stderr, which must be one line of memd's own."""
    assert result.stdout == ""
    assert result.stderr.startswith("memd: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


@pytest.fixture(scope="module")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data directory with two topics."""
    folder = tmp_path_factory.mktemp("log")
    store = open_store(None, folder, segment_entries_max=100_000)
    store.topic("first").append([replace(draft(number), content=f"{CONTENT} {number}") for number in range(ENTRIES)])
    store.topic("second").append([draft(0)])
    store.close()
    return folder


@pytest.fixture
def damaged_dir(tmp_path: Path) -> Path:
    """A data directory in which a byte in the middle of a file has flipped."""
    store = open_store(None, tmp_path, segment_entries_max=100_000)
    store.topic("first").append([draft(number) for number in range(10)])
    store.topic("first").append([draft(number) for number in range(10)])
    store.close()
    path = tmp_path / "first" / "active.bin"
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)
    return tmp_path


# All commands


def test_the_version_is_the_package_s_and_the_help_has_commands_in_groups_with_at_most_ten_for_every_day() -> None:
    assert memd("--version").stdout == f"memd {__version__}\n"

    told = memd("--help").stdout
    assert re.findall(r"^([A-Z][a-z ]+):$", told, re.MULTILINE) == ["Options", *GROUPS]
    assert len(next(iter(GROUPS.values()))) <= 10 and sum(map(len, GROUPS.values())) == len(COMMANDS)
    assert all(name in told for name in main.list_commands())

    for named in ([], ["search"], ["token"], ["token", "add"]):
        shown = memd("help", *named)
        assert shown.exit_code == 0 and shown.stdout == memd(*named, "--help").stdout
    assert one_line(memd("help", "serv")) == "memd: there is no command 'serv'; did you mean serve?\n"


def test_a_command_s_help_begins_with_the_sentence_in_the_list_and_ends_with_an_example_that_can_be_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for name, (_, summary) in COMMANDS.items():
        command = main.get_command(None, name)
        assert command is not None and command.name == name
        assert (command.help or "").startswith(f"{summary}\n"), name
        [example] = re.findall(r"^ *Example: (?:.*-- )?memd (.+)$", command.help or "", re.MULTILINE)
        words = shlex.split(re.split(r" [|<>] ", example)[0])
        assert words[0] == name
        found: click.Command | None = main
        while isinstance(found, click.Group):
            named = words[0] if words and not words[0].startswith("-") else "state"  # `memd encrypt` alone
            context, found, words = click.Context(found), found.get_command(click.Context(found), named), words[1:]
        assert found is not None and found.make_context(name, words, parent=context), example


def test_memd_alone_says_what_runs_what_is_remembered_and_what_to_do_next(
    log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = memd()
    assert told.exit_code == 0 and "Nothing is stored yet." in told.output and "memd demo" in told.output
    assert f"No daemon runs on {tmp_path / 'memory'}." in told.output and not (tmp_path / "memory").exists()
    assert memd("--data-dir", log_dir).stdout.startswith(f"No daemon runs on {log_dir}.\nRemembered: ")
    refused = memd("--data-dir", log_dir, "log")
    assert refused.exit_code == 2 and "stand behind the command: memd log --data-dir DIR" in refused.stderr
    monkeypatch.setenv("MEMD_DATA_DIR", str(log_dir))
    told = memd()
    assert f"{ENTRIES + 1:,} chunks (first {ENTRIES:,}, second 1)" in told.output and "memd search" in told.output


@pytest.mark.process
def test_memd_without_a_token_offers_no_base_url_that_it_was_not_told(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = make_daemon(upstream.url, {"auth": {"token": "a" * 40}}).start()
    monkeypatch.setenv("MEMD_DATA_DIR", str(daemon.data_dir))
    told = memd().output
    assert "which wants a token: give its auth.token" in told and "/v1" not in told and "memd serve" not in told
    second = memd("serve", "--upstream", upstream.url)
    assert f"memd already runs on {daemon.data_dir} (pid " in second.stderr, second.stderr
    monkeypatch.setenv("MEMD_AUTH_TOKEN", "a" * 40)
    assert f"{daemon.base_url}/v1" in memd().output


@pytest.mark.process
def test_whoever_asks_hears_which_settings_a_running_daemon_does_not_know(
    served: DaemonProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (docs := tmp_path / "docs").mkdir()
    (docs / "keys.md").write_text("The spare keys are with Marta.")
    monkeypatch.setenv("MEMD_DATA_DIR", str(served.data_dir))
    monkeypatch.setenv("MEMD_CONFIG", str(served.config))
    known = memd("index")
    assert known.exit_code == 0 and not known.stderr, "its flags are no change"
    served.configure({"sources": [{"path": str(docs)}], "retrieval": {"min_score": 0.3}})
    told = "the running daemon has former settings, without the change of sources, retrieval.min_score"
    index = memd("index")
    assert index.exit_code == 1 and f"memd: {told}; start it again" in index.stderr and not index.stdout.strip()
    assert f"In trouble: {told}; start it again." in memd().output
    checks = json.loads(memd("check", "--json").stdout)["checks"]
    assert {"check": "daemon", "mark": "warning", "said": told, "remedy": "start it again"} in checks
    served.config.write_text("a: [")  # an editor has begun to write
    assert ask(f"{served.own_url}/memd/health").json["changed_settings"] == ["sources", "retrieval.min_score"]
    served.configure({"sources": [{"path": str(docs)}]})
    served.terminate()
    served.start()
    index = memd("index")
    assert index.exit_code == 0 and not index.stderr and "1 file; " in index.stdout


def test_former_commands_go_on_working_and_no_list_has_them(tmp_path: Path, log_dir: Path) -> None:
    assert memd("key", "new", tmp_path / "old").exit_code == memd("encrypt", "key", tmp_path / "new").exit_code == 0
    for former in (["encrypt", "on"], ["decrypt"], ["encrypt", "off"]):
        told = memd(*former, "--data-dir", log_dir)
        assert told.exit_code in (1, 2) and "there is no key" in told.stderr, told.output
    assert not FORMER.keys() & {*COMMANDS, *re.findall(r"^  (\w+)", memd("--help").stdout, re.MULTILINE)}


MISUSED = {
    "serv": "there is no command 'serv'; did you mean serve?",
    "xyzzy": "there is no command 'xyzzy'; `memd --help` lists them",
    "token ad": "there is no command 'ad'; did you mean add?",
    "--wrong": "there is no option --wrong; `memd --help` shows how",
    "serve --prot 1": "there is no option --prot; did you mean --port?",
    "erase --topic talk": "there is no option --topic; `memd erase --help` shows how",
    "encrypt --key-stdin": "there is no option --key-stdin here; `memd encrypt on --key-stdin` takes it",
    "encrypt --data": "there is no option --data here; `memd encrypt rekey --data` takes it",
    "correct 9ada --wrong": "there is no option --wrong; `memd correct --help` shows how",
    "serve --port 65536": "--port: '65536' is no whole number from 0 to 65,535",
    "turn --limit abc": "--limit: 'abc' is no whole number from 1 to 500",
    "search key --limit abc": "--limit: 'abc' is no whole number from 1 to 500",
    "search key --limit": "--limit needs a value: --limit VALUE",
    "stats --data-dir": "--data-dir needs a value: --data-dir VALUE",
    "turn --steps=yes": "--steps takes no value: write it alone",
    "stats --data-dir /etc/hosts": "--data-dir: '/etc/hosts' is a file; name a folder",
    "backup /etc/hosts": "DIR: '/etc/hosts' is a file; name a folder",
    "encrypt key /": "FILE: '/' is a folder; name a file",
    "encrypt rekey --new-key-file /": "--new-key-file: '/' is a folder; name a file",
    "serve --log-level loud": "--log-level: there is no 'loud'; there are debug, info, warning, error",
    "digest --by dya": "--by: there is no 'dya'; did you mean day?",
    "serve --model /does/not/exist.gguf": "--model: there is no file '/does/not/exist.gguf'; name one that there is",
    "show": "ID is missing; for example: memd show 9ada",
    "token add anna": "--topics is missing; `memd token add --help` shows how",
    "search which port": "'port' is more than it takes; what belongs together stands in quotes",
    "export surplus": "'surplus' is more than it takes; `memd export --help` shows how",
}


@pytest.mark.parametrize("arguments", MISUSED)
def test_wrong_usage_is_one_line_with_what_is_meant_and_exit_code_2(arguments: str) -> None:
    result = memd(*arguments.split())
    assert result.exit_code == 2 and one_line(result) == f"memd: {MISUSED[arguments]}\n"


ERASABLE = (
    "name what to erase: TOPIC, --chunk, --author, --source, --retention or --resume, one of them alone; --before "
    "belongs to TOPIC"
)
REFUSED = {
    "erase": ERASABLE,
    "erase --before 2026-01-01": ERASABLE,
    "erase --author ann --chunk a3f9": ERASABLE,
    "search key --from 2026-02-01 --to 2026-01-01": "--from is not before --to, so nothing can be between them",
    "log --before soon": "--before: 'soon' is no time; write it like 2026-11-20 or 2026-11-20T14:30",
}


@pytest.mark.process
def test_what_a_daemon_refuses_is_said_with_flags_in_place_of_the_parameters(served: DaemonProcess) -> None:
    for arguments, said in REFUSED.items():
        result = memd(*arguments.split(), "--data-dir", served.data_dir)
        assert result.exit_code == 2 and one_line(result) == f"memd: {said}\n"


def test_what_others_call_a_command_is_told_what_does_that_here() -> None:
    others = {name: way for way, names in OTHERS_CALL_IT.items() for name in names.split()}
    for other, way in others.items():
        named = re.findall("`memd ([a-z]+)", way)
        assert named and {*named} <= {*COMMANDS} and other not in COMMANDS
        assert one_line(memd(other)) == f"memd: there is no command '{other}'; {way} does that here\n"
    assert {"ls", "rm", "list", "forget", "delete", "start", "stop"} <= others.keys()
    assert "`memd sources --remove` (a document)" in others["remove"], "the other way is for good"


def test_a_model_and_an_upstream_exclude_each_other(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    result = memd("serve", "--model", model, "--upstream", "http://127.0.0.1:1")
    assert result.exit_code == 2
    assert "give either --model or --upstream" in result.stderr


NO_SUCH_SETTING = "{tmp}/config.yaml, line 2: there is no setting listen.prot; did you mean listen.port?\n"
WRONG = [
    *((f"{command} --config {{tmp}}/config.yaml", 2, NO_SUCH_SETTING) for command in ("serve", "verify", "export")),
    ("remember fact --config {tmp}/model.yaml", 2, "did you mean 'bundled'?"),
    ("remember fact --config {tmp}/path.yaml", 2, "there is no folder"),
    ("serve --upstream localhost:8080", 2, "memd: the command line: upstream.url is 'localhost:8080'"),
    *((f"{command} --data-dir {{tmp}}/nowhere", 2, "there is no such folder") for command in ("verify", "export")),
    (
        "verify {tmp}/nowhere",
        2,
        "{tmp}/nowhere: there is no such folder; name the folder that `memd backup` wrote to\n",
    ),
    ("export --data-dir {log} --topic ../first", 2, "is not a topic name"),
    ("export --data-dir {log} --output {tmp}", 1, "{tmp}"),
    pytest.param("export --data-dir {log} --output /dev/full", 1, "No space left", marks=pytest.mark.linux),
]


@pytest.mark.parametrize(("arguments", "code", "said"), WRONG)
def test_what_goes_wrong_is_one_line_and_an_exit_code(
    log_dir: Path, tmp_path: Path, arguments: str, code: int, said: str
) -> None:
    (tmp_path / "config.yaml").write_text("listen:\n  prot: 1\n")
    for name, model in (("model", "bundeld"), ("path", f"path:{tmp_path / 'none'}")):
        settings = {"data_dir": str(tmp_path / "memory"), "embedding": {"model": model}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(settings))
    result = memd(*arguments.format(tmp=tmp_path, log=log_dir).split())
    assert result.exit_code == code and said.format(tmp=tmp_path) in one_line(result)
    assert not (tmp_path / "nowhere").exists()


def test_settings_of_earlier_versions_are_one_line_of_a_command_and_a_line_each_of_check(
    log_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONSTANTS_VARIABLE, raising=False)
    config = tmp_path / "config.yaml"
    config.write_text(f"data_dir: {log_dir}\ninjection:\n  pressure_ratio: 0.7\n  freeze_seconds: 60\n")
    assert memd("stats", "--config", config).stderr == (
        f"memd: 2 settings have no effect any more, from {config}, line 3 on; `memd check` says why, and what to do\n"
    )
    checks = json.loads(memd("check", "--config", config, "--json").stdout)["checks"]
    told = {check["said"].split()[3]: check["remedy"] for check in checks if "no effect any more" in check["said"]}
    assert told == {"injection.pressure_ratio": "remove it", "injection.freeze_seconds": "remove it"}


SERVER = {"aiohttp", "onnxruntime", "tokenizers", "tiktoken", "memd.ingest", "memd.embedding", "memd.proxy"}
HELP = "from memd.cli.main import main; main(['--help'], standalone_mode=False)"


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "heavy"),
    [
        (HELP, {"aiohttp", "fastembed", "numpy", "onnxruntime", "tiktoken", "rich", "asyncio"}),
        ("import memd.cli.views", SERVER),  # memd search, turn, log, show
        ("import memd.daemon.app", {"markdown_it", "pathspec", "statistics", "rich", "fastembed"}),
    ],
    ids=["help", "views", "daemon"],
)
def test_no_more_is_imported_than_is_needed(program: str, heavy: set[str]) -> None:
    script = f"import sys; {program}; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not heavy & set(run.stdout.split())


# verify


def test_verify_of_a_damaged_log_is_exit_code_1_and_names_the_file(log_dir: Path, damaged_dir: Path) -> None:
    for folder, code in ((log_dir, 0), (damaged_dir, 1)):
        told, report = memd("verify", "--data-dir", folder), memd("verify", "--json", "--data-dir", folder)
        assert told.exit_code == report.exit_code == code and isinstance(json.loads(report.stdout), dict)
    assert "active.bin" in told.stdout


# export


def test_export_writes_a_json_object_per_entry_in_order(log_dir: Path) -> None:
    result = memd("export", "--data-dir", log_dir)
    assert result.exit_code == 0
    entries = [json.loads(line) for line in result.stdout_bytes.decode().splitlines()]
    assert len(entries) == ENTRIES + 1
    assert entries == sorted(entries, key=lambda entry: int(entry["canonical_id"]))
    assert entries[0]["content"] == f"{CONTENT} 0"


def test_export_replaces_a_file_only_by_force(log_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    output.write_text("old")
    refused = memd("export", "--data-dir", log_dir, "--output", output)
    assert refused.exit_code == 2 and output.read_text() == "old"
    assert one_line(refused).startswith(f"memd: {output}: is there already; name another file, or replace it with --f")
    result = memd("export", "--data-dir", log_dir, "--output", output, "--force")
    assert result.exit_code == 0 and result.stdout.startswith(f"{output}: {ENTRIES + 1:,} entries, ")
    assert len(output.read_text().splitlines()) == ENTRIES + 1
    assert list(tmp_path.iterdir()) == [output]


def test_export_into_a_device_does_not_replace_the_device(log_dir: Path) -> None:
    assert memd("export", "--data-dir", log_dir, "--output", os.devnull).exit_code == 0
    assert not Path(os.devnull).is_file()


@pytest.mark.process
def test_a_reader_that_has_seen_enough_ends_an_export_quietly(log_dir: Path) -> None:
    command = [sys.executable, "-m", "memd", "export", "--data-dir", str(log_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert json.loads(process.stdout.readline())["topic_id"] == "first"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0


def test_a_terminal_obeys_no_character_of_an_error(tmp_path: Path) -> None:
    refused = memd("verify", tmp_path / "gone\x07")
    assert refused.exit_code == 2 and "gone\\x07: there is no such folder" in refused.stderr


ON_A_MEMORY = [
    *("search x", "turn", "log", "correct 9ada --helpful", "undo 9ada", "show 9ada", "stats", "digest", "related 9ada"),
    *("entities", "usage", "backup to", "verify", "export", "encrypt", "encrypt on", "encrypt off", "erase work --yes"),
    *("encrypt rekey --new-key-stdin", "sources", "index", "reembed", "token list"),
    *("token rotate anna", "token revoke anna", "audit"),
]


@pytest.mark.parametrize("command", ON_A_MEMORY)
def test_a_command_that_reads_or_mends_a_memory_makes_none_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.chdir(tmp_path)
    other, typo = tmp_path / "other", tmp_path / "typo"
    for path in (other / "notes.md", other / "letters" / "ann.md", other / "films" / "segments" / "one.mp4"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("The spare key is with Ann.")
    before = sorted(tmp_path.rglob("*"))
    for folder in (other, typo):
        result = memd(*command.split(), "--data-dir", folder)
        why = "there is no such folder" if folder == typo else "is no memory: it has nothing of memd in it"
        assert result.exit_code == 2
        assert one_line(result).startswith(f"memd: {folder}: {why}; name a data directory (--data-dir)")
    assert memd("verify", other).exit_code == 2
    assert one_line(memd("move", typo, "postgresql://nobody@127.0.0.1:1/x")).startswith(f"memd: {typo}: there is no s")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_there_and_empty_is_an_empty_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / ".gitkeep").touch()  # as in a clone
    for command, code in (("", 0), ("stats", 0), ("search x", 1), ("log", 0)):
        told = memd(*command.split())
        assert told.exit_code == code and "Nothing is stored yet. What is said" in told.stdout, told.output
    for command in ("turn", "sources", "token list"):
        assert memd(*command.split()).exit_code == 0


def test_sources_of_the_settings_begin_a_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "moon.md").write_text("The moon base is at Tycho.")
    (tmp_path / "config.yaml").write_text("sources: [notes]\ndata_dir: kept")
    told = memd("index")
    assert told.exit_code == 0 and "1 file; 1 chunk written" in told.stdout and (tmp_path / "kept").is_dir()


# Terminals that are narrow, or whose encoding lacks characters

SAID = "Żółć: the “spare” key hangs behind the barometer… 気圧計"


def test_what_is_stored_is_shown_and_asked_for_where_the_terminal_or_the_locale_lacks_its_characters(
    served: DaemonProcess,
) -> None:
    served.chat([{"role": "user", "content": SAID}])
    served.wait_stored(SAID)
    for command in (["search", "spare key"], ["log"], ["turn"], ["digest"]):
        done = CliRunner(charset="latin-1").invoke(main, [*command, "--data-dir", str(served.data_dir)])
        assert done.exit_code == 0, done.output
        assert '?ó??: the "spare" key hangs' in done.stdout, done.stdout

    typed = SAID.encode().decode("ascii", errors="surrogateescape")
    where = ["--data-dir", str(served.data_dir)]
    found = CliRunner().invoke(main, ["search", typed, *where])
    assert SAID in found.stdout, found.output
    [chunk] = served.export()
    refused = CliRunner().invoke(main, ["correct", chunk["id"], "--helpful", "--reason", typed, *where])
    assert refused.exit_code == 2 and "PYTHONUTF8=1" in refused.stderr, refused.output


def test_what_stands_in_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    open_store(None, folder := tmp_path / "mine[bold]").close()
    told = CliRunner().invoke(main, ["stats", "--data-dir", str(folder)])
    assert told.exit_code == 0 and folder.name in told.stdout


@pytest.mark.parametrize("width", [200, 80, 60, 40, 18])
def test_no_cell_is_cut_on_a_narrow_terminal(width: int) -> None:
    ids = ["4054ebcf959a4014", "c3573531ecab40b5"]
    table = Table(box=box.SIMPLE_HEAD, title="/data", show_footer=True)
    table.add_column("id", "all", no_wrap=True)
    table.add_column("asked")
    for name in ("tokens", "ms"):
        table.add_column(name, "9,999", no_wrap=True, justify="right")
    for id_ in ids:
        table.add_row(id_, "Where does the spare key of the old house hang now?", "1,234", "21.9")
    console = Console(file=io.StringIO(), width=width)
    console.print(fitting(table, console))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert all(len(line) <= width for line in shown.splitlines())
    for word in [*ids, "spare", "hang", "1,234", "21.9", "9,999", "/data"]:
        assert word in shown.split() or f"{word}," in shown.split(), shown
    assert "…" not in shown


def test_the_columns_of_a_narrow_terminal_share_what_has_to_go() -> None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for name in ("memory", "asked"):
        table.add_column(name)
    table.add_row("HTTP 400, degraded: unreadable", "When does the ferry to the island leave on a Sunday, please?")
    console = Console(file=io.StringIO(), width=42)
    console.print(fitting(table, console))
    assert isinstance(console.file, io.StringIO) and len(console.file.getvalue().splitlines()) <= 5


# The token, which commands tell nobody but the daemon that has the data directory

TOKEN = "the token of this memory"


@pytest.fixture
def stranger() -> Iterator[RecordingUpstream]:
    """A server that is not memd, and all that it has been told."""
    with recording_upstream() as running:
        running.answers_all = True
        running.answer = lambda _: Response((b"{}",))
        yield running


@pytest.fixture
def guarded(serving: Serving) -> DaemonProcess:
    return serving({"auth": {"token": TOKEN}})


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A data directory whose lock is held."""
    lock: Lock = LocalDisk().lock(tmp_path / "memd.lock")
    yield tmp_path
    lock.release()


def run_beside(guarded: DaemonProcess, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run_memd(*arguments, "--data-dir", guarded.data_dir, "--config", guarded.config, **environment)


def test_an_address_that_was_left_behind_is_not_even_asked(guarded: DaemonProcess, stranger: RecordingUpstream) -> None:
    guarded.kill()
    assert (guarded.data_dir / "memd.url").exists() and (
        guarded.data_dir / "memd.secret"
    ).stat().st_mode & 0o777 == 0o600
    (guarded.data_dir / "memd.url").write_text(stranger.url)
    for command in (["stats"], ["check", "--upstream", "http://127.0.0.1:9"], ["log"]):
        run_beside(guarded, *command)
    assert stranger.requests == []


def test_the_daemon_is_found_whatever_proxy_there_is_and_a_stranger_at_its_address_never_hears_the_token(
    guarded: DaemonProcess, stranger: RecordingUpstream
) -> None:
    asked = run_beside(
        guarded, "stats", "--json", http_proxy=stranger.url, all_proxy=stranger.url, HTTP_PROXY=stranger.url
    )
    assert asked.returncode == 0 and f'"daemon_url":"{guarded.own_url}"' in asked.stdout
    assert stranger.requests == []

    config = guarded.folder / "other.yaml"
    config.write_text("auth: {token: some other token}\n")
    checked = guarded.run("check", "--config", str(config), "--upstream", "http://127.0.0.1:9")
    assert "does not know this token" in checked.stdout

    def pass_on(request: Request) -> Response:
        return Response((ask(guarded.own_url + request.target).body,))

    def lead(request: Request) -> Response:
        return Response((), 307, (("Location", guarded.own_url + request.target),))

    (guarded.data_dir / "memd.url").write_text(stranger.url)
    for answer in (stranger.answer, pass_on, lead):
        stranger.answer = answer
        heard = len(stranger.requests)
        refused = run_beside(guarded, "log")
        assert refused.returncode == 1 and "in use by another memd" in refused.stderr
        assert len(stranger.requests) == heard + 1 and TOKEN not in str(stranger.requests)


@pytest.mark.parametrize(
    "url", ["http://192.0.2.1:8766", "http://example.invalid:8766", "file:///etc/passwd", "http://127.0.0.1", "", "\0"]
)
def test_only_an_address_of_this_machine_is_asked(held: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("somebody is asked")

    monkeypatch.setattr("socket.create_connection", refuse)
    (held / "memd.url").write_text(url)
    (held / "memd.secret").write_text("0" * 64)
    assert RunningDaemon.find(held, TOKEN) is None


def test_a_proof_is_for_one_challenge_and_needs_one(guarded: DaemonProcess) -> None:
    first, second = (ask(f"{guarded.own_url}/memd/proof?challenge={digit * 64}") for digit in "ab")
    assert first.status == second.status == 200 and first.json != second.json
    assert ask(f"{guarded.own_url}/memd/proof?challenge=short").status == 400
    assert ask(f"{guarded.own_url}/memd/proof").status == 400
    assert guarded.terminate() == 0
    assert not {"memd.url", "memd.secret"} & {path.name for path in guarded.data_dir.iterdir()}
