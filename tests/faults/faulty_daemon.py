"""A daemon on a disk that fails: one life with one fault, and what is left of it on a healthy disk.

Rule: the judge knows only what was answered. A fact counts as acknowledged if its request was answered without saying
that memory is degraded; every such fact is found after the next start, whatever the disk did.

A life may begin on an old log (`OldLog`): one without what an earlier version had not beside it, the indexes and the
words of its segments, which the daemon then makes in the background.
"""

import errno
import http.client
import shutil
import struct
import subprocess
import urllib.error
import urllib.parse
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from daemon_process import Answer, DaemonProcess, ask, wait_until

from memd.store.audit import read_book
from memd.store.disk import LocalDisk
from memd.store.layout import is_derived

KINDS = ("write", "sync", "rename", "open", "read", "close", "truncate", "unlink")
"""In the order of `inject.c`."""
ENDS = 0
"""Instead of an error number: the process ends at the call."""
ERRORS = (errno.EIO, errno.ENOSPC, ENDS)
GONE = (urllib.error.URLError, http.client.HTTPException, ConnectionError)
"""Of a request whose process has ended."""
TURNS = 9
SETTINGS: dict[str, dict[str, Any]] = {
    "buffer": {"journal_fsync": "always", "store_after_seconds": 0, "idle_seconds": 1},
    "compaction": {"retry_seconds": 0.1},
    "segment": {"max_entries": 4},  # so that a life meets rotation and sealing too
    "audit": {"record": "always"},
}
THINGS = ("lighthouse", "crane", "ferry", "windmill", "foundry", "quarry", "granary", "smithy", "reservoir")


@dataclass(frozen=True)
class Fault:
    """The call that fails; without a kind none does."""

    kind: str = ""
    nth: int = 0
    error: int = errno.EIO
    lasts: bool = False
    """Every call from there on."""
    under: str = ""
    """Counted and failing are calls on files below this folder of the data directory alone."""

    def __str__(self) -> str:
        how = "ends the process" if self.error == ENDS else errno.errorcode[self.error]
        return f"{self.kind} {self.nth}{' and after' if self.lasts else ''}: {how}" if self.kind else "no fault"


@dataclass
class Life:
    """What a life with a fault has shown."""

    counts: dict[str, int] = field(default_factory=dict)
    """Calls of each kind below the data directory."""
    acknowledged: list[str] = field(default_factory=list)
    refused_start: bool = False
    complaints: list[str] = field(default_factory=list)


class OldLog(NamedTuple):
    """A data directory, and the words in it."""

    folder: Path
    words: tuple[str, ...]

    def put(self, data_dir: Path) -> None:
        """Copy it, without what can be made from its log."""
        shutil.copytree(self.folder, data_dir)
        for path in data_dir.rglob("*"):
            if is_derived(path.name):
                path.unlink()

    def is_complete(self, data_dir: Path) -> bool:
        """Whether all is there again; of a merged index its own words are enough, or those of its segments."""
        had, now = (
            {one.name for one in folder.rglob("*") if is_derived(one.name)} for folder in (self.folder, data_dir)
        )
        is_merged = any(name.startswith("merged") for name in now)
        return all(is_merged and name.endswith(".words") for name in had - now)


