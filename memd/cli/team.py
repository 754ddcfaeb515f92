"""`memd token` and `memd audit`: who else may use this memory, and what each did.

Rule: a secret is shown once, to its recipient, and not stored. A change takes effect at once in a running daemon, or
the command says when. The running daemon ends a program's grant (OAuth). Without a daemon the command edits the file
under the directory's lock; in a cluster it edits the database, which all daemons follow. Without `cluster.database`
nothing connects there. `memd audit` asks the running daemon, or reads the files without starting one, so that reading
changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any, get_args

import click
import msgspec
from rich.text import Text

from memd.admin import auditing
from memd.admin.auditing import AuditAnswer, AuditedAct, AuditQuery, audit_of
from memd.admin.oauth import endpoint
from memd.admin.oauth.ledger import GivenGrant, GrantFile, GrantList, SharedGrants
from memd.admin.routing import ALL_TOPICS, as_given, decode_query
from memd.admin.tokens import reload_tokens
from memd.cli.flags import FOUND_SOMETHING, CommandGroup, config_to_begin, say, with_settings
from memd.cli.operations import Lines, asked_with, options_of, print_lines, table, time_of
from memd.cli.running import RunningDaemon, command_act
from memd.errors import BadQuestion, ConfigError, DaemonError, NotFound, RightMissing
from memd.principals import SECRET_PREFIX, Right, digest_of
from memd.receipts import receipt_lines
from memd.settings.loading import Setting, read_tokens, token_problems
from memd.settings.model import Config, TokenSettings
from memd.store.disk import LocalDisk
from memd.store.encryption.disk import disk_of
from memd.store.layout import GRANTS_NAME, LOCK_NAME, TOKENS_NAME, check_no_cluster
from memd.store.shared.books import FileBook, KeptToken, SharedBook, TokenList
from memd.store.shared.postgres import shared_log
from memd.wording import counted, day_and_time, name_for_terminal

Tokens = tuple[KeptToken, ...]
SECRET_BYTES = 32
ONCE = "this is the token; it is shown this once, and memd keeps no more than its SHA-256"


@click.group(cls=CommandGroup)
def token() -> None:
    """Make, list and take back tokens for others, each with its topics and rights.

    Rights: read, write, correct, admin. See docs/rights.md.

    Example: memd token add anna --topics work --rights read
    """


@token.command()
@click.argument("name")
@click.option(
    "--topics", required=True, metavar="PATTERN,…", help="Topics in which it holds; * stands for any characters."
)
@click.option("--rights", required=True, metavar="RIGHT,…", help=f"Of {', '.join(get_args(Right))}.")
@with_settings(config_to_begin)
def add(name: str, config: Config, **chosen: str) -> int:
    """Make a token for NAME and print it, once."""
    config.data_dir.mkdir(parents=True, exist_ok=True)
    secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    lists = {name: [one.strip() for one in text.split(",") if one.strip()] for name, text in chosen.items()}
    item = {"name": name, "token_sha256": digest_of(secret).hex(), **lists}
    try:
        [given] = read_tokens(Setting("the token", [item], "memd token add"))
    except ConfigError as error:  # drops the prefix of a list item
        raise ConfigError(str(error).rpartition("item 1: ")[2]) from None
    made = KeptToken(**msgspec.structs.asdict(given), since=time.time_ns() // 1000)

    def added(kept: Tokens) -> Tokens:
        if any(one.name == name for one in (*config.auth.tokens, *kept)):
            raise BadQuestion(f"there is a token {name} already; `memd token rotate {name}` gives it another secret")
        return (*kept, made)

    before = _change(config, added, f"added {name}: {', '.join(made.rights)} in {', '.join(made.topics)}")
    is_first = not (config.auth.is_closed or before)
    _show(secret)
    if _tell(config) and is_first:
        say("every request to memd needs a token now; commands here only if auth.token is set")
    return 0


@token.command()
@click.argument("name")
@with_settings()
def rotate(name: str, config: Config) -> int:
    """Make another secret for the token NAME and print it; the one before is refused from now on."""
    secret = SECRET_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    new = {"token_sha256": digest_of(secret).hex(), "since": time.time_ns() // 1000}

    def rotated(kept: Tokens) -> Tokens:
        _make_sure(config, kept, name)
        return tuple(msgspec.structs.replace(one, **new) if one.name == name else one for one in kept)

    _change(config, rotated, f"rotated {name}")
    _show(secret)
    _tell(config)
    return 0


@token.command()
@click.argument("name")
@with_settings()
def revoke(name: str, config: Config) -> int:
    """Take back the token NAME, or the grant with this id: its next request is refused.

    The grants of programs that were given with a token end with it.
    """
    with _lists(config) as (listed, _):
        tokens = (*config.auth.tokens, *listed.read())
    if all(one.name != name for one in tokens) and any(one.id == name for one in _live_grants(config)):
        _end_grant(config, name)
        click.echo(f"revoked {name}")
        return 0

    def left(kept: Tokens) -> Tokens:
        _make_sure(config, kept, name)
        return tuple(one for one in kept if one.name != name)

    before = _change(config, left, f"revoked {name}")
    click.echo(f"revoked {name}")
    if len(before) == 1 and not config.auth.is_closed:
        say("that was the last token: from its next start on the daemon answers whoever shows none")
    _tell(config)
    return 0


@token.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@with_settings()
def list_(as_json: bool, config: Config) -> int:
    """List the tokens with their topics and rights, and the grants of programs (OAuth); never the secrets."""
    with _lists(config) as (listed, _):
        tokens: list[TokenSettings] = [*config.auth.tokens, *listed.read()]
    grants = _live_grants(config)
    if as_json:
        told: list[dict[str, object]] = list(map(msgspec.to_builtins, (*tokens, *grants)))
        shown = [{name: value for name, value in one.items() if name != "token_sha256"} for one in told]
        click.echo(json.dumps(shown, indent=2))
        return 0
    if config.auth.token and digest_of(config.auth.token).hex() not in {one.token_sha256 for one in tokens}:
        click.echo("owner: every right in every topic (auth.token)")
    for one in tokens:
        origin = f"since {day_and_time(one.since)}" if isinstance(one, KeptToken) else "auth.tokens of the settings"
        click.echo(f"{one.name}: {', '.join(one.rights)} in {', '.join(one.topics)} ({origin})")
    for grant in grants:
        where = ", ".join(grant.topics) or f"the topics of {grant.principal}"
        until = f"{datetime.fromtimestamp(grant.until, UTC).astimezone():%Y-%m-%d}"
        may = f"{', '.join(grant.rights)} in {where} (OAuth; if not used, until {until})"
        click.echo(f"{grant.id}: {grant.program}, as {grant.principal}: {may}")
    if not tokens and not config.auth.token:
        click.echo("There is no token: whoever is on this machine may do everything, and nobody else anything.")
    return 0


def _change(config: Config, work: Callable[[Tokens], Tokens], act: str) -> Tokens:
    """Change the list; `act` describes the change in the audit. Returns the previous list."""
    before: list[KeptToken] = []
    gone: set[str] = set()

    def checked(kept: Tokens) -> Tokens:
        after = work(kept)
        for _, problem in token_problems([*config.auth.tokens, *after]):
            raise ConfigError(problem)
        before[:] = kept
        gone.update({one.token_sha256 for one in kept} - {one.token_sha256 for one in after})
        return after

    with _lists(config) as (listed, grants):
        checked(listed.read())  # an impossible change leaves no line in the audit
        with command_act(config, "token", "", act):
            listed.change(checked)
        if config.cluster.is_on and gone:  # without a cluster the daemon ends their grants itself
            grants.change(lambda state: state.end(lambda one: one.principal_sha256 in gone))
    return tuple(before)


def _make_sure(config: Config, kept: Tokens, name: str) -> None:
    if any(one.name == name for one in config.auth.tokens):
        raise BadQuestion(f"the token {name} stands in auth.tokens of the settings; change it there")
    if not any(one.name == name for one in kept):
        raise NotFound(f"there is no token {name[:80]!r}; `memd token list` shows them")


def _show(secret: str) -> None:
    say(ONCE)
    click.echo(secret)


def _tell(config: Config) -> bool:
    """Make a running daemon reload the tokens. Return True if it has or none runs. Raises DaemonError: it still uses
    the old tokens."""
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    if daemon is None:
        return True
    try:
        daemon.ask(reload_tokens, body={})
    except RightMissing:  # the daemon already needs tokens, and reloads the list by itself
        say("the running daemon takes this up within a second")
        return False
    except (DaemonError, BadQuestion) as error:
        raise DaemonError(f"this is kept, but the running daemon does not follow yet: {error}") from None
    return True


def _live_grants(config: Config) -> tuple[GivenGrant, ...]:
    """Return the live grants, oldest first; without a daemon's answer, including grants of revoked tokens. Raises
    StoreError: the list cannot be read."""
    daemon = None if config.cluster.is_on else RunningDaemon.find(config.data_dir, config.auth.token)
    with contextlib.suppress(DaemonError):  # this token may not ask; the file has the grants too
        if daemon is not None:
            return daemon.ask(endpoint.grants).grants
    with _lists(config) as (_, kept):
        return tuple(one.given for one in kept.read().grants.values() if time.time() < one.until)


def _end_grant(config: Config, grant_id: str) -> None:
    is_shared = config.cluster.is_on
    if not is_shared and (daemon := RunningDaemon.find(config.data_dir, config.auth.token)) is not None:
        daemon.ask(endpoint.end_grant, body={"id": grant_id})
        return
    act = command_act(config, "token", "", f"ended the grant {grant_id}")
    with act if is_shared else LocalDisk().lock(config.data_dir / LOCK_NAME), _lists(config) as (_, grants):
        grants.change(lambda state: state.end(lambda one: one.id == grant_id))


@contextmanager
def _lists(config: Config) -> Iterator[tuple[TokenList, GrantList]]:
    """Yield the lists of `memd token` and of grants; raises StoreError if the database cannot be used."""
    if config.cluster.is_on:
        with closing(shared_log(config)) as kept:
            kept.connect()
            yield TokenList(SharedBook(kept, TOKENS_NAME)), SharedGrants(SharedBook(kept, GRANTS_NAME))
    else:
        check_no_cluster(LocalDisk(), config.data_dir)
        yield TokenList(FileBook(LocalDisk(), config.data_dir)), GrantFile(LocalDisk(), config.data_dir / GRANTS_NAME)


IDS_SHOWN, ID_DIGITS = 3, 8
HEAD_SHOWN = 16
FIRST_ERROR = 400


@click.command()
@with_settings()
@options_of(AuditQuery)
@click.option("--verify", is_flag=True, help="Only whether the record is whole, without the acts.")
@click.option("--head", "head_only", is_flag=True, help="Only the number and hash of its last line, to be kept.")
@click.option("--json", "as_json", is_flag=True, help="JSON Lines: the state of the record, then one act a line.")
def audit(config: Config, *, verify: bool, head_only: bool, as_json: bool, **given: Any) -> int:
    """Show who read, wrote, corrected, erased and exported what.

    It says first whether the record is whole; exit code 1 if it is not, or has no such act.

    Example: memd audit --verify
    """
    asked = asked_with(AuditQuery, given)
    if (daemon := RunningDaemon.find(config.data_dir, config.auth.token)) is not None:
        answer = daemon.ask(auditing.audit, **asked)
    else:
        files, query = disk_of(config), decode_query(as_given(asked), AuditQuery)  # as the daemon would
        answer = audit_of(files, config.data_dir, receipt_lines(files, config.data_dir), query)
    chain = answer.chain
    if head_only:
        click.echo(chain.head if chain is not None else "", nl=chain is not None)
    elif as_json:
        state = {"chain": chain, "receipts_since": answer.receipts_since}
        for one in (state, *(() if verify else answer.acts)):
            click.echo(msgspec.json.encode(one))
    else:
        print_lines([*_state(answer, config, given["expect"]), *([] if verify else _table(answer))])
    is_told = bool(answer.acts) or (chain is not None and (verify or head_only))
    return 0 if is_told and (chain is None or chain.is_whole) else FOUND_SOMETHING


def _state(answer: AuditAnswer, config: Config, expected: str | None) -> Lines:
    if (chain := answer.chain) is None:
        begins = "the first token for others begins one (`memd token add`), and so does audit.record: always"
        why = "audit.record is never" if config.audit.record == "never" else begins
        return [f"No audit is kept in {config.data_dir}: {why}. Only requests to a model are known, by their receipts."]
    lines = counted(chain.lines, "line")
    head = f"{chain.head[:HEAD_SHOWN]}… (`memd audit --head` prints all of it)"
    told = [f"The audit is whole: {lines}, none missing, none changed. Its head is {head}"]
    told += (
        [f"It has the line that was expected ({expected[:HEAD_SHOWN]}…), unchanged up to there."] if expected else []
    )
    if not chain.is_whole:
        told = [f"THE AUDIT IS NOT WHOLE ({lines}):", *(f"  {finding}" for finding in chain.findings)]
    if config.cluster.is_on:
        told.append("It is this daemon's: each one of a cluster has an audit of what it answered. Verify all of them.")
    return [*map(Text, told), *(Text(f"  {notice}") for notice in chain.notices)]


def _table(answer: AuditAnswer) -> Lines:
    if not answer.acts:
        return ["No act was recorded that was asked for."]
    shown = table("line", "when", "who", "act", "topic", "what", "from", right=("line",), whole=("line", "act"))
    for act in answer.acts:
        topics = ", ".join("all" if topic == ALL_TOPICS else topic for topic in act.topics)
        at = f"at {act.daemon}" if act.daemon else ""
        source = " ".join(filter(None, (act.source, act.what, at)))
        cells = (act.who or "nobody", act.act, topics, _extent(act), source)
        lines = f"{act.ends}, {act.n}" if act.ends else str(act.n or "")  # numbers of its first and last line
        shown.add_row(lines, time_of(act.at), *(Text(name_for_terminal(cell)) for cell in cells))
    told: Lines = [shown]
    if answer.receipts_since is not None:
        since = time_of(answer.receipts_since)
        told.append(f"Requests to a model are known from {since} on, as far back as receipts are kept.")
    return told


def _extent(act: AuditedAct) -> str:
    ids = [one[:ID_DIGITS] for one in act.ids[:IDS_SHOWN]]
    words = [
        counted(act.count, "item") if act.count is not None else "",
        " ".join(ids) + (" …" if len(act.ids) > IDS_SHOWN else ""),
        f"turn {act.turn}" if act.turn else "",
        f"answered {act.status}" if act.status is not None and act.status >= FIRST_ERROR else "",
        counted(act.times, "attempt") if act.act == "refused" else "",
        "begun, and no end is recorded" if act.begins else "",
        "a new file of the audit begins" if act.act == "file" else "",
        act.detail,
    ]
    return ", ".join(filter(None, words))
