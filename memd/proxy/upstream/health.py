"""The health of one of several model servers: whether requests go to it, and when it is tried again.

Rule: pure; the time is passed in, in seconds that only go on. What is wrong with a request says nothing about a server:
only a server that does not answer is left out at once, one that answers every request with an error after a few. To be
left out is to come last, never to be refused: where no server is well, all are tried.
"""

from __future__ import annotations

from memd.wording import counted

RETRY_SECONDS, RETRY_SECONDS_MAX = 1.0, 10.0
"""The first pause before a server that failed is asked again, doubled with each failure, and the longest."""
ERRORS_MAX = 3
"""So many conversations that got errors (500), and no answer between them: it is the server, hardly the requests. On
trial one is enough: else a server that does nothing but fail gets as many each time it says that it is well."""


class Health:
    """The health of a server, by what came of the requests to it."""

    def __init__(self) -> None:
        self.reason = ""
        """Why it is left out; empty if it is not."""
        self.retry_at = 0.0
        """When it is asked again."""
        self._failures = 0
        self._erred: set[bytes] = set()

    @property
    def is_out(self) -> bool:
        """Whether requests go elsewhere."""
        return bool(self.reason)

    @property
    def is_on_trial(self) -> bool:
        """Whether it has answered a question of memd's own since it failed, and no request yet: it gets one at once."""
        return self._failures > 0 and not self.reason

    def answered(self) -> None:
        """A request was answered."""
        self.reason, self._failures = "", 0
        self._erred.clear()

    def erred(self, now: float, conversation: bytes) -> None:
        """A request was answered with an error of the server; a client that repeats one counts once."""
        self._erred.add(conversation)
        if len(self._erred) >= (1 if self.is_on_trial else ERRORS_MAX) and not self.is_out:
            self.failed(now, f"it answered {counted(len(self._erred), 'conversation')} running with errors")
            self._erred.clear()

    def failed(self, now: float, reason: str) -> None:
        """It did not answer, or said that it cannot now."""
        self.reason = reason
        self.retry_at = now + min(RETRY_SECONDS * 2**self._failures, RETRY_SECONDS_MAX)
        self._failures = min(self._failures + 1, 16)

    def answers_again(self) -> None:
        """A question of memd's own was answered."""
        self.reason = ""
