"""`memd move`: topics between a folder and a cluster.

Rule: one side is a data directory, the other a cluster: its settings file, or its database. The command reads both
sides again, shows how far it came, and says what stayed behind. Tokens and grants are added to those that are there,
never in their place: a secret that is to hold on one side alone is taken back on the other.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

from memd.admin.oauth.grants import LedgerState
from memd.admin.oauth.ledger import GrantFile, SharedGrants
from memd.cli.flags import FOUND_SOMETHING, config_of, key_flag, key_of
from memd.cli.ingest import progress
from memd.errors import BadQuestion, ConfigError
from memd.settings.model import EncryptionSettings
from memd.store.disk import LocalDisk
from memd.store.encryption.opening import disk_of
from memd.store.layout import GRANTS_NAME, topic_ids_in
from memd.store.shared.books import SharedBook, SharedTokens
from memd.store.shared.moving import MovedTopic, into_folder, into_log
from memd.store.shared.postgres import shared_log
from memd.store.shared.seam import SharedLog, topics_in
from memd.store.token_list import KeptToken, TokenList
from memd.wording import counted, for_terminal, sized

_SCHEMES = ("postgresql://", "postgres://")
_TWO_SIDES = (
    "name a folder and a cluster: of the two places one is a data directory, and one the settings file of a daemon of "
    "the cluster, or postgresql://USER@HOST/DATABASE"
)
_STAYS = (
    "Receipts, the audit and the list of erasures are not moved: keep them as long as you want to look things up. "
    "Tokens that were copied hold on both sides: take those back that are to hold on one alone."
)


class CopiedRights(NamedTuple):
    """The names of tokens, and the number of grants."""

    tokens: tuple[str, ...]
    """Those that are new there."""
    left: tuple[str, ...]
    """Those whose name or secret another one has there: they were not copied."""
    grants: int


@click.command()
@click.option(
    "--config", "config_path", type=click.Path(path_type=Path), help="Settings, where a URL stands for the cluster."
)
@click.option("--topic", "topics", metavar="TOPIC", multiple=True, help="Only this topic; may be given again.")
@click.option("--dry-run", is_flag=True, help="Only show what would be moved.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object for each topic.")
@key_flag
@click.argument("source", metavar="FROM")
@click.argument("target", metavar="TO")
def move(
    config_path: Path | None,
    topics: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    key_stdin: bool,
    source: str,
    target: str,
) -> int:
    """Move topics between a folder and a cluster.

    FROM and TO: a data directory, and a cluster: the settings file of one of its daemons, or its
    postgresql://USER@HOST/DATABASE. Nothing is removed from FROM.

    Example: memd move ./memory cluster.yaml
    """
    from_log, is_into_log = (one.startswith(_SCHEMES) or Path(one).is_file() for one in (source, target))
    if is_into_log == from_log:
        raise BadQuestion(_TWO_SIDES)
    folder, place = (Path(source), target) if is_into_log else (Path(target), source)
    if place.startswith(_SCHEMES):
        config = config_of(config_path, {"cluster.database": place})
    else:
        config = config_of(Path(place), {})
        if not config.cluster.is_on:
            raise ConfigError(f"{place}: names no cluster; set cluster.database in it")
    own = EncryptionSettings(key=key_of(key_stdin) or "") if key_stdin else config.encryption
    files = disk_of(msgspec.structs.replace(config, data_dir=folder.absolute(), encryption=own), creating=not dry_run)
    with closing(shared_log(config)) as kept:
        kept.connect()
        names = topics or (topic_ids_in(files, folder) if is_into_log else topics_in(kept))
        if dry_run:
            for name in names:
                click.echo(f"{name}: to be moved")
            click.echo(f"{counted(len(names), 'topic')} to move; nothing was changed.")
            return 0
        steps = into_log(folder, files, kept, names) if is_into_log else into_folder(kept, folder, files, names)
        done = list[MovedTopic]()
        with progress("moving") as advanced:
            for number, of, one in steps:
                done.append(one)
                advanced(number, of)
                if as_json:
                    click.echo(msgspec.json.encode(one))
                elif one.note:
                    click.echo(f"{one.topic}: not moved: {for_terminal(one.note)}")
        rights = None if topics else _copy_rights(folder, kept, is_into_cluster=is_into_log)
    if not as_json:
        moved = [one for one in done if one.outcome == "moved"]
        compared = f"{counted(sum(one.entries for one in moved), 'entry')}, {sized(sum(one.bytes for one in moved))}"
        click.echo(
            f"{counted(len(moved), 'topic')} moved, {len(done) - len(moved):,} refused; {compared} read again there "
            "and compared. Nothing was removed from where they came from."
        )
        if rights is not None and rights.tokens:
            grants = f", with {counted(rights.grants, 'grant')}" if rights.grants else ""
            click.echo(f"Tokens that hold there now: {', '.join(rights.tokens)}{grants}.")
        if rights is not None and rights.left:
            click.echo(f"Not copied, as another token there has the name or the secret: {', '.join(rights.left)}.")
        click.echo(_STAYS)
    return FOUND_SOMETHING if any(one.outcome == "refused" for one in done) else 0


def _copy_rights(folder: Path, kept_there: SharedLog, *, is_into_cluster: bool) -> CopiedRights:
    """Copy the tokens; the grants too where no program has registered yet, as its id holds only there.

    Raises:
        StoreError: a side cannot be read or written; what was copied is there.
    """
    shared, own = SharedTokens(SharedBook(kept_there, "tokens")), TokenList(LocalDisk(), folder)
    tokens, left = _copy_tokens(own, shared) if is_into_cluster else _copy_tokens(shared, own)
    there, path = SharedGrants(SharedBook(kept_there, "grants")), folder / GRANTS_NAME
    here, is_kept = GrantFile(LocalDisk(), path), LocalDisk().size(path) is not None
    grants = 0
    if is_into_cluster and is_kept:
        given, before = here.read(), there.read().grants

        def joined(state: LedgerState) -> LedgerState:
            if state.key not in (b"", given.key):
                return state
            ids = {one.id for one in state.grants}
            new = (one for one in given.grants if one.id not in ids)
            return msgspec.structs.replace(state, key=given.key, grants=(*state.grants, *new))

        grants = len(there.change(joined).grants) - len(before)
    elif not is_into_cluster and not is_kept:
        state = there.read()
        if state.key:
            grants = len(here.change(lambda _: msgspec.structs.replace(state, codes={})).grants)
    return CopiedRights(tokens, left, grants)


def _copy_tokens(source: TokenList, target: TokenList) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Copy tokens; return the names of those that are new, and of those that cannot be there beside another one."""
    wanted, new, left = source.read(), list[KeptToken](), list[KeptToken]()

    def joined(kept: tuple[KeptToken, ...]) -> tuple[KeptToken, ...]:
        names, digests = {one.name for one in kept}, {one.token_sha256.lower() for one in kept}
        new[:] = [one for one in wanted if one.name not in names and one.token_sha256.lower() not in digests]
        left[:] = [one for one in wanted if one not in new and one not in kept]
        return (*kept, *new)

    if wanted:
        target.change(joined)
    return tuple(one.name for one in new), tuple(one.name for one in left)
