"""`memd audit`: who read, wrote, corrected, erased and exported what, and whether the record of it is whole.

Rule: it asks the running daemon; without one it reads the files, and starts none: looking leaves them as they are.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec
from multidict import MultiDict
from rich.text import Text

from memd.admin import auditing
from memd.admin.auditing import AuditAnswer, AuditedAct, audit_of
from memd.admin.queries import ALL_TOPICS, AuditQuery, decode_query
from memd.cli.flags import FOUND_SOMETHING, with_settings
from memd.cli.operations import asked_with, options_of
from memd.cli.running import RunningDaemon
from memd.cli.tables import Lines, print_lines, table, time_of
from memd.settings.model import Config
from memd.store.encryption.opening import disk_of
from memd.store.receipts import receipt_lines
from memd.wording import counted, name_for_terminal

IDS_SHOWN, ID_DIGITS = 3, 8
FIRST_ERROR = 400


@click.command()
@with_settings()
@options_of(AuditQuery)
@click.option("--verify", is_flag=True, help="Only whether the record is whole, without the acts.")
@click.option("--head", "head_only", is_flag=True, help="Only the number and hash of its last line, to be kept.")
@click.option("--json", "as_json", is_flag=True, help="JSON Lines: the state of the record, then one act a line.")
def audit(config: Config, *, verify: bool, head_only: bool, as_json: bool, **given: Any) -> int:
    """Show who read, wrote, corrected, erased and exported what.

    It says first whether the record is whole; exit code 1 if it is not.

    Example: memd audit --verify
    """
    asked = asked_with(AuditQuery, given)
    if (daemon := RunningDaemon.find(config.data_dir, config.auth.token)) is not None:
        answer = daemon.ask(auditing.audit, **asked)
    else:
        files, several = disk_of(config), MultiDict[str]()
        for name, value in asked.items():
            several.extend((name, str(one)) for one in (value if isinstance(value, tuple) else [value]))
        query = decode_query(several, AuditQuery)  # as the daemon would
        answer = audit_of(files, config.data_dir, receipt_lines(files, config.data_dir), query)
    chain = answer.chain
    if head_only:
        click.echo(chain.head if chain is not None else "", nl=chain is not None)
    elif as_json:
        state = {"chain": chain, "receipts_since": answer.receipts_since}
        for one in (state, *(() if verify else answer.acts)):
            click.echo(msgspec.json.encode(one))
    else:
        print_lines([*_state(answer, config), *([] if verify else _table(answer))])
    is_fine = bool(answer.acts) if chain is None else chain.is_whole
    return 0 if is_fine else FOUND_SOMETHING


def _state(answer: AuditAnswer, config: Config) -> Lines:
    if (chain := answer.chain) is None:
        begins = "the first token for others begins one (`memd token add`), and so does audit.record: always"
        why = "audit.record is never" if config.audit.record == "never" else begins
        return [f"No audit is kept in {config.data_dir}: {why}. Only requests to a model are known, by their receipts."]
    lines = counted(chain.lines, "line")
    told = [f"The audit is whole: {lines}, none missing, none changed. Its head is {chain.head}"]
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
        lines = f"{act.ends}, {act.n}" if act.ends else str(act.n or "")  # of its beginning and of its end
        shown.add_row(lines, time_of(act.at), *(Text(name_for_terminal(cell)) for cell in cells))
    told: Lines = [shown]
    if answer.receipts_since is not None:
        since = time_of(answer.receipts_since)
        told.append(f"Requests to a model are known from {since} on, as far back as receipts are kept.")
    return told


def _extent(act: AuditedAct) -> str:
    """Say in a few words what an act was about."""
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
