"""Grants: what people allowed programs to do in their name, and the codes and tokens that stand for it.

Rule: pure: time and secrets are passed in. Of every secret only the SHA-256 is kept. A code serves once, and
so does a refresh token: one that comes again ends its grant, for one of the two who had it is a thief (OAuth 2.1
section 4.3.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from memd.admin.oauth.protocol import Permission, TokenRequest, is_answer_to
from memd.errors import OAuthRefused
from memd.principals import Held, Right, surplus

NewSecret = Callable[[], str]
"""Returns another secret of 256 bits each time."""
CODE_SECONDS = 60
ACCESS_SECONDS = 3_600
REFRESH_SECONDS = 30 * 86_400
"""From the last time that tokens were given: a program that is not used for so long has to ask again."""
GRANTS_MAX = 256
CODES_MAX = 256
"""Of all people together; beyond it the oldest of whoever has the most makes room (`memd.principals`)."""
REFRESH_UNKNOWN = (
    "the refresh token is not known: it was revoked, not used for 30 days, or made room for another, as there are at "
    f"most {GRANTS_MAX} programs; ask again"
)
SPENT_MAX = 32
"""Refresh tokens of one grant that are known again after they served: the last ones. Who shows an older one gets none
either."""


class Allowed(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of the person who was asked."""

    principal: str
    principal_sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Of the token with which it was allowed; a grant ends with that token."""
    rights: tuple[Right, ...]
    topics: tuple[str, ...]
    """Patterns; none: all topics of the principal."""


class GivenGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A grant, as people are told it."""

    id: str
    program: str
    """As the program calls itself."""
    principal: str
    rights: tuple[Right, ...]
    topics: tuple[str, ...]
    created_at: int
    until: int
    """It ends then if it is not used before. In seconds since 1970, as `created_at`."""


