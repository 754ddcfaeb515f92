"""Whether the daemon of bench/soak.py grows: its process sampled every second, each of its lives judged by itself."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

WARM_UP = 1 / 3
"""Of each life of the daemon."""
RSS_MB_MAX = 8.0
"""What its memory may gain over the rest of a life, beside what it counts itself: noise of the allocators ..."""
RSS_KB_PER_REQUEST_MAX = 6.0
"""... and this: counts and texts that are kept, up to 20 MB. A request that is never let go would be 20 and more."""
FDS_MAX, THREADS_MAX, TASKS_MAX = 4, 4, 8
"""By how many more of each a second half may have; a task is as short as a request."""
TOPIC_TASKS = 3
"""Of an open topic: it is tended, its text stored and its indexes made. A topic
stays open while it has work, and those that have none are 256 at most (`ingest.topics.OPEN_MAX`)."""
TOPICS_TASKS_MAX = 16
"""Work in the background besides: replies that are being kept, corrections, journals."""
LIFE_SECONDS_MIN = 30.0
"""A shorter life tells nothing about growth."""
JUDGED_SECONDS_MIN = 170.0
"""A shorter one is shown, not judged: caches and allocators are still filling up."""


class Sample(NamedTuple):
    """The daemon's process at one moment."""

    at: float
    pid: int
    rss_mb: float
    """Without what is mapped from files, which the system takes back when it needs the room."""
    counted_mb: float
    """What it says that it has loaded of the log, keeps in its caches (bounded), and has in its buffers."""
    fds: int
    threads: int
    tasks: int
    """Connections, requests and what belongs to them; without `background`."""
    background: int
    """Tasks that no request waits for."""
    requests: int
    """Of all agents so far."""
    topics: int
    """Those that are open."""
    unstored: int
    """Messages that wait to be embedded, of all branches."""


def looked_at(pid: int, stats: dict[str, Any], requests: int) -> Sample:
    """The process as it is now.

    Raises:
        OSError: it is not there any more.
    """
    counted_mb = sum(stats[name] for name in ("memory_bytes", "cache_bytes", "buffer_bytes")) / 1e6
    status = Path(f"/proc/{pid}/status").read_text()
    rss_kb = int(status.split("RssAnon:")[1].split()[0])
    threads = len(list(Path(f"/proc/{pid}/task").iterdir()))
    fds = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    background = stats["background_tasks"]
    return Sample(
        time.monotonic(),
        pid,
        rss_kb / 1e3,
        counted_mb,
        fds,
        threads,
        stats["tasks"] - background,
        background,
        requests,
        len(stats["topics"]),
        stats["unstored"],
    )


class Life(NamedTuple):
    """One life of the daemon, from when it was warm to its end."""

    seconds: float
    requests: int
    rss_mb: tuple[float, float]
    """When warm and at the end."""
    rss_gain_mb: float
    """Over that time, by least squares; without what it counts itself."""
    fds: tuple[int, int]
    """At its quietest while warm, in the first half and in the second: what is never let go raises that too, and what
    comes and goes does not."""
    threads: tuple[int, int]
    tasks: tuple[int, int]
    too_many: int
    """Tasks in the background beyond those that the open topics may have, at the quietest moment."""
    topics: tuple[int, int]
    """The most that were open."""
    unstored: tuple[int, int]
    """Messages that waited to be embedded, when warm and at the end: more where others keep the processor busy."""


def lives(samples: list[Sample], warm_up: float = WARM_UP) -> list[Life]:
    """Each life that was long enough to tell something, without its share of warming up."""
    by_pid: defaultdict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_pid[sample.pid].append(sample)
    found = []
    for life in by_pid.values():
        if life[-1].at - life[0].at < LIFE_SECONDS_MIN:
            continue
        warm = life[int(len(life) * warm_up) :]
        first, second = warm[: len(warm) // 2], warm[len(warm) // 2 :]
        seconds = warm[-1].at - warm[0].at
        own = [sample.rss_mb - sample.counted_mb for sample in warm]
        slope = float(np.polyfit([sample.at for sample in warm], own, 1)[0])
        found.append(
            Life(
                seconds,
                warm[-1].requests - warm[0].requests,
                (warm[0].rss_mb, warm[-1].rss_mb),
                slope * seconds,
                (_fewest(first, "fds"), _fewest(second, "fds")),
                (_fewest(first, "threads"), _fewest(second, "threads")),
                (_fewest(first, "tasks"), _fewest(second, "tasks")),
                min(one.background - TOPIC_TASKS * one.topics for one in second) - TOPICS_TASKS_MAX,
                (max(sample.topics for sample in first), max(sample.topics for sample in second)),
                (warm[0].unstored, warm[-1].unstored),
            )
        )
    return found


def _fewest(samples: list[Sample], name: str) -> int:
    return min(int(getattr(sample, name)) for sample in samples)


def growth(found: list[Life]) -> list[str]:
    """What grew."""
    bad = []
    for life in found:
        if life.seconds < JUDGED_SECONDS_MIN * (1 - WARM_UP):
            continue
        if life.rss_gain_mb > RSS_MB_MAX + RSS_KB_PER_REQUEST_MAX * life.requests / 1e3:
            bad.append(f"memory grew by {life.rss_gain_mb:.0f} MB in {life.requests} requests")
        if life.too_many > 0:
            bad.append(
                f"{life.too_many} more tasks in the background than open topics may have, in {life.requests} requests"
            )
        for name, most, (first, second) in (
            ("open files", FDS_MAX, life.fds),
            ("threads", THREADS_MAX, life.threads),
            ("tasks", TASKS_MAX, life.tasks),
        ):
            if second > first + most:
                bad.append(f"{name} grew from {first} to {second} in {life.requests} requests")
    return bad
