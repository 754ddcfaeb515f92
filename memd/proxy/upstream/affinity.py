"""Which model server has the prompt of a conversation in its cache.

Rule: pure and bounded. A conversation is known by its messages as its client sends them, so that it needs no name, is
the same conversation with and without memory, and its branches are found where their common beginning was read. What is
forgotten (a restart, or more conversations than `KNOWN_MAX`) is computed from its beginning, the same each time: the
server is then the right one unless the conversation was begun, or moved, while that one had more to do or was away.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from itertools import chain

import msgspec

from memd.messages import DIGEST_BYTES, ROOT_DIGEST, chain_all, leading_count
from memd.wire.request import ModelRequest

KNOWN_MAX = 20_000
"""Keys whose server is remembered: about 3 MB."""


class Trail(msgspec.Struct, frozen=True):
    """The ways in which a conversation can be recognised."""

    names: Sequence[bytes]
    """Of the conversation, the best first; none where nobody has given it one."""
    digests: Sequence[bytes]
    """Of its messages, each chained to those before it; in order."""
    opening: bytes
    """Its beginning up to the first answer, which stays as it goes on."""
    goes_on: bool
    """The model has answered in it before."""


def trail_of(
    request: ModelRequest, names: Sequence[str] = (), digests: Sequence[bytes] | None = None, *, goes_on: bool = False
) -> Trail:
    """Return the trail of a request.

    Args:
        names: of its conversation, and of the one that it is a branch of; the client's or memd's own.
        digests: of its messages, chained, where they are known.
        goes_on: it does, though the client sends only what is new.
    """
    lead = leading_count(request.messages)
    if digests is None:
        digests = chain_all(request.digests[lead:])
    roles = [message.role for message in request.messages[lead:]]
    first = roles.index("assistant") if "assistant" in roles else len(roles)
    known = [_key(name) for name in names]
    beginning = digests[:first]
    opening = beginning[-1] if beginning else known[0] if known else ROOT_DIGEST
    return Trail(known, digests, opening, goes_on or first < len(roles))


def _key(name: str) -> bytes:
    return hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=DIGEST_BYTES).digest()


class Affinity:
    """The servers, by their addresses, that have answered conversations last."""

    def __init__(self) -> None:
        self._known: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def home(self, trail: Trail) -> str | None:
        """The server that answered last in the conversation; None if it is not known.

        What was asked before the first answer binds nobody: many conversations may begin alike.
        """
        if not trail.goes_on:
            return None
        keys = chain(trail.names, reversed(trail.digests))
        return next((self._known[key] for key in keys if key in self._known), None)

    def answered(self, trail: Trail, url: str) -> bool:
        """A server answered a request of the conversation; whether that is another one than before."""
        has_moved = self.home(trail) not in (None, url)
        for key in (*trail.names[:1], *trail.digests[-1:]):
            self._known[key] = url
            self._known.move_to_end(key)
        while len(self._known) > KNOWN_MAX:
            self._known.popitem(last=False)
        return has_moved


def rank(opening: bytes, url: str) -> bytes:
    """The rank of a server for a conversation that begins so: the highest of all is its own (rendezvous hashing)."""
    return hashlib.blake2b(url.encode(), key=opening, digest_size=8).digest()
