"""Requests that were refused for their token, as lines of the log.

Rule: whoever tries tokens leaves a trace and cannot fill the log: of each address the first attempt is told at once,
then once a minute how many there were. No line has a token in it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger("memd")

TOLD_SECONDS = 60.0
ADDRESSES_MAX = 256
"""Addresses that are told apart at a time; the rest are counted together."""
REST = "others"


class WrongTokens:
    """Counts refused requests by their address. Belongs to the event loop."""

    def __init__(
        self,
        later: Callable[[float, Callable[[str], None], str], object],
        audited: Callable[[str, int], None] = lambda address, attempts: None,
    ) -> None:
        """
        Args:
            later: calls a function with an argument after so many seconds, as `loop.call_later` does.
            audited: is told of an address and its attempts, as the log is.
        """
        self._later = later
        self._audited = audited
        self._untold: dict[str, int] = {}
        """By address, since its last line; an address without one has not been seen for a minute."""

    def note(self, remote: str | None) -> None:
        """Note one refused request."""
        address = remote or "unknown"
        if address not in self._untold and len(self._untold) >= ADDRESSES_MAX:
            address = REST
        if address in self._untold:
            self._untold[address] += 1
        else:
            self._tell(address, 1)

    def _tell(self, address: str, attempts: int) -> None:
        log.warning("refused: no auth.token, or a wrong one", extra={"remote": address, "attempts": attempts})
        self._audited(address, attempts)
        self._untold[address] = 0
        self._later(TOLD_SECONDS, self._tell_rest, address)

    def _tell_rest(self, address: str) -> None:
        if attempts := self._untold.pop(address):
            self._tell(address, attempts)