def compiled(folder: Path) -> Path:
    """The injector, compiled."""
    library = folder / "inject.so"
    source = Path(__file__).with_name("inject.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


def fact(number: int) -> tuple[str, str]:
    """A sentence, and the code word that stands in no other."""
    word = f"KESTREL{number}{number * 7919 % 10_000:04d}"
    return f"Please note: the code of the {THINGS[number % len(THINGS)]} is {word}, ask nobody else for it.", word


def environment(daemon: DaemonProcess, library: Path) -> dict[str, str]:
    """The variables with which a daemon runs on the disk that fails; which calls fail is told by further ones."""
    counts = daemon.folder / "counts"
    counts.write_bytes(bytes(8 * len(KINDS)))
    return {"LD_PRELOAD": str(library), "FAULT_FOLDER": str(daemon.data_dir), "FAULT_COUNTS": str(counts)}


def live(daemon: DaemonProcess, library: Path, fault: Fault, old: OldLog | None = None) -> Life:
    """One life on the failing disk, then one on a healthy one; what was not as promised is in `complaints`."""
    life = Life()
    if old is not None:
        old.put(daemon.data_dir)
        life.acknowledged += old.words
    daemon.environment = environment(daemon, library) | {
        "FAULT_FOLDER": str(daemon.data_dir / fault.under),
        "FAULT_CALL": fault.kind,
        "FAULT_NTH": str(fault.nth),
        "FAULT_TIMES": "0" if fault.lasts else "1",
        "FAULT_ERRNO": str(fault.error),
    }
    try:
        daemon.start()
    except (AssertionError, *GONE):  # it ends before it listens, or before it has said that it is ready
        life.refused_start = True
    said = [] if life.refused_start else list(_talk(daemon, life, fault) if old is None else _look(daemon, fault, old))
    if not life.refused_start and not daemon.has_ended:
        daemon.terminate()
    daemon.discard()
    life.counts = dict(
        zip(KINDS, struct.unpack(f"{len(KINDS)}L", (daemon.folder / "counts").read_bytes()), strict=True)
    )
    daemon.environment = {}
    _judge(daemon, life, said, old)
    if "Traceback" in daemon.log.read_text(errors="replace"):
        life.complaints.append("a traceback in what the daemon said")
    return life


def _talk(daemon: DaemonProcess, life: Life, fault: Fault) -> Iterator[dict[str, str]]:
    """Tell the facts in two chats; the messages of the second, in which every request sends all that was said."""
    history: list[dict[str, str]] = []
    try:
        for number in range(TURNS):
            text, word = fact(number)
            history.append({"role": "user", "content": text})
            yield history[-1]
            answer = daemon.chat(history)
            if answer.status != 200:
                life.complaints.append(f"a request was answered {answer.status}: {answer.body[:200]!r}")
            elif not answer.headers["X-Memory-Status"].startswith("degraded"):
                life.acknowledged.append(word)
            history.append({"role": "assistant", "content": "Noted."})
            yield history[-1]
        if not fault.lasts:
            wait_until(lambda: daemon.has_ended or _is_stored(daemon, life.acknowledged), lambda: repr(daemon))
    except GONE:
        if fault.error != ENDS:
            life.complaints.append("the daemon was gone")


def _look(daemon: DaemonProcess, fault: Fault, old: OldLog) -> Iterator[dict[str, str]]:
    """Ask for each word of the old log until it is whole again; nothing is said."""
    yield from ()
    with suppress(*GONE):
        for word in old.words:
            _found(daemon, word)
        if not fault.lasts:
            wait_until(lambda: daemon.has_ended or old.is_complete(daemon.data_dir), lambda: repr(daemon))


def _is_stored(daemon: DaemonProcess, words: list[str]) -> bool:
    text = "\n".join(daemon.said())
    return all(word in text for word in words)


def _judge(daemon: DaemonProcess, life: Life, said: list[dict[str, str]], old: OldLog | None) -> None:
    verified = daemon.run("verify")
    is_nothing = life.refused_start and not life.acknowledged and "is no memory" in verified.stderr
    if not (is_nothing or verified.returncode in (0, 1)) or "Traceback" in verified.stderr:
        life.complaints.append(f"memd verify: {verified.returncode}, {verified.stderr[-300:]}")
    daemon.start()
    lost = [word for word in life.acknowledged if word not in _found(daemon, word).body.decode()]
    if lost:
        life.complaints.append(f"lost: {', '.join(lost)}")
    question = {"role": "user", "content": "What did I tell you?"}
    while said and said[-1]["role"] == "user":
        said.pop()
    answer = daemon.chat([*said, question])
    if answer.status != 200 or answer.headers["X-Memory-Status"].startswith("degraded"):
        life.complaints.append(f"after the restart: {answer.status}, {answer.headers['X-Memory-Status']}")
    daemon.wait_stored(*life.acknowledged)
    if old is not None:
        wait_until(lambda: old.is_complete(daemon.data_dir), lambda: f"what was missing is not made: {daemon!r}")
    daemon.terminate()
    copies = [entry["content"] for entry in daemon.export() if entry["live"]]
    audit = read_book(LocalDisk(), daemon.data_dir, lambda _: False)
    if audit is None or audit.findings:
        life.complaints.append(f"the audit is not whole: {audit}")
    twice = [word for word in life.acknowledged if sum(word in text for text in copies) > 1]
    if twice:
        life.complaints.append(f"stored twice: {', '.join(twice)}")


def _found(daemon: DaemonProcess, word: str) -> Answer:
    """What a search for a word brings, out of the log or the journal."""
    return ask(f"{daemon.own_url}/memd/search?q={urllib.parse.quote(word)}")
