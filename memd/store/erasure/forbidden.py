"""The text that is never to be stored again in a topic: digests of erased messages and chunks, never their words.

Rule: kept in one small file beside the log, which is replaced as a whole. A digest tells nobody what was said, but who
guesses the text can check his guess: so it is kept only for who asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from memd.errors import CorruptFile
from memd.messages import Message
from memd.store.claim import Claim
from memd.store.files import Files, write_beside
from memd.store.layout import TopicLayout
from memd.store.log.columns import digest_word, text_hash


class ForbiddenText(msgspec.Struct, frozen=True, kw_only=True):
    """Digests, as hexadecimal digits in the file."""

    messages: frozenset[str] = frozenset()
    """The first 8 bytes of digests of messages in their place (see `messages.chain`)."""
    contents: frozenset[str] = frozenset()
    """Of those of messages wherever they stand."""
    texts: frozenset[str] = frozenset()
    """Of chunks: `columns.text_hash`."""

    def __bool__(self) -> bool:
        return bool(self.messages or self.contents or self.texts)

    def has_digest(self, digest: bytes) -> bool:
        """Whether this is the digest of a forbidden message in its place."""
        return bool(self.messages) and _hex(digest_word(digest)) in self.messages

    def has_message(self, digest: bytes, message: Message) -> bool:
        """Whether a message is forbidden, in its place or wherever it stands."""
        if self.has_digest(digest):
            return True
        forms = (message.content_digest, message.former_digest) if self.contents else ()
        return any(_hex(digest_word(one)) in self.contents for one in forms)

    def has_text(self, text: str) -> bool:
        """Whether this is the content of a forbidden chunk."""
        return bool(self.texts) and _hex(text_hash(text)) in self.texts

    def also(
        self, *, messages: Iterable[int] = (), contents: Iterable[bytes] = (), texts: Iterable[int] = ()
    ) -> ForbiddenText:
        """Return this with further ones.

        Args:
            messages: `digest_word`s.
            texts: `text_hash`es.
        """
        return ForbiddenText(
            messages=self.messages | set(map(_hex, messages)),
            contents=self.contents | {_hex(digest_word(one)) for one in contents},
            texts=self.texts | set(map(_hex, texts)),
        )


def read_forbidden(files: Files, layout: TopicLayout) -> ForbiddenText:
    """Return what a topic is never to store again.

    Raises:
        StoreError: the file cannot be read (CorruptFile if it is damaged): then the topic is not opened, because it
            would store what its owner has forbidden.
    """
    if files.size(layout.forbidden) is None:
        return ForbiddenText()
    try:
        return msgspec.json.decode(files.read(layout.forbidden), type=ForbiddenText)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CorruptFile(
            f"{layout.forbidden}: cannot be read ({error}); put it back out of a backup, or remove it if what was "
            "erased may be stored again"
        ) from error


def publish_forbidden(claim: Claim, forbidden: ForbiddenText) -> None:
    """Replace the file of a topic that is open, durably."""
    path = claim.layout.forbidden
    claim.publish({path: write_beside(claim.files, path, encode_forbidden(forbidden))})


def encode_forbidden(forbidden: ForbiddenText) -> bytes:
    """Encode the file."""
    return msgspec.json.encode(forbidden, order="sorted")


def _hex(word: int) -> str:
    return f"{word:016x}"
