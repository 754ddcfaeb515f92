"""Refusals for length: what a model server says when a prompt is too long for the model.

Rule: pure. A refusal is recognised by the words of the servers that are listed here, and a number is taken only from
where one of them is known to name its window; anything else is the upstream's own affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

BODY_BYTES_MAX = 64 * 1024
"""An error is a sentence; a larger body is none that could be understood."""

_N = r"([\d,]+)"
_WINDOW = re.compile(
    "|".join(
        (
            rf"maximum context length (?:is|of) {_N}",  # OpenAI, vLLM, SGLang, OpenRouter, LiteLLM, DeepSeek
            rf"available context size \({_N} tokens\)",  # llama.cpp (server-context.cpp)
            rf"max context size \({_N} tokens\)",  # llama.cpp, where a prompt is not split
            rf"n_ctx: {_N}",  # LM Studio
            rf"tokens > {_N} maximum",  # Anthropic
            rf"exceed context limit: [\d,]+ \+ [\d,]+ > {_N}",  # Anthropic, with max_tokens
            rf"context length \({_N} tokens\)",  # Together
            rf"with {_N} maximum context length",  # Mistral
            rf"number of tokens allowed \({_N}\)",  # Google
            rf"maximum prompt length is {_N}",  # xAI
            rf"exceeds the limit of {_N}",  # GitHub Copilot
            rf"model token limit: {_N}",  # Moonshot
            rf"configured context size is {_N}",  # DS4
            rf"`max_new_tokens` must be <= {_N}",  # text-generation-inference
            rf"`inputs` must have less than {_N} tokens",  # the same, without max_new_tokens
        )
    ),
    re.IGNORECASE,
)
_LENGTH = re.compile(
    r"exceed_context_size|context[_ ](?:length|window|size)[_ ](?:has been )?exceed|exceeds? the (?:available )?context"
    r"|(?:greater|longer) than the context|prompt (?:is )?too long|exceeded max context|context window exceeds"
    r"|reduce the length of the (?:messages|input|prompt)|input is too long for"
    r"|exceeds max(?:imum)? (?:context )?length|exceed context limit",
    re.IGNORECASE,
)
_COUNTS_REPLY = re.compile(
    # The first are the words of OpenAI and of all that speak like it, and those count, also where they do not say so.
    r"maximum context length (?:is|of)"
    r"|max_(?:new_|completion_)?tokens|in the (?:completion|output)|output tokens|tokens for the completion",
    re.IGNORECASE,
)
_PROMPT = re.compile(
    rf"(?:request|input) \({_N} tokens\)|(?:has|contains) {_N} input tokens|resulted in {_N} tokens"
    rf"|\({_N} in the messages|too long: {_N} tokens",
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


def refusal_for_length(body: bytes) -> LengthRefusal | None:
    """Read an error; None if it is not about the prompt's length.

    A JSON body is searched in all its texts, whatever the shape: OpenAI and llama.cpp have `error.message`, Ollama and
    LM Studio a text as `error`, older vLLM `message`, and gateways wrap one error into the text of another.
    """
    try:
        answer = msgspec.json.decode(body[:BODY_BYTES_MAX])
    except (msgspec.DecodeError, RecursionError):
        answer = body[:BODY_BYTES_MAX].decode(errors="replace")
    text = "\n".join(_texts(answer))
    fields = answer.get("error") if isinstance(answer, dict) else None
    told = fields if isinstance(fields, dict) else {}
    named = _WINDOW.search(text)
    window = _number(told.get("n_ctx")) or _first(named)
    if window is None and _LENGTH.search(text) is None:
        return None
    prompt_tokens = _number(told.get("n_prompt_tokens")) or _first(_PROMPT.search(text))
    return LengthRefusal(window, prompt_tokens, _COUNTS_REPLY.search(text) is not None)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _first(found: re.Match[str] | None) -> int | None:
    """The number of the alternative that matched."""
    if found is None:
        return None
    return _number(int(next(group for group in found.groups() if group).replace(",", "") or 0))


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 40 else None
