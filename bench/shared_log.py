"""Topics in a folder and in PostgreSQL: what sharing them costs, in turns on one machine.

Backs these claims: a durable append of 20 chunks takes at most twice as long as the folder's; a first byte comes at
most 1.5 ms later, a search no later.

A real PostgreSQL that syncs, on a socket of this machine: there is no network in the figures, and each of these adds
one round trip. The daemons are processes of their own before a stub that begins its answer at once and
ends it 50 ms later (the end waits until the reply is durable); their requests take turns.
The other daemon of the cluster is asked as often, so that there is something to be taken in.

    python bench/shared_log.py [--rounds 300] [--json FILE]
    python bench/shared_log.py --topics 1000000 [--active 1000]    of many topics with a note each a few are used
"""

from __future__ import annotations

import memd  # noqa: F401 - before numpy: it keeps BLAS at one thread, as in the daemon

# isort: split
import argparse
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from urllib.parse import quote, urlsplit

import numpy as np
import psycopg
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support")]

from daemon_process import DaemonProcess, wait_until  # noqa: E402  # needs the path above, as those that follow
from overhead_targets import resident_bytes, serving  # noqa: E402
from postgres_server import PostgresServer, running_postgres  # noqa: E402
from store import DIMENSION, GROUP, SEGMENT_ENTRIES, drafts  # noqa: E402

from memd.store.shared.postgres import SharedLog  # noqa: E402
from memd.store.shared.shared_topic import SharedTopicLog  # noqa: E402
from memd.store.store import ModelId, Store, StoreShared, TopicLog  # noqa: E402

Figures = dict[str, float]
FOLDER, SHARED, OTHER = "folder", "PostgreSQL", "its other daemon"
DURABLE = {"fsync": "on", "shared_buffers": "128MB"}
NOTES, WARM = 300, 20
PAUSE_SECONDS = 0.05
GOALS = {"append of 20 chunks": ("times", 2.0), "first byte": ("added", 1.5), "search": ("added", 0.5)}


def appends(folder: Path, postgres: PostgresServer, rounds: int) -> Figures:
    """Milliseconds of durable appends of GROUP chunks, and of `since` with nothing new and with one group."""
    chosen, times = np.random.default_rng(1), dict[str, list[float]]()
    with ExitStack() as stack:
        kept = [stack.enter_context(closing(SharedLog(postgres.database("appends")))) for _ in range(1)]
        kept.append(stack.enter_context(closing(SharedLog(kept[0]._url))))

        def opened(name: str, one: SharedLog | None = None) -> TopicLog:
            own = StoreShared(model=ModelId(DIMENSION, "bench"), segment_entries_max=SEGMENT_ENTRIES)
            return stack.enter_context(closing(Store(folder / name, own, kept=one))).topic("team")

        alone, shared = opened("alone"), [opened(f"copy{i}", one) for i, one in enumerate(kept)]
        first, second = (log for log in shared if isinstance(log, SharedTopicLog))
        logs: list[tuple[str, TopicLog]] = [(FOLDER, alone), (SHARED, first)]

        def timed(name: str, work: Callable[[], object]) -> None:
            began = time.perf_counter()
            work()
            times.setdefault(name, []).append((time.perf_counter() - began) * 1000)

        for number in range(WARM + rounds):
            vectors = chosen.standard_normal((GROUP, DIMENSION)).astype(np.float32)
            made = drafts(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), chosen)
            for name, log in logs if number % 2 else logs[::-1]:
                timed(f"append of 20 chunks, {name}", lambda log=log, made=made: log.append(made))  # type: ignore[misc]
            timed(f"one group is taken in, {SHARED}", second.catch_up)
            timed(f"nothing is new, {SHARED}", second.catch_up)
    return {name: statistics.median(taken[WARM:]) for name, taken in times.items()}


class Asker:
    """One client over a kept connection; milliseconds of each request."""

    def __init__(self, daemon: DaemonProcess) -> None:
        self._models = http.client.HTTPConnection(urlsplit(daemon.base_url).netloc, timeout=60)
        self._own = http.client.HTTPConnection(urlsplit(daemon.own_url).netloc, timeout=60)

    def first_byte(self, number: int, topic: str = "team") -> float:
        """Of a streamed reply in a new conversation."""
        question = f"With which word is gate {number % NOTES} opened? I ask for the {number}th time."
        asked = [{"role": "user", "content": question}]
        body = {"messages": asked, "stream": True, "max_tokens": 8, "stop": ["slowly"]}  # the stub reads its end
        return self._timed(self._models, f"/t/{topic}/v1/chat/completions", body, first=True)

    def note(self, number: int) -> float:
        """A note, which is durable when it is answered."""
        body = {"topic_id": "team", "notes": [{"content": f"Gate {number} is opened with the word w{number * 7}."}]}
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
        begun = answer.read(1 if first else None)
        took = (time.perf_counter() - began) * 1000
        answer.read()
        assert answer.status == 200, path
        assert not first or begun == b"d", f"no stream: {begun!r}"
        return took


