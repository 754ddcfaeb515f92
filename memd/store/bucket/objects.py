"""A bucket on any S3-compatible server, the objects of a backup in it, and the state of the data directory's files that
they record for each time.

Rule: only this module uses obstore, which is imported when a bucket is first used. Every failure is a `BucketError`
with a remedy. A request ends within some minutes, whatever the server does. A round object is complete in itself, and
never changed, except that erased text is overwritten in its pieces. A generation is read from a full round on, without
a gap: if a listing lacks a round, that is an error and never an older state. The state at a time is that of the last
round up to it.

    memd-backup.json                                  the identity of the backup's data directory
    owner.json                                        the generation that currently writes
    rounds/GENERATION/NUMBER-TIME.full                the state of every file in the bucket at a time
    rounds/GENERATION/NUMBER-TIME.tail                the changes since the previous round
    files/TOPIC/NAME.GENERATION-COUNT                 a single file: a full segment, or a large file

A round object; its header is a MessagePack map, compressed with zlib:

    | pieces of files | header       | length of the header | CRC32 of the header | magic   |
    | any             | length bytes | u32                  | u32                 | 8 bytes |
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

import msgspec

from memd.errors import BucketError, ConfigError, CorruptFile, NotOurBucket, ObjectMissing
from memd.settings.model import BackupSettings
from memd.wording import pip_install

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or MEMD_BACKUP_ACCESS_KEY and MEMD_BACKUP_SECRET_KEY"
_SECONDS_CONNECT, _SECONDS_RETRY, _RETRIES = 5, 20, 4
_SECONDS_REQUEST = 180
"""For 8 MB, the largest round, at 50 KB a second."""
_PART_BYTES, _PARTS_AT_ONCE = 5 << 20, 2
_EXPIRED = f"the credentials have expired; renew {_KEYS} and start memd again"
_REMEDIES = {
    "NoSuchBucket": "the bucket does not exist; create it, or correct backup.bucket",
    "InvalidAccessKeyId": f"the server does not know the key; correct {_KEYS}",
    "SignatureDoesNotMatch": f"the secret is not that of the key; correct {_KEYS}",
    "ExpiredToken": _EXPIRED,
    "RequestTimeTooSkewed": "the clock of this machine is wrong; set it",
    "SlowDown": "the server wants fewer requests; it is tried again later",
    "PermanentRedirect": "the bucket is in another region; correct backup.region",
    "AuthorizationHeaderMalformed": "the bucket is in another region; correct backup.region",
    "InvalidObjectState": "the object was moved to an archive; restore it there first",
}
_CODE = re.compile(r"<Code>(\w+)</Code>")


class StoredObject(msgspec.Struct, frozen=True):
    """An object in a listing."""

    key: str
    size: int
    changed_at: int
    """Microseconds since the epoch, by the server's clock."""


