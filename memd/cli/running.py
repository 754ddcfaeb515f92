"""The daemon that a command asks: the running one, or one inside the command; and the audit of commands that need none.

Rule: a command reveals nothing to a process that does not hold the data directory. It checks the lock first. Then the
listener at the address in `memd.url`, which must be on this machine, has to prove that it has the directory
(admin/tokens.py); only then it receives the token. Proxies and redirects are not followed. A daemon inside a command is
an ordinary one, in a thread, on a free local port, so that commands ask in only one way. A command that reads or
changes files itself does nothing before the audit has its first line.
"""

from __future__ import annotations

import http.client
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from hmac import compare_digest
from pathlib import Path
from typing import Any

import click
import msgspec

from memd import errors
from memd.admin.routing import ALL_TOPICS, Answer, Listed, as_given, encoded, route_of
from memd.admin.tokens import PROOF, Proof, command_token, new_secret, proof_of, user_name
from memd.cli.flags import name_of, note_memory, say
from memd.errors import BadQuestion, DaemonError, StoreError, StoreLocked
from memd.principals import TOKEN_HEADER
from memd.settings.model import AdminSettings, Config, ListenSettings
from memd.store.audit import Act, ActKind, AuditBook, not_done, read_book
from memd.store.disk import LocalDisk
from memd.store.layout import ADDRESS_NAME, LOCK_NAME, SECRET_NAME
from memd.store.tools.backup import MARKER_NAME
from memd.telemetry.logging import configure_logging
from memd.wording import outdated

ANSWER_SECONDS_MAX = 60.0
OK, BAD_REQUEST, WANTS_TOKEN = 200, 400, 401
THE_RIGHT_ONE = "give its auth.token, or one of `memd token add`, as MEMD_AUTH_TOKEN or in the settings (--config)"
GLANCE_SECONDS_MAX = 5.0
START_SECONDS_MAX = 5.0
"""Time that a command waits for a daemon that holds the folder and does not answer, because it starts or ends."""
START_GLANCES_SECONDS = 0.1


class RunningDaemon:
    """The daemon that holds a data directory, over its own routes. Use `find` to get one."""

    def __init__(self, url: str, token: str, command_token: str = "") -> None:
        """`command_token`: sent if there is no token; empty: no token is sent."""
        self.url = url
        self._token = token
        self._command_token = command_token

    @property
    def refusal(self) -> str:
        """The reason, with the daemon as its subject, why a request without the right token was refused."""
        return "does not know this token" if self._token else "wants a token"

    def ask(
        self,
        operation: Callable[..., Awaitable[Answer]],
        id_: str = "",
        body: object = None,
        seconds: float = ANSWER_SECONDS_MAX,
        **query: Any,
    ) -> Answer:
        """See `admin.routing.AskedDaemon`. `seconds`: timeout."""
        route = route_of(operation)
        path = route.path.replace("{id}", urllib.parse.quote(id_, safe=""))
        if given := list(as_given(query).items()):
            path += f"?{urllib.parse.urlencode(given, errors='surrogateescape')}"  # bytes as the terminal gave them
        answer: Answer = msgspec.json.decode(self.answer(path, body, seconds), type=route.answer)
        if isinstance(answer, Listed) and answer.note:
            say(answer.note)
        return answer

    def answer(self, path: str, body: object = None, seconds: float = ANSWER_SECONDS_MAX) -> bytes:
        """Return the body of the answer to a GET, or to a POST if there is a body. Raises BadQuestion: the request is
        wrong; DaemonError: the daemon refused, or does not answer."""
        token, content = self._token or self._command_token, None if body is None else encoded(body)
        headers = {TOKEN_HEADER: token} if token else {}
        headers |= {} if body is None else {"Content-Type": "application/json"}
        parts = urllib.parse.urlsplit(self.url)
        made: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
        if parts.scheme == "https":
            made = partial(http.client.HTTPSConnection, context=unchecked_tls())
        try:
            with closing(made(parts.netloc, timeout=seconds)) as connection:
                connection.request("GET" if body is None else "POST", path, content, headers)
                answer = connection.getresponse()
                told = answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise DaemonError(f"the daemon at {self.url} does not answer: {error}; see its log") from None
        if answer.status == WANTS_TOKEN:
            raise errors.RightMissing(f"the daemon at {self.url} {self.refusal}; {THE_RIGHT_ONE}")
        if answer.status != OK:
            message, kind = _error(told)
            refused: type[errors.MemdError] = BadQuestion if answer.status == BAD_REQUEST else DaemonError
            kinds = {errors.UnknownTopic.kind: errors.UnknownTopic, errors.Forbidden.kind: errors.RightMissing}
            raise kinds.get(kind, refused)(_with_flags(message) or f"the daemon at {self.url} answers {answer.status}")
        return told

    @classmethod
    def find(cls, data_dir: Path, token: str) -> RunningDaemon | None:
        """Return the daemon that holds `data_dir`; None if there is none or it cannot prove it."""
        if not LocalDisk().is_locked(data_dir / LOCK_NAME):
            return None  # its files are left over, or forged
        try:
            url, secret = ((data_dir / name).read_text() for name in (ADDRESS_NAME, SECRET_NAME))
        except (OSError, ValueError):
            return None
        if not _is_on_this_machine(url):
            return None
        challenge = new_secret()
        told = cls(url, "")._glance(f"{PROOF}?challenge={challenge}", Proof) or Proof("")
        proves = compare_digest(told.proof.encode(), proof_of(secret, url, challenge).encode())
        return cls(url, token, command_token(secret)) if proves else None

    def health(self) -> dict[str, Any]:
        """Return its health: `version`, `data_dir` and more; empty if no memd answers."""
        return self._glance("/memd/health", dict[str, Any]) or {}

    def _glance(self, path: str, kind: type[Answer]) -> Answer | None:
        """Return the answer to a request; None if no memd answers."""
        try:
            return msgspec.json.decode(self.answer(path, seconds=GLANCE_SECONDS_MAX), type=kind)
        except (ValueError, msgspec.MsgspecError, BadQuestion, DaemonError):
            return None

    @property
    def model_url(self) -> str:
        """Address at which programs on this machine reach the model through this daemon; empty if this client may not
        know it."""
        own, told = urllib.parse.urlsplit(self.url), self.health().get("model_url", "")
        return f"{own.scheme}://{own.netloc.rpartition(':')[0]}:{urllib.parse.urlsplit(told).port}" if told else ""


