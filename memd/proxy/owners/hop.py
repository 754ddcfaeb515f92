"""The mark of a request that one daemon passes on to another, and the proof that a daemon of the cluster answers it.

Rule: a request is passed on once, and only between daemons of one cluster. Mark and proof are made of the cluster's
name, which the database and the data directories have and no client: so no page can pretend to be a daemon, and nobody
who listens at the address of one that is gone can answer in its name: a proof is good for one request. The mark gives
no right: whoever asks shows their own token with it.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping
from pathlib import Path

from aiohttp import web
from multidict import CIMultiDict

from memd.admin.access import let_ask_from
from memd.admin.http import error_response
from memd.errors import StoreError
from memd.store.files import Files
from memd.store.layout import CLUSTER_NAME

HOP_HEADER = "X-Memory-Hop"
FROM_HEADER = "X-Memory-From"
"""The client's address, for the audit of the daemon that answers."""
CHALLENGE_HEADER, PROOF_HEADER = "X-Memory-Challenge", "X-Memory-Proof"
"""Of a request that is passed on, a number; of the answer, what only a daemon of the cluster can make of it."""
PROOF = web.RequestKey("proof", str)
"""Of a request: the proof that its answer has to show."""
ALONE_HEADER = "X-Memory-Alone"
"""Whoever is asked with it answers of itself alone."""
OWNER_HEADER = "X-Memory-Owner"
"""Of an answer that another daemon gave: which one."""
MISDIRECTED = 421
"""RFC 9110 section 15.5.20."""

NOT_HERE = f"memd: {HOP_HEADER} is for daemons of one cluster, which pass a request on once; leave it out"


class HopMarks:
    """Makes and recognises the mark."""

    def __init__(self, files: Files, data_dir: Path) -> None:
        """`data_dir`: the cache of a cluster; which one stands there once a daemon has seen the database."""
        self._files = files
        self._marker = data_dir / CLUSTER_NAME
        self._cluster = b""

    @property
    def mark(self) -> str:
        """The cluster's; empty as long as it is not known."""
        if not self._cluster:
            try:
                told = self._files.read(self._marker) if self._files.size(self._marker) else b""
                self._cluster = told.partition(b" ")[0]
            except StoreError:  # asked again
                return ""
        return hmac.digest(self._cluster, b"memd hop", "sha256").hex() if self._cluster else ""

    def is_hop(self, request: web.BaseRequest) -> bool:
        """Whether a request has been passed on already, by whomever."""
        return HOP_HEADER in request.headers

    def admits(self, request: web.BaseRequest) -> bool:
        """Whether a daemon of this cluster passed a request on; then it is noted from where."""
        if not self._has_mark(request.headers):
            return False
        let_ask_from(request, request.headers.get(FROM_HEADER, ""))
        return True

    def is_misdirected(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether an answer says that the other daemon does not have the topic."""
        return status == MISDIRECTED and self._has_mark(headers)

    def put_on(self, headers: CIMultiDict[str], source: str = "") -> str:
        """Mark a request, and return the proof that its answer has to show; `source` is where it came from."""
        headers[HOP_HEADER], headers[CHALLENGE_HEADER] = self.mark, (challenge := secrets.token_hex(16))
        if source:
            headers[FROM_HEADER] = source
        return self._proof_for(challenge)

    def prepare_proof(self, request: web.BaseRequest) -> None:
        """Have the answer to a request show that a daemon of the cluster gives it, if one has passed it on."""
        if self._has_mark(request.headers) and (challenge := request.headers.get(CHALLENGE_HEADER)):
            request[PROOF] = self._proof_for(challenge)

    def _proof_for(self, challenge: str) -> str:
        told = b"memd answer " + challenge.encode(errors="surrogateescape")
        return hmac.digest(self._cluster, told, "sha256").hex() if self.mark else ""

    def misdirected(self, request: web.BaseRequest) -> web.Response:
        """The answer to a request that was passed on to the wrong daemon; the mark is told to whoever has it alone."""
        response = error_response(MISDIRECTED, NOT_HERE, "misdirected")
        if self._has_mark(request.headers):
            response.headers[HOP_HEADER] = self.mark
        return response

    def is_proven(self, headers: Mapping[str, str], proof: str) -> bool:
        """Whether an answer shows the proof that it has to."""
        shown = headers.get(PROOF_HEADER, "").encode(errors="surrogateescape")
        return bool(proof) and hmac.compare_digest(shown, proof.encode())

    def _has_mark(self, headers: Mapping[str, str]) -> bool:
        shown = headers.get(HOP_HEADER, "").encode(errors="surrogateescape")
        return bool(self.mark) and hmac.compare_digest(shown, self.mark.encode())