class Bucket:
    """The objects under one prefix. Thread-safe."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        """`url`: the name for messages."""
        self._store = store
        self._has_versions = url.startswith("s3://")  # for a folder or in memory, versions mean something else
        self.url = url
        self.keeps_versions = False
        """Whether it was seen to keep overwritten and removed versions."""
        self.requests = 0
        self.bytes_sent = 0

    @classmethod
    def of(cls, settings: BackupSettings, env: Mapping[str, str]) -> Bucket:
        """Return the bucket of the settings, without a request. Raises BucketError: the package is not installed, or
        the settings contradict each other."""
        try:
            from obstore.store import S3Store
        except ImportError:
            raise BucketError(f"a bucket needs the obstore package: {pip_install('memd-proxy[bucket]')}") from None
        parts = urlsplit(settings.bucket)
        endpoint = settings.endpoint or env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or ""
        named = {
            "endpoint": endpoint,
            "region": settings.region,
            "access_key_id": settings.access_key,
            "secret_access_key": settings.secret_key,
        }
        try:
            store = S3Store(
                parts.netloc,
                prefix=parts.path.strip("/") or None,
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "connect_timeout": timedelta(seconds=_SECONDS_CONNECT),
                    "timeout": timedelta(seconds=_SECONDS_REQUEST),
                },
                retry_config={"max_retries": _RETRIES, "retry_timeout": timedelta(seconds=_SECONDS_RETRY)},
                **{key: value for key, value in named.items() if value},
            )
        except Exception as error:
            raise BucketError(
                f"{settings.bucket}: {_first_line(error)}; correct backup.bucket and what goes with it"
            ) from None
        return cls(store, settings.bucket.rstrip("/"))

    def put(self, key: str, data: bytes | Iterable[bytes]) -> None:
        """Write an object: all of it, or none. `data` in pieces is sent in parts, and need not fit in memory."""
        import obstore

        with self._asked():
            done = obstore.put(
                self._store,
                key,
                data if isinstance(data, bytes) else self._counted(data),
                use_multipart=not isinstance(data, bytes),
                chunk_size=_PART_BYTES,
                max_concurrency=_PARTS_AT_ONCE,
            )
        self.keeps_versions |= self._has_versions and done["version"] not in (None, "null")
        self.bytes_sent += len(data) if isinstance(data, bytes) else 0

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Read an object or a part of it; shorter or empty if the object ends before; None if there is none."""
        import obstore

        with self._asked():
            try:
                if end is None:
                    return bytes(obstore.get(self._store, key).bytes())
                return bytes(obstore.get_range(self._store, key, start=start, end=end))
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            except obstore.exceptions.BaseError as error:
                if "invalidrange" not in str(error).lower().replace(" ", ""):
                    raise
                return b""

    def read(self, key: str, start: int, end: int) -> bytes:
        """Read a part of an object that must exist. Raises ObjectMissing: it does not."""
        if (data := self.get(key, start, end)) is None:
            raise ObjectMissing(
                f"{self.url}/{key}: is missing; something else than memd has removed it, or the server does not list "
                "what was written a moment ago: try again, or another --until"
            )
        return data

    def listed(self, prefix: str) -> Iterator[StoredObject]:
        """Yield the objects whose keys begin with a prefix that ends in a slash, page by page."""
        import obstore

        try:
            for page in obstore.list(self._store, prefix=prefix, chunk_size=1000):
                self.requests += 1
                for one in page:
                    yield StoredObject(one["path"], one["size"], int(one["last_modified"].timestamp() * 1e6))
        except Exception as error:
            raise self._problem(error) from error

    def delete(self, keys: list[str]) -> None:
        """Remove objects; a missing one is no error."""
        import obstore

        self.requests += len(keys) // 1000
        with self._asked(), suppress(FileNotFoundError):
            obstore.delete(self._store, keys)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Count a request, and turn its errors into a BucketError."""
        self.requests += 1
        try:
            yield
        except Exception as error:
            raise self._problem(error) from error

    def _counted(self, data: Iterable[bytes]) -> Iterator[bytes]:
        for piece in data:
            self.bytes_sent += len(piece)
            yield piece

    def _problem(self, error: Exception) -> BucketError:
        import obstore

        code = next(iter(_CODE.findall(str(error))), "")
        if isinstance(error, BucketError):
            return error
        if code in _REMEDIES:
            remedy = _REMEDIES[code]
        elif isinstance(error, obstore.exceptions.PermissionDeniedError | obstore.exceptions.UnauthenticatedError):
            remedy = "it is refused; correct the rights of the key (read, write, list, delete), or the key itself"
        elif "credential" in str(error).lower() or "169.254" in str(error):
            remedy = f"there are no credentials; set {_KEYS}"
        else:
            remedy = "see whether backup.endpoint is right and the server can be reached"
        return BucketError(f"{self.url}: {code or _first_line(error)}: {remedy}")


def at_url(settings: BackupSettings, url: str) -> BackupSettings:
    """Return the settings with another bucket. Raises ConfigError: the URL is no bucket's."""
    try:
        return msgspec.convert(msgspec.structs.asdict(settings) | {"bucket": url}, BackupSettings)
    except msgspec.ValidationError:
        raise ConfigError(f"{url[:100]!r} is no bucket; give s3://BUCKET/PREFIX") from None


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r" in [\d.]+m?s\b.*?(?= - |$)", "", line)[:200]