def _error(body: bytes) -> tuple[str, str]:
    """Return the message and the type of an error; empty if the body is not an error."""
    try:
        error = msgspec.json.decode(body, type=dict[str, dict[str, Any]]).get("error", {})
    except msgspec.MsgspecError:
        return "", ""
    return str(error.get("message", "")).removeprefix("memd: "), str(error.get("type", ""))


def _with_flags(message: str) -> str:
    """Replace route parameters in errors, at its beginning or in backquotes, by this command's flags and arguments."""
    context = click.get_current_context(silent=True)
    parameters = [] if context is None else context.command.params
    names = {one.name: name_of(one) for one in parameters}
    return re.sub(r"^the parameter (\w+)|`(\w+)`", lambda found: names.get(found[1] or found[2], found[0]), message)


def unchecked_tls() -> ssl.SSLContext:
    """Return a TLS context that checks no certificate: it has the public name, and the daemon gives another proof."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


@contextmanager
def telling_who_serves(config: Config) -> Iterator[None]:
    """If a start fails in the block because another memd has the data directory, say which one and where it is."""
    try:
        yield
    except (errors.AddressUnusable, StoreLocked):
        if not LocalDisk().is_locked(lock := config.data_dir / LOCK_NAME):
            raise
        other, holder = RunningDaemon.find(config.data_dir, config.auth.token), lock.read_text(errors="replace").strip()
        at = f" at {url}" if other is not None and (url := other.model_url) else ""
        raise StoreLocked(
            f"memd already runs on {config.data_dir}{at} ({holder}): use that one, or stop it first; for a second one "
            "choose another data_dir, and another port with --port"
        ) from None


@contextmanager
def daemon_for(config: Config) -> Iterator[RunningDaemon]:
    """Yield the daemon that holds `config.data_dir`, or one that runs only during the block. Waits for one that is
    starting or ending. Raises StoreLocked: a daemon holds the folder and does not answer; MemdError: none can be
    started."""
    note_memory(config)
    with ExitStack() as until_then:
        daemon: RunningDaemon | None = None
        while daemon is None:
            daemon, is_held = awaited(config)
            if daemon is None:
                try:
                    daemon = RunningDaemon(*until_then.enter_context(embedded_daemon(config, command_name())))
                except StoreLocked:
                    if is_held:
                        raise
            elif changed := daemon.health().get("changed_settings"):
                say(outdated(changed))
        yield daemon


def awaited(config: Config) -> tuple[RunningDaemon | None, bool]:
    """Return the daemon that holds the data directory, or None, and whether the directory is locked. Waits for a daemon
    that is starting or ending and does not listen."""
    until = time.monotonic() + START_SECONDS_MAX
    while (is_held := LocalDisk().is_locked(config.data_dir / LOCK_NAME)) and time.monotonic() <= until:
        with suppress(OSError, ValueError):
            address = urllib.parse.urlsplit((config.data_dir / ADDRESS_NAME).read_text())
            socket.create_connection((address.hostname or "", address.port or 0), GLANCE_SECONDS_MAX).close()
            break
        time.sleep(START_GLANCES_SECONDS)
    return RunningDaemon.find(config.data_dir, config.auth.token), is_held


def _is_on_this_machine(url: str) -> bool:
    """Return whether a URL has an IP address of this machine, so that requests never leave it."""
    try:
        parts = urllib.parse.urlsplit(url)
        host = ipaddress.ip_address(parts.hostname or "")
        if parts.scheme not in ("http", "https") or parts.port is None:
            return False
        with socket.socket(socket.AF_INET6 if host.version == 6 else socket.AF_INET) as probe:
            probe.bind((str(host), 0))
    except (ValueError, OSError):
        return False
    return True


class CommandAct:
    """Counts of an act, filled in while the command runs."""

    count = 0


def command_name() -> str:
    """Return the command that runs in this thread, as `memd export`."""
    context = click.get_current_context(silent=True)
    root = "" if context is None else context.find_root().command_path
    return "memd" if context is None else f"memd{context.command_path.removeprefix(root)}"


@contextmanager
def command_act(config: Config, kind: ActKind, topic: str | None, detail: str = "") -> Iterator[CommandAct]:
    """Write an audit line before and after the block. `topic`: None: all; empty: no topic. `detail`: the folder or file
    that the act writes. Raises StoreError: the first line cannot be written; the block did not run."""
    done, folder = CommandAct(), config.data_dir
    book = AuditBook(LocalDisk(), folder, config.audit.keep_months)
    begins = config.audit.record == "auto" and (kind == "token" or bool(config.auth.tokens))
    is_backup = (folder / MARKER_NAME).exists() and not (folder / LOCK_NAME).exists()
    if is_backup or not (begins or book.is_kept(config.audit.record)):
        yield done
        return

    def act(**more: Any) -> Act:
        topics = () if topic == "" else (topic or ALL_TOPICS,)
        facts = {"who": user_name(), "source": command_name(), "topics": topics, "detail": detail}
        return Act(at=time.time_ns() // 1000, act=kind, **{**facts, **more})

    try:
        began = book.append([act(begins=True)]).n
    except StoreError as error:
        raise not_done(error) from error
    try:
        yield done
    except BaseException as error:
        with suppress(StoreError):
            book.append([act(ends=began, detail=f"{detail} failed: {type(error).__name__}".strip())])
        raise
    book.append([act(ends=began, count=None if topic == "" else done.count)])


def note_restored(config: Config, folder: Path, source: str, files: int, *, is_copy: bool) -> None:
    """Record a restoration in the folder's audit, if it has one. `is_copy`: restored from `memd backup`, which copies
    the audit before its own last line. Raises StoreError: it cannot be written."""
    book = AuditBook(LocalDisk(), folder, config.audit.keep_months)
    if not book.is_kept(config.audit.record):
        return
    kept = read_book(LocalDisk(), folder, lambda act: act.act == "backup") if is_copy else None
    acts = kept.acts if kept is not None else ()
    ended = {act.ends for _, act in acts}
    began = max((number for number, act in acts if act.begins and number not in ended), default=0)
    by: dict[str, Any] = {"who": user_name(), "source": command_name(), "topics": (ALL_TOPICS,)}
    book.append([Act(at=time.time_ns() // 1000, act="restore", count=files, ends=began, detail=source, **by)])


@contextmanager
def embedded_daemon(config: Config, command: str) -> Iterator[tuple[str, str]]:
    """Run a daemon during the block; yield the URL of its own routes and the command token. Raises StoreLocked: a
    daemon runs on the folder; MemdError: it cannot be started."""
    from memd.ingest.redaction import Redactor  # importing it takes a second, like the daemon

    ingest = msgspec.structs.replace(config.ingest, reindex_seconds=0)  # only commands for sources look at them
    listen = ListenSettings(host="127.0.0.1", port=0)
    auth = msgspec.structs.replace(config.auth, token="")  # the command's token may be any principal's
    config = msgspec.structs.replace(config, listen=listen, admin=AdminSettings(), auth=auth, ingest=ingest)
    # Warnings about the folder do not belong in a command's output.
    configure_logging(msgspec.structs.replace(config.log, level="error"), Redactor.of(config.ingest).text)
    from anyio.from_thread import start_blocking_portal

    from memd.daemon.app import running

    with start_blocking_portal(name="memd-embedded") as thread:
        serving = thread.wrap_async_context_manager(running(config, command=command))
        daemon = serving.__enter__()
        try:
            yield daemon.own_url, command_token(daemon.token_watch.secret)
        finally:  # the daemon ends normally after any error in the block
            serving.__exit__(None, None, None)
