"""A cluster beside a memd alone: what a request costs more, how fast others take over, a million topics, what it costs.

Backs these claims: a first byte and a search take at most 1 ms longer at the daemon that has the topic, and at most
3 ms longer through another one; topics of a daemon that was killed are answered for by another one within a second,
and those of a silent one within two leases; what is asked of the database does not grow with the topics that
are at rest.

A real PostgreSQL that syncs, an S3 server in this process, daemons in processes of their own, all on this machine:
there is no network in the figures, and each hop adds its round trip. The requests of a memd alone, of the owner and
through another daemon take turns. Topics at rest are simulated: their rows are real, what they say is not; those that
are open are real. Prices are parameters; the bytes and requests that they are multiplied with were measured.

    python bench/cluster.py [--parts requests,takeover,topics,costs] [--rounds 200] [--kills 12] [--lease 5]
        [--topics 1000000] [--prices gb_month=0.023,puts_million=5,gets_million=0.4,database_month=100,database_gb=0.12]
        [--json FILE]
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import numpy as np
import psycopg
from obstore.store import MemoryStore
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / one) for one in ("support", "cluster")]

from bucket_server import s3_server  # noqa: E402  # needs the path above, as those that follow
from daemon_process import DaemonProcess  # noqa: E402
from house import Member, running_house  # noqa: E402
from overhead_targets import serving  # noqa: E402
from postgres_server import running_postgres  # noqa: E402
from store import DIMENSION, GROUP, SEGMENT_ENTRIES, drafts  # noqa: E402

from memd.store.bucket.objects import Bucket  # noqa: E402
from memd.store.cluster.database import Database  # noqa: E402
from memd.store.cluster.postgres_shelf import PostgresShelf  # noqa: E402
from memd.store.disk import DiskFiles, LocalDisk  # noqa: E402
from memd.store.store import Store  # noqa: E402

Figures = dict[str, float]
ALONE, OWNER, OTHER = "memd alone", "the owner", "through another"
PARTS = ("requests", "takeover", "topics", "costs")
GOALS = {(what, who): limit for what in ("first byte", "search") for who, limit in ((OWNER, 1.0), (OTHER, 3.0))}
"""Milliseconds more than with a memd alone, of medians."""
NOTES, WARM = 300, 20
STORED_SECONDS = 0.1
"""After a note, so that the next one is not behind the work that this one leaves."""
TAKEN_TOPICS = 6
ACTIVE = 1_000
COST_CHUNKS = 2 * SEGMENT_ENTRIES
PRICES = {"gb_month": 0.023, "puts_million": 5.0, "gets_million": 0.4, "database_month": 100.0, "database_gb": 0.12}
"""Of a bucket's gigabyte for a month, of a million writes and reads, of a small database with a synchronous standby for
a month, and of a gigabyte of its disks. Nobody's list: give your own."""
CHUNKS_A_TOPIC, LET_GO, MONTHS = 200, 30, 12
"""For what is calculated: how often a topic is let go in a year, each an object, and what all was said in."""
RESTING_BYTES = 400
"""Of a topic's rows, where `topics` was not measured."""
DURABLE = {"fsync": "on", "shared_buffers": "128MB"}


class Target(NamedTuple):
    """Whom requests are sent to."""

    name: str
    daemon: DaemonProcess


# -- requests -----------------------------------------------------------------------------------------------------


@contextmanager
def targets(folder: Path) -> Iterator[list[Target]]:
    """A memd alone, and two of a cluster, of which the first has the topic; all with the same notes."""
    with ExitStack() as stack:
        upstream, _ = stack.enter_context(serving("stub"))
        postgres, s3 = stack.enter_context(running_postgres(settings=DURABLE)), stack.enter_context(s3_server())
        bucket = s3.settings()
        store = {
            "url": postgres.database("memd"),
            "bucket": bucket.bucket,
            "endpoint": s3.url,
            "region": "us-east-1",
            "access_key": "any",
            "secret_key": "any",
        }
        made = []
        for name in (ALONE, OWNER, OTHER):
            own = folder / name.replace(" ", "-")
            own.mkdir()
            settings = {"log": {"level": "warning"}} | ({} if name == ALONE else {"store": store})
            daemon = DaemonProcess(own, upstream, settings)
            stack.callback(daemon.discard)
            made.append(Target(name, daemon.start()))
        for target in made[:2]:
            for number in range(0, NOTES, 50):
                notes = [
                    {"content": f"Gate {n} opens with word {n * 7919 % 10007}."} for n in range(number, number + 50)
                ]
                asked(target.daemon.own_url, "/memd/notes", {"topic_id": "team", "notes": notes})
        yield made


