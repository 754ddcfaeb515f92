"""What README.md, SECURITY.md and docs/ claim is so: each sentence stands in its page, and a program has tried it.

Rule: a claim is quoted as it is written, white space aside, beside what shows it; whoever changes one of the two is
told. What other test files show at length is tried here once, through the doors that users have.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeDaemon
from daemon_process import DaemonProcess, ask, user, wait_until
from recording_upstream import RecordingUpstream

from memd.conversation import tokens
from memd.conversation.hot_buffer import CORRECTABLE_TURNS
from memd.entries import HELPFUL_STEPS_MAX, UNHELPFUL_STEPS_MAX, UTILITY_RATIO
from memd.settings.model import Config
from memd.store.layout import AUDIT_NAME
from memd.store.log import segment
from memd.wire.message_cache import CACHE_BYTES_MAX
from memd.wire.registry import APIS
from memd.wire.sideband import INJECTED_HEADER_BYTES_MAX

ROOT = Path(__file__).parent.parent
FACT = "The vermilion walrus keeps the foghorn's spare key under the third granite step."
RIGHTS = ("--topics", "default", "--rights", "read,write")
SECRET = "sk-proj-aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3zA5bC7dE9fG1hJ3"


def claimed(page: str, *sentences: str) -> None:
    """These stand in the page."""
    text = " ".join((ROOT / page).read_text().split())
    for sentence in sentences:
        assert " ".join(sentence.split()) in text, f"{page} does not say {sentence!r} any more: what shows it, here?"


def files_with(folder: Path, text: bytes) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


def test_ports_addresses_and_bounds_that_pages_name_are_those_of_the_product() -> None:
    config = Config()
    claimed("SECURITY.md", "It listens on `127.0.0.1`.")
    claimed("README.md", 'baseURL: "http://127.0.0.1:8765/v1"', "`http://127.0.0.1:8766/memd/` shows each turn")
    assert (config.listen.host, config.listen.port, config.admin.port) == ("127.0.0.1", 8765, "auto")
    claimed("docs/protocol.md", "multiply or divide the score by 1.5, from 1.5⁻⁴", "to 1.5¹⁰", "at most 4 KB")
    assert (UTILITY_RATIO, UNHELPFUL_STEPS_MAX, HELPFUL_STEPS_MAX, INJECTED_HEADER_BYTES_MAX) == (1.5, 4, 10, 4096)
    claimed("docs/protocol.md", "was shown in the last 64 turns of the topic")
    assert CORRECTABLE_TURNS == 64
    claimed("docs/operations.md", "caches, at most 48 MB together: parsed messages, token counts, chunks")
    counts = tokens._COUNTS_BYTES_MAX + 2 * tokens._TEXTS_BYTES_MAX
    assert CACHE_BYTES_MAX + counts + segment.ENTRIES_READ.bytes_max <= 48_000_000


def test_what_the_readme_says_of_installing_and_of_apis_is_so() -> None:
    claimed("README.md", "Python 3.11 or later", "with OpenAI's, Anthropic's or Ollama's API", "make demo", "make test")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert {"chat", "responses", "messages", "ollama"} == {api.name for api in APIS}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {"demo", "test", "quick", "faults", "cluster"} <= targets
    for named in re.findall(r"`python (bench/\w+\.py)|`(bench/\w+\.py)", (ROOT / "README.md").read_text()):
        assert (ROOT / next(filter(None, named))).exists()


@pytest.mark.process
def test_elsewhere_memd_listens_with_a_token_alone_and_keeps_its_sum(tmp_path: Path) -> None:
    claimed(
        "SECURITY.md",
        "Elsewhere it refuses to listen without `auth.token` or other tokens",
        "Tokens are compared by their SHA-256",
    )
    daemon = DaemonProcess(tmp_path, "http://127.0.0.1:9", {"listen": {"host": "0.0.0.0"}})
    with pytest.raises(AssertionError, match=r"ended with 2[\s\S]*auth\.token"):
        daemon.start()
    daemon.discard()
    added = daemon.run("token", "add", "ann", *RIGHTS)
    assert added.returncode == 0, added.stderr
    [token] = re.findall(r"\S{40,}", added.stdout)
    assert files_with(daemon.data_dir, b"ann") and not files_with(daemon.data_dir, token.encode())


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Real-IP", "Via"])
@pytest.mark.process
def test_what_a_proxy_passed_on_has_no_memory_and_no_routes_of_memd(served: DaemonProcess, header: str) -> None:
    claimed(
        "SECURITY.md", "(`Forwarded`, `X-Forwarded-…`, `X-Real-IP`, `Via`) gets no memory and none of memd's own routes"
    )
    passed = {header: "for=192.0.2.1"}
    assert served.chat([user(FACT)], passed).headers["X-Memory-Status"] == "token-required"
    assert ask(f"{served.own_url}/memd/stats", headers=passed).status == 403


@pytest.mark.process
def test_files_are_its_users_alone_and_a_correction_leaves_what_an_erasure_takes(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    claimed(
        "SECURITY.md",
        "they are readable by you alone (0600, folders 0700)",
        "**Erased text** leaves every file",
        "a correction only takes it out of recall.",
        "It sends no statistics",
    )
    daemon = make_daemon(upstream.url, {"buffer": {"store_after_seconds": 0}}).start()
    daemon.chat([user(FACT)])
    daemon.wait_stored(FACT)
    modes = {path: path.stat().st_mode & 0o777 for path in (daemon.data_dir, *daemon.data_dir.rglob("*"))}
    assert {path: oct(mode) for path, mode in modes.items() if mode & 0o077} == {}
    [chunk] = [entry["id"] for entry in daemon.export() if entry["live"] and FACT in entry["content"]]
    body: dict[str, Any] = {"topic_id": "default", "chunk_ids": [chunk], "action": "Update", "reason": "It moved."}
    assert ask(f"{daemon.own_url}/memd/corrections", body).status == 200
    assert daemon.chat([user("Where is the spare key of the foghorn?")]).headers["X-Memory-Injected"] == ""
    assert files_with(daemon.data_dir, b"vermilion walrus")
    erased = daemon.run("erase", "default", "--chunk", chunk, "--yes")
    assert erased.returncode == 0, erased.stdout + erased.stderr
    assert files_with(daemon.data_dir, b"vermilion walrus") == []
    asked = {request.target.partition("?")[0] for request in upstream.requests}
    assert asked <= {"/v1/chat/completions", "/props", "/apply-template", "/v1/models", "/health"}, "and nobody else"


@pytest.mark.process
def test_with_a_key_files_are_encrypted_and_with_redaction_secrets_are_replaced(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, tmp_path: Path
) -> None:
    claimed(
        "SECURITY.md", "They are encrypted if you give a key", "with `ingest.redact: true`: keys, tokens, passwords"
    )
    key = tmp_path / "key"
    key.write_text(os.urandom(32).hex())
    key.chmod(0o600)
    daemon = make_daemon(upstream.url, {"encryption": {"key_file": str(key)}, "ingest": {"redact": True}}).start()
    daemon.chat([user(f"{FACT} The key of the API is {SECRET}.")])
    wait_until(
        lambda: "vermilion" in ask(f"{daemon.own_url}/memd/search?q=vermilion+walrus").body.decode(),
        lambda: repr(daemon),
    )
    assert SECRET not in ask(f"{daemon.own_url}/memd/search?q=vermilion+walrus").body.decode()
    assert daemon.terminate() == 0
    assert files_with(daemon.data_dir, b"vermilion") == []


@pytest.mark.process
def test_where_others_have_a_token_what_they_did_is_recorded_in_a_chain(
    make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    claimed("SECURITY.md", "memd records who did what, in lines that show when one is missing or was changed")
    daemon = make_daemon(upstream.url)
    added = daemon.run("token", "add", "ann", *RIGHTS)
    assert added.returncode == 0, added.stdout + added.stderr
    [token] = re.findall(r"\S{40,}", added.stdout)
    daemon.start()
    assert daemon.chat([user(FACT)], {"X-Memory-Token": token}).status == 200
    daemon.terminate()
    told = daemon.run("audit")
    assert told.returncode == 0 and "ann" in told.stdout, told.stdout + told.stderr
    [book] = [path for path in (daemon.data_dir / AUDIT_NAME).iterdir() if b"ann" in path.read_bytes()]
    book.write_bytes(book.read_bytes().replace(b"ann", b"bob", 1))
    assert daemon.run("audit", "--verify").returncode == 1
