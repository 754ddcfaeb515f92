"""Where the window of a model comes from: what servers tell of it, what they refuse, and what is kept of both."""

from __future__ import annotations

import json
from typing import Any

import pytest

from memd.proxy.upstream.refusals import LengthRefusal, refusal_for_length
from memd.proxy.upstream.window_answers import ModelWindow
from memd.proxy.upstream.windows import KnownWindows, ask_windows

# Shapes as these servers answer; the reason is the source that has them.
VLLM = {"object": "list", "data": [{"id": "qwen", "owned_by": "vllm", "root": "Qwen/Qwen3", "max_model_len": 32_768}]}
VLLM_ADAPTER = {"data": [*VLLM["data"], {"id": "sql", "parent": "qwen", "max_model_len": None}]}
OPENROUTER = {
    "data": [
        {"id": "a/large", "context_length": 200_000, "top_provider": {"context_length": 131_072}},
        {"id": "b/small", "context_length": 8_192, "top_provider": {"context_length": None}},
    ]
}
LLAMA_MODELS = {"data": [{"id": "tiny", "owned_by": "llamacpp", "meta": {"n_ctx": 4_096, "n_ctx_train": 131_072}}]}
ROUTER_PROPS = {"role": "router", "model_path": "none", "default_generation_settings": {"params": {}, "n_ctx": 0}}
ROUTER_MODELS = {
    "data": [
        {"id": "idle", "owned_by": "llamacpp", "context_length": 131_072, "status": {"value": "unloaded"}},
        {
            "id": "loaded",
            "aliases": ["l"],
            "owned_by": "llamacpp",
            "context_length": 131_072,
            "meta": {"n_ctx": 8_192, "n_ctx_train": 131_072},
        },
    ]
}
LM_STUDIO = {
    "data": [
        {"id": "idle", "state": "not-loaded", "max_context_length": 131_072},
        {"id": "loaded", "state": "loaded", "max_context_length": 131_072, "loaded_context_length": 4_096},
    ]
}
LM_STUDIO_UNKNOWN = {"error": "Unexpected endpoint or method. (GET /props)"}  # with status 200
OLLAMA_MODELS = {"data": [{"id": "qwen3:latest", "object": "model", "owned_by": "library"}]}
OLLAMA_PS = {"models": [{"name": "qwen3:latest", "model": "qwen3:latest", "context_length": 4_096}]}
OLLAMA_SHOW = {
    "parameters": 'num_ctx                        16384\nstop                           "<|im_end|>"',
    "model_info": {"qwen3.context_length": 262_144},
}

Answers = dict[str, Any]


async def asked(answers: Answers, model: str = "", props: Any = None) -> dict[str, int | None]:
    """The tokens by model that a server with these answers tells; a path that it does not know is a 404."""

    async def ask(method: str, path: str, body: bytes | None) -> Any:
        return answers.get(f"{method} {path}" if body is None else f"{method} {path} {body.decode()}")

    told = await ask_windows(ask, props or {}, model)
    return {name: window.tokens for name, window in told.items()}


async def test_llama_server_tells_the_window_of_a_slot_whatever_a_client_calls_its_model() -> None:
    assert await asked({}, "anything", {"default_generation_settings": {"n_ctx": 4_096}}) == {"": 4_096}


async def test_a_router_is_asked_for_the_model_without_loading_it() -> None:
    own = {"default_generation_settings": {"n_ctx": 16_384}}
    answers = {"GET /v1/models": ROUTER_MODELS, "GET /props?model=org%2Fm%3AQ4&autoload=false": own}
    assert await asked(answers, "org/m:Q4", ROUTER_PROPS) == {"loaded": 8_192, "l": 8_192, "org/m:Q4": 16_384}
    assert await asked(answers, "", ROUTER_PROPS) == {"loaded": 8_192, "l": 8_192}


@pytest.mark.parametrize(
    ("answers", "model", "expected"),
    [
        ({"GET /v1/models": VLLM}, "qwen", {"qwen": 32_768, "": 32_768}),
        ({"GET /v1/models": VLLM_ADAPTER}, "sql", {"qwen": 32_768, "sql": 32_768}),
        ({"GET /v1/models": OPENROUTER}, "", {"a/large": 131_072, "b/small": 8_192}),
        ({"GET /v1/models": LLAMA_MODELS}, "", {"tiny": 4_096, "": 4_096}),
        ({"GET /v1/models": {"data": [{"id": "g", "context_window": 131_072}]}}, "", {"g": 131_072, "": 131_072}),
        ({"GET /api/v0/models": LM_STUDIO, "GET /api/ps": LM_STUDIO_UNKNOWN}, "loaded", {"loaded": 4_096}),
        (
            {"GET /v1/models": OLLAMA_MODELS, "GET /api/ps": OLLAMA_PS},
            "qwen3",
            {"qwen3": 4_096, "qwen3:latest": 4_096},
        ),
        ({"GET /api/ps": {"models": []}, 'POST /api/show {"model":"q"}': OLLAMA_SHOW}, "q", {"q": 16_384}),
        ({"GET /api/ps": {"models": []}, 'POST /api/show {"model":"q"}': {"model_info": {}}}, "q", {}),
    ],
    ids=["vllm", "vllm adapter", "openrouter", "llama.cpp", "groq", "lm studio", "ollama", "modelfile", "ollama idle"],
)
async def test_each_server_tells_the_window_that_it_runs_a_model_with(
    answers: Answers, model: str, expected: dict[str, int]
) -> None:
    assert await asked(answers, model) == expected


