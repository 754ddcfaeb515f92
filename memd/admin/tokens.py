"""The routes about tokens: what the one that asks may do, and that the lists have changed.

Rule: no route makes, shows or takes back a token: that is done on the machine itself (`memd token`), by whoever may
read the data directory anyway.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from memd.admin.acts import Extent
from memd.admin.queries import Body
from memd.admin.routing import get, post
from memd.principals import Principal, Right


class OwnRights(msgspec.Struct, frozen=True):
    """A principal, as it is told itself."""

    name: str
    topics: tuple[str, ...]
    """Patterns; `*` stands for any characters."""
    rights: tuple[Right, ...]


class ReloadBody(Body):
    """The body of `POST /memd/tokens/reload`: empty."""


class TokensRead(msgspec.Struct, frozen=True):
    """The tokens are as the lists have them."""

    reloaded: bool = True
    changes: str = ""
    """The names of those that are new, gone or others than before, in words."""


class TokenRoutes:
    """Tokens."""

    def __init__(self, reload: Callable[[], Awaitable[str]]) -> None:
        """`reload`: reads the lists again, and says what changed."""
        self._reload = reload

    @get("/memd/me", "any")
    async def me(self, who: Principal) -> OwnRights:
        """The name, the topics and the rights of the token that asks."""
        return OwnRights(who.name, who.topics, tuple(sorted(who.rights)))

    @post(
        "/memd/tokens/reload",
        "admin",
        act="settings",
        touches=lambda read: Extent(detail=f"tokens {read.changes}" if read.changes else "no token has changed"),
    )
    async def reload_tokens(self, body: ReloadBody) -> TokensRead:
        """Read the tokens of the settings and of `memd token` again: one that was revoked is refused from now on."""
        return TokensRead(changes=await self._reload())
