"""Refusals of a prompt: what a model server says when it is too long for the model, or its memory has no place in it.

Rule: pure. A refusal is recognised by the words of the servers that are listed here, and a number is taken only from
where one of them is known to name its window, never from what an error repeats of the request; anything else is the
upstream's own affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from memd.caching import late_pattern
from memd.wire.lenient_json import UNREADABLE

BODY_BYTES_MAX = 64 * 1024
"""An error is a sentence; a larger body echoes the request (vLLM repeats it for each fault that it found)."""
TEXT_CHARACTERS_MAX = 2_000
"""Of each text: what servers say comes first, before what they quote. Gateways put some hundred characters in front."""
DEPTH_MAX = 8
_TELLING = ("error", "message", "detail", "msg", "type", "code", "errors", "response", "metadata", "raw")
"""The members in which a server speaks; all others (`input`, `body`, `ctx`, …) may repeat what the client said. FastAPI
has `detail[].msg`, a failed response `response.error`, OpenRouter the provider's own error as text in
`error.metadata.raw`."""
_QUOTATION = late_pattern(
    r"""['"\\](?:input|messages)\\*['"]\s*:|\binput_value=|\bFailed to parse |\blast read: |\bmessages = """
)
"""Where a message goes on with the request: the errors of pydantic (vLLM, SGLang), llama.cpp's parser."""

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
    # The first are the words of OpenAI and of all that speak like it, and those count, also where they do not say so.
    r"maximum context length (?:is|of)"
    r"|max_(?:new_|completion_)?tokens|in the (?:completion|output)|output tokens|tokens for the completion",
    re.IGNORECASE,
)
_FOR_MEMORY = late_pattern(
    r"templat|jinja"  # llama.cpp, Ollama, vLLM, transformers
    r"|\broles?\b|alternat|system message"  # what templates and APIs say themselves: Gemma, Mistral, Anthropic, OpenAI
    r"|content[_ ](?:filter|management policy)|moderation",  # Azure and gateways: the words of an old chunk
    re.IGNORECASE,
)
_PROMPT = late_pattern(
    # Not "at least N input tokens" and "You passed N": vLLM stops to count where its window ends.
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
    """None: it names none."""
    prompt_tokens: int | None = None
    """The server's own count of the prompt."""
    counts_reply: bool = False
    """Prompt and `max_tokens` together have to fit: it says so, or comes from a server that is known for it."""
    is_exact: bool = False
    """It names its window in a field (llama.cpp's `n_ctx`), not in words."""


def refusal_for_length(body: bytes) -> LengthRefusal | None:
    """Read an error; None if it is not about the prompt's length.

    A JSON body is searched only where servers speak (`_TELLING`): OpenAI and llama.cpp have `error.message`, Ollama and
    LM Studio a text as `error`, older vLLM `message`, and gateways wrap one error into the text of another. What a
    server repeats of the request says nothing of its window.
    """
    answer = _decoded(body)
    text = "\n".join(_told(answer, DEPTH_MAX))
    fields = answer.get("error") if isinstance(answer, dict) else None
    structured = fields if isinstance(fields, dict) else {}
    window = _number(structured.get("n_ctx"))
    is_exact = window is not None
    window = window or _first(_WINDOW.search(text))
    if window is None and _LENGTH.search(text) is None:
        return None
    prompt_tokens = _number(structured.get("n_prompt_tokens")) or _first(_PROMPT.search(text))
    return LengthRefusal(window, prompt_tokens, _COUNTS_REPLY.search(text) is not None, is_exact)


def may_be_for_memory(body: bytes) -> bool:
    """Whether an error may be about the memory in the prompt: its template has no place for it, or a filter."""
    is_about_it = any(_FOR_MEMORY.search(text) for text in _told(_decoded(body), DEPTH_MAX))
    return is_about_it and refusal_for_length(body) is None


def _decoded(body: bytes) -> Any:
    """The JSON value, or the text of another body; None where what it says cannot be told from what it repeats."""
    if len(body) > BODY_BYTES_MAX:
        return None
    try:
        return msgspec.json.decode(body)
    except UNREADABLE:
        text = body.decode(errors="replace")
        return None if text.lstrip()[:1] in ("{", "[") else text


def _told(value: Any, depth: int) -> Iterator[str]:
    """The texts of an error in which the server itself speaks, without what it quotes."""
    if isinstance(value, str):
        nested = _nested(value) if depth else None
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


def _nested(text: str) -> dict[str, Any] | None:
    """The error that is the whole of a text, as gateways pass it on."""
    if text[:1] != "{":
        return None
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except UNREADABLE:
        return None


def _first(found: re.Match[str] | None) -> int | None:
    """The number of the alternative that matched."""
    if found is None:
        return None
    return _number(int(next(group for group in found.groups() if group).replace(",", "") or 0))


def _number(value: object) -> int | None:
    """A count of tokens, of a plausible size."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else None