class Grant(Allowed, frozen=True, kw_only=True):
    """One person's permission for one program. Times are seconds since 1970, digests hexadecimal."""

    id: str
    program: str = msgspec.field(name="client_name")
    client_sha256: str
    """Of the client's id."""
    created_at: int
    access_sha256: str = ""
    access_until: int = 0
    refresh_sha256: str = ""
    until: int = msgspec.field(default=0, name="refresh_until")
    spent: tuple[str, ...] = ()
    """Digests of the refresh tokens before, the newest last."""

    @property
    def given(self) -> GivenGrant:
        """The grant without its digests."""
        return GivenGrant(**{name: getattr(self, name) for name in GivenGrant.__struct_fields__})


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request for tokens (RFC 6749 section 5.1)."""

    access_token: str
    token_type: str = "Bearer"  # noqa: S105  # a kind of token
    expires_in: int = ACCESS_SECONDS
    refresh_token: str
    scope: str


class GivenCode(msgspec.Struct, frozen=True):
    """A code on its way to a program."""

    permission: Permission
    allowed: Allowed
    until: int
    grant_id: str = ""
    """The grant that it became; empty as long as it has not served."""


class LedgerState(msgspec.Struct, frozen=True, kw_only=True):
    """All grants and the codes on their way."""

    key: bytes = b""
    """Seals the ids of clients; empty before the first one registered."""
    grants: tuple[Grant, ...] = ()
    """Oldest first."""
    codes: Mapping[str, GivenCode] = {}
    """By their SHA-256, the oldest first. A file has none: they are not kept over a restart."""
    changes: int = 0
    """How often the book was changed."""
    made_room: Mapping[str, str] = {}
    """By the ids of grants that had to make room for others with the last change: why."""

    def acting(self, access_token: str, now: int) -> Grant | None:
        """Return the grant for which an access token stands now; None if it stands for none."""
        digest = sha256_of(access_token)
        found = next((one for one in self.grants if one.access_sha256 == digest), None)
        return found if found is not None and now < found.access_until else None

    def without(self, is_over: Callable[[Grant], bool]) -> LedgerState:
        """The state after some grants have ended."""
        return msgspec.structs.replace(self, grants=tuple(one for one in self.grants if not is_over(one)))

    def ended(self, grant_id: str) -> LedgerState:
        """The state after a grant has ended."""
        return self.without(lambda one: one.id == grant_id)

    def revoked(self, token: str) -> LedgerState:
        """The state without the grant of an access or refresh token, if it is one (RFC 7009 section 2.1)."""
        digest = sha256_of(token)
        return self.without(lambda one: digest in (one.access_sha256, one.refresh_sha256))

    def allowed(self, permission: Permission, allowed: Allowed, code: str, now: int) -> LedgerState:
        """The state with a code for a client that a person allowed to go on."""
        codes = {digest: one for digest, one in self.codes.items() if now < one.until}
        codes[sha256_of(code)] = GivenCode(permission, allowed, now + CODE_SECONDS)
        digests = list(codes)
        for leaving in surplus((Held(one.allowed.principal) for one in codes.values()), CODES_MAX):
            del codes[digests[leaving.place]]
        return msgspec.structs.replace(self, codes=codes)

    def asked(self, asked: TokenRequest, new_secret: NewSecret, now: int) -> tuple[LedgerState, Tokens | OAuthRefused]:
        """The state after a request for tokens, and the answer: tokens for a code or a refresh token, which has served
        with that; a refusal if it is not known, not this client's, or has served before, which ends its grant."""
        return (self._exchanged if asked.verifier is not None else self._refreshed)(asked, new_secret, now)

    def _exchanged(self, asked: TokenRequest, new_secret: NewSecret, now: int) -> _Answer:
        digest = sha256_of(asked.secret)
        code = self.codes.get(digest)
        if code is None or code.permission.client_id != asked.client_id or now >= code.until:
            return self, _void(f"the code is not known: it is another program's, or older than {CODE_SECONDS} s")
        if code.grant_id:  # somebody else may have had the code too (RFC 6749 section 4.1.2)
            return self.ended(code.grant_id), _void("the code has served before, so its tokens are void; ask again")
        grant_id = sha256_of(new_secret())[:8]
        served = {**self.codes, digest: msgspec.structs.replace(code, grant_id=grant_id)}
        state = msgspec.structs.replace(self, codes=served)
        assert asked.verifier is not None
        if not is_answer_to(code.permission.challenge, asked.verifier):
            return state, _void("code_verifier does not belong to the code_challenge; ask again")
        if asked.redirect_uri not in (None, code.permission.redirect_uri):
            return state, _void("redirect_uri is another one than before; ask again")
        grant = Grant(
            id=grant_id,
            program=code.permission.client.name,
            client_sha256=sha256_of(asked.client_id),
            created_at=now,
            **msgspec.structs.asdict(code.allowed),
        )
        return state._with_room(now, code.allowed.principal)._given(grant, new_secret, now)

    def _refreshed(self, asked: TokenRequest, new_secret: NewSecret, now: int) -> _Answer:
        digest, client = sha256_of(asked.secret), sha256_of(asked.client_id)
        for grant in self.grants:
            if digest in grant.spent:
                told = "the refresh token has served before; its grant is void, ask again"
                return self.ended(grant.id), _void(told)
            if digest == grant.refresh_sha256 and client == grant.client_sha256 and now < grant.until:
                spent = (*grant.spent, digest)[-SPENT_MAX:]
                return self._given(msgspec.structs.replace(grant, spent=spent), new_secret, now)
        return self, _void(REFRESH_UNKNOWN)

    def _given(self, grant: Grant, new_secret: NewSecret, now: int) -> _Answer:
        access, refresh = new_secret(), new_secret()
        grant = msgspec.structs.replace(
            grant,
            access_sha256=sha256_of(access),
            access_until=now + ACCESS_SECONDS,
            refresh_sha256=sha256_of(refresh),
            until=now + REFRESH_SECONDS,
        )
        grants = {one.id: one for one in self.grants} | {grant.id: grant}
        tokens = Tokens(access_token=access, refresh_token=refresh, scope=" ".join(grant.rights))
        return msgspec.structs.replace(self, grants=tuple(grants.values())), tokens

    def _with_room(self, now: int, principal: str) -> LedgerState:
        """Without the grants that are over, and of too many, with one more of this principal's, those of whoever
        allowed the most that have not been used for longest."""
        live = sorted((one for one in self.grants if now < one.until), key=lambda one: one.until)
        held = [*(Held(one.principal) for one in live), Held(principal)]
        leaving = {one.place: one.why(GRANTS_MAX, "programs") for one in surplus(held, GRANTS_MAX)}
        made_room = {live[place].id: why for place, why in leaving.items()}
        grants = tuple(one for place, one in enumerate(live) if place not in leaving)
        return msgspec.structs.replace(self, grants=grants, made_room=made_room)


_Answer = tuple[LedgerState, Tokens | OAuthRefused]


def _void(why: str) -> OAuthRefused:
    return OAuthRefused("invalid_grant", why)


def sha256_of(secret: str) -> str:
    """Return the SHA-256 of a secret as it was shown, in hexadecimal digits."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()
