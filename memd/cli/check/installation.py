"""Are the packages, the tokenizer and the embedding model installed correctly?

Rule: known inputs have known outputs; what differs is damaged or another version, and nothing is guessed from it.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

import numpy as np
from packaging.requirements import Requirement

from memd import __version__
from memd.assets import ranks_bytes
from memd.cli.check.result import CheckResult, failed, failed_with, ok, warning
from memd.conversation.tokens import TokenCounter, cl100k_base
from memd.embedding.bundled import FINGERPRINT
from memd.embedding.embedder import Embedder
from memd.embedding.loading import BUNDLED, HTTP, MULTILINGUAL, PATH, load_embedder
from memd.errors import EmbeddingError, RerankError
from memd.ingest.offline import stored_models
from memd.recall.rerank import Reranker
from memd.settings.model import Config
from memd.store import descriptors
from memd.store.disk import LocalDisk
from memd.store.layout import models_dir
from memd.store.tools.disk_usage import TopicDiskUsage
from memd.wording import counted

INSTALLATION, TOKENIZER, MODEL, OPEN_FILES = "installation", "tokenizer", "embedding model", "open files"
RERANKER = "reranker"
DISTRIBUTION = "memd-proxy"
REINSTALL = f"install memd again: pip install --force-reinstall {DISTRIBUTION} (from a checkout: pip install -e .)"

KNOWN_COUNTS = {"hello world": 2, "antidisestablishmentarianism": 6, "2 + 2 = 4": 7, "お誕生日おめでとう": 9}
"""Tokens by OpenAI's own tables of cl100k_base."""
KNOWN_TEXT = "This is an example sentence"
KNOWN_VECTOR = (0.06019, 0.06585, 0.0426, 0.07842, 0.02613, -0.00282, 0.05016, -0.01573, 0.05674, 0.03386)
"""The first components that the bundled model has for it, run as its graph has it; see memd/embedding/bundled.py."""
TOLERANCE = 0.001


def packages() -> CheckResult:
    """The versions of Python and of what memd depends on."""
    try:
        required = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    except metadata.PackageNotFoundError:
        said = f"memd {__version__} on Python {platform.python_version()}; not installed, so versions are not compared"
        return warning(INSTALLATION, said, "install it: pip install .")
    fitting, wrong = 0, []
    for requirement in required:
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # an extra's
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if requirement.specifier.contains(version, prereleases=True):
            fitting += 1
        else:
            wrong.append(f"{requirement.name} is {version}, memd needs {requirement.specifier}")
    if wrong:
        return failed(INSTALLATION, "; ".join(wrong), REINSTALL)
    packages = counted(fitting, "package")
    return ok(INSTALLATION, f"memd {__version__}, Python {platform.python_version()}, {packages} in fitting versions")


def tokenizer() -> CheckResult:
    """Known texts have known counts."""
    try:
        counter = TokenCounter(cl100k_base(ranks_bytes()))
        wrong = {text: counter.count(text) for text, count in KNOWN_COUNTS.items() if counter.count(text) != count}
    except (OSError, ValueError) as error:
        return failed(TOKENIZER, f"the bundled ranks cannot be read: {error}", REINSTALL)
    if wrong:
        text, count = next(iter(wrong.items()))
        return failed(TOKENIZER, f"{text!r} counts {count} tokens instead of {KNOWN_COUNTS[text]}", REINSTALL)
    return ok(TOKENIZER, f"cl100k_base counts {counted(len(KNOWN_COUNTS), 'known text')} right")


def open_files(config: Config) -> CheckResult:
    """How many descriptors a daemon may have, and whether that is enough for its connections."""
    allowed, wanted = descriptors.hard_limit(), config.limits.connections_max
    room = descriptors.connections_max(allowed)
    said = f"{allowed:,} at a time: room for {counted(min(room, wanted), 'connection')} and any number of topics"
    if room >= wanted:
        return ok(OPEN_FILES, said)
    return warning(OPEN_FILES, f"{said}; limits.connections_max is {wanted}", descriptors.REMEDY)


def embedding_model(config: Config, topics: list[TopicDiskUsage], files: LocalDisk) -> Iterator[CheckResult]:
    """Known text has its known vector, and what is stored was embedded with this model."""
    name = config.embedding.model
    try:
        embedder = load_embedder(
            config.embedding, models_dir=models_dir(config.data_dir), fetch=False, stored=stored_models(config, files)
        )
        problem = _infidelity(embedder)
    except EmbeddingError as error:
        if name in (BUNDLED, MULTILINGUAL, HTTP) or name.startswith(PATH):
            yield failed_with(MODEL, error)
        else:
            yield failed(MODEL, f"{name!r} is not on this machine, or unknown", f"memd serve fetches it once: {error}")
        return
    if problem:
        yield failed(MODEL, problem, REINSTALL)
        return
    yield ok(MODEL, f"{embedder.name}, {embedder.dimension} dimensions, fingerprint {embedder.fingerprint}")
    if others := sum(topic.chunks_of_others(embedder.fingerprint) for topic in topics):
        yield warning(
            MODEL,
            f"{counted(others, 'stored chunk')} were embedded with another model: no search by meaning finds them",
            "stop memd and run `memd reembed`, or set embedding.model back",
        )


def reranker(config: Config) -> Iterator[CheckResult]:
    """The reranker, if there is one, gives two texts scores."""
    if config.rerank.url:
        asking = Reranker(config.rerank)
        try:
            asking.scores(KNOWN_TEXT, [KNOWN_TEXT, "memd"])
        except RerankError as error:
            yield warning(RERANKER, str(error), "chunks stay in memd's own order; start it, or take rerank.url out")
        else:
            yield ok(RERANKER, asking.name)


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
