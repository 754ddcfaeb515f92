"""Whether a cluster's bucket can be used is known without asking it each time, and told by the daemon's health."""

from __future__ import annotations

import itertools
import urllib.request

import pytest
from bucket_server import S3Server
from conftest import MakeDaemon
from daemon_process import ask, wait_until
from moto.server import ThreadedMotoServer
from owner_daemons import figure
from postgres_server import PostgresServer
from recording_upstream import RecordingUpstream
from reserved_port import reserved_port

from memd.errors import BucketError
from memd.store.bucket.objects import Bucket
from memd.store.cluster.bucket_watch import BucketWatch
from memd.store.cluster.object_keeper import MARKER

pytestmark = pytest.mark.process


class Watched:
    """A bucket of a cluster, as it is watched, and a clock."""

    def __init__(self, s3: S3Server) -> None:
        settings = s3.settings("")
        self._url = f"{s3.url}/{settings.bucket.split('/')[2]}"
        self.bucket = Bucket.of(settings, {}, "store")
        self.seconds = 0.0
        self.watch = BucketWatch(self.bucket, lambda: "one", lambda: self.bucket.answered_at + self.seconds)
        self.bucket.put(MARKER, b"one")

    def remove(self) -> None:
        self.bucket.delete([MARKER])
        urllib.request.urlopen(urllib.request.Request(self._url, method="DELETE")).close()

    def restore(self) -> None:
        urllib.request.urlopen(urllib.request.Request(self._url, method="PUT")).close()

    def asked(self) -> int:
        """How many requests a look takes."""
        before = self.bucket.requests
        self.watch.look()
        return self.bucket.requests - before


@pytest.fixture
def watched(s3: S3Server) -> Watched:
    return Watched(s3)


def test_a_bucket_that_answered_lately_is_not_asked(watched: Watched) -> None:
    watched.seconds = 29.0
    assert watched.asked() == 0
    watched.seconds = 31.0
    assert watched.asked() == 1 and watched.watch.trouble is None


def test_a_daemon_that_has_written_nothing_for_an_hour_notices_that_the_bucket_is_gone(watched: Watched) -> None:
    watched.remove()
    watched.seconds = 3600.0
    watched.watch.look()
    told = watched.watch.trouble
    assert told is not None and "create it, or correct store.bucket" in told
    watched.restore()
    watched.watch.look()
    assert watched.watch.trouble is None


def test_a_bucket_that_cannot_be_written_is_in_trouble_until_it_can(watched: Watched) -> None:
    watched.remove()
    with pytest.raises(BucketError):
        watched.bucket.put("topic/1", b"data")
    watched.restore()
    assert watched.bucket.get("topic/1") is None and watched.watch.trouble is not None, "it was only read"
    watched.bucket._store.put(MARKER, b"one")
    watched.watch.look()
    assert watched.watch.trouble is None


def test_a_bucket_that_says_nothing_is_in_trouble_before_the_request_fails(watched: Watched) -> None:
    told: list[str | None] = []
    times = itertools.chain([100.0, 100.0], itertools.repeat(116.0))
    watch = BucketWatch(watched.bucket, lambda: "one", lambda: watched.bucket.answered_at + next(times))

    class Asked(Bucket):
        def get(self, key: str) -> bytes | None:
            told.append(watch.trouble)
            return super().get(key)

    watched.bucket.__class__ = Asked
    watch.look()
    assert told[0] is not None and "says nothing" in told[0]
    assert watch.trouble is None


def test_the_health_of_a_daemon_tells_that_the_bucket_is_away(
    make_daemon: MakeDaemon, upstream: RecordingUpstream, postgres: PostgresServer
) -> None:
    with reserved_port() as port:
        store = {
            "url": postgres.database("watched"),
            "bucket": "s3://late/memd",
            "endpoint": f"http://127.0.0.1:{port}",
        }
        keys = {"region": "us-east-1", "access_key": "any", "secret_key": "any"}
        daemon = make_daemon(upstream.url, {"store": {**store, **keys}}).start()

        def health() -> tuple[str, str | None]:
            told = ask(f"{daemon.own_url}/memd/health").json
            return told["memory"], told["trouble"]

        wait_until(lambda: health()[0] == "degraded", lambda: repr(daemon))
        assert "see whether store.endpoint is right" in str(health()[1])
        assert figure(daemon, "memd_bucket_away") == 1
        wait_until(lambda: "the cluster's bucket cannot be used" in daemon.log.read_text(), lambda: repr(daemon))
        server = ThreadedMotoServer(ip_address="127.0.0.1", port=port, verbose=False)
        server.start()
        try:
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{port}/late", method="PUT")).close()
            wait_until(lambda: health() == ("ok", None), lambda: repr(daemon))
            assert figure(daemon, "memd_bucket_away") == 0
        finally:
            server.stop()
