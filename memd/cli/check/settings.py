"""Is memd installed whole, are the settings safe, is the address free, and can the folders in `sources` be read?

Rule: `load_config` has checked the settings already; these checks depend on the machine, or find what is allowed but
unwise. Of sources only the lists of folders are read; what a file holds is found out when it is indexed.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from itertools import islice
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from packaging.requirements import Requirement

from memd import __version__
from memd.assets import ranks_bytes
from memd.cli.check import CheckResult, check, failed, ok, warning
from memd.cli.running import RunningDaemon
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.embedder import Embedder
from memd.embedding.loading import BUNDLED, load_embedder
from memd.embedding.local import FINGERPRINT
from memd.errors import MemdError, RerankError, StoreError
from memd.ingest.offline import stored_models
from memd.ingest.sources.look import Chosen, Walk
from memd.ingest.sources.watch import topic_of
from memd.proxy.connections import bound, own_port, tls_of
from memd.recall.rerank import Reranker
from memd.settings.model import AUTO_TOPIC, REMEDY_IF_SHORT, Config, SourceSettings, is_this_machine
from memd.store.disk import DESCRIPTORS_REMEDY, LocalDisk, connections_room, descriptors_hard_limit
from memd.store.layout import TopicLayout, models_dir
from memd.store.lexical.postings import GrowingColumns, main_language
from memd.store.log.recovery import read_log_file
from memd.store.shared.books import TokenList
from memd.store.tools.disk_usage import TopicDiskUsage
from memd.store.tools.export import active_bytes
from memd.wording import counted, name_for_terminal, not_english, pip_install

SETTINGS = "settings"
OTHERS_MAY_READ = 0o044


@check(SETTINGS)
def origin(path: Path | None, places: Mapping[str, str]) -> Iterator[CheckResult]:
    """Where the settings come from: `path` is the file that was read, `places` has the place of each."""
    elsewhere = sorted({place for place in places.values() if path is None or not place.startswith(f"{path}, line ")})
    in_file = sum(place not in elsewhere for place in places.values())
    parts = [] if path is None else [f"{path}: {counted(in_file, 'setting')}"]
    parts += [f"{place}: {', '.join(key for key in places if places[key] == place)}" for place in elsewhere]
    yield ok("; ".join(parts) or "all at their defaults: no file, no MEMD_ variable, no flag")


@check("access")
def access(config: Config, path: Path | None, places: Mapping[str, str]) -> Iterator[CheckResult]:
    """Who can reach the memory, and whether the token is long enough and not readable by others."""
    host, token = config.listen.host, config.auth.token
    is_open = not is_this_machine(host)
    # In a cluster, as this machine knew them last: nothing is made in its database.
    others = (*config.auth.tokens, *TokenList(LocalDisk(), config.data_dir).read())
    needed = "a token (`memd token list` shows whose)" if others else "auth.token"
    if token and path is not None and places.get("auth.token", "").startswith(f"{path}, line "):
        with suppress(OSError):
            if path.stat().st_mode & OTHERS_MAY_READ:
                said = f"others on this machine may read auth.token in {path}"
                yield warning(said, f"chmod 600 {path}, or give it as MEMD_AUTH_TOKEN")
                return
    if config.auth.is_short:
        who = f"{host} can be reached by others, and" if is_open else "only this machine, but"
        yield warning(f"{who} auth.token has only {counted(len(token), 'character')}", REMEDY_IF_SHORT)
    elif is_open and config.listen.tls_cert:
        yield ok(f"{host} can be reached by others, by TLS; each request has to show {needed}")
    elif is_open:
        said = f"{host} can be reached by others; each request has to show {needed}, and nothing is encrypted"
        yield ok(said, "set listen.tls_cert, or put a TLS proxy before it, if others share the network")
    else:
        yield ok("only this machine, " + (f"with {needed}" if token or others else "without a token"))


@check("address")
def address(config: Config, daemon: RunningDaemon | None) -> Iterator[CheckResult]:
    """Whether memd listens, or can listen, at the addresses in the settings."""
    host, port = config.listen.host, config.listen.port
    if daemon is not None:
        if model_url := daemon.model_url:
            elsewhere = port not in (0, urlsplit(model_url).port)
            said = f"the running daemon listens at {model_url}, its own page is at {daemon.url}/memd/"
            yield ok(said + (f" (the settings say port {port})" if elsewhere else ""))
        else:
            yield ok(f"the running daemon's own page is at {daemon.url}/memd/; to others it tells nothing more")
        return
    try:
        tls_of(config)
        listeners = bound(config)
    except MemdError:
        other = RunningDaemon(f"http://{host}:{port}", "").health().get("data_dir")
        if other is None:
            raise
        said = f"{host}:{port} is in use by a memd that holds {other}"
        yield failed(said, "stop that one, name its folder with --data-dir, or choose another listen.port")
        return
    listeners.close()
    if listeners.moved:
        said = f"memd's own page will be at a port that is not known yet: {listeners.moved.rpartition('; ')[0]}"
        yield warning(said, "stop what uses the port, or choose another with admin.port")
    elif not port:
        yield ok(f"{host}, any free port")
    else:
        yield ok(f"{host}:{port} is free" + (f", and so is {own}" if (own := own_port(config)) else ""))


LATEST = 200
"""Entries whose language is looked at."""
FILES_COUNTED_MAX = 20_000
"""Of one source; some seconds on a slow disk."""


@check("sources")
def source(source: SourceSettings, data_dir: Path) -> Iterator[CheckResult]:
    """A source of the settings can be read, and there is something in it."""
    path = Path(source.path)
    shown = name_for_terminal(source.path)
    chosen = Chosen(exclude=(*source.exclude, str(data_dir)), formats=source.formats, follow_links=source.follow_links)
    walk = Walk(path.resolve(), chosen)
    try:
        found = list(islice(walk.files(), FILES_COUNTED_MAX + 1))
    except OSError as error:
        said = f"{shown} cannot be read ({error.strerror or error}); what is known of it stays"
        yield warning(said, "mount it or give this user the right to read it, or remove it from sources")
        return
    unread = [*walk.unread, *((one.below, "no right to read it") for one in found if not os.access(one.path, os.R_OK))]
    more = f"more than {FILES_COUNTED_MAX:,} files" if len(found) > FILES_COUNTED_MAX else counted(len(found), "file")
    topic = topic_of(path) if source.topic == AUTO_TOPIC else source.topic
    said = f"{shown}: {more} for topic {topic}"
    if unread:
        name, reason = unread[0]
        said += f"; {counted(len(unread), 'path')} in it cannot be read: {name_for_terminal(name)} ({reason})"
        yield warning(said, "give this user the right to read them, or leave them out with exclude")
    elif not found:
        yield warning(said, "look whether it is the right folder, and at its exclude and formats")
    else:
        yield ok(said)


DISTRIBUTION = "memd-proxy"
REINSTALL = f"install memd again: {pip_install('--force-reinstall', DISTRIBUTION)} (from a checkout: -e . in its place)"

KNOWN_COUNTS = {"hello world": 2, "antidisestablishmentarianism": 6, "2 + 2 = 4": 7, "お誕生日おめでとう": 9}
"""Tokens by OpenAI's own tables of cl100k_base."""
KNOWN_TEXT = "This is an example sentence"
KNOWN_VECTOR = (0.06019, 0.06585, 0.0426, 0.07842, 0.02613, -0.00282, 0.05016, -0.01573, 0.05674, 0.03386)
"""The first components that the bundled model has for it, run as its graph has it; see memd/embedding/local.py."""
TOLERANCE = 0.001


