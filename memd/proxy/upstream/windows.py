"""Windows of the upstream's models: read from model servers' various answers, learned from refusals, and remembered.

Rule: a value stays until a newer one arrives. Asking never loads a model and changes nothing. A refusal may have
another cause, or repeat the client's words, so it counts only if it fits the prompt; a window that is too small costs
every later request its history.

Answers of another shape are ignored. Only the window with which a server runs a model counts. The maximum it was
trained for (llama.cpp's `n_ctx_train` and its router's `context_length`, LM Studio's `max_context_length`, Ollama's
`model_info`) says nothing about a server that allows less.

A refusal is recognized by the wording of the servers listed here. A number counts only in a phrase in which one of them
names its window, never in text that an error quotes from the request. All other errors are passed on unread.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import msgspec

from memd.caching import Latest, late_pattern
from memd.wire.lenient_json import MEMBERS, UNREADABLE, decode_or_none

_NUM_CTX = re.compile(r"^num_ctx\s+(\d+)\s*$", re.MULTILINE)


class ModelWindow(msgspec.Struct, frozen=True):
    """A model's window, as far as it is known."""

    tokens: int | None = None
    """None if unknown."""
    counts_reply: bool = False
    """The server refuses a request unless prompt and `max_tokens` together fit. vLLM, SGLang and the hosted APIs do
    that; llama.cpp, LM Studio and Ollama accept any `max_tokens` and end the reply at the window's end."""
    source: str = ""
    """Its origin for people: an address, a setting, a refusal."""


Windows = Mapping[str, ModelWindow]
"""By model name; the empty name holds for every model without an entry."""


def is_router(props: Mapping[str, Any]) -> bool:
    """Return whether `/props` is from a llama-server that serves several models (tools/server/server-models.cpp)."""
    return props.get("role") == "router"


def of_props(props: Mapping[str, Any]) -> int | None:
    """Return the tokens of a slot from llama-server's `/props`; the router's own answer has 0 there."""
    settings = props.get("default_generation_settings")
    return _positive(settings.get("n_ctx")) if isinstance(settings, dict) else None


def of_list(path: str, answer: Any) -> dict[str, ModelWindow]:
    """Return windows from a server's list of models: `/v1/models`, LM Studio's `/api/v0/models`, or Ollama's `/api/ps`,
    which has the loaded ones (api/types.go, `ProcessModelResponse`).

    Fields: `max_model_len` in vLLM and SGLang, `context_length` in Ollama and OpenRouter (whose `top_provider` may have
    less), `context_window` in Groq, `loaded_context_length` in LM Studio, `meta.n_ctx` in llama-server
    (server-context.cpp).
    """
    listed = _dicts(answer, "models" if path == "/api/ps" else "data")
    windows: dict[str, ModelWindow] = {}
    for card in listed:
        window = _of_card(card, path)
        if window is None and isinstance(card.get("parent"), str):
            window = windows.get(card["parent"])  # a vLLM adapter has the window of its base model
        if window is not None:
            windows |= dict.fromkeys(_names(card), window)
    if len(listed) == 1 and windows and path == "/v1/models":
        windows[""] = next(iter(windows.values()))
    return windows


def models_of(answer: Any) -> frozenset[str]:
    """Return the names by which clients request the models in `/v1/models`."""
    return frozenset(name for card in _dicts(answer, "data") for name in _names(card))


def of_ollama_model(answer: Any) -> ModelWindow | None:
    """Return one model's window from Ollama's `/api/show`: the `num_ctx` of its Modelfile. Without that the server's
    default applies, which is reported only once the model is loaded."""
    parameters = answer.get("parameters") if isinstance(answer, dict) else None
    found = _NUM_CTX.search(parameters) if isinstance(parameters, str) else None
    return ModelWindow(int(found[1]), source="/api/show") if found and int(found[1]) > 0 else None