@pytest.mark.parametrize("nonsense", [None, [], "no", 7, {"data": 3}, {"data": [3, {"id": 4, "max_model_len": "x"}]}])
async def test_an_answer_of_another_shape_tells_nothing(nonsense: Any) -> None:
    paths = ("GET /v1/models", "GET /api/v0/models", "GET /api/ps")
    assert await asked(dict.fromkeys(paths, nonsense), "m", {"default_generation_settings": []}) == {}
    assert await asked(dict.fromkeys(paths, nonsense), "m") == {}


# -- refusals ---------------------------------------------------------------------------------------------------------

LLAMA_CPP = {
    "error": {
        "code": 400,
        "message": "request (9412 tokens) exceeds the available context size (8192 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 9_412,
        "n_ctx": 8_192,
    }
}
OPENAI = (
    "This model's maximum context length is 8192 tokens. However, you requested 9100 tokens (8100 in the messages, "
    "1000 in the completion). Please reduce the length of the messages or completion."
)
VLLM_INPUT = (
    "This model's maximum context length is 65536 tokens. However, your request has 99103 input tokens. Please reduce "
    "the length of the input messages."
)
VLLM_REPLY = (
    "'max_tokens' or 'max_completion_tokens' is too large: 32000. This model's maximum context length is 32768 tokens "
    "and your request has 1000 input tokens (32000 > 32768 - 1000)."
)
LM_STUDIO_KEEP = (
    "The number of tokens to keep from the initial prompt is greater than the context length (n_keep: 5382 >= n_ctx: "
    "4096). Try to load the model with a larger context length, or provide a shorter input"
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (LLAMA_CPP, LengthRefusal(8_192, 9_412)),
        ({"error": {"message": OPENAI, "code": "context_length_exceeded"}}, LengthRefusal(8_192, 8_100, True)),
        ({"object": "error", "message": VLLM_INPUT, "code": 400}, LengthRefusal(65_536, 99_103, True)),
        ({"error": {"message": VLLM_REPLY}}, LengthRefusal(32_768, 1_000, True)),
        ({"error": LM_STUDIO_KEEP}, LengthRefusal(4_096)),
        ({"error": "prompt too long; exceeded max context length by 1200 tokens"}, LengthRefusal()),  # Ollama
        ({"error": {"message": "Your input exceeds the context window of this model."}}, LengthRefusal()),
        (
            {"type": "error", "error": {"message": "prompt is too long: 213462 tokens > 200000 maximum"}},
            LengthRefusal(200_000, 213_462),
        ),
        (
            {"error": {"message": "input length and `max_tokens` exceed context limit: 190000 + 32000 > 200000"}},
            LengthRefusal(200_000, None, True),
        ),
        (
            {"error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 17 ..."},
            LengthRefusal(4_096, None, True),
        ),
        ({"detail": json.dumps(LLAMA_CPP)}, LengthRefusal(8_192, 9_412)),  # wrapped by a gateway
    ],
    ids=[
        "llama.cpp",
        "openai",
        "vllm",
        "vllm reply",
        "lm studio",
        "ollama",
        "codex",
        "claude",
        "both",
        "tgi",
        "wrapped",
    ],
)
def test_a_refusal_for_length_is_understood(body: Any, expected: LengthRefusal) -> None:
    assert refusal_for_length(json.dumps(body).encode()) == expected


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"error": {"message": "Invalid \'tools\' format", "type": "invalid_request_error"}}',
        b'{"error": {"message": "max_tokens is too large: 32000. This model supports at most 16384"}}',
        b'{"error": {"message": "Rate limit reached: Limit 6000, please reduce your message size and try again"}}',
        b'{"error": {"message": "the template has no place for this"}}',
        b'{"error": {"n_ctx": true, "message": "no"}}',
    ],
)
def test_any_other_error_is_none(body: bytes) -> None:
    assert refusal_for_length(body) is None


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_the_settings_come_first_and_then_the_server() -> None:
    known = KnownWindows({"qwen": 16_384})
    known.told({"qwen": ModelWindow(32_768, counts_reply=True), "gemma": ModelWindow(8_192)})
    assert (known.of("qwen").tokens, known.of("qwen").counts_reply) == (16_384, True)
    assert known.of("gemma").tokens == 8_192 and known.of("other").tokens is None
    assert KnownWindows(9_000).of("any").tokens == 9_000
    assert KnownWindows("auto").of("any").tokens is None


def test_a_refusal_counts_more_than_settings_that_promise_too_much() -> None:
    known = KnownWindows(16_384)
    assert known.refused("m", LengthRefusal(8_192), 12_000).tokens == 8_192
    assert known.refused("m", LengthRefusal(32_768), 12_000).tokens == 16_384, "a higher one raises nothing"
    assert known.of("other").tokens == 16_384


def test_a_refusal_without_a_number_is_taken_to_be_a_little_less_than_what_was_sent() -> None:
    known = KnownWindows("auto")
    assert known.refused("m", LengthRefusal(), 10_000).tokens == 9_000
    assert known.refused("m", LengthRefusal(), 5_000).tokens == 4_500
    assert known.refused("m", LengthRefusal(counts_reply=True), 5_000).counts_reply


def test_a_window_stays_known_when_its_model_is_unloaded_and_changes_when_it_is_told_anew() -> None:
    known = KnownWindows("auto")
    known.told({"m": ModelWindow(8_192)})
    known.refused("m", LengthRefusal(4_096), 8_000)
    known.told({})
    assert known.of("m").tokens == 4_096
    known.told({"m": ModelWindow(16_384)})
    assert known.of("m").tokens == 16_384, "loaded with another window"


def test_a_server_with_one_window_may_become_one_with_many() -> None:
    known = KnownWindows("auto")
    known.told({"": ModelWindow(8_192)})
    assert known.is_told_for_all() and known.of("any").tokens == 8_192
    known.told({"qwen": ModelWindow(32_768)})
    assert not known.is_told_for_all() and known.of("any").tokens is None