@check("installation")
def packages() -> Iterator[CheckResult]:
    """The versions of Python and of what memd depends on."""
    this = f"memd {__version__}"
    try:
        required = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        said = f"{this} on Python {platform.python_version()}; not installed, so versions are not compared"
        yield warning(said, f"install it: {pip_install('.')}")
        return
    required = [one for one in required if one.marker is None or one.marker.evaluate()]  # the others are of extras
    wrong = []
    for requirement in required:
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, memd needs {requirement.specifier}")
    if wrong:
        yield failed("; ".join(wrong), REINSTALL)
    else:
        packages = counted(len(required), "package")
        yield ok(f"{this}, Python {platform.python_version()}, {packages} in fitting versions")


@check("tokenizer")
def tokenizer() -> Iterator[CheckResult]:
    """Known texts have known counts."""
    try:
        counter = TokenCounter(cl100k_base(ranks_bytes()))
        counts = {text: counter.count(text) for text in KNOWN_COUNTS}
    except (OSError, ValueError) as error:
        yield failed(f"the bundled ranks cannot be read: {error}", REINSTALL)
        return
    for text, count in counts.items():
        if count != KNOWN_COUNTS[text]:
            yield failed(f"{text!r} counts {count} tokens instead of {KNOWN_COUNTS[text]}", REINSTALL)
            return
    yield ok(f"cl100k_base counts {counted(len(KNOWN_COUNTS), 'known text')} right")