def requests(folder: Path, postgres: PostgresServer, rounds: int) -> Figures:
    """Milliseconds of each kind of request, the daemons in turns."""
    figures: Figures = {}
    with ExitStack() as stack:
        upstream, _ = stack.enter_context(serving("stub"))
        shared = {"cluster": {"database": postgres.database("requests")}}
        askers = {}
        for name, settings in ((FOLDER, {}), (SHARED, shared), (OTHER, shared)):
            (own := folder / name.replace(" ", "-")).mkdir()
            daemon = DaemonProcess(own, upstream, {"log": {"level": "warning"}, **settings})
            stack.callback(daemon.discard)
            askers[name] = Asker(daemon.start())
        for number in range(NOTES):
            askers[FOLDER].note(number)
            askers[SHARED].note(number)
        time.sleep(5)  # until all of it is embedded
        kinds = {"first byte": Asker.first_byte, "search": Asker.search, "again": Asker.search, "note": Asker.note}
        times = {f"{kind}, {name}": list[float]() for kind in kinds for name in askers}
        for number in range(WARM + rounds):  # kinds in turns: an idle connection would be closed
            for kind, ask in kinds.items():
                for name in list(askers) if number % 2 else list(askers)[::-1]:
                    time.sleep(PAUSE_SECONDS)  # what is stored meanwhile is done
                    times[f"{kind}, {name}"].append(ask(askers[name], number + NOTES * (kind == "note")))
        figures |= {name: statistics.median(taken[WARM:]) for name, taken in times.items()}
    return figures


def many_topics(folder: Path, postgres: PostgresServer, count: int, active: int) -> Figures:
    """Start, first byte and memory of a daemon that is asked for some of very many topics, each with one note."""
    url = postgres.database("many")
    with ExitStack() as stack:
        upstream, _ = stack.enter_context(serving("stub"))
        daemon = DaemonProcess(folder, upstream, {"log": {"level": "warning"}, "cluster": {"database": url}})
        stack.callback(daemon.discard)
        connection = stack.enter_context(psycopg.connect(url, autocommit=True))

        def started() -> float:
            began = time.perf_counter()
            daemon.start()
            return time.perf_counter() - began

        figures = {"seconds of a start, no topic": started()}
        Asker(daemon).note(0)
        stored = "SELECT count(*) FROM memd_log WHERE topic = 'team' AND stream = 'log'"
        wait_until(lambda: connection.execute(stored).fetchone() == (1,), lambda: "the note is not stored")
        daemon.terminate()
        for statement in _FILL:
            connection.execute(statement, {"count": count}, binary=True)
        [(size, rows)] = connection.execute(_SIZE).fetchall()
        figures |= {"topics": count, "bytes of a topic in PostgreSQL": size / count, "bytes of a chunk in it": rows}
        figures["seconds of a start, empty folder"] = started()
        figures["MB at first"] = resident_bytes(daemon.pid) / 1e6
        for name in ("first use", "second use"):
            asker, taken = Asker(daemon), list[float]()
            for number in range(active):
                taken.append(asker.first_byte(0, f"t{number * (count // active)}"))
                time.sleep(PAUSE_SECONDS / 5)
            figures |= {
                f"first byte, {name}": statistics.median(taken),
                f"first byte, {name}, p99": quantile(taken, 99),
            }
            figures[f"MB behind the {name}"] = resident_bytes(daemon.pid) / 1e6
        daemon.terminate()
        figures[f"seconds of a start, {active} topics in the folder"] = started()
        figures["MB after that"] = resident_bytes(daemon.pid) / 1e6
    return figures


def quantile(taken: list[float], percent: int) -> float:
    """A percentile."""
    return statistics.quantiles(taken, n=100)[percent - 1]


_FILL = (
    "INSERT INTO memd_topic SELECT 't' || n, stream, head, base, generation FROM memd_topic, "
    "generate_series(0, %(count)s - 1) n WHERE topic = 'team'",
    "INSERT INTO memd_log SELECT 't' || n, stream, last, data FROM memd_log, generate_series(0, %(count)s - 1) n "
    "WHERE topic = 'team'",
    "VACUUM ANALYZE memd_topic",
    "VACUUM ANALYZE memd_log",
)
_SIZE = (
    "SELECT pg_total_relation_size('memd_topic') + pg_total_relation_size('memd_log'), "
    "(SELECT max(octet_length(data)) FROM memd_log WHERE topic = 'team' AND stream = 'log')"
)


def table(figures: Figures) -> Table:
    """Side by side, with what was aimed at."""
    made = Table(title="milliseconds, medians in turns")
    for column in ("", FOLDER, SHARED, OTHER, "goal"):
        made.add_column(column, justify="right")
    for kind in dict.fromkeys(name.split(", ")[0] for name in figures):
        cells = [figures.get(f"{kind}, {who}") for who in (FOLDER, SHARED, OTHER)]
        goal = ""
        if kind in GOALS and cells[0] is not None and cells[1] is not None:
            how, limit = GOALS[kind]
            value = cells[1] / cells[0] if how == "times" else cells[1] - cells[0]
            goal = f"{value:.2f} {how}, at most {limit:g}: {'met' if value <= limit else 'MISSED'}"
        made.add_row(kind, *("" if cell is None else f"{cell:.2f}" for cell in cells), goal)
    return made


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--topics", type=int, default=0)
    parser.add_argument("--active", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="memd-shared-") as name, running_postgres(settings=DURABLE) as postgres:
        if asked.topics:
            figures = many_topics(Path(name), postgres, asked.topics, asked.active)
            print(*(f"{value:14,.2f}  {what}" for what, value in figures.items()), sep="\n")
        else:
            figures = appends(Path(name), postgres, asked.rounds) | requests(Path(name), postgres, asked.rounds)
            Console(width=120).print(table(figures))
    if asked.json:
        asked.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
