"""Encryption of what a cluster keeps: rows and objects leave the daemon sealed if its data directory is encrypted.

Rule: without the master key nothing that the database and the bucket have can be opened: it wraps the cluster's key,
which wraps those of the topics. All daemons have the same master key, or none. What is sealed is bound to its place and
cannot be moved to another one.

    | nonce | ciphertext      | tag |      AES-256-GCM; a row is one of these, an object one for each piece
    | 12    | length          | 16  |
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from memd.errors import CorruptFile, WrongKey
from memd.store.cluster.database import Connection, Database

if TYPE_CHECKING:
    from memd.store.encryption.frames import DataKey
    from memd.store.encryption.key_files import KeyMaker
    from memd.store.encryption.master_key import MasterKey

_NONCE_BYTES, _TAG_BYTES = 12, 16
_SEALS_KEPT = 10_000
_WHERE = Path("the cluster's keys")
_GIVE = "give the key that all its daemons have, with encryption.key_file or MEMD_ENCRYPTION_KEY"


class Seal(Protocol):
    """Seals what is kept of one topic. For any thread."""

    overhead: int
    """Bytes by which a sealed piece is longer."""

    def sealed(self, data: bytes, place: str) -> bytes:
        """Seal a piece."""

    def opened(self, data: bytes, place: str) -> bytes:
        """Open a sealed piece; raises CorruptFile if it is not as it was sealed at this place."""


class PlainSeal:
    """Leaves everything as it is."""

    overhead = 0

    def sealed(self, data: bytes, place: str) -> bytes:
        """See Seal."""
        return data

    def opened(self, data: bytes, place: str) -> bytes:
        """See Seal."""
        return data


class KeySeal:
    """Encrypts with the key of a topic."""

    overhead = _NONCE_BYTES + _TAG_BYTES

    def __init__(self, key: DataKey) -> None:
        self._cipher = key.cipher(b"cluster")

    def sealed(self, data: bytes, place: str) -> bytes:
        """See Seal."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._cipher.encrypt(nonce, data, place.encode())

    def opened(self, data: bytes, place: str) -> bytes:
        """See Seal."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], place.encode())
        except (InvalidTag, ValueError):
            raise CorruptFile(
                f"{place}: is not as it was encrypted; something else changed it, restore the database and the bucket"
            ) from None


class ClusterKeys:
    """The keys of a cluster, as a daemon has them. For any thread."""

    def __init__(self, database: Database, master: MasterKey | None) -> None:
        """`master`: that of the daemon's data directory; None: it is not encrypted."""
        self._database = database
        self._master = master
        self._lock = Lock()
        self._opened: tuple[KeyMaker, DataKey] | None = None
        self._has_joined = False
        self._plain = PlainSeal()
        self._seals: OrderedDict[str, KeySeal] = OrderedDict()

    @property
    def is_plain(self) -> bool:
        """Whether nothing is encrypted."""
        return self._master is None

    def join(self) -> None:
        """Make sure that this daemon may read what the cluster keeps; a new cluster becomes encrypted if it has a key.

        Raises:
            WrongKey: the key is missing, is another one, or the cluster keeps plain text.
            StoreError: the database cannot be asked.
        """
        with self._lock:
            if self._has_joined:
                return
            name = self._database.cluster
            text = self._database.ask(lambda connection: connection.execute(_KEY).fetchone()[0])
            if text is None and self._master is not None:
                made = self._new_key_text(name)
                text = self._database.again(lambda connection: _encrypted_from_now_on(connection, made))
            if text is None:
                if self._master is not None:
                    raise WrongKey(
                        f"{self._database.place}: a key is given, but the cluster has topics in plain text; "
                        "`memd move` them to a new cluster, or take the key out of the settings"
                    )
            elif self._master is None:
                raise WrongKey(f"{self._database.place}: the cluster is encrypted; {_GIVE}")
            else:
                self._opened = self._open(text)
            self._has_joined = True

    def new(self) -> str:
        """Make the key of a topic, wrapped; empty: it needs none. After `join`."""
        if self._opened is None:
            return ""
        from memd.store.encryption.key_files import encode_key_file, new_topic_key

        maker, key = self._opened
        return encode_key_file(new_topic_key(maker.directory, key, secrets.token_bytes)[1]).decode()

    def seal(self, text: str) -> Seal:
        """Return the seal of a topic with this key. Raises as `join`."""
        if not text:
            return self._plain
        self.join()
        with self._lock:
            seal = self._seals.get(text)
            if seal is None:
                seal = self._seals[text] = KeySeal(self._topic_key(text))
                if len(self._seals) > _SEALS_KEPT:
                    self._seals.popitem(last=False)
            return seal

    def _topic_key(self, text: str) -> DataKey:
        from memd.store.encryption.key_files import TopicKeyFile, decode_key_file, opened_topic_key

        if self._opened is None:
            raise WrongKey(f"{self._database.place}: the cluster is encrypted; {_GIVE}")
        maker, key = self._opened
        found = decode_key_file(text.encode(), _WHERE, TopicKeyFile)
        return opened_topic_key(found, _WHERE, maker.directory, key)

    def _new_key_text(self, name: str) -> str:
        from memd.store.encryption.key_files import KeyMaker, encode_key_file, new_key

        assert self._master is not None, "asked before"
        maker = KeyMaker(self._master, name.replace("-", ""), secrets.token_bytes)
        return encode_key_file(maker.key_file(new_key(secrets.token_bytes))).decode()

    def _open(self, text: str) -> tuple[KeyMaker, DataKey]:
        from memd.store.encryption.key_files import DirectoryKeyFile, KeyMaker, decode_key_file

        assert self._master is not None, "asked before"
        found = decode_key_file(text.encode(), _WHERE, DirectoryKeyFile)
        if found.master != self._master.id:
            raise WrongKey(
                f"{self._database.place}: the cluster was encrypted with the key {found.master}, and this daemon has "
                f"{self._master.id}: where `memd rekey` gave it another one, run that here, too; else {_GIVE}"
            )
        maker = KeyMaker(self._master, found.directory, secrets.token_bytes)
        return maker, maker.opened(_WHERE, found)[0]