def asked(base: str, path: str, body: object = None) -> bytes:
    """A whole answer over a connection of its own."""
    parts = urlsplit(base)
    with contextlib.closing(http.client.HTTPConnection(parts.netloc, timeout=60)) as connection:
        sent = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        told = answer.read()
        assert answer.status == 200, told
        return told


class Asker:
    """One client over a kept connection; milliseconds of each request."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._models = http.client.HTTPConnection(urlsplit(daemon.base_url).netloc, timeout=60)
        self._own = http.client.HTTPConnection(urlsplit(daemon.own_url).netloc, timeout=60)
        self._count = 0

    def first_byte(self, number: int) -> float:
        """Of a streamed reply in a new conversation."""
        question = f"With which word is gate {number % NOTES} opened? I ask for the {number}th time."
        body = {"stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": question}]}
        return self._timed(self._models, "/t/team/v1/chat/completions", body, first=True)

    def append(self, number: int) -> float:
        """Of a note, which is durable when it is answered."""
        body = {"topic_id": "team", "notes": [{"content": f"Visitor {number} {id(self)} came at noon."}]}
        return self._timed(self._own, "/memd/notes", body)

    def search(self, number: int) -> float:
        """By meaning and by words."""
        question = quote(f"the word of gate {number % NOTES}")
        return self._timed(self._own, f"/memd/search?topic=team&q={question}", None)

    def _timed(self, connection: http.client.HTTPConnection, path: str, body: object, *, first: bool = False) -> float:
        sent = None if body is None else json.dumps(body).encode()
        began = time.perf_counter()
        connection.request("GET" if body is None else "POST", path, sent, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read(1 if first else None)
        took = (time.perf_counter() - began) * 1000
        answer.read()
        assert answer.status == 200, path
        return took


def requests(folder: Path, rounds: int) -> Figures:
    """Milliseconds of each kind of request, the targets in turns."""
    figures: Figures = {}
    with targets(folder) as made:
        askers = {target.name: Asker(target.daemon) for target in made}
        kinds: dict[str, Callable[[Asker, int], float]] = {
            "first byte": Asker.first_byte,
            "search": Asker.search,
            "append of a note": Asker.append,
        }
        for kind, ask in kinds.items():
            times: dict[str, list[float]] = {name: [] for name in askers}
            for number in range(WARM + rounds):
                names = list(askers) if number % 2 else list(askers)[::-1]
                for name in names:
                    times[name].append(ask(askers[name], number))
                    time.sleep(STORED_SECONDS if ask is Asker.append else 0)
            for name, taken in times.items():
                figures[f"{kind}, {name}"] = statistics.median(taken[WARM:])
    return figures


def requests_table(figures: Figures) -> Table:
    """With what is added, and whether that is within the goal."""
    table = Table(title="milliseconds, medians in turns")
    for column in ("", ALONE, OWNER, "added", OTHER, "added"):
        table.add_column(column, justify="right")
    for kind in dict.fromkeys(name.split(", ")[0] for name in figures):
        alone = figures[f"{kind}, {ALONE}"]
        cells = [kind, f"{alone:.2f}"]
        for who in (OWNER, OTHER):
            added = figures[f"{kind}, {who}"] - alone
            goal = GOALS.get((kind, who))
            told = "" if goal is None else f" ({'met' if added <= goal else 'MISSED'}: {goal:g})"
            cells += [f"{figures[f'{kind}, {who}']:.2f}", f"{added:+.2f}{told}"]
        table.add_row(*cells)
    return table


# -- takeover -----------------------------------------------------------------------------------------------------


TROUBLES = {"killed": (Member.kill, Member.start), "silent": (Member.stop, Member.go_on)}


def takeover(folder: Path, kills: int, lease_seconds: float) -> Figures:
    """Seconds from the end of an owner to the first note that another daemon takes, of each of its topics."""
    figures: Figures = {}
    with running_house(folder, daemons=2, lease_seconds=lease_seconds) as house:
        house.start()
        house.write(TAKEN_TOPICS, TAKEN_TOPICS, think_seconds=0.02, corrects=False)
        house.wait_whole()
        for kind, (begin, undo) in TROUBLES.items():
            taken: list[float] = []
            for _ in range(kills):
                owner = house.owner()
                had = {topic for topic, number in house.owners().items() if number == owner.number} & house.topics
                others = {member.number for member in house.members} - {owner.number}
                began = time.monotonic()
                begin(owner)
                taken += house.taken_over(began, had, others).values()
                undo(owner)
                house.wait_whole()
            figures |= {
                f"{kind}, p50": float(np.percentile(taken, 50)),
                f"{kind}, p99": float(np.percentile(taken, 99)),
                f"{kind}, topics": float(len(taken)),
            }
        house.end_writers()
        verdict = house.verdict()
        print(*verdict.wrong, *verdict.missing, sep="\n", end="")
        figures["lost or twice"] = float(len(verdict.wrong) + len(verdict.missing))
    return figures


# -- a million topics ---------------------------------------------------------------------------------------------


def shelf_in(database: Database, folder: Path, bucket: Bucket, files: LocalDisk | None = None) -> PostgresShelf:
    """The shelf of a daemon."""
    folder.mkdir(exist_ok=True)
    return PostgresShelf(database, bucket, files or DiskFiles(), folder, url="http://bench", lease_seconds=600)


RESTING = (
    "INSERT INTO memd_topic (topic, epoch, lease_until, owner, since, log_end, hot_end)"
    " SELECT 'rest-' || n, 2, now(), 'bench', 1, 40000, 400 FROM generate_series(1, %s) n",
    "INSERT INTO memd_object (topic, name, key, crc, bytes, at)"
    " SELECT 'rest-' || n, 'tail', 'rest-' || n || '/0000000001/' || md5(n::text) || '/tail', n, 40400, 0"
    " FROM generate_series(1, %s) n",
)
"""Topics that were let go: a row each, and an object that has all of it."""
SIZE = "SELECT pg_total_relation_size('memd_topic') + pg_total_relation_size('memd_object')"


def topics(folder: Path, count: int) -> Figures:
    """Milliseconds of what a daemon asks of the database, with `count` topics at rest and with none, in turns."""
    figures: Figures = {}
    with ExitStack() as stack:
        postgres = stack.enter_context(running_postgres(settings=DURABLE))
        shelves: dict[str, PostgresShelf] = {}
        for name, resting in (("none", 0), ("many", count)):
            database = Database(url := postgres.database(name))
            stack.callback(database.close)
            database.connect()
            shelf = shelves[name] = shelf_in(database, folder / name, Bucket(MemoryStore(), "memory://"))
            shelf.claim("first").release()  # from then on the bucket is the cluster's
            with psycopg.connect(url, autocommit=True) as connection:
                for statement in RESTING if resting else ():
                    connection.execute(statement, (resting,))
                connection.execute("ANALYZE")
                if resting:
                    size = connection.execute(SIZE).fetchone()
                    assert size is not None
                    figures["bytes in the database of a topic at rest"] = size[0] / count
        claims = {name: [shelf.claim(f"active-{one}") for one in range(ACTIVE)] for name, shelf in shelves.items()}
        some = [f"rest-{number}" for number in range(1, 9)]
        kinds: dict[str, Callable[[str, int], object]] = {
            "claim a topic and let it go": lambda name, n: shelves[name].claim(f"new-{n}").release(),
            f"renew {ACTIVE:,} claims": lambda name, n: shelves[name].renew(claims[name]),
            "heads of 8 topics": lambda name, n: shelves[name].heads(some),
            "a page of 100 topics": lambda name, n: shelves[name].topics("rest-5", 100),
        }
        for kind, work in kinds.items():
            times: dict[str, list[float]] = {name: [] for name in shelves}
            for number in range(50):
                for name in shelves if number % 2 else list(shelves)[::-1]:
                    began = time.perf_counter()
                    work(name, number)
                    times[name].append((time.perf_counter() - began) * 1000)
            for name, taken in times.items():
                figures[f"{kind}, {name} at rest, ms"] = statistics.median(taken)
    return figures


# -- costs --------------------------------------------------------------------------------------------------------


def written(folder: Path) -> Figures:
    """What chunks cost in appends, bytes and requests, beside a folder alone, in turns."""
    chosen = np.random.default_rng(1)
    vectors = chosen.normal(size=(COST_CHUNKS, DIMENSION)).astype(np.float32)
    made = drafts(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), chosen)
    bucket = Bucket(MemoryStore(), "memory://")
    with (
        running_postgres(settings=DURABLE) as postgres,
        contextlib.closing(Database(postgres.database("costs"))) as database,
    ):
        database.connect()
        given = {"dimension": DIMENSION, "fingerprint": "bench", "segment_entries_max": SEGMENT_ENTRIES}
        shared = Store.open(folder / "cache", **given, shelf=lambda files, to: shelf_in(database, to, bucket, files))  # type: ignore[arg-type]
        stores = {ALONE: Store.open(folder / "alone", **given), "cluster": shared}  # type: ignore[arg-type]
        logs = {name: store.topic("team") for name, store in stores.items()}
        times: dict[str, list[float]] = {name: [] for name in logs}
        wal, tail = asked_of(database, WAL), 0.0
        for number, start in enumerate(range(0, COST_CHUNKS, GROUP)):
            for name in logs if number % 2 else list(logs)[::-1]:
                began = time.perf_counter()
                logs[name].append(made[start : start + GROUP])
                times[name].append((time.perf_counter() - began) * 1000)
        tail = asked_of(database, TAIL)
        for log in logs.values():
            for segment_id in log.unsealed():
                log.seal(segment_id)
        figures = {f"append of {GROUP} chunks, {name}, ms": statistics.median(taken) for name, taken in times.items()}
        sealed = COST_CHUNKS // SEGMENT_ENTRIES * SEGMENT_ENTRIES
        figures |= {
            "WAL, bytes a chunk": (asked_of(database, WAL) - wal) / COST_CHUNKS,
            "log in the database, bytes a chunk": tail / COST_CHUNKS,
            "bucket, bytes a chunk": bucket.bytes_sent / sealed,
            "bucket, requests a chunk": bucket.requests / sealed,
        }
        for store in stores.values():
            store.close()
    return figures


WAL = "SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')"
TAIL = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('memd_log')"


def asked_of(database: Database, statement: str) -> float:
    """A number that the database tells."""
    return database.ask(lambda connection: float(connection.execute(statement).fetchone()[0]))


def months(figures: Figures, prices: Figures) -> Table:
    """What a month costs with so many chunks, a twelfth of which was said in it; calculated."""
    table = Table(title="a month, calculated with the prices that were given")
    for column in ("chunks", "topics", "bucket, GB", "writes", "database, GB", "bucket", "database", "both"):
        table.add_column(column, justify="right")
    for chunks in (1_000_000, 1_000_000_000):
        count = chunks // CHUNKS_A_TOPIC
        kept = chunks * figures["bucket, bytes a chunk"] / 1e9
        writes = (chunks * figures["bucket, requests a chunk"] + count * LET_GO) / MONTHS
        tails = min(count, ACTIVE) * min(CHUNKS_A_TOPIC, SEGMENT_ENTRIES / 2)
        rows = figures.get("bytes in the database of a topic at rest", RESTING_BYTES)
        held = (count * rows + tails * figures["log in the database, bytes a chunk"]) / 1e9
        bucket = kept * prices["gb_month"] + writes / 1e6 * (prices["puts_million"] + prices["gets_million"])
        database = prices["database_month"] + held * prices["database_gb"]
        cells = (f"{chunks:,}", f"{count:,}", f"{kept:,.1f}", f"{writes:,.0f}", f"{held:.2f}")
        table.add_row(*cells, f"{bucket:,.2f}", f"{database:,.2f}", f"{bucket + database:,.2f}")
    return table


# -- all ----------------------------------------------------------------------------------------------------------


def listed(title: str, figures: Figures) -> Table:
    """A figure a line."""
    table = Table(title=title)
    table.add_column("")
    table.add_column("", justify="right")
    for what, value in figures.items():
        table.add_row(what, f"{value:,.5f}" if 0 < value < 0.01 else f"{value:,.2f}")
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--lease", type=float, default=5.0)
    parser.add_argument("--topics", type=int, default=1_000_000)
    parser.add_argument("--prices", default="")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    prices = PRICES | {
        name: float(price) for name, _, price in (one.partition("=") for one in given.prices.split(",") if one)
    }
    DaemonProcess.forks = sys.platform == "linux"
    console, parts, told = Console(), given.parts.split(","), {}
    with tempfile.TemporaryDirectory(prefix="memd-bench-", ignore_cleanup_errors=True) as name:
        for part in parts:
            (folder := Path(name).absolute() / part).mkdir()
            if part == "requests":
                told[part] = requests(folder, given.rounds)
                console.print(requests_table(told[part]))
            elif part == "takeover":
                told[part] = takeover(folder, given.kills, given.lease)
                console.print(listed(f"takeover, seconds, with a lease of {given.lease:g}", told[part]))
            elif part == "topics":
                told[part] = topics(folder, given.topics)
                console.print(listed(f"{given.topics:,} topics at rest (simulated), {ACTIVE:,} open", told[part]))
            else:
                told[part] = written(folder)
                console.print(listed(f"{COST_CHUNKS:,} chunks", told[part]))
                console.print(months(told.get("topics", {}) | told[part], prices))
    if given.json:
        given.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
