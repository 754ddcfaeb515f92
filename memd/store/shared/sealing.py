"""Encryption of what daemons share: rows leave a daemon sealed if its data directory is encrypted.

Rule: all daemons of a cluster have the same master key, or none; which of both, its first daemon decides. Without the
key nothing that the database has can be read. What is sealed is bound to its place and cannot be moved to another one.

    | nonce | ciphertext      | tag |      AES-256-GCM; bound to topic, stream and number
    | 12    | length          | 16  |
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import msgspec

from memd.errors import CorruptFile
from memd.store.encryption.key_files import MasterKey
from memd.store.shared.postgres import PostgresLog
from memd.store.shared.seam import PAGE_ROWS, News, Stream

_NONCE_BYTES = 12


class SealedLog(PostgresLog):
    """See SharedLog: of what the database has nothing can be read but names, numbers and lengths."""

    def __init__(self, url: str, master: MasterKey) -> None:
        super().__init__(url, key_id=master.id)
        self._key = master.wrapping(b"shared log")

    def since(self, topic_id: str, after: Mapping[Stream, int], limit: int = PAGE_ROWS) -> News:
        """See SharedLog. Raises CorruptFile: a row is not as it was sealed."""
        news = super().since(topic_id, after, limit)
        rows = (
            msgspec.structs.replace(row, data=self._opened(row.data, (topic_id, row.stream, row.last)))
            for row in news.rows
        )
        return msgspec.structs.replace(news, rows=tuple(rows))

    def append(
        self, topic_id: str, stream: Stream, after: int, last: int, data: bytes, *, generation: int, base: bool = False
    ) -> bool:
        """See SharedLog."""
        sealed = self._sealed(data, (topic_id, stream, last))
        return super().append(topic_id, stream, after, last, sealed, generation=generation, base=base)

    def rewrite(self, topic_id: str, generation: int, rows: Mapping[tuple[Stream, int], bytes] | None) -> int:
        """See SharedLog."""
        sealed = None
        if rows is not None:
            sealed = {place: self._sealed(data, (topic_id, *place)) for place, data in rows.items()}
        return super().rewrite(topic_id, generation, sealed)

    def _sealed(self, data: bytes, place: tuple[str, Stream, int]) -> bytes:
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return nonce + self._key.cipher(place[0].encode()).encrypt(nonce, data, _bound(place))

    def _opened(self, data: bytes, place: tuple[str, Stream, int]) -> bytes:
        from cryptography.exceptions import InvalidTag

        try:
            cipher = self._key.cipher(place[0].encode())
            return cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], _bound(place))
        except (InvalidTag, ValueError):
            raise CorruptFile(
                f"{self.place}: row {place[2]} of topic {place[0]} is not as it was encrypted; something else changed "
                "it, restore the database from a backup"
            ) from None


def _bound(place: tuple[str, Stream, int]) -> bytes:
    return "\0".join(map(str, place)).encode()