# The objects of a backup

IDENTITY_KEY = "memd-backup.json"
OWNER_KEY = "owner.json"
ROUNDS = "rounds/"
FILES = "files/"
_MAGIC = b"memd.rnd"
_TRAILER = struct.Struct("<II8s")
_NAME = re.compile(r"rounds/(\d{8}-[0-9a-f]{8})/(\d{10})-(\d{16})\.(full|tail)")

READERS = 8
"""Concurrent requests: at 20 ms each they read 400 objects a second."""
_GUESS_BYTES = 4096
"""Headers of most rounds are shorter, so one request is enough."""


class Stretch(msgspec.Struct, frozen=True, array_like=True):
    """The place of a file's bytes in the bucket."""

    key: str
    """Key of the object; empty for the round itself."""
    offset: int
    length: int


class KnownFile(msgspec.Struct, frozen=True, array_like=True):
    """A file as the bucket has it."""

    size: int
    crc: int
    """CRC32 of the whole file."""
    changed_at: int
    """Time of its last change in its file system. By this and the size, a start recognises an unchanged file."""
    extents: tuple[Stretch, ...]


class FileChange(msgspec.Struct, frozen=True, array_like=True):
    """The change of a file since the previous round."""

    folder: str
    name: str
    kind: Literal["new", "grown", "gone"]
    file: KnownFile | None = None
    """For a grown file, `extents` has only the added bytes."""


class RoundHeader(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The header of a round object."""

    at: int
    """The time up to which it has everything, in microseconds since the epoch."""
    is_whole: bool
    """Whether everything present when the generation began is in the bucket."""
    changes: tuple[FileChange, ...] = ()
    topics: dict[str, bytes] | None = None
    """In a full round: the files by folder; see `Catalog`."""
    stated_anew: tuple[str, ...] = ()
    """Folders from which text was erased: all their files are listed here, and earlier entries are void."""
    erasures: tuple[int, ...] = ()
    """Ids of erasures done in the bucket; in a full round, of all known ones."""


class Identity(msgspec.Struct, frozen=True):
    """The identity of the backup's data directory."""

    format: int
    directory: str
    key_id: str | None
    """Id of the key that wraps those of topics; None for plain text."""


def read_identity(stored: bytes | None, bucket: Bucket) -> Identity:
    """Return the identity of a backup. Raises NotOurBucket: it is not memd's, or a newer memd's."""
    try:
        identity = msgspec.json.decode(stored or b"", type=Identity)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        identity = None
    if identity is None or identity.format != 1:
        raise NotOurBucket(f"{bucket.url}: has no backup that this memd can read; correct the address, or update memd")
    return identity


class Owner(msgspec.Struct, frozen=True):
    """The generation that writes."""

    generation: str


class RoundName(msgspec.Struct, frozen=True, order=True):
    """A round object, from its key; sorted in the order of writing."""

    generation: str
    """Its number in eight digits, and a random part."""
    number: int
    at: int
    is_full: bool
    size: int = 0
    """Size of the whole object, in bytes."""

    @property
    def key(self) -> str:
        """The object's key."""
        return f"{ROUNDS}{self.generation}/{self.number:010d}-{self.at:016d}.{'full' if self.is_full else 'tail'}"


def encode_round(header: RoundHeader, pieces: Iterable[bytes] = ()) -> bytes:
    """Return a round object."""
    packed = zlib.compress(_encoder.encode(header), 1)
    return b"".join((*pieces, packed, _TRAILER.pack(len(packed), zlib.crc32(packed), _MAGIC)))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RoundHeader)
_files_decoder = msgspec.msgpack.Decoder(dict[str, KnownFile])


