"""A bucket: keys and bytes, on any server that speaks S3.

Rule: the only module that knows obstore, which is imported when somebody wants a bucket. Every failure is a
`BucketError` that says what to do. A request ends within some minutes, whatever the server does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import msgspec

from memd.errors import BucketError, ConfigError, ObjectMissing
from memd.settings.model import BackupSettings
from memd.wording import pip_install

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or MEMD_BACKUP_ACCESS_KEY and MEMD_BACKUP_SECRET_KEY"
_SECONDS_CONNECT, _SECONDS_RETRY, _RETRIES = 5, 20, 4
_SECONDS_REQUEST = 180
"""Of 8 MB, the largest round, over a line of 50 KB a second."""
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
    """An object as a listing tells of it."""

    key: str
    size: int
    changed_at: int
    """Microseconds since the epoch, by the server's clock."""


class Bucket:
    """The objects under one prefix. Any thread may use it."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        """`url`: what to call it."""
        self._store = store
        self._has_versions = url.startswith("s3://")  # a folder or memory calls other things so
        self.url = url
        self.keeps_versions = False
        """Whether it was seen to keep what is overwritten and removed."""
        self.requests = 0
        self.bytes_sent = 0

    @classmethod
    def of(cls, settings: BackupSettings, env: Mapping[str, str]) -> Bucket:
        """Return the bucket of the settings; nothing is asked of it yet.

        Raises:
            BucketError: the package is not there, or the settings contradict each other.
        """
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
        """Write an object: all of it, or none.

        Args:
            data: in pieces, it is sent in parts, and need not fit in memory.
        """
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
        """Read an object or a part of it, less than that or nothing where it is shorter; None if there is none."""
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
        """Read a part of an object that has to be there. Raises ObjectMissing: it is not."""
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
        """Remove objects; one that is not there is no error."""
        import obstore

        self.requests += len(keys) // 1000
        with self._asked(), suppress(FileNotFoundError):
            obstore.delete(self._store, keys)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """A request: counted, and what it fails with is told."""
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
    """Return the settings with another bucket.

    Raises:
        ConfigError: it is no address of one.
    """
    try:
        return msgspec.convert(msgspec.structs.asdict(settings) | {"bucket": url}, BackupSettings)
    except msgspec.ValidationError:
        raise ConfigError(f"{url[:100]!r} is no bucket; give s3://BUCKET/PREFIX") from None


def _first_line(error: Exception) -> str:
    line = str(error).strip().partition("\n")[0]
    return re.sub(r" in [\d.]+m?s\b.*?(?= - |$)", "", line)[:200]
