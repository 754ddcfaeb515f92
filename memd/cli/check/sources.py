"""Can the folders in `sources` be read, and how many files are in them?

Rule: nothing is read but the lists of folders; what a file holds is found out when it is indexed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from memd.cli.check.result import CheckResult, ok, warning
from memd.ingest.sources.tending import topic_of
from memd.ingest.sources.walking import Chosen, Walk
from memd.settings.model import AUTO_TOPIC, Config, SourceSettings
from memd.wording import counted, name_for_terminal

SOURCES = "sources"
FILES_COUNTED_MAX = 20_000
"""Of one source; some seconds on a slow disk."""


def sources(config: Config) -> Iterator[CheckResult]:
    """Look at each source of the settings."""
    return (_source(one, config.data_dir) for one in config.sources)


def _source(source: SourceSettings, data_dir: Path) -> CheckResult:
    path = Path(source.path)
    shown = name_for_terminal(source.path)
    chosen = Chosen(exclude=(*source.exclude, str(data_dir)), formats=source.formats, follow_links=source.follow_links)
    walk = Walk(path.resolve(), chosen)
    try:
        found = list(islice(walk.files(), FILES_COUNTED_MAX + 1))
    except OSError as error:
        said = f"{shown} cannot be read ({error.strerror or error}); what is known of it stays"
        return warning(SOURCES, said, "mount it or give this user the right to read it, or remove it from sources")
    unread = [*walk.unread, *((one.below, "no right to read it") for one in found if not os.access(one.path, os.R_OK))]
    more = f"more than {FILES_COUNTED_MAX:,} files" if len(found) > FILES_COUNTED_MAX else counted(len(found), "file")
    topic = topic_of(path) if source.topic == AUTO_TOPIC else source.topic
    said = f"{shown}: {more} for topic {topic}"
    if unread:
        name, reason = unread[0]
        said += f"; {counted(len(unread), 'path')} in it cannot be read: {name_for_terminal(name)} ({reason})"
        return warning(SOURCES, said, "give this user the right to read them, or leave them out with exclude")
    if not found:
        return warning(SOURCES, said, "look whether it is the right folder, and at its exclude and formats")
    return ok(SOURCES, said)