@check("open files")
def open_files(config: Config) -> Iterator[CheckResult]:
    """How many descriptors a daemon may have, and whether that is enough for its connections."""
    allowed, wanted = descriptors_hard_limit(), config.limits.connections_max
    room = connections_room(allowed)
    said = f"{allowed:,} at a time: room for {counted(min(room, wanted), 'connection')} and any number of topics"
    is_enough = room >= wanted
    yield ok(said) if is_enough else warning(f"{said}; limits.connections_max is {wanted}", DESCRIPTORS_REMEDY)


@check("embedding model")
def embedding_model(config: Config, topics: list[TopicDiskUsage], files: LocalDisk) -> Iterator[CheckResult]:
    """Known text has its known vector, and what is stored was embedded with this model."""
    embedder = load_embedder(
        config.embedding, models_dir=models_dir(config.data_dir), fetch=False, stored=stored_models(config, files)
    )
    if problem := _infidelity(embedder):
        yield failed(problem, REINSTALL)
        return
    yield ok(f"{embedder.name}, {embedder.dimension} dimensions, fingerprint {embedder.fingerprint}")
    if others := sum(topic.chunks_of_others(embedder.fingerprint) for topic in topics):
        said = f"{counted(others, 'stored chunk')} were embedded with another model: no search by meaning finds them"
        yield warning(said, "stop memd and run `memd reembed`, or set embedding.model back")
    if embedder.fingerprint == FINGERPRINT:
        layouts = (TopicLayout(config.data_dir, topic.topic_id) for topic in topics)
        for language in dict.fromkeys(filter(None, (_said_last_in(files, one) for one in layouts))):
            yield warning(*not_english(language))


def _said_last_in(files: LocalDisk, layout: TopicLayout) -> str | None:
    """See `main_language`; of the latest entries of a topic."""
    with suppress(StoreError):  # which the check of the log tells
        data, columns = active_bytes(files, layout), GrowingColumns()
        found = None if data is None else read_log_file(data, name=str(layout.active), dimension=None)
        columns.extend([] if found is None else found.entries[-LATEST:])
        return main_language(columns)
    return None


@check("reranker")
def reranker(config: Config) -> Iterator[CheckResult]:
    """The reranker, if there is one, gives two texts scores."""
    if config.rerank.url:
        asking = Reranker(config.rerank)
        try:
            asking.scores(KNOWN_TEXT, [KNOWN_TEXT, "memd"])
        except RerankError as error:
            yield warning(str(error), "chunks stay in memd's own order; start it, or take rerank.url out")
        else:
            yield ok(asking.name)


def _infidelity(embedder: Embedder) -> str:
    """Compare the model's vectors with known ones, and describe the difference; empty if there is none."""
    vector = embedder.embed(KNOWN_TEXT)
    if not np.isfinite(vector).all() or abs(float(np.linalg.norm(vector)) - 1) > TOLERANCE:
        return f"{embedder.name} gives no unit vector for a plain sentence"
    if embedder.name != BUNDLED:
        return ""
    if embedder.fingerprint != FINGERPRINT:
        return f"the files of the bundled model have changed: fingerprint {embedder.fingerprint}"
    difference = float(np.abs(vector[: len(KNOWN_VECTOR)] - np.asarray(KNOWN_VECTOR)).max())
    if difference > TOLERANCE:
        return f"the bundled model gives other vectors than it should (by {difference:.4f}): results will be poor"
    return ""
