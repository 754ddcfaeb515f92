"""The tokens that a running daemon knows: those of the settings and those that `memd token` keeps, read again.

Rule: a list that cannot be read changes nothing: whoever was let in before is let in still, and the log says why. What
was closed is never opened by a list that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from memd.admin.proof import command_token, new_secret
from memd.errors import ConfigError, MemdError
from memd.principals import OWNER, Principals
from memd.settings.tokens import AuthSettings, known_principals, token_problems
from memd.store.files import Files
from memd.store.layout import TOKENS_NAME
from memd.store.token_list import kept_tokens
from memd.telemetry.tasks import Tasks

log = logging.getLogger("memd")

LOOK_SECONDS = 1.0
Stamp = tuple[int, int, int] | None
"""By what a file is told from itself before: its time, size and number; None: there is none."""


class AuthSource(msgspec.Struct, frozen=True):
    """Where the settings `auth` come from."""

    path: Path | None
    """The settings file, to be looked at for changes."""
    read: Callable[[], AuthSettings]
    """Reads them anew; raises ConfigError."""


class TokenWatch:
    """Keeps the principals as the lists have them. Belongs to the event loop."""

    def __init__(self, auth: AuthSettings, files: Files, data_dir: Path, source: AuthSource | None) -> None:
        """`auth`: the settings at the start; `source`: where they are read again, None if nowhere."""
        self.principals = Principals()
        self.secret = new_secret()
        """With which the daemon proves to commands that it has the data directory."""
        if not auth.token:  # else commands show that
            self.principals.lend(command_token(self.secret), OWNER)
        self._auth = auth
        self._files = files
        self._data_dir = data_dir
        self._source = source
        self._seen: tuple[Stamp, ...] = ()
        self._watching: asyncio.Task[None] | None = None

    def load(self) -> None:
        """Read the lists at the start, in this thread.

        Raises:
            MemdError: a list is not what it should be.
        """
        self._seen = self._stamps()
        self.principals.exchange(known_principals(self._whole(self._auth)))

    async def reload(self) -> None:
        """Read the lists again.

        Raises:
            MemdError: a list is not what it should be, and nothing has changed.
        """
        stamps, auth = await asyncio.to_thread(self._read)
        self._seen = stamps
        self.principals.exchange(known_principals(auth))
        log.info("the tokens were read again", extra={"tokens": len(auth.tokens)})

    def watch(self, tasks: Tasks) -> None:
        """Look at the lists now and then from now on; not where no token is needed: then `memd token` has to tell."""
        if self._watching is None and not self.principals.is_open:
            self._watching = tasks.spawn(self._watch(), "tokens")

    def stop(self) -> None:
        """Look no more."""
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            stamps = await asyncio.to_thread(self._stamps)
            if stamps == self._seen:
                continue
            try:
                await self.reload()
            except MemdError as error:
                self._seen = stamps
                log.error("the tokens stay as they were", extra={"error": error})

    def _read(self) -> tuple[tuple[Stamp, ...], AuthSettings]:
        stamps = self._stamps()
        return stamps, self._whole(self._auth if self._source is None else self._source.read())

    def _whole(self, auth: AuthSettings) -> AuthSettings:
        kept = kept_tokens(self._files, self._data_dir)
        for _, problem in token_problems((*auth.tokens, *kept), auth.token):
            raise ConfigError(f"{self._data_dir / TOKENS_NAME} beside auth.tokens: {problem} (`memd token list`)")
        return msgspec.structs.replace(auth, tokens=(*auth.tokens, *kept))

    def _stamps(self) -> tuple[Stamp, ...]:
        return _stamp(self._data_dir / TOKENS_NAME), _stamp(None if self._source is None else self._source.path)


def _stamp(path: Path | None) -> Stamp:
    if path is not None:
        with contextlib.suppress(OSError):
            found = path.stat()
            return found.st_mtime_ns, found.st_size, found.st_ino
    return None
