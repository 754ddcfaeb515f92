"""The right to write the folder of a topic.

Rule: reading and searching work on the files of a topic's folder. Whatever must survive is written through the topic's
claim and nowhere else. What an interrupted write left (`.tmp`, `.torn`) is the folder's own.

A topic has two streams, which grow at their end: the log's file that is appended to, and the journal. All its other
files are written once, beside their place, and then published.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.layout import TopicLayout

Stream = Literal["log", "hot"]
"""log: `active.bin`. hot: `hot.log`."""


class Claim(Protocol):
    """The right to write one topic. For one thread each stream.

    Every method but `release` raises StoreWriteFailed: Fenced if another claim was granted since, and then for good.
    """

    files: LocalDisk
    """The disk of the folder."""
    layout: TopicLayout
    """The folder, which was brought up to date."""

    def resume(self, stream: Stream, at: int) -> None:
        """Go on at the end of a stream that was read, and mended where an interrupted write had torn it."""

    def append(self, stream: Stream, at: int, data: bytes, *, sync: bool = True) -> None:
        """Append to a stream that was resumed or rolled: all of `data`, or nothing.

        Args:
            at: where the stream ends, as far as the caller knows; Fenced if that is not so.
            sync: durably; else it is before the next `sync`, and a crash may take it.
        """

    def sync(self, stream: Stream) -> None:
        """Make everything appended durable."""

    def roll(self, stream: Stream, temporary: Path, wiper: Wiper | None = None) -> None:
        """Begin a stream, or replace it, with a file that was written beside it: durably, and in one step.

        Args:
            temporary: it is gone afterwards, also after an error.
            wiper: overwrites what the stream was.
        """

    def rotate(self, segment_id: int) -> None:
        """File the log's stream, which is full, as this segment. The next one begins with `roll`."""

    def publish(self, written: Mapping[Path, Path], trims: Iterable[Path] = (), wiper: Wiper | None = None) -> None:
        """Remove files of the topic, then give others their place, durably, in this order.

        Args:
            written: the place of a file → the file that was written beside it, and is gone afterwards, also after an
                error; or the place again of a full segment, which what comes behind it vouches for.
            trims: nobody reads them any more.
            wiper: overwrites what is removed or replaced.
        """

    def release(self) -> None:
        """Let go of the topic; later writes are Fenced. A second call does nothing."""
