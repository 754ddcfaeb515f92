"""`memd stats`: what is stored, and how fast a running daemon finds it; and the few lines of `memd` alone.

Rule: the files tell what is stored; the daemon, if there is one, adds only what it alone knows.
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from memd.cli.data_dir import waiting_messages, waiting_note
from memd.cli.flags import config_of, with_settings
from memd.cli.memories import memory_elsewhere
from memd.cli.operations import json_flag, show
from memd.cli.running import RunningDaemon
from memd.cli.tables import Lines, table
from memd.embedding.loading import load_embedder
from memd.errors import EmbeddingError, StoreError
from memd.ingest.offline import stored_models
from memd.settings.model import Config
from memd.store.disk_trouble import Trouble, disk_trouble
from memd.store.encryption.opening import disk_of
from memd.store.layout import check_no_cluster, models_dir
from memd.store.tools.disk_usage import TopicDiskUsage, disk_usage
from memd.wording import counted, day_and_time, sized, tallied, unsearched

TOPICS_NAMED = 5


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


@click.command()
@with_settings()
@json_flag
def stats(config: Config, as_json: bool) -> int:
    """Show what is stored, and how fast a running daemon finds it.

    Example: memd stats
    """
    data_dir, files = config.data_dir, disk_of(config)
    daemon = RunningDaemon.find(data_dir, config.auth.token)
    health, told = {} if daemon is None else daemon.health(), None
    if daemon is not None and health:  # else it wants another auth.token; what is on disk is shown all the same
        told = msgspec.json.decode(daemon.get("/memd/stats"), type=dict[str, Any])
        troubles = msgspec.convert(health.get("troubles", []), list[Trouble])
    else:
        found = disk_trouble(data_dir, files.room(data_dir))
        troubles = [] if found is None else [Trouble(found.what, found.since, found.remedy)]
    if not config.cluster.is_on:
        check_no_cluster(files, data_dir)
    topics, unsearched_chunks = disk_usage(data_dir, files), 0
    if any(topic.chunks for topic in topics):
        try:
            beside, stored = models_dir(data_dir), stored_models(config, files)
            present = load_embedder(config.embedding, models_dir=beside, fetch=False, stored=stored).fingerprint
            unsearched_chunks = sum(topic.chunks_of_others(present) for topic in topics)
        except EmbeddingError:
            pass  # it is not on this machine
    figures = StoredFigures(
        data_dir=str(data_dir),
        topics=topics,
        daemon_url=None if daemon is None else daemon.url,
        daemon=told,
        waiting_messages=waiting_messages(data_dir, files),
        unsearched_chunks=unsearched_chunks,
        is_cache=config.cluster.is_on,
        troubles=troubles,
    )
    show(figures, _lines(figures), as_json=as_json)
    return 0


def _lines(figures: StoredFigures) -> Lines:
    """Return the figures as text: a table, and a line about the daemon."""
    numbers = ("chunks", "entries", "disk", "memory", "indexes", "fan-out")
    shown = table("topic", *numbers, right=numbers, whole=numbers, title=figures.data_dir)
    in_memory = {} if figures.daemon is None else figures.daemon["topics"]
    for topic in figures.topics:
        cells = [f"{topic.chunks:,}", f"{topic.entries:,}", sized(topic.log_bytes + topic.derived_bytes)]
        loaded = ["-"] * 3
        if (known := in_memory.get(topic.topic_id)) is not None:
            fan_out = "-" if known["fan_out_ms"] is None else f"{known['fan_out_ms']:.2f} ms"
            loaded = [sized(known["memory_bytes"]), f"{known['indexes_loaded']}/{known['indexes']}", fan_out]
        shown.add_row(topic.topic_id, *cells, *loaded)
    lines: Lines = [shown]
    for trouble in figures.troubles:
        since = f" since {day_and_time(trouble.since)}" if trouble.since else ""
        lines.append(f"In trouble{since}: {trouble}.")
    lines += [f"{unsearched(figures.unsearched_chunks)}."] if figures.unsearched_chunks else []
    if figures.is_cache:
        lines.append("These are the topics in this cache, as the daemon had them last; the cluster may have more.")
    if waiting := waiting_note(figures.waiting_messages):
        lines.append(f"{waiting}.")
    if figures.daemon is None:
        who = "No daemon holds this folder; only a running one"
        if figures.daemon_url is not None:
            who = f"Only the daemon at {figures.daemon_url}, which wants a token that it knows,"
        return [*lines, f"{who} knows the last three columns."]
    lines += [sentence for topic in in_memory.values() for sentence in topic["damage"]]
    used, allowed = figures.daemon["memory_bytes"], figures.daemon["memory_bytes_max"]
    lines.append(f"The daemon at {figures.daemon_url} has {sized(used)} of at most {sized(allowed)} loaded.")
    if backlog := figures.daemon.get("embedding_backlog"):
        lines.append(f"{counted(backlog, 'chunk')} that are being stored wait for the embedding model.")
    if backup := figures.daemon.get("backup"):
        left = f", {counted(backup['topics_left'], 'topic')} still to be compared" if backup["topics_left"] else ""
        why = f": {backup['trouble']}" if backup["trouble"] else ""
        lines.append(f"The backup in {backup['bucket']} is {backup['lag_seconds']:.0f} s behind{left}{why}.")
    redacted = figures.daemon.get("redacted")
    if redacted is not None:
        lines.append(f"Redacted in what it has stored since its start: {tallied(redacted) or 'nothing'}.")
    return lines


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
        lines = [f"A daemon runs at {url}, which {daemon.refusal}.", *remembered]
        if health:
            answers = "" if health["upstream"]["reachable"] else ", which does not answer"
            troubles = msgspec.convert(health["troubles"], list[Trouble])
            lines = [f"A daemon runs at {url}, in front of {health['upstream']['url']}{answers}.", *remembered]
            lines += [f"In trouble: {one}." for one in troubles]
    steps = {}
    if url is None and is_empty:
        steps["memd demo"] = "shows on a long conversation what memd does; it needs no model"
    if url is None:
        steps["memd serve"] = "runs the daemon; --upstream URL names the model server"
    elif is_empty:
        steps[f"{url}/v1"] = "is the base URL for your programs; what is said there is remembered"
    else:
        steps["memd turn"] = "shows what memory did in the latest turns"
    if is_empty:
        steps["memd add PATH"] = "remembers documents and exported conversations"
    else:
        steps['memd search "…"'] = "shows what a chat with this question would get"
    steps |= {"memd check": "says whether everything is ready", "memd --help": "shows all commands"}
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
    told += [f"{note}."] if (note := waiting_note(waiting)) else []
    nothing = (not told and memory_elsewhere(config)) or "nothing is stored yet"
    return told or [f"{nothing[0].upper()}{nothing[1:]}."], not (told or config.cluster.is_on)
