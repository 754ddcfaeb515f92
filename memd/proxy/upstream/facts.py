"""Facts that a model server told of itself, and the words for those that it did not tell.

Rule: pure. A server that tells nothing can still be used.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from memd.proxy.upstream.window_answers import is_router

_STAND_IN = bytes.fromhex("73c374cad16f317212d596b51d344012")
"""The digest of the plain ChatML template that llama-server takes, and tells as the model's, where that has none."""
NO_TEMPLATE = (
    "this model has no chat template: a base model goes on with a text and does not chat; take its version for chats "
    "(Instruct, it), or give llama-server the right template (--chat-template)"
)
ASK_SECONDS = 2.0
"""The longest that a request waits for what a server tells."""


class UpstreamFacts(msgspec.Struct, frozen=True):
    """Facts that the upstream told; the defaults stand for an upstream that tells nothing."""

    reachable: bool = False
    window: int | None = None
    """The window in tokens of `model`, or of all models; None if it is not known or differs from model to model."""
    wants_key: bool = False
    """It tells nothing without a key."""
    key_refused: bool = False
    """It tells nothing for the key that the latest probe carried."""
    is_slow: bool = False
    """It has not answered the latest probe within `ASK_SECONDS`, or not yet."""
    model: str = ""
    template: bytes = b""
    """The 16-byte digest of the chat template; empty if unknown."""
    shows_separate: bool | None = None
    """Whether this model's template renders a separate memory message in its place; None if not probed."""

    @property
    def lacks_template(self) -> bool:
        """Whether the model has no chat template of its own; False if the server does not tell."""
        return self.template == _STAND_IN


def window_unknown(facts: UpstreamFacts) -> str:
    """Say why no window is known, what that means, and what to do."""
    reason = "without a key the server tells nothing" if facts.wants_key else "the server tells no window"
    if facts.key_refused:
        reason = "the server refuses the key that it was shown"
    elif facts.is_slow:
        reason = f"the server has not told its window within {ASK_SECONDS:g} s and is asked again in the background"
    remedy = "set upstream.api_key, or upstream.window" if facts.wants_key else "set upstream.window"
    return f"{reason}: nothing leaves the prompt until it is known; {remedy}"


def facts_from(props: dict[str, Any]) -> UpstreamFacts:
    """Return what `/props` tells; everything in it is the server's."""
    template = str(props.get("chat_template") or "")
    return UpstreamFacts(
        reachable=True,
        model="" if is_router(props) else str(props.get("model_alias") or props.get("model_path") or ""),
        template=hashlib.blake2b(template.encode(), digest_size=16).digest() if template else b"",
    )