_KEY = "SELECT key FROM memd_version"


def rewrap(database: Database, master: MasterKey, other: MasterKey) -> bool:
    """Wrap the key of a cluster with another master key, in one step; False: that was done before.

    Daemons that run go on: the key itself stays, and with it those of the topics.

    Raises:
        WrongKey: the cluster is not encrypted, or with another key than these.
        StoreError: the database cannot be asked.
    """
    from memd.store.encryption.key_files import DirectoryKeyFile, KeyMaker, decode_key_file, encode_key_file

    text = database.ask(lambda connection: connection.execute(_KEY).fetchone()[0])
    if text is None:
        raise WrongKey(f"{database.place}: the cluster is not encrypted, and has no key")
    found = decode_key_file(text.encode(), _WHERE, DirectoryKeyFile)
    if found.master == other.id:
        KeyMaker(other, found.directory, secrets.token_bytes).opened(_WHERE, found)
        return False
    key, _ = KeyMaker(master, found.directory, secrets.token_bytes).opened(_WHERE, found)
    made = encode_key_file(KeyMaker(other, found.directory, secrets.token_bytes).key_file(key)).decode()
    change = "UPDATE memd_version SET key = %s WHERE key IN (%s, %s)"  # the first where it has to be done twice
    if not database.again(lambda connection: connection.execute(change, (made, text, made)).rowcount):
        raise WrongKey(f"{database.place}: somebody else has changed the key at this moment; try again")
    return True


def _encrypted_from_now_on(connection: Connection, text: str) -> str | None:
    """Note the key of a cluster that has none and no topic; return the key that it has by now."""
    with connection.transaction():
        connection.execute("LOCK TABLE memd_topic IN SHARE ROW EXCLUSIVE MODE")
        connection.execute(
            "UPDATE memd_version SET key = %s WHERE key IS NULL AND NOT EXISTS (SELECT FROM memd_topic)", (text,)
        )
        row: tuple[str | None] = connection.execute(_KEY).fetchone()
        return row[0]
