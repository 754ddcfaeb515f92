"""`memd stats`: what is stored, and how fast a running daemon finds it; and the few lines of `memd` alone.

Rule: the files tell what is stored; the daemon, if there is one, adds only what it alone knows.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec
from rich.console import RenderableType

from memd.cli.flags import config_of, print_lines, with_settings
from memd.cli.kept import waiting_messages, waiting_note
from memd.cli.running import RunningDaemon
from memd.cli.tables import table
from memd.embedding.loading import load_embedder
from memd.errors import EmbeddingError, StoreError
from memd.ingest.offline import stored_models
from memd.settings.model import Config
from memd.store.disk import LocalDisk
from memd.store.disk_trouble import Trouble, disk_trouble
from memd.store.encryption.opening import disk_of
from memd.store.layout import check_no_cluster, models_dir
from memd.store.tools.disk_usage import TopicDiskUsage, disk_usage
from memd.wording import counted, day_and_time, sized, tallied, unsearched

TOPICS_NAMED = 5


@click.command()
@with_settings()
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
def stats(config: Config, as_json: bool) -> int:
    """Show what is stored, and how fast a running daemon finds it.

    Example: memd stats
    """
    figures = _gather(config)
    if as_json:
        click.echo(msgspec.json.encode(figures))
    else:
        print_lines(_table(figures))
    return 0


def overview() -> str:
    """Say whether a daemon runs on the data directory of the settings, what is remembered there and what to do next.

    Raises:
        ConfigError: a setting is wrong.
    """
    config = config_of(None, {})
    daemon = RunningDaemon.find(config.data_dir, config.auth.token)
    remembered, is_empty = _remembered(config)
    lines, url = [f"No daemon runs on {config.data_dir}.", *remembered], None
    if daemon is not None:
        health = daemon.health()
        url = health.get("model_url", daemon.url)
        lines = [f"A daemon runs at {url}, which does not know this token.", *remembered]
        if health:
            answers = "" if health["upstream"]["reachable"] else ", which does not answer"
            troubles = msgspec.convert(health["troubles"], list[Trouble])
            lines = [f"A daemon runs at {url}, in front of {health['upstream']['url']}{answers}.", *remembered]
            lines += [f"In trouble: {one}." for one in troubles]
    steps = _next_steps(url, is_empty=is_empty)
    width = max(map(len, steps))
    return "\n".join([*lines, "", "Next:", *(f"  {step.ljust(width)}  {does}" for step, does in steps.items())])


def _remembered(config: Config) -> tuple[list[str], bool]:
    """The contents of the data directory, in lines, and whether that is nothing at all."""
    try:
        files = disk_of(config)
        topics = sorted((one for one in disk_usage(config.data_dir, files) if one.chunks), key=lambda one: -one.chunks)
        waiting = waiting_messages(config.data_dir, files)
    except StoreError as error:
        return [f"What is remembered cannot be counted: {error}."], False
    where = "In its cache of the cluster" if config.cluster.is_on else "Remembered"
    named = [f"{one.topic_id} {one.chunks:,}" for one in topics[:TOPICS_NAMED]]
    named += [f"{counted(len(topics) - TOPICS_NAMED, 'topic')} more"] if len(topics) > TOPICS_NAMED else []
    told = [f"{where}: {counted(sum(one.chunks for one in topics), 'chunk')} ({', '.join(named)})."] if topics else []
    if waiting:
        until = (
            f"answered ones in a moment, others when their conversation has rested for {config.buffer.idle_seconds:g} s"
        )
        told.append(f"{counted(waiting, 'message')} said and not stored yet: {until}.")
    return told or ["Nothing is stored yet."], not (told or config.cluster.is_on)


def _next_steps(url: str | None, *, is_empty: bool) -> dict[str, str]:
    """Commands and what each does. `url`: where programs reach the daemon that runs; None: none does."""
    if url is None:
        first = {"memd demo": "shows on a long conversation what memd does; it needs no model"} if is_empty else {}
        steps = first | {"memd serve": "runs the daemon; --upstream URL names the model server"}
    elif is_empty:
        steps = {f"{url}/v1": "is the base URL for your programs; what is said there is remembered"}
    else:
        steps = {"memd turn": "shows what memory did in the latest turns"}
    steps |= (
        {"memd add PATH": "remembers documents and exported conversations"}
        if is_empty
        else {'memd search "…"': "shows what a chat with this question would get"}
    )
    return steps | {"memd check": "says whether everything is ready", "memd --help": "shows all commands"}


class StoredFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of the files and of the daemon."""

    data_dir: str
    topics: list[TopicDiskUsage]
    daemon_url: str | None
    """None: no daemon holds this folder."""
    daemon: dict[str, Any] | None
    """The answer of `/memd/stats`; None if no daemon holds this folder, or it wants another `auth.token`."""
    waiting_messages: int
    """Messages that were said and are not in the log yet, only in its journal."""
    unsearched_chunks: int
    """Live chunks that another model than `embedding.model` embedded; 0 if that model is not on this machine."""
    is_cache: bool
    """Whether it is a daemon's cache of a cluster, whose topics need not be in it."""
    troubles: list[Trouble]
    """Those that the daemon's health tells; without a daemon that of the disk."""


