"""The windows of the upstream's models: asked of the server, and kept.

Rule: what was told or refused stays known until something newer is; asking never loads a model and changes nothing.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from memd.proxy.upstream import window_answers
from memd.proxy.upstream.refusals import LengthRefusal
from memd.proxy.upstream.window_answers import ModelWindow, Windows

Ask = Callable[[str, str, bytes | None], Awaitable[Any]]
"""Sends (method, path, JSON body) and returns the decoded JSON of an answer with status 200, else None."""

REFUSED_MODELS_MAX = 256  # clients choose model names freely
SENT_SHARE = 0.9
"""A refusal that names no number: the window is taken to be this share of what was sent. A compaction halves the
conversation, so a window that is much smaller is reached in a few requests."""


class KnownWindows:
    """All that is known of windows; `of` puts it together."""

    def __init__(self, configured: str | int | Mapping[str, int]) -> None:
        """`configured`: the setting `upstream.window`."""
        self._configured = configured
        self._told: dict[str, ModelWindow] = {}
        self._refused: OrderedDict[str, ModelWindow] = OrderedDict()

    def of(self, model: str) -> ModelWindow:
        """The window of a model: that of the settings, else what the server told; never more than it was refused at."""
        told = self._told.get(model) or self._told.get("") or ModelWindow()
        configured = self._configured.get(model) if isinstance(self._configured, Mapping) else self._configured
        if isinstance(configured, int):
            told = ModelWindow(configured, told.counts_reply, "upstream.window")
        refused = self._refused.get(model)
        if refused is None:
            return told
        counts_reply = told.counts_reply or refused.counts_reply
        lowest = refused if told.tokens is None or (refused.tokens or 0) < told.tokens else told
        return msgspec.structs.replace(lowest, counts_reply=counts_reply)

    def is_told_for_all(self) -> bool:
        """Whether one window holds for every model name."""
        return "" in self._told or isinstance(self._configured, int)

    def told(self, windows: Windows) -> None:
        """Take in an answer of the server; a window that changed makes refusals out of date."""
        if "" not in windows:
            self._told.pop("", None)
        changed = {name for name, window in windows.items() if self._told.get(name) != window}
        self._told |= windows
        for model in [model for model in self._refused if model in changed or "" in changed]:
            del self._refused[model]

    def refused(self, model: str, refusal: LengthRefusal, sent_tokens: int) -> ModelWindow:
        """Learn from a refusal and return what is known now.

        Args:
            sent_tokens: what was sent, in the model's tokens, with `max_tokens` if the refusal speaks of that too.
        """
        tokens = refusal.window or max(1, int(sent_tokens * SENT_SHARE))
        self._refused[model] = ModelWindow(tokens, refusal.counts_reply, "a refusal")
        self._refused.move_to_end(model)
        if len(self._refused) > REFUSED_MODELS_MAX:
            self._refused.popitem(last=False)
        return self.of(model)

    def forget_refusals(self) -> None:
        """The server was away: it may have come back with larger windows."""
        self._refused.clear()


async def ask_windows(ask: Ask, props: Mapping[str, Any], model: str) -> dict[str, ModelWindow]:
    """Ask the server for its windows; nothing if it does not tell.

    Args:
        props: its answer to `/props`, empty if there was none.
        model: the one that matters now, as its client calls it; empty if no request came yet.
    """
    if tokens := window_answers.of_props(props):
        return {"": ModelWindow(tokens, source="/props")}
    windows = window_answers.of_models(await ask("GET", "/v1/models", None))
    if window_answers.is_router(props) and model:
        own = await ask("GET", f"/props?model={quote(model, safe='')}&autoload=false", None)
        if tokens := window_answers.of_props(own if isinstance(own, dict) else {}):
            windows[model] = ModelWindow(tokens, source="/props?model=")
    if windows or "default_generation_settings" in props:
        return windows
    studio, running = await asyncio.gather(ask("GET", "/api/v0/models", None), ask("GET", "/api/ps", None))
    windows = window_answers.of_lm_studio(studio) | window_answers.of_ollama(running)
    if model and model not in windows and isinstance(running, dict) and "models" in running:
        show = await ask("POST", "/api/show", msgspec.json.encode({"model": model}))
        if (shown := window_answers.of_ollama_model(show)) is not None:
            windows[model] = shown
    return windows
