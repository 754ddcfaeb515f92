"""A real S3 server in this process, with one fresh bucket for whoever asks, and buckets that fail when told to."""

from __future__ import annotations

import itertools
import logging
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from drafts import draft, open_store, seal_all
from moto.server import ThreadedMotoServer
from obstore.store import MemoryStore

from memd.errors import BucketError
from memd.settings.model import BackupSettings
from memd.store.bucket.objects import Bucket
from memd.store.bucket.writing import BucketWriter, NotingDisk
from memd.store.topic import TopicLog

_numbers = itertools.count(1)


class S3Server:
    """The server; keys are not checked."""

    def __init__(self, url: str) -> None:
        self.url = url

    def settings(self) -> BackupSettings:
        """The settings of a backup into a new bucket."""
        name = f"bucket-{next(_numbers)}"
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT")).close()
        return self.settings_of(f"s3://{name}/memd")

    def settings_of(self, url: str) -> BackupSettings:
        return BackupSettings(bucket=url, endpoint=self.url, region="us-east-1", access_key="any", secret_key="any")

    def keep_versions(self, settings: BackupSettings) -> None:
        """Let the bucket of these settings keep what is overwritten."""
        name, kind = settings.bucket.split("/")[2], {"Content-Type": "application/xml"}
        on = b"<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
        url = f"{self.url}/{name}?versioning"
        urllib.request.urlopen(urllib.request.Request(url, on, kind, method="PUT")).close()

    def bucket(self) -> Bucket:
        return Bucket.of(self.settings(), {})


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server on a free port, until the block ends."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield S3Server(f"http://{host}:{port}")
    finally:
        server.stop()


class FaultyBucket(Bucket):
    """A bucket in memory whose requests fail as `fails` says of their number, before or after they were carried out."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "s3://faulty/memd")
        self.calls = 0
        self.fails: Callable[[int], bool] = lambda call: False
        self.fails_after = False
        """Whether a request that fails was carried out, and only its answer was lost."""

    @contextmanager
    def _call(self) -> Iterator[None]:
        self.calls += 1
        is_failing = self.fails(self.calls)
        if is_failing and not self.fails_after:
            raise BucketError("s3://faulty/memd: SlowDown: it is tried again later")
        yield
        if is_failing:
            raise BucketError("s3://faulty/memd: the answer was lost")

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        with self._call():
            super().put(key, data)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        with self._call():
            return super().get(key, start, end)

    def delete(self, keys: list[str]) -> None:
        with self._call():
            super().delete(keys)


def writer_for(bucket: Bucket, disk: NotingDisk, data_dir: Path, now_us: Callable[[], int]) -> BucketWriter:
    """A writer whose generations have names that can be foretold."""
    numbers = itertools.count(1)
    return BucketWriter(bucket, disk, data_dir, 7, now_us, lambda length: next(numbers).to_bytes(length, "big"))


class Clock:
    """A time that a test sets."""

    now = 1_800_000_000_000_000

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Source:
    """A data directory, and the writer that backs it up."""

    def __init__(self, folder: Path, bucket: Bucket) -> None:
        self.folder, self.bucket = folder, bucket
        self.clock = Clock()
        self.restart()

    def restart(self) -> None:
        self.restart_writer()
        self.store = open_store(self.disk, self.folder, segment_entries_max=5)

    def restart_writer(self) -> None:
        """Begin another generation."""
        self.disk = NotingDisk(self.folder)
        self.writer = writer_for(self.bucket, self.disk, self.folder, self.clock)

    def topic(self, name: str = "talk") -> TopicLog:
        return self.store.topic(name)

    def say(self, *numbers: int, topic: str = "talk") -> None:
        for number in numbers:
            self.topic(topic).append([draft(number)])
            seal_all(self.topic(topic))

    def back_up(self) -> int:
        """Begin, if necessary, and write all; the time afterwards."""
        if not self.writer.is_begun:
            self.writer.begin()
        while not self.writer.round():
            pass
        self.writer.tidy()
        return self.clock()
