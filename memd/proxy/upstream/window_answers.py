"""The shapes in which model servers tell the windows of their models.

Rule: pure, and an answer of another shape tells nothing. Only the window that a server runs a model with counts: the
maximum that a model was trained for (llama.cpp's `n_ctx_train` and its router's `context_length`, LM Studio's
`max_context_length`, Ollama's `model_info`) says nothing of a server that gives it less.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

_NUM_CTX = re.compile(r"^num_ctx\s+(\d+)\s*$", re.MULTILINE)


class ModelWindow(msgspec.Struct, frozen=True):
    """One model's window as far as it is known."""

    tokens: int | None = None
    """None: not known."""
    counts_reply: bool = False
    """Prompt and `max_tokens` together have to fit it, or the server refuses the request. vLLM, SGLang and the hosted
    APIs do that; llama.cpp, LM Studio and Ollama take any `max_tokens` and end the reply where the window ends."""
    source: str = ""
    """Where it comes from, for people: an address, a setting, a refusal."""


Windows = Mapping[str, ModelWindow]
"""By the model's name; the empty one stands for every model that has no entry of its own."""


def is_router(props: Mapping[str, Any]) -> bool:
    """Whether `/props` is that of a llama-server that serves several models (tools/server/server-models.cpp)."""
    return props.get("role") == "router"


def of_props(props: Mapping[str, Any]) -> int | None:
    """The tokens of a slot from llama-server's `/props`; the router's own answer has 0 there."""
    settings = props.get("default_generation_settings")
    return _positive(settings.get("n_ctx")) if isinstance(settings, dict) else None


def of_models(answer: Any) -> dict[str, ModelWindow]:
    """Windows from `/v1/models`.

    `max_model_len` is vLLM's and SGLang's, `context_length` OpenRouter's (its `top_provider` may have less),
    `context_window` Groq's, `loaded_context_length` LM Studio's; llama-server has `meta.n_ctx` (server-context.cpp).
    """
    listed = _dicts(answer, "data")
    windows: dict[str, ModelWindow] = {}
    for card in listed:
        window = _of_card(card)
        if window is None and isinstance(card.get("parent"), str):
            window = windows.get(card["parent"])  # an adapter of vLLM has the window of the model below it
        if window is not None:
            windows |= dict.fromkeys(_names(card), window)
    if len(listed) == 1 and windows:
        windows[""] = next(iter(windows.values()))
    return windows


def models_of(answer: Any) -> frozenset[str]:
    """The names under which clients ask for the models of `/v1/models`; Ollama takes one without its `:latest`."""
    names = {name for card in _dicts(answer, "data") for name in _names(card)}
    return frozenset(names | {name.removesuffix(":latest") for name in names})


def of_lm_studio(answer: Any) -> dict[str, ModelWindow]:
    """Windows of the loaded models from LM Studio's `/api/v0/models`."""
    loaded = ((card.get("id"), _positive(card.get("loaded_context_length"))) for card in _dicts(answer, "data"))
    return {name: ModelWindow(tokens, source="/api/v0/models") for name, tokens in loaded if name and tokens}


def of_ollama(answer: Any) -> dict[str, ModelWindow]:
    """Windows of the loaded models from Ollama's `/api/ps` (api/types.go, `ProcessModelResponse`)."""
    windows: dict[str, ModelWindow] = {}
    for card in _dicts(answer, "models"):
        name, tokens = card.get("model") or card.get("name"), _positive(card.get("context_length"))
        if isinstance(name, str) and tokens:
            windows |= dict.fromkeys((name, name.removesuffix(":latest")), ModelWindow(tokens, source="/api/ps"))
    return windows


def of_ollama_model(answer: Any) -> ModelWindow | None:
    """The window of one model from Ollama's `/api/show`: its Modelfile's `num_ctx`, with which it is loaded.

    Where there is none, the server's own default counts, and that is told only once the model is loaded.
    """
    parameters = answer.get("parameters") if isinstance(answer, dict) else None
    found = _NUM_CTX.search(parameters) if isinstance(parameters, str) else None
    return ModelWindow(int(found[1]), source="/api/show") if found and int(found[1]) > 0 else None


def _of_card(card: Mapping[str, Any]) -> ModelWindow | None:
    source, meta = "/v1/models", card.get("meta")
    tokens = _positive(meta.get("n_ctx")) if isinstance(meta, dict) else None
    tokens = tokens or _positive(card.get("loaded_context_length"))
    if tokens is not None or card.get("owned_by") == "llamacpp":
        return None if tokens is None else ModelWindow(tokens, source=source)
    provider = card.get("top_provider")
    told = [card.get(name) for name in ("max_model_len", "context_length", "context_window")]
    told.append(provider.get("context_length") if isinstance(provider, dict) else None)
    numbers = [number for number in map(_positive, told) if number is not None]
    return ModelWindow(min(numbers), counts_reply=True, source=source) if numbers else None


def _names(card: Mapping[str, Any]) -> Iterator[str]:
    aliases = card.get("aliases")
    for name in (card.get("id"), *(aliases if isinstance(aliases, list) else ())):
        if isinstance(name, str) and name:
            yield name


def _dicts(answer: Any, field: str) -> list[dict[str, Any]]:
    listed = answer.get(field) if isinstance(answer, dict) else None
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def _positive(value: object) -> int | None:
    """Return a whole positive number as it is; anything else, a number in a text too, says nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
