"""How a daemon proves to a command that it has the data directory, before it is told the token.

Rule: the secret is made anew at each start and never leaves its file (0600, in the data directory). An answer holds for
the address that was asked and no other: whoever listens there and passes the challenge on gets one that is of no use.
Where `auth.token` is not set, commands show what is derived from the secret, after the proof.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from memd.admin.queries import ProofQuery
from memd.admin.routing import get

PROOF = "/memd/proof"
_CONTEXT = b"memd: this daemon has the data directory\n"


class Proof(msgspec.Struct, frozen=True):
    """The answer to a challenge."""

    proof: str
    """HMAC-SHA256 of the address and the challenge with the secret, in hexadecimal digits."""


class ProofRoutes:
    """The proof. It needs no token: it comes before the token is told."""

    def __init__(self, secret: str, url: str) -> None:
        """`url`: the address that commands are told, in the file beside that of the secret."""
        self._secret = secret
        self._url = url

    @get(PROOF, "open")
    async def prove(self, query: ProofQuery) -> Proof:
        """The proof that this daemon has the data directory; for commands, see docs/format.md."""
        return Proof(proof_of(self._secret, self._url, query.challenge))


def command_token(secret: str) -> str:
    """Return the token of commands on this machine: whoever may read the data directory is its owner."""
    return hmac.new(secret.encode(), b"memd: a command of the owner\n", hashlib.sha256).hexdigest()


def new_secret() -> str:
    """A secret of 256 bits, also fit to be a challenge: 64 hexadecimal digits."""
    return secrets.token_hex(32)


def proof_of(secret: str, url: str, challenge: str) -> str:
    """Return the only right answer to a challenge."""
    message = _CONTEXT + f"{url}\n{challenge}".encode()
    return hmac.new(secret.encode(), message, hashlib.sha256).hexdigest()