def _of_card(card: Mapping[str, Any], path: str) -> ModelWindow | None:
    meta = card.get("meta")
    tokens = _positive(meta.get("n_ctx")) if isinstance(meta, dict) else None
    tokens = tokens or _positive(card.get("loaded_context_length"))
    if tokens is not None or card.get("owned_by") == "llamacpp":
        return None if tokens is None else ModelWindow(tokens, source=path)
    provider = card.get("top_provider")
    told = [card.get(name) for name in ("max_model_len", "context_length", "context_window")]
    told.append(provider.get("context_length") if isinstance(provider, dict) else None)
    numbers = [number for number in map(_positive, told) if number is not None]
    return ModelWindow(min(numbers), counts_reply=path == "/v1/models", source=path) if numbers else None


def model_name(card: Any) -> str | None:
    """Return the name of a listed model, or None, from OpenAI's lists or one of Ollama's two."""
    named = (card.get(field) for field in ("id", "model", "name")) if isinstance(card, dict) else ()
    return next((name for name in named if isinstance(name, str) and name), None)


def _names(card: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of a model; Ollama also accepts one without its `:latest`."""
    aliases = card.get("aliases")
    for name in (model_name(card), *(aliases if isinstance(aliases, list) else ())):
        if isinstance(name, str) and name:
            yield from dict.fromkeys((name, name.removesuffix(":latest")))


def _dicts(answer: Any, field: str) -> list[dict[str, Any]]:
    listed = answer.get(field) if isinstance(answer, dict) else None
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def _positive(value: object) -> int | None:
    """Return a token count of plausible size; None for anything else, also for numbers in strings."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else None


BODY_BYTES_MAX = 64 * 1024
"""Limit on errors read: an error is a sentence; a larger body echoes the request (vLLM once per fault)."""
TEXT_CHARACTERS_MAX = 2_000
"""Limit on each text read: servers' own words come before quotations. Gateways prepend a few hundred characters."""
DEPTH_MAX = 8
_TELLING = ("error", "message", "detail", "msg", "type", "code", "errors", "response", "metadata", "raw")
"""Fields with the server's own words; all others (`input`, `body`, `ctx`, …) may repeat the client's. FastAPI has
`detail[].msg`, a failed response `response.error`, OpenRouter the provider's own error as text in
`error.metadata.raw`."""
_QUOTATION = late_pattern(
    r"""['"\\](?:input|messages)\\*['"]\s*:|\binput_value=|\bFailed to parse |\blast read: |\bmessages = """
)
"""Matches where a message begins to quote the request: errors of pydantic (vLLM, SGLang), llama.cpp's parser."""

_N = r"([\d,]+)"
_ANY = r"[\d,.]+"
_WINDOW = late_pattern(
    "|".join(
        (
            rf"maximum context (?:length|size|limit) (?:is|of) {_N}",  # OpenAI, vLLM, SGLang, OpenRouter, DeepSeek
            rf"maximum context length \({_N}\)",  # vLLM behind gateways
            rf"context length is only {_N} tokens",  # vLLM; LM Studio with llama.cpp: "context length of only"
            rf"context length of only {_N} tokens",
            rf"maximum model length of {_N}",  # vLLM, where images are counted (v1/engine/input_processor)
            rf"fit into the model \(context length {_N}\)",  # the same, older
            rf"context length \({_N} tokens\)",  # SGLang (tokenizer_manager), Together
            rf"Input length \({_ANY} tokens\) exceeds the maximum allowed length \({_N} tokens\)",  # SGLang (scheduler)
            rf"maximum allowed input length of {_N} tokens",  # Poolside
            rf"available context size \({_N} tokens\)",  # llama.cpp (server-context.cpp)
            rf"max context size \({_N} tokens\)",  # llama.cpp, where a prompt is not split
            rf"context length \(n_keep: {_ANY} ?>= n_ctx: {_N}\)",  # LM Studio with llama.cpp
            rf"context length only supports {_N} tokens",  # LM Studio with MLX
            rf"tokens > {_N} maximum",  # Anthropic
            rf"exceed context limit: {_ANY} \+ {_ANY} > {_N}",  # Anthropic, with max_tokens
            rf"too large for model with {_N} maximum context length",  # Mistral
            rf"input token count (?:\({_ANY}\) )?exceeds the maximum number of tokens allowed \(?{_N}",  # Google
            rf"maximum prompt length is {_N}",  # xAI
            rf"prompt token count of {_ANY} exceeds the limit of {_N}",  # GitHub Copilot
            rf"exceeded model token limit: {_N}",  # Moonshot
            rf"Input tokens exceed the configured limit of {_N} tokens",  # OpenAI
            rf"Range of input length should be \[\d+, {_N}\]",  # Alibaba
            rf"configured context size is {_N}",  # DS4
            rf"`?inputs`? tokens \+ `?max_new_tokens`? must be <= {_N}",  # text-generation-inference (validation.rs)
            rf"`?inputs`? must have less than {_N} tokens",  # the same, without max_new_tokens
        )
    ),
    re.IGNORECASE,
)
_LENGTH = late_pattern(
    r"exceed_context_size|(?:context|prompt)[_ ](?:length|window|size)[_ ](?:has been )?exceed"
    r"|exceeds? the (?:available )?context|(?:greater|longer) than the context|prompt (?:is )?too long"
    r"|exceeded max context|context window exceeds|reduce the length of the (?:messages|input|prompt)"
    r"|input is too long for (?:the )?(?:requested )?model|exceeds? (?:the )?max(?:imum)? context"
    r"|exceed context limit|context window is full",
    re.IGNORECASE,
)
_COUNTS_REPLY = late_pattern(
    # The first is used by OpenAI and compatible servers, which count the reply even where they do not mention it.
    r"maximum context length (?:is|of)"
    r"|max_(?:new_|completion_)?tokens|in the (?:completion|output)|output tokens|tokens for the completion",
    re.IGNORECASE,
)
_FOR_MEMORY = late_pattern(
    r"templat|jinja"  # llama.cpp, Ollama, vLLM, transformers
    r"|\broles?\b|alternat|system message"  # words of templates and APIs: Gemma, Mistral, Anthropic, OpenAI
    r"|content[_ ](?:filter|management policy)|moderation",  # Azure and gateways, about the words of an old chunk
    re.IGNORECASE,
)
_PROMPT = late_pattern(
    # Not "at least N input tokens" and "You passed N": vLLM stops counting at the end of its window.
    rf"(?:request|input|input length) \({_N}(?: tokens)?\)|(?:has|contains) {_N} input tokens|resulted in {_N} tokens"
    rf"|\({_N} in the messages|too long: {_N} tokens|{_N} tokens from the input messages"
    rf"|prompt \((?:total )?length {_N}\)|The input has {_N} tokens|input token count \({_N}\)"
    rf"|prompt (?:contains|has) {_N} tokens|the request contains {_N} tokens|prompt token count of {_N}"
    rf"|must have less than {_ANY} tokens\. Given: {_N}|must be <= {_ANY}\. Given: {_N} `?inputs`? tokens",
    re.IGNORECASE,
)


class LengthRefusal(msgspec.Struct, frozen=True):
    """The content of a refusal for length."""

    window: int | None = None
    prompt_tokens: int | None = None
    """The server's own count."""
    counts_reply: bool = False
    """Prompt and `max_tokens` together must fit, by the refusal's words or because the server is known for it."""
    is_exact: bool = False
    """The window is in a field (llama.cpp's `n_ctx`), not in a sentence."""


def refusal_for_length(body: bytes) -> LengthRefusal | None:
    """Read an error; None if it is not about the prompt's length.

    A JSON body is searched only in the fields with the server's own words (`_TELLING`): OpenAI and llama.cpp have
    `error.message`, Ollama and LM Studio a text as `error`, older vLLM `message`, and gateways wrap one error into the
    text of another. Quotations from the request say nothing about the window.
    """
    answer = _decoded(body)
    text = "\n".join(_told(answer, DEPTH_MAX))
    fields = answer.get("error") if isinstance(answer, dict) else None
    structured = fields if isinstance(fields, dict) else {}
    window = _positive(structured.get("n_ctx"))
    is_exact = window is not None
    window = window or _first(_WINDOW.search(text))
    if window is None and _LENGTH.search(text) is None:
        return None
    prompt_tokens = _positive(structured.get("n_prompt_tokens")) or _first(_PROMPT.search(text))
    return LengthRefusal(window, prompt_tokens, _COUNTS_REPLY.search(text) is not None, is_exact)


def may_be_for_memory(body: bytes) -> bool:
    """Return whether an error may be about the memory in the prompt: a template without a place for it, or a filter."""
    is_about_it = any(_FOR_MEMORY.search(text) for text in _told(_decoded(body), DEPTH_MAX))
    return is_about_it and refusal_for_length(body) is None


def _decoded(body: bytes) -> Any:
    """Return the JSON value, or the text of another body; None if own words and quotations cannot be distinguished."""
    if len(body) > BODY_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
        text = body.decode(errors="replace")
        return None if text.lstrip()[:1] in ("{", "[") else text


def _told(value: Any, depth: int) -> Iterator[str]:
    """Yield the server's own words in an error, without quotations."""
    if isinstance(value, str):
        # Gateways forward an error as the whole text of another one.
        nested = decode_or_none(MEMBERS, value.encode()) if depth and value[:1] == "{" else None
        if nested is not None:
            yield from _told(nested, depth - 1)
        else:
            yield _QUOTATION.split(value[:TEXT_CHARACTERS_MAX], maxsplit=1)[0]
    elif isinstance(value, list) and depth:
        for inner in value:
            yield from _told(inner, depth - 1)
    elif isinstance(value, dict) and depth:
        for name in _TELLING:
            yield from _told(value.get(name), depth - 1)


def _first(found: re.Match[str] | None) -> int | None:
    """Return the number from the alternative that matched."""
    if found is None:
        return None
    return _positive(int(next(group for group in found.groups() if group).replace(",", "") or 0))


Ask = Callable[[str, str, bytes | None], Awaitable[Any]]
"""Sends (method, path, JSON body) and returns the decoded JSON of an answer with status 200, else None."""

MODELS_MAX = 256
"""Limit on remembered model names, which clients choose freely."""
SENT_SHARE = 0.9
"""If a refusal has no number, the window is assumed to be this share of the prompt. Each compaction halves the
conversation, so a much smaller window is reached within a few requests."""
WINDOW_MIN = 256
"""No chat model has less, so a smaller number is not a window."""
AGREEMENT = 2
"""A refusal's count refers to this prompt if it differs from our estimate by at most this factor."""


class Sent(msgspec.Struct, frozen=True):
    """A prompt as we estimate it, in the model's tokens."""

    tokens: int
    reply_tokens: int = 0
    """Its `max_tokens`."""
    doubt: float = 1.0
    """The prompt may take so many times the estimate; infinite with images."""

    def agrees_with(self, count: int | None) -> bool:
        """Return whether a server's count can be that of this prompt."""
        if count is None or math.isinf(self.doubt):
            return False
        return self.tokens <= count * AGREEMENT and count <= self.tokens * AGREEMENT


class _Seen(msgspec.Struct, frozen=True):
    """A model's window according to the prompts sent to it."""

    refused: ModelWindow | None = None
    accepted: int = 0
    """Tokens of the longest prompt it accepted, by its own count."""
    is_doubted: bool = False
    """Its last refusal was not credible."""


class KnownWindows:
    """All known windows; `of` combines the sources."""

    def __init__(self, configured: str | int | Mapping[str, int]) -> None:
        """`configured`: the setting `upstream.window`."""
        self._configured = configured if isinstance(configured, int) else None
        self._configured_of = configured if isinstance(configured, Mapping) else {}
        self._told: dict[str, ModelWindow] = {}
        self._seen: Latest[str, _Seen] = Latest(MODELS_MAX)

    def of(self, model: str) -> ModelWindow:
        """Return a model's window: from the settings, else from the server; never more than the size it refused."""
        told = self._promised(model)
        refused = self._seen.get(model, _Seen()).refused
        if refused is None:
            return told
        counts_reply = told.counts_reply or refused.counts_reply
        lowest = refused if told.tokens is None or (refused.tokens or 0) < told.tokens else told
        return msgspec.structs.replace(lowest, counts_reply=counts_reply)

    def is_told_for_all(self) -> bool:
        """Return whether one window holds for every model name."""
        return "" in self._told or self._configured is not None

    def told(self, windows: Windows) -> None:
        """Record an answer of the server; if a window changed, accepted and refused sizes are dropped."""
        if "" not in windows:
            self._told.pop("", None)
        changed = {name for name, window in windows.items() if self._told.get(name) != window}
        self._told |= windows
        for model in [*self._seen] if "" in changed else changed:
            self._seen.pop(model, None)

    def accepted(self, model: str, tokens: int) -> None:
        """Note that the model accepted a prompt of so many of its tokens."""
        seen = self._seen.get(model, _Seen())
        self._seen[model] = _Seen(seen.refused, max(tokens, seen.accepted))

    def refused(self, model: str, refusal: LengthRefusal, sent: Sent) -> bool:
        """Learn from a refusal; False, and nothing learned, if it is not credible.

        A number in a sentence is not credible if the prompt plainly fits it. A number below an accepted size or
        llama-server's own `/props` needs confirmation, because the model may have been reloaded with less: either the
        server's count roughly matches ours, which quoted numbers do not, or the refusal comes twice in a row.
        """
        seen = self._seen.get(model, _Seen())
        reply = sent.reply_tokens if refusal.counts_reply else 0
        tokens = refusal.window or max(1, int(((refusal.prompt_tokens or sent.tokens) + reply) * SENT_SHARE))
        if not refusal.is_exact:
            fits = refusal.window is not None and sent.tokens * sent.doubt + sent.reply_tokens < refusal.window
            if fits or tokens < WINDOW_MIN:
                return False
            floor = max(self._floor(model, refusal), seen.accepted)
            if tokens < floor and not sent.agrees_with(refusal.prompt_tokens) and not seen.is_doubted:
                self._seen[model] = msgspec.structs.replace(seen, is_doubted=True)
                return False
        window = ModelWindow(tokens, refusal.counts_reply, "a refusal")
        self._seen[model] = _Seen(window, 0 if tokens < seen.accepted else seen.accepted)
        return True

    def forget_refusals(self) -> None:
        """Note that the server was away and may have returned with other windows."""
        self._seen.clear()

    def _promised(self, model: str) -> ModelWindow:
        """Return the window by the settings, else by the server."""
        told = self._told.get(model) or self._told.get("") or ModelWindow()
        configured = self._configured_of.get(model, self._configured)
        return told if configured is None else ModelWindow(configured, told.counts_reply, "upstream.window")

    def _floor(self, model: str, refusal: LengthRefusal) -> int:
        """Return the smallest credible window; settings and lists may promise too much."""
        promised = self._promised(model)
        tokens = promised.tokens or 0
        if refusal.window is not None:
            return tokens if promised.source.startswith("/props") else 0
        return tokens // 2  # without a number: a short prompt is not refused for its length


async def ask_windows(ask: Ask, props: Mapping[str, Any], model: str) -> dict[str, ModelWindow]:
    """Ask the server for its windows; empty if it reports none. `model`: the one needed now, if any; `props`: its
    answer to `/props`, if any."""
    if tokens := of_props(props):
        return {"": ModelWindow(tokens, source="/props")}
    windows = of_list("/v1/models", await ask("GET", "/v1/models", None))
    if is_router(props) and model:
        own = await ask("GET", f"/props?model={quote(model, safe='')}&autoload=false", None)
        if tokens := of_props(own if isinstance(own, dict) else {}):
            windows[model] = ModelWindow(tokens, source="/props?model=")
    if windows or "default_generation_settings" in props:
        return windows
    studio, running = await asyncio.gather(ask("GET", "/api/v0/models", None), ask("GET", "/api/ps", None))
    windows = of_list("/api/v0/models", studio) | of_list("/api/ps", running)
    if model and model not in windows and isinstance(running, dict) and "models" in running:
        show = await ask("POST", "/api/show", msgspec.json.encode({"model": model}))
        if (shown := of_ollama_model(show)) is not None:
            windows[model] = shown
    return windows