class Catalog:
    """The files in a bucket, by folder. Each folder's entry is kept packed: there may be a hundred thousand."""

    def __init__(self) -> None:
        self.topics: dict[str, bytes] = {}
        self.erasures: set[int] = set()

    def files(self, folder: str) -> dict[str, KnownFile]:
        """Return the files of a folder by their names in it."""
        packed = self.topics.get(folder)
        return {} if packed is None else _files_decoder.decode(packed)

    def apply(self, header: RoundHeader, key: str) -> None:
        """Apply a round; `key` is that of its object."""
        if header.topics is not None:
            self.topics = dict(header.topics)
            self.erasures = set()
        self.erasures.update(header.erasures)
        for folder in header.stated_anew:
            self.topics.pop(folder, None)
        for folder, changes in groupby(sorted(header.changes, key=lambda one: one.folder), lambda one: one.folder):
            files = self.files(folder)
            for change in changes:
                before = files.pop(change.name, None)
                if change.file is not None:
                    kept = before.extents if before is not None and change.kind == "grown" else ()
                    added = (Stretch(one.key or key, one.offset, one.length) for one in change.file.extents)
                    files[change.name] = msgspec.structs.replace(change.file, extents=(*kept, *added))
            self.put(folder, files)

    def put(self, folder: str, files: dict[str, KnownFile]) -> None:
        """Set the files of a folder."""
        if files:
            self.topics[folder] = _encoder.encode(files)
        else:
            self.topics.pop(folder, None)

    def extents(self) -> Iterator[tuple[str, str, Stretch]]:
        """Yield all places in the bucket that are in use: folder, name, extent."""
        for folder in list(self.topics):
            for name, file in self.files(folder).items():
                yield from ((folder, name, extent) for extent in file.extents)


class Rounds:
    """All rounds in a bucket, from a listing."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        found = ((_NAME.fullmatch(one.key), one.size) for one in bucket.listed(ROUNDS))
        self.every = sorted(
            RoundName(name[1], int(name[2]), int(name[3]), name[4] == "full", size) for name, size in found if name
        )
        self.names = list({(one.generation, one.number): one for one in self.every}.values())
        """The valid rounds: the later of two with the same number, because only the first one's answer was lost."""
        self.moments: list[RoundName] = []
        """The rounds that can be restored, in the order of time: a full one of their generation precedes them."""
        for one in self.names:
            if one.is_full or (self.moments and self.moments[-1].generation == one.generation):
                self.moments.append(one)

    def headers(self, names: Sequence[RoundName]) -> Iterator[tuple[RoundName, RoundHeader]]:
        """Read the headers of some rounds, in their order."""
        with ThreadPoolExecutor(READERS, thread_name_prefix="memd-bucket") as readers:
            for at in range(0, len(names), 10 * READERS):
                part = names[at : at + 10 * READERS]
                yield from zip(part, readers.map(self._header, part), strict=True)

    def _header(self, name: RoundName) -> RoundHeader:
        said, needed = f"{self._bucket.url}/{name.key}", _GUESS_BYTES
        while True:
            end = self._bucket.read(name.key, max(0, name.size - needed), name.size)
            if len(end) < _TRAILER.size or not end.endswith(_MAGIC):
                raise CorruptFile(f"{said}: is no part of a backup of memd")
            length, crc, _ = _TRAILER.unpack(end[-_TRAILER.size :])
            if needed >= length + _TRAILER.size or needed >= name.size:
                break
            needed = length + _TRAILER.size
        packed = end[-_TRAILER.size - length : -_TRAILER.size]
        if len(packed) != length or zlib.crc32(packed) != crc:
            raise CorruptFile(f"{said}: is damaged; restore to a time before or after it (--until)")
        return _decoder.decode(zlib.decompress(packed))

    def catalog(self, last: RoundName) -> tuple[Catalog, bool]:
        """Return the files as they were after a round, and whether the bucket had everything then. Raises
        ObjectMissing: the listing has a gap."""
        own = [name for name in self.names if name.generation == last.generation and name.number <= last.number]
        own = own[max(position for position, name in enumerate(own) if name.is_full) :]
        for one, following in pairwise(own):
            if following.number != one.number + 1:
                raise ObjectMissing(
                    f"{self._bucket.url}: round {one.number + 1} of generation {one.generation} is missing: the "
                    "server does not list everything yet, or something else than memd has removed it; try again, or "
                    "give an earlier --until"
                )
        catalog, is_whole = Catalog(), False
        for name, header in self.headers(own):
            catalog.apply(header, name.key)
            is_whole = header.is_whole
        return catalog, is_whole