def _gather(config: Config) -> StoredFigures:
    """Read the directory and ask the daemon.

    Raises:
        StoreError: a file cannot be read.
        DaemonError: the daemon went away while it was asked.
    """
    data_dir = config.data_dir
    daemon = RunningDaemon.find(data_dir, config.auth.token)
    told, files = None, disk_of(config)
    health = {} if daemon is None else daemon.health()
    if daemon is not None and health:  # else it wants another auth.token; what is on disk is shown all the same
        told = msgspec.json.decode(daemon.get("/memd/stats"), type=dict[str, Any])
        troubles = msgspec.convert(health.get("troubles", []), list[Trouble])
    else:
        found = disk_trouble(data_dir, files.room(data_dir))
        troubles = [] if found is None else [Trouble(found.what, found.since, found.remedy)]
    if not config.cluster.is_on:
        check_no_cluster(files, data_dir)
    topics = disk_usage(data_dir, files)
    return StoredFigures(
        data_dir=str(data_dir),
        topics=topics,
        daemon_url=None if daemon is None else daemon.url,
        daemon=told,
        waiting_messages=waiting_messages(data_dir, files),
        unsearched_chunks=_unsearched_chunks(config, files, topics),
        is_cache=config.cluster.is_on,
        troubles=troubles,
    )


def _unsearched_chunks(config: Config, files: LocalDisk, topics: list[TopicDiskUsage]) -> int:
    if not any(topic.chunks for topic in topics):
        return 0
    try:
        beside, stored = models_dir(config.data_dir), stored_models(config, files)
        present = load_embedder(config.embedding, models_dir=beside, fetch=False, stored=stored).fingerprint
    except EmbeddingError:
        return 0
    return sum(topic.chunks_of_others(present) for topic in topics)


def _table(figures: StoredFigures) -> list[RenderableType]:
    """Return the figures as text: a table, and a line about the daemon."""
    numbers = ("chunks", "entries", "disk", "memory", "indexes", "fan-out")
    shown = table("topic", *numbers, right=numbers, whole=numbers, title=figures.data_dir)
    in_memory = {} if figures.daemon is None else figures.daemon["topics"]
    for topic in figures.topics:
        shown.add_row(
            topic.topic_id,
            f"{topic.chunks:,}",
            f"{topic.entries:,}",
            sized(topic.log_bytes + topic.derived_bytes),
            *_measured(in_memory.get(topic.topic_id)),
        )
    notes = [f"In trouble{_since(one)}: {one}." for one in figures.troubles]
    notes += [f"{unsearched(figures.unsearched_chunks)}."] if figures.unsearched_chunks else []
    if figures.is_cache:
        notes.append("These are the topics in this cache, as the daemon had them last; the cluster may have more.")
    if waiting := waiting_note(figures.waiting_messages):
        notes.append(f"{waiting}.")
    if figures.daemon is None:
        who = "No daemon holds this folder; only a running one"
        if figures.daemon_url is not None:
            who = f"Only the daemon at {figures.daemon_url}, which does not know this token,"
        return [shown, *notes, f"{who} knows the last three columns."]
    notes += [sentence for topic in in_memory.values() for sentence in topic["damage"]]
    used, allowed = figures.daemon["memory_bytes"], figures.daemon["memory_bytes_max"]
    told = [f"The daemon at {figures.daemon_url} has {sized(used)} of at most {sized(allowed)} loaded."]
    if backlog := figures.daemon.get("embedding_backlog"):
        told.append(f"{counted(backlog, 'chunk')} that are being stored wait for the embedding model.")
    if backup := figures.daemon.get("backup"):
        left = f", {counted(backup['topics_left'], 'topic')} still to be compared" if backup["topics_left"] else ""
        trouble = f": {backup['trouble']}" if backup["trouble"] else ""
        told.append(f"The backup in {backup['bucket']} is {backup['lag_seconds']:.0f} s behind{left}{trouble}.")
    redacted = figures.daemon.get("redacted")
    if redacted is not None:
        told.append(f"Redacted in what it has stored since its start: {tallied(redacted) or 'nothing'}.")
    return [shown, *notes, *told]


def _since(trouble: Trouble) -> str:
    return f" since {day_and_time(trouble.since)}" if trouble.since else ""


def _measured(topic: dict[str, Any] | None) -> list[str]:
    if topic is None:
        return ["-"] * 3
    fan_out = topic["fan_out_ms"]
    return [
        sized(topic["memory_bytes"]),
        f"{topic['indexes_loaded']}/{topic['indexes']}",
        "-" if fan_out is None else f"{fan_out:.2f} ms",
    ]
