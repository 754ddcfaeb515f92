"""The seam between the log and whatever keeps it: a folder of this disk, or an engine that several machines share.

Rule: reading and searching work on the files of a topic's folder. Whatever must survive is written through the topic's
claim and nowhere else, so that a shelf may keep the truth in another place, with the folder as its cache. The lexical
index and what an interrupted write left (`.tmp`, `.torn`) are the folder's own.

A topic has two streams, which grow at their end: the log's file that is appended to, and the journal. All its other
files are written once, beside their place, and then published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from memd.store.disk import LocalDisk
from memd.store.erasure.wiping import Wiper
from memd.store.layout import TopicLayout

Stream = Literal["log", "hot"]
"""log: `active.bin`. hot: `hot.log`."""


class Position(msgspec.Struct, frozen=True, order=True):
    """A place in a stream."""

    number: int
    """Of the log: the segment. Of the journal: how often it was replaced, where the shelf counts that, else 0."""
    end: int
    """Bytes before it."""


class Heads(msgspec.Struct, frozen=True):
    """Where the streams of a topic end."""

    epoch: int
    """Of the latest claim; 0: nobody has one."""
    log: Position
    hot: Position
    revision: int = 0
    """Another one after anything but an append or a new journal, where the shelf counts that."""


class Claim(Protocol):
    """The right to write one topic, which one daemon has at a time. For one thread each stream.

    Every method but `release` raises StoreWriteFailed: Fenced if another claim was granted since, and then for good;
    InDoubt if nobody knows whether it happened, which `Shelf.heads` says once it can be asked.
    """

    files: LocalDisk
    """The disk of the folder."""
    layout: TopicLayout
    """The folder, which was brought up to date."""
    epoch: int
    """Higher than that of any earlier claim to the topic by which somebody might still write."""
    since: int
    """The epoch from which on nobody but this daemon had the topic."""
    id_floor: int
    """Ids up to this one were given out to entries of a topic of this name, which was erased."""
    id_turn: int | None
    """See `CanonicalClock.turn`; None: no other daemon gives out ids."""

    @property
    def renewed_at(self) -> float:
        """When it was asked for, or to be renewed the last time that it was (`steady_now`); infinite: it needs none."""

    @property
    def is_over(self) -> bool:
        """Whether it is known that nothing can be written by it any more: it was released, Fenced or InDoubt."""

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

    def release(self, *, unfinished: bool = False) -> None:
        """Let others have the topic; later writes are Fenced. A second call does nothing.

        Args:
            unfinished: something is left to do in it: `Shelf.unfinished` tells of it.
        """


class Shelf(Protocol):
    """Keeps topics. It raises StoreError where it cannot be read, StoreWriteFailed where it cannot be written."""

    def claim(self, topic_id: str, *, gone: str = "") -> Claim:
        """Claim a topic and bring its folder, made if necessary, up to date. A claim that was granted here before ends.

        Args:
            gone: the URL of a daemon that is known to be gone: from it the topic is taken at once.

        Raises:
            TopicHeld: another daemon has it.
        """

    def renew(self, claims: Collection[Claim]) -> list[Claim]:
        """Keep claims for another while; return those that are lost."""

    def forget(self, topic_id: str, *, erasure: int = 0, id_floor: int = 0, forbidden: bytes = b"") -> list[str]:
        """Remove all that is kept of a topic elsewhere than in its folder; the next claim begins another one.

        Args:
            erasure: its id; with the same one nothing more is removed, as others may have begun another topic since.
            id_floor: see Claim.
            forbidden: the file of what is never to be stored again; empty: as it is.

        Returns:
            What is still to be removed by `sweep`, in words.

        Raises:
            TopicHeld: another daemon has it.
        """

    def sweep(self, topic_id: str) -> list[str]:
        """Remove what counts no more of a topic and could not be removed until now; return what is still there."""

    def heads(self, topic_ids: Collection[str]) -> dict[str, Heads]:
        """Where the streams of topics end; those that there are not are left out."""

    def read(self, topic_id: str, stream: Stream, after: Position) -> bytes:
        """Return all that a stream has behind a position in the segment, or the journal, which that names."""

    def topics(self, after: str, limit: int) -> list[str]:
        """Return the names of the first topics behind a name, sorted."""

    def unfinished(self, limit: int) -> list[str]:
        """Return topics that nobody has by now, and that were left with something to do, as far as is known: a daemon
        that had them has died, or ended before it was done."""
