"""`memd check`: what is in order is said to be, what is not is named with its remedy, and nothing is changed."""

import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY, WINDOW, MakeDaemon, Serving
from daemon_process import ask, clean_environment, run_memd, wait_until
from full_disk import FullDisk
from llama_server import running_llama
from raw_wire import answer, raw_upstream
from recording_upstream import RecordingUpstream, Request, Response, chat_answer, recording_upstream
from reserved_port import reserved_port
from strict_llama import KEY, StrictLlama

from memd.assets import ranks_bytes
from memd.cli.check import CheckResult, machine, ok
from memd.cli.check import upstream as upstream_checks
from memd.cli.check.report import line, outcomes
from memd.cli.main import main
from memd.embedding.local import FINGERPRINT
from memd.entries import Draft
from memd.store.store import ModelId, Store, StoreShared

NOWHERE = "http://127.0.0.1:9"  # the discard port: nobody listens
UNTRUSTED = Path(__file__).parent / "support" / "untrusted.pem"
"""A certificate for 127.0.0.1 that nobody signed, and its key."""
CHECKS = (
    *("installation", "tokenizer", "settings", "access", "open files", "data directory", "lock", "log"),
    *("embedding model", "address", "upstream", "model", "exact counts", "placement"),
)


class Place:
    """A settings file and a data directory that `memd check` is run on."""

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.data_dir = folder / "memory"
        self.config = folder / "settings.yaml"
        given = {"listen": {"port": 0}, "upstream": {"url": NOWHERE}, "data_dir": str(self.data_dir), **settings}
        self.config.write_text(yaml.safe_dump(given))

    def check(self, *flags: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
        """The exit code, and the outcomes by their check."""
        command = ["check", "--json", "--config", str(self.config), *flags]
        done = CliRunner().invoke(main, command, env=dict.fromkeys(set(os.environ) - set(clean_environment())))
        report = json.loads(done.stdout)
        assert report["ok"] == (done.exit_code == 0)
        found: dict[str, list[dict[str, str]]] = {}
        for outcome in report["checks"]:
            found.setdefault(outcome["check"], []).append(outcome)
            assert outcome["mark"] == "ok" or outcome["remedy"], outcome
        return done.exit_code, found

    def failures(self, *flags: str, mark: str = "failed") -> dict[str, str]:
        """What failed: the check, and what is said about it and what to do."""
        code, found = self.check(*flags)
        told = [outcome for group in found.values() for outcome in group if outcome["mark"] == mark]
        assert code == (1 if told and mark == "failed" else 0)
        return {outcome["check"]: f"{outcome['said']} → {outcome['remedy']}" for outcome in told}

    def warnings(self) -> dict[str, str]:
        """The same for warnings."""
        return self.failures(mark="warning")


@pytest.fixture
def place(tmp_path: Path, llama: str) -> Place:
    """In front of the real llama.cpp, nothing stored yet."""
    return Place(tmp_path, {"upstream": {"url": llama}})


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder but the lexical index, which a daemon may be building from the log just now."""
    paths = (path for path in sorted(folder.rglob("*")) if "lexical" not in path.parts)
    return {str(path): path.read_bytes() if path.is_file() else None for path in paths}


def fill(data_dir: Path, fingerprint: str = FINGERPRINT, segment_entries_max: int = 100) -> None:
    """Put five entries into a log, as if a model with this fingerprint had embedded them."""
    store = Store(data_dir, StoreShared(model=ModelId(384, fingerprint), segment_entries_max=segment_entries_max))
    for number in range(5):
        vector = np.zeros(384, dtype="<f4")
        vector[number] = 1
        text = f"user: sentence {number} about bicycles"
        draft = Draft(uuid=os.urandom(16), content=text, vector=vector.tobytes(), created_at=1, roles=("user",))
        store.topic("default").append([draft])
    store.close()


def told(place: Place, disk: FullDisk | None = None) -> Iterator[CheckResult]:
    """The same within this process, where a fault can be injected."""
    return outcomes(place.config, {}, {}, live=False, files=disk)


# In order


def test_where_all_is_well_every_check_says_so_and_nothing_is_made(place: Place, tmp_path: Path) -> None:
    before = contents(tmp_path)
    code, found = place.check("--live")
    assert code == 0 and len(found.pop("live")) == 2 and tuple(found) == CHECKS
    assert {outcome["mark"] for told in found.values() for outcome in told} == {"ok"}
    assert found["model"][0]["said"] == f"tiny, window {WINDOW:,} tokens"
    assert re.fullmatch(r"memd \S+, Python \S+", found["installation"][0]["said"])
    assert contents(tmp_path) == before


def test_a_running_daemon_is_found_and_remembers_and_keeps_no_trace_of_it(
    make_daemon: MakeDaemon, llama: str, tmp_path: Path
) -> None:
    daemon = make_daemon(None, {"upstream": {"url": llama}}).start()
    daemon.chat([{"role": "user", "content": "The code of the gate is on the blue bicycle."}])
    [journal] = daemon.data_dir.rglob("hot.log")
    wait_until(lambda: b"marked" in journal.read_bytes(), lambda: repr(daemon))  # as stored, behind its entry
    assert len(daemon.export()) == 1
    before = contents(daemon.data_dir)
    done = daemon.run("check", "--live", "--json", "--config", str(daemon.config))
    report = json.loads(done.stdout)
    said = {outcome["check"]: outcome["said"] for outcome in report["checks"]}
    assert done.returncode == 0 and report["ok"] and daemon.base_url in said["address"]
    assert f"pid {daemon.pid}," in said["lock"] and "which answers" in said["lock"]
    live = [outcome for outcome in report["checks"] if outcome["check"] == "live"]
    marks = [outcome["mark"] for outcome in live]
    assert marks == ["ok", "warning", "ok"], "this model says the same to whatever it is shown"
    assert [line.partition(" …")[0].split()[1] for line in done.stderr.splitlines()] == ["asking", "telling", "holding"]
    assert daemon.base_url in live[0]["said"] and "its memory answers" in live[0]["said"]
    assert "the model was shown it" in live[1]["said"] and "was held" in live[2]["said"]

    port = int(daemon.base_url.rpartition(":")[2])
    found = Place(tmp_path, {"upstream": {"url": llama}, "listen": {"port": port}}).failures()
    assert set(found) == {"address"} and f"a memd that holds {daemon.data_dir}" in found["address"]
    found = Place(tmp_path, {"upstream": {"url": daemon.base_url}}).failures()
    assert set(found) == {"upstream"} and "in circles" in found["upstream"]
    place = Place(tmp_path, {"data_dir": str(daemon.data_dir)})  # it says that the upstream is nowhere
    code, of_daemon = place.check()
    assert code == 0 and of_daemon["upstream"][0]["said"] == f"{llama} answers", "that of the running daemon"
    assert "upstream" in place.failures("--upstream", NOWHERE)
    assert contents(daemon.data_dir) == before
    assert daemon.restart().run("verify").returncode == 0 and len(daemon.export()) == 1
    assert daemon.terminate() == 0
    assert "upstream" in place.failures() and place.check("--upstream", llama)[0] == 0


@pytest.mark.process
def test_a_person_gets_a_line_per_check_and_the_remedies_below(place: Place) -> None:
    place.config.write_text(f"upstream:\n  url: {NOWHERE}\nlisten:\n  port: 0\n")
    done = run_memd("check", "--config", place.config)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    at = next(number for number, text in enumerate(lines) if text.startswith("failed   upstream"))
    assert "does not answer: Connection refused" in lines[at]
    assert lines[at + 1].lstrip().startswith("→ start it there")
    assert lines[0] == "memd is not ready: 1 failed (upstream), 0 warnings"


def test_what_others_said_does_nothing_to_a_terminal() -> None:
    shown = line(ok("tiny\x1b[2J\nok       a line of its own", check="model"))
    assert "\\x1b[2J" in shown and "\n" not in shown


# The log and its folder


def test_a_full_disk_is_said_to_be_full(place: Place) -> None:
    place.data_dir.mkdir()
    disk = FullDisk()
    disk.full = True
    found = {outcome.check: outcome for outcome in told(place, disk)}
    assert found["data directory"].mark == "failed"
    assert "the disk is full" in found["data directory"].said and "free some space" in found["data directory"].remedy


@pytest.mark.parametrize("folder", ["read-only", "below a file"])
def test_a_directory_that_cannot_be_written_is_named(folder: str, tmp_path: Path, llama: str) -> None:
    if folder == "below a file":
        (tmp_path / "file").touch()
        where = tmp_path / "file" / "memory"
        named = f"{tmp_path / 'file'} is a file"
    elif os.geteuid() == 0 and sys.platform == "linux":  # whom permissions do not stop
        where, named = Path("/proc/memd"), "/proc: cannot be written"
    else:
        tmp_path.chmod(0o500)
        where, named = tmp_path / "memory", f"{tmp_path}: cannot be written"
    settings = {"upstream": {"url": llama}, "data_dir": str(where)}
    tmp_path.with_name(tmp_path.name + "-settings").mkdir()
    failures = Place(tmp_path.with_name(tmp_path.name + "-settings"), settings).failures()
    assert set(failures) == {"data directory"} and named in failures["data directory"]


@pytest.mark.process
def test_who_holds_the_lock_without_answering_is_named_once_a_start_would_be_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.data_dir.mkdir()
    program = (
        "import sys; from pathlib import Path; from memd.store.disk import LocalDisk; "
        "held = LocalDisk().lock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(place.data_dir / "memd.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with monkeypatch.context() as at_once:
            at_once.setattr("memd.cli.running.START_SECONDS_MAX", 0.0)
            assert place.failures()["lock"].startswith(f"held by a memd command or daemon (pid {holder.pid},")
            (place.data_dir / "memd.url").write_text("http://203.0.113.9:8766")
            failures = place.failures()
        assert failures.keys() == {"lock"}
        assert failures["lock"].startswith(f"held by a daemon at http://203.0.113.9:8766 (pid {holder.pid},")
        (place.data_dir / "memd.url").unlink()
        ended = (call() for call in (holder.kill, holder.wait))
        monkeypatch.setattr("memd.cli.running.time.sleep", lambda _: list(ended))
        assert "lock" not in place.failures() and holder.poll() is not None, "it was waited for"


# What is installed


MACHINE = "memd.cli.check.machine"
OTHER_VECTOR = (machine.KNOWN_VECTOR[0] + 2 * machine.TOLERANCE, *machine.KNOWN_VECTOR[1:])
FEWER_RANKS = b"\n".join(rank for rank in ranks_bytes().split(b"\n") if not rank.startswith(b"aGVsbG8= "))  # "hello"


@pytest.mark.parametrize(
    ("name", "value", "check", "mark", "said", "remedy"),
    [
        (f"{MACHINE}.KNOWN_VECTOR", OTHER_VECTOR, "embedding model", "failed", "", ""),
        (f"{MACHINE}.ranks_bytes", lambda: FEWER_RANKS, "tokenizer", "failed", "", ""),
        (f"{MACHINE}.descriptors_limit", lambda raised: 256, "open files", "warning", "room for 72 conn", "ulimit -n"),
        (f"{MACHINE}.READ_BYTES_MAX", 1_000, "log", "ok", "5 chunks", "memd verify"),
    ],
)
def test_what_is_not_as_it_should_be_is_told_and_nothing_else(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    value: object,
    check: str,
    mark: str,
    said: str,
    remedy: str,
) -> None:
    fill(place.data_dir)
    monkeypatch.setattr(name, value)
    [found] = [one for one in told(place) if one.mark != "ok" or (mark == "ok" and one.check == check)]
    assert (found.check, found.mark) == (check, mark)
    assert said in found.said and remedy in found.remedy


def test_a_model_that_is_not_here_is_not_fetched_nor_said_to_be_where_fastembed_is_missing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.config.write_text(f"{place.config.read_text()}embedding:\n  model: BAAI/bge-small-en-v1.5\n")
    failures = place.failures()
    assert set(failures) == {"embedding model"} and "not on this machine" in failures["embedding model"]
    assert "→ `memd serve` fetches it once" in failures["embedding model"]
    monkeypatch.setitem(sys.modules, "fastembed", None)
    failure = place.failures()["embedding model"]
    assert "pip install 'memd-proxy[fastembed]'" in failure.partition(" → ")[2] and "fetches" not in failure


# Settings and address


def test_a_wrong_setting_is_named_with_its_line_and_exit_code_1(place: Place) -> None:
    place.config.write_text("listen:\n  prot: 1\n")
    failures = place.failures()
    assert (
        failures["settings"] == f"{place.config}, line 2: there is no setting listen.prot → did you mean listen.port?"
    )
    assert set(failures) == {"settings", "the rest"}


def test_a_port_that_something_else_uses_is_named(tmp_path: Path, llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memd.cli.running.GLANCE_SECONDS_MAX", 0.2)  # it takes the question, and never answers
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = Place(tmp_path, {"upstream": {"url": llama}, "listen": {"port": port}}).failures()
    assert set(found) == {"address"} and f"cannot listen on 127.0.0.1:{port}" in found["address"]


def test_a_token_that_others_may_read_or_guess_is_a_warning(tmp_path: Path, llama: str) -> None:
    for token, host, mode, said in (
        ("a" * 40, "127.0.0.1", 0o644, f"chmod 600 {tmp_path / 'settings.yaml'}"),
        ("a" * 40, "127.0.0.1", 0o600, ""),
        ("short", "127.0.0.1", 0o600, "only this machine, but auth.token has only 5 characters"),
        ("a", "0.0.0.0", 0o600, "only 1 character"),
    ):
        listen = {"host": host, "port": 0}
        place = Place(tmp_path, {"upstream": {"url": llama}, "auth": {"token": token}, "listen": listen})
        place.config.chmod(mode)
        warned = place.warnings()
        assert said in warned["access"] if said else warned == {}


@pytest.mark.parametrize("auth", [{}, {"token": "a" * 40}], ids=["people", "owner and people"])
def test_a_token_of_memd_token_is_needed_as_one_of_the_settings_is(tmp_path: Path, auth: dict[str, str]) -> None:
    place = Place(tmp_path, {"auth": auth})
    place.config.chmod(0o600)
    [open_] = place.check()[1]["access"]
    assert open_["said"] == "only this machine, " + ("with auth.token" if auth else "without a token")
    added = ["token", "add", "ann", "--topics", "a", "--rights", "read", "--config", str(place.config)]
    assert CliRunner().invoke(main, added).exit_code == 0
    [closed] = place.check()[1]["access"]
    assert closed["said"] == "only this machine, with a token (`memd token list` shows whose)"


def test_a_daemon_with_another_token_is_not_taken_for_none(serving: Serving) -> None:
    daemon = serving({"auth": {"token": "a" * 15}})
    wait_until(
        lambda: "auth.token has only 15 characters: take a longer one" in daemon.log.read_text(), daemon.__repr__
    )
    remedy = "give its auth.token, or one of `memd token add`, as MEMD_AUTH_TOKEN or in the settings (--config)"
    found = {one["check"]: one for one in json.loads(daemon.run("check", "--json").stdout)["checks"]}
    assert found["lock"]["mark"] == "failed" and found["lock"]["remedy"] == remedy
    assert daemon.own_url in found["address"]["said"] and "listens at" not in found["address"]["said"]
    assert "which wants a token" in found["lock"]["said"]  # and not: which does not know this one, as none was shown
    assert f"the daemon at {daemon.own_url}, which wants a token" in daemon.run("stats").stdout
    refused = daemon.run("log")
    assert refused.returncode == 1
    assert refused.stderr == f"memd: the daemon at {daemon.own_url} wants a token; {remedy}\n"


GERMAN = (
    "Die Werkstatt öffnet um neun Uhr und schließt am Abend um sechs.",
    "Der Schlüssel für den Keller hängt hinter der blauen Tür im Flur.",
    "Wir haben gestern beschlossen, dass die Rechnungen am Montag verschickt werden.",
    "Das Lager ist im Winter nicht geheizt, deshalb stehen die Farben im Büro.",
)


def test_a_memory_in_a_language_that_the_model_does_not_know_is_told(serving: Serving) -> None:
    daemon = serving()
    told = "in German, and the bundled model knows English: by meaning it finds little"

    def remember(texts: Sequence[str]) -> None:
        notes = [{"content": f"{text} ({number})"} for number, text in enumerate(texts)]
        assert ask(f"{daemon.own_url}/memd/notes", {"notes": notes}).status == 200

    remember(["The workshop opens at nine in the morning and it closes at six."] * 20)
    daemon.wait_stored("(19)")
    assert told not in daemon.run("check").stdout
    remember(GERMAN * 6)
    daemon.wait_stored("Büro. (23)")
    found = [one for one in json.loads(daemon.run("check", "--json").stdout)["checks"] if told in one["said"]]
    assert [one["mark"] for one in found] == ["warning"]
    assert found[0]["remedy"].startswith("run `memd model add multilingual`, set embedding.model: multilingual")
    assert told not in daemon.log.read_text()
    assert daemon.terminate() == 0
    daemon.start()
    daemon.run("search", "Wann öffnet die Werkstatt?")
    assert daemon.log.read_text().count(told) == 1


# The model server


def test_a_server_that_does_not_answer_fails_and_the_rest_is_still_checked(tmp_path: Path) -> None:
    failures = Place(tmp_path, {}).failures("--live")
    assert set(failures) == {"upstream", "live"}
    assert f"{NOWHERE} does not answer" in failures["upstream"] and "upstream.url" in failures["upstream"]


def test_each_of_several_servers_has_a_line_and_one_that_is_away_is_a_warning(tmp_path: Path, llama: str) -> None:
    with recording_upstream(window=2048) as other:
        other.answer = lambda _: Response((b'{"data": [{"id": "recorded"}]}',))
        place = Place(tmp_path, {"upstream": {"urls": [llama, NOWHERE, other.url]}})
        code, found = place.check()
        told = {outcome["said"]: outcome for outcome in found["upstream"]}
        assert code == 0 and f"{llama} answers: tiny, window {WINDOW:,} tokens" in told
        assert f"{other.url} answers: recorded, window 2,048 tokens" in told
        assert [one["mark"] for one in found["upstream"]] == ["ok", "warning", "ok"]
        assert f"{NOWHERE} does not answer" in place.warnings()["upstream"]
        [differ] = found["model"]
        assert "lists tiny" in differ["said"] and "lists recorded" in differ["said"] and "--alias" in differ["remedy"]
    failures = Place(tmp_path, {"upstream": {"urls": [NOWHERE, "http://127.0.0.1:7"]}}).failures()
    assert set(failures) == {"upstream"}, "none answers"


def test_memd_s_own_address_as_upstream_is_recognised_before_it_runs(tmp_path: Path) -> None:
    with reserved_port() as port:
        settings = {"listen": {"port": port}, "upstream": {"url": f"http://localhost:{port}/v1"}}
        assert "in circles" in Place(tmp_path, settings).failures()["upstream"]


@pytest.mark.parametrize("page", [b"", b"<html>an app that answers everything</html>", b'{"error": {"code": 404}}'])
def test_a_wrong_path_in_the_address_is_found_out(tmp_path: Path, page: bytes) -> None:
    with raw_upstream(props=page) as upstream:
        status = b"200 OK" if page.startswith(b"<") else b"404 Not Found"
        upstream.script = lambda peer: peer.send(answer(page, status=status))
        failures = Place(tmp_path, {"upstream": {"url": upstream.url + "/api"}}).failures("--live")
    assert set(failures) == {"upstream", "live"}
    assert "/api answers, but" in failures["upstream"] and "upstream.url" in failures["upstream"]


def test_a_certificate_that_is_not_trusted_is_named_with_the_remedy(
    tmp_path: Path, make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(UNTRUSTED)
    with raw_upstream(tls=tls) as upstream:
        failed = Place(tmp_path, {"upstream": {"url": upstream.url}}).failures()["upstream"]
        memd = make_daemon(upstream.url).start()
        refused = ask(memd.base_url + "/v1/models")
        trusting = make_daemon(upstream.url)
        trusting.environment = {"SSL_CERT_FILE": str(UNTRUSTED)}
        trusting.start()
        assert ask(trusting.base_url + "/v1/models").status == 200
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "gone.pem"))
        gone = Place(tmp_path, {"upstream": {"url": upstream.url}}).failures()["upstream"]
    assert "→ name the file of its certificate" in failed and "start it there" not in failed
    assert gone.endswith(f"SSL_CERT_FILE: {tmp_path / 'gone.pem'} is not there")
    for told in (failed, refused.json["error"]["message"], memd.log.read_text()):
        assert "certificate is not trusted (self-signed certificate)" in told
        assert "SSL_CERT_FILE" in told


def test_a_server_that_hides_its_window_is_a_warning_unless_the_settings_have_it(tmp_path: Path) -> None:
    with recording_upstream(window=None) as upstream:
        place = Place(tmp_path, {"upstream": {"url": upstream.url}})
        assert "nothing leaves the prompt until it is known → set upstream.window" in place.warnings()["model"]
        code, found = Place(tmp_path, {"upstream": {"url": upstream.url, "window": 9000}}).check()
        assert code == 0 and found["model"][0]["said"].endswith("window 9,000 tokens (upstream.window)")
        assert found["exact counts"][0]["remedy"] == "", "it is no llama-server, of which there could be a newer one"


def test_a_server_that_wants_a_key_or_refuses_one_is_said_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with recording_upstream(window=None) as upstream:
        upstream.answer = lambda _: Response((b'{"error": {"message": "Invalid API Key"}}',), status=401)
        code, found = Place(tmp_path, {"upstream": {"url": upstream.url}}).check("--live")
        wrong = Place(tmp_path, {"upstream": {"url": upstream.url, "api_key": "not-this-one"}}).check("--live")[1]
        url = upstream.url.replace("http://", "http://me:wrong@")
        password = Place(tmp_path, {"upstream": {"url": url}}).warnings()["model"]
    assert code == 0
    assert "wants a key" in found["model"][0]["said"] and found["live"][0]["mark"] == "warning"
    assert all("MEMD_UPSTREAM_API_KEY" in found[check][0]["remedy"] for check in ("model", "live"))
    for outcome in (wrong["model"][0], wrong["live"][0]):
        assert outcome["mark"] == "warning" and "refuses the key in upstream.api_key" in outcome["said"]
    assert "refuses the user and password in upstream.url" in password and "wrong@" not in password
    assert capsys.readouterr().err == "", "the log of its own daemon is not for people"


def test_a_window_that_only_the_running_daemon_knows_is_told(make_daemon: MakeDaemon) -> None:
    with recording_upstream(answer=StrictLlama(8192, told="key")) as upstream:
        daemon = make_daemon(upstream.url).start()
        before = json.loads(daemon.run("check", "--json", "--config", str(daemon.config)).stdout)
        daemon.chat([{"role": "user", "content": "Hello"}], {"Authorization": f"Bearer {KEY}"})
        after = json.loads(daemon.run("check", "--json", "--config", str(daemon.config)).stdout)
    [unknown] = [outcome for outcome in before["checks"] if outcome["check"] == "model"]
    [known] = [outcome for outcome in after["checks"] if outcome["check"] == "model"]
    assert unknown["mark"] == "warning" and known["mark"] == "ok"
    assert known["said"].endswith("window 8,192 tokens (as the running daemon knows)")


@pytest.mark.llama
def test_a_model_without_a_chat_template_is_told_at_the_start_and_by_check(
    tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    from tiny_model import write_scripted_model

    model = tmp_path / "base.gguf"
    write_scripted_model(model, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY, template="")
    with running_llama(model, context=WINDOW, log=tmp_path / "llama.log") as url:
        found = Place(tmp_path, {"upstream": {"url": url}}).check()[1]["model"]
        daemon = make_daemon(url).start()
        told = daemon.run("check", "--live", "--config", str(daemon.config)).stdout
    assert (
        found[1]["mark"] == "warning"
        and "has no chat template" in found[1]["said"]
        and "Instruct" in found[1]["remedy"]
    )
    assert "has no chat template" in told and "has no chat template" in daemon.log.read_text()


# A conversation with the model


def refusing(part: bytes, message: str, status: int) -> Callable[[Request], Response]:
    def answer(request: Request) -> Response:
        refusal = Response((json.dumps({"error": {"message": message}}).encode(),), status=status)
        return refusal if part in request.body else chat_answer(request)

    return answer


ROLES, JINJA = "Only user and assistant roles!", "tools param requires --jinja flag"


@pytest.mark.parametrize(
    ("answer", "line", "mark", "said", "remedy"),
    [
        (lambda request: chat_answer(request, "It is heron-4519."), 0, "ok", ("answered with it",), ""),
        (lambda request: chat_answer(request, "I do not know."), 0, "warning", ("('I do not know.')",), "instruct"),
        (refusing(b'"tool_call_id"', ROLES, 400), 1, "failed", ("was not held (window 4,096; 1 s", ROLES), "template"),
        (refusing(b'"tools"', JINJA, 500), 1, "warning", (JINJA,), "--jinja"),
    ],
    ids=["uses it", "does not", "takes no results", "takes no tools"],
)
def test_live_says_what_a_model_and_its_server_cannot_do_and_what_helps(
    tmp_path: Path,
    upstream: RecordingUpstream,
    answer: Callable[[Request], Response],
    line: int,
    mark: str,
    said: tuple[str, ...],
    remedy: str,
) -> None:
    upstream.answer = answer
    code, found = Place(tmp_path, {"upstream": {"url": upstream.url}}).check("--live")
    assert code == (mark == "failed") and found["live"][line]["mark"] == mark
    assert {check for check, told in found.items() if mark in {one["mark"] for one in told}} >= {"live"}
    assert all(words in found["live"][line]["said"] for words in said) and remedy in found["live"][line]["remedy"]


@pytest.mark.llama
def test_live_holds_a_tool_loop_longer_than_the_models_window(tmp_path: Path, calling_gguf: Path) -> None:
    with running_llama(calling_gguf, context=3072, log=tmp_path / "llama.log") as url:
        code, found = Place(tmp_path, {"upstream": {"url": url}}).check("--live")
    assert code == 0 and found["live"][1]["mark"] == "ok", found["live"]
    assert "was held (window 3,072;" in found["live"][1]["said"]


def test_live_ends_a_loop_of_a_slow_model_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream_checks, "LOOP_SECONDS_MAX", 0.0)
    with recording_upstream() as upstream:
        upstream.answer, upstream.answers_all = StrictLlama(4000), True
        code, found = Place(tmp_path, {"upstream": {"url": upstream.url}}).check("--live")
    assert code == 0 and "the model is slow" in found["live"][1]["said"] and found["live"][1]["mark"] == "warning"


def test_recorded_requests_are_held_against_the_rules_for_programs(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "Which port has the exporter?"}
    aider = {"role": "user", "content": "I didn't see any properly formatted edits in your reply?!"}
    side = {"role": "system", "content": "You are a title generator. You output ONLY a thread title. Nothing else."}
    lines = (
        {"def": "asked", "v": asked},
        {"path": "/v1/chat/completions", "body": {"messages": [aider, {"$ref": "asked"}]}},
        {"messages": [side, asked]},
        {"path": "/v1/embeddings", "body": {"input": "x"}},
    )
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text("\n".join(map(json.dumps, lines)))
    told = CliRunner().invoke(main, ["check", "--traffic", str(recorded)])
    assert told.exit_code == 0
    first, *rules = told.stdout.splitlines()
    assert first == "2 requests: 1 that a program makes for itself and memory leaves alone"
    assert any(one.startswith("message") and "aider" in one for one in rules)
    assert any(one.startswith("ignore_system") and "opencode" in one for one in rules)
    assert rules[-2:] == ["1 text taken for a user's speech:", f"{1:>19}  {asked['content']}"]
    for text in ("no request", f'{{"messages":{"[" * 100_000}{"]" * 100_000}}}'):
        recorded.write_text(f"{text}\n")
        wrong = CliRunner().invoke(main, ["check", "--traffic", str(recorded)])
        assert wrong.exit_code == 1 and "line 1 is no recorded request" in wrong.output


# Folders in `sources`


def test_a_source_is_told_with_its_files_its_topic_and_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docs = tmp_path / "docs"
    (docs / "build").mkdir(parents=True)
    for name in ("a.md", "b.md", "build/c.md", "picture.png"):
        (docs / name).write_text("text")

    def of_sources(*sources: object) -> list[CheckResult]:
        return [one for one in told(Place(tmp_path, {"sources": list(sources)})) if one.check == "sources"]

    assert of_sources() == []
    [one] = of_sources({"path": str(docs), "topic": "auto", "exclude": ["build"]})
    assert (one.mark, one.said) == ("ok", f"{docs}: 2 files for topic docs")
    missing, useless = of_sources(str(tmp_path / "gone"), {"path": str(docs), "formats": ["pdf"]})
    assert missing.mark == useless.mark == "warning"
    assert missing.said.startswith(f"{tmp_path}/gone cannot be read (No such file or directory); ")
    assert useless.said == f"{docs}: 0 files for topic default" and "formats" in useless.remedy
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda path, _: not str(path).endswith("b.md"))  # root may read everything
        [one] = of_sources(str(docs))
    assert one.mark == "warning" and one.said.endswith("; 1 path in it cannot be read: b.md (no right to read it)")
    monkeypatch.setattr(machine, "FILES_COUNTED_MAX", 2)
    [one] = of_sources(str(docs))
    assert (one.mark, one.said) == ("ok", f"{docs}: more than 2 files for topic default")


# Files that are not their user's alone


@pytest.fixture(autouse=True)
def generous() -> Iterator[None]:
    """The umask that most systems have."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    return [str(path) for path in (folder, *folder.rglob("*")) if path.stat().st_mode & 0o077]


def test_files_and_backups_are_their_user_s_alone_and_check_warns_of_older_ones_with_what_fixes_them(
    serving: Serving, tmp_path: Path
) -> None:
    def warnings() -> list[str]:
        found = json.loads(filled.run("check", "--json", "--config", str(filled.config)).stdout)["checks"]
        return [one["remedy"] for one in found if one["mark"] == "warning" and "other users" in one["said"]]

    filled, backup = serving({"segment": {"max_entries": 2}}), tmp_path / "backup"
    filled.tell(*(f"The code of locker {number} is {number * 37}." for number in range(5)))
    for _ in range(2):  # the second one replaces files
        assert filled.run("backup", str(backup)).returncode == 0
    assert filled.terminate() == 0
    written = [path.name for path in filled.data_dir.rglob("*")]
    kinds = (".bin", ".meta", "hot.log", "memd.lock", "memd.receipts", ".words")
    assert [kind for kind in kinds if not any(name.endswith(kind) for name in written)] == []
    assert list(backup.rglob("*.meta"))
    assert open_to_others(filled.data_dir) == open_to_others(backup) == warnings() == []
    (filled.data_dir / "default" / "hot.log").chmod(0o644)
    [remedy] = warnings()
    filled.data_dir.chmod(0o755)
    assert warnings() == [remedy]
    subprocess.run(remedy, shell=True, check=True)
    assert warnings() == [] and open_to_others(filled.data_dir) == []


def test_a_folder_without_a_memory_becomes_private_when_the_first_daemon_begins_in_it(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    daemon = make_daemon(upstream.url)
    daemon.data_dir.mkdir(0o755)
    (daemon.data_dir / ".gitkeep").touch(0o644)
    assert "other users" not in daemon.run("check", "--config", str(daemon.config)).stdout
    daemon.start()
    assert daemon.data_dir.stat().st_mode & 0o777 == 0o700
    assert "other users" not in daemon.run("check", "--config", str(daemon.config)).stdout
