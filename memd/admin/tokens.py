"""The operations on tokens, and the proof by which a command knows the daemon that has the data directory.

Rule: no route makes, shows or takes back a token: that is done on the machine itself (`memd token`), by whoever may
read the data directory anyway. The secret of the proof is made anew at each start and never leaves its file (0600, in
the data directory). An answer holds for the address that was asked and no other: whoever listens there and passes the
challenge on gets one that is of no use. Where `auth.token` is not set, commands show what is derived from the secret.
"""

from __future__ import annotations

import getpass
import hashlib
import hmac
import os
import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from memd.admin.parts import DaemonParts
from memd.admin.routing import Body, Extent, NoQuery, get, post
from memd.principals import Principal, Right


class ProofQuery(NoQuery, frozen=True, kw_only=True):
    """`GET /memd/proof`."""

    challenge: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$", description="64 hexadecimal digits, chosen at random.")]


class OwnRights(msgspec.Struct, frozen=True):
    """A principal, as it is told itself."""

    name: str
    topics: tuple[str, ...]
    """Patterns; `*` stands for any characters."""
    rights: tuple[Right, ...]


class ReloadBody(Body, frozen=True):
    """The body of `POST /memd/tokens/reload`: empty."""


class TokensRead(msgspec.Struct, frozen=True):
    """The tokens are as the lists have them."""

    reloaded: bool = True
    changes: str = ""
    """The names of those that are new, gone or others than before, in words."""


@get("/memd/me", "any")
async def me(parts: DaemonParts, who: Principal) -> OwnRights:
    """The name, the topics and the rights of the token that asks."""
    return OwnRights(who.name, who.topics, tuple(sorted(who.rights)))


@post(
    "/memd/tokens/reload",
    "admin",
    act="settings",
    touches=lambda read: Extent(detail=f"tokens {read.changes}" if read.changes else "no token has changed"),
)
async def reload_tokens(parts: DaemonParts, body: ReloadBody) -> TokensRead:
    """Read the tokens of the settings and of `memd token` again: one that was revoked is refused from now on."""
    return TokensRead(changes=await parts.token_watch.reload())


def user_name() -> str:
    """The system's name of the user who runs this process, or its number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"


PROOF = "/memd/proof"
_CONTEXT = b"memd: this daemon has the data directory\n"


class Proof(msgspec.Struct, frozen=True):
    """The answer to a challenge."""

    proof: str
    """HMAC-SHA256 of the address and the challenge with the secret, in hexadecimal digits."""


@get(PROOF, "open")
async def prove(parts: DaemonParts, query: ProofQuery) -> Proof:
    """The proof that this daemon has the data directory; for commands, see docs/format.md."""
    return Proof(proof_of(parts.token_watch.secret, parts.local_url, query.challenge))


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
