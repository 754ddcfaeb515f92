"""Where the window of a model comes from: what servers tell of it, what they refuse, and what is kept of both."""

import json
import math
from typing import Any

import pytest

from memd.proxy.upstream.windows import KnownWindows, LengthRefusal, ModelWindow, Sent, ask_windows, refusal_for_length

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
        ({"GET /v1/models": OLLAMA_MODELS, "GET /api/ps": OLLAMA_PS}, "qwen3", {"qwen3": 4_096, "qwen3:latest": 4_096}),
        ({"GET /api/ps": {"models": []}, 'POST /api/show {"model":"q"}': OLLAMA_SHOW}, "q", {"q": 16_384}),
        ({"GET /api/ps": {"models": []}, 'POST /api/show {"model":"q"}': {"model_info": {}}}, "q", {}),
    ],
    ids=["vllm", "vllm adapter", "openrouter", "llama.cpp", "groq", "lm studio", "ollama", "modelfile", "ollama idle"],
)
async def test_each_server_tells_the_window_that_it_runs_a_model_with(
    answers: Answers, model: str, expected: dict[str, int]
) -> None:
    assert await asked(answers, model) == expected


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


INPUT_PROCESSOR = (
    "The decoder prompt (length 11157) is longer than the maximum model length of 4096. Make sure that `max_model_len` "
    "is no smaller than the number of text tokens plus multimodal tokens."
)
VLLM_AT_LEAST = (
    "This model's maximum context length is 8192 tokens. However, you requested 64 output tokens and your prompt "
    "contains at least 8129 input tokens, for a total of at least 8193 tokens. Please reduce the length of the input "
    "prompt or the number of requested output tokens."
)
VLLM_PASSED = (
    "You passed 3585 input tokens and requested 512 output tokens. However, the model's context length is only 4096 "
    "tokens, resulting in a maximum input length of 3584 tokens. Please reduce the length of the input prompt."
)
SGLANG_TOTAL = (
    "Requested token count exceeds the model's maximum context length of 262144 tokens. You requested a total of "
    "267042 tokens: 201506 tokens from the input messages and 65536 tokens for the completion."
)
SGLANG_POOL = (
    "Input length (57719 tokens) exceeds the maximum allowed length (55539 tokens). Use a shorter input or enable "
    "--allow-auto-truncate."
)
OPENROUTER_WORDS = (
    "This endpoint's maximum context length is 200000 tokens. However, you requested about 201326 tokens (197771 of "
    "text input, 3555 of tool input). Please reduce the length of either one."
)
LM_STUDIO_MLX = (
    "Input does not fit in context length. The input has 31430 tokens, but the context length only supports 30000 "
    "tokens."
)
LM_STUDIO_OLD = (
    "Trying to keep the first 15857 tokens when context the overflows. However, the model is loaded with context "
    "length of only 4096 tokens, which is not enough."
)
OLLAMA_LLAMA = (
    "the prompt is longer than the context length currently available to the model; shorten the prompt, adjust the "
    "context length in settings, or use a model with a longer context length"
)
MISTRAL = "Prompt contains 65673 tokens and 0 draft tokens, too large for model with 32768 maximum context length"
LITELLM = (
    "litellm.ContextWindowExceededError: litellm.BadRequestError: ContextWindowExceededError: OpenAIException - Error "
    "code: 400 - {'error': {'message': \"This model's maximum context length is 128000 tokens. However, your messages "
    "resulted in 419624 tokens. Please reduce the length of the messages.\", 'type': 'invalid_request_error', 'param': "
    "'messages', 'code': 'context_length_exceeded'}}"
)
REFUSALS: dict[str, tuple[Any, LengthRefusal]] = {
    "llama.cpp": (LLAMA_CPP, LengthRefusal(8_192, 9_412, is_exact=True)),
    "openai": ({"error": {"message": OPENAI, "code": "context_length_exceeded"}}, LengthRefusal(8_192, 8_100, True)),
    "openai newer": (
        "Input tokens exceed the configured limit of 272000 tokens. Your messages resulted in 509178 tokens. Please "
        "reduce the length of the messages.",
        LengthRefusal(272_000, 509_178),
    ),
    "vllm": ({"object": "error", "message": VLLM_INPUT, "code": 400}, LengthRefusal(65_536, 99_103, True)),
    "vllm reply": (VLLM_REPLY, LengthRefusal(32_768, 1_000, True)),
    "vllm, uncounted": (VLLM_AT_LEAST, LengthRefusal(8_192, None, True)),
    "vllm, cut": (VLLM_PASSED, LengthRefusal(4_096, None, True)),
    "vllm images": (INPUT_PROCESSOR, LengthRefusal(4_096, 11_157)),
    "vllm images, older": (
        "The prompt (total length 25938) is too long to fit into the model (context length 4096). Make sure that "
        "`max_model_len` is no smaller than the number of text tokens.",
        LengthRefusal(4_096, 25_938),
    ),
    "sglang": (SGLANG_TOTAL, LengthRefusal(262_144, 201_506, True)),
    "sglang input": (
        {"message": "The input (400013 tokens) is longer than the model's context length (262144 tokens)."},
        LengthRefusal(262_144, 400_013),
    ),
    "sglang pool": ({"object": "error", "message": SGLANG_POOL}, LengthRefusal(55_539, 57_719)),
    "lm studio": ({"error": LM_STUDIO_KEEP}, LengthRefusal(4_096)),
    "lm studio, older": ({"error": LM_STUDIO_OLD}, LengthRefusal(4_096)),
    "mlx": ({"error": {"message": LM_STUDIO_MLX}, "message": LM_STUDIO_MLX}, LengthRefusal(30_000, 31_430)),
    "ollama": ({"error": "prompt too long; exceeded max context length by 1200 tokens"}, LengthRefusal()),
    "ollama with llama-server": ({"error": OLLAMA_LLAMA}, LengthRefusal()),
    "openrouter": (OPENROUTER_WORDS, LengthRefusal(200_000, None, True)),
    "openrouter's provider": (
        {"error": {"message": "Error", "metadata": {"raw": json.dumps({"error": {"message": OPENAI}})}}},
        LengthRefusal(8_192, 8_100, True),
    ),
    "litellm": (LITELLM, LengthRefusal(128_000, 419_624, True)),
    "mistral": ({"object": "error", "message": MISTRAL}, LengthRefusal(32_768, 65_673)),
    "codex": ("Your input exceeds the context window of this model.", LengthRefusal()),
    "claude": (
        {"type": "error", "error": {"message": "prompt is too long: 213462 tokens > 200000 maximum"}},
        LengthRefusal(200_000, 213_462),
    ),
    "claude, both": (
        "input length and `max_tokens` exceed context limit: 190000 + 32000 > 200000",
        LengthRefusal(200_000, None, True),
    ),
    "google": (
        [
            {
                "error": {
                    "message": "The input token count (1196265) exceeds the maximum number of tokens allowed (1048575)."
                }
            }
        ],
        LengthRefusal(1_048_575, 1_196_265),
    ),
    "xai": (
        "This model's maximum prompt length is 131072 but the request contains 537812 tokens",
        LengthRefusal(131_072, 537_812),
    ),
    "copilot": ("prompt token count of 200000 exceeds the limit of 128000", LengthRefusal(128_000, 200_000)),
    "tgi": (
        {
            "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 4096. Given: 4017 `inputs` "
            "tokens and"
        },
        LengthRefusal(4_096, 4_017, True),
    ),
    "tgi inputs": (
        {"error": "Input validation error: `inputs` must have less than 4095 tokens. Given: 5000"},
        LengthRefusal(4_095, 5_000),
    ),
    "wrapped": ({"detail": json.dumps(LLAMA_CPP)}, LengthRefusal(8_192, 9_412)),
    "responses": (
        {"type": "response.failed", "response": {"error": {"code": "context_length_exceeded", "message": ""}}},
        LengthRefusal(),
    ),
}
"""What a server says, by its name: the body of the answer, or the message of an error in OpenAI's form."""


@pytest.mark.parametrize(("said", "expected"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_for_length_is_understood(said: Any, expected: LengthRefusal) -> None:
    body = {"error": {"message": said}} if isinstance(said, str) else said
    assert refusal_for_length(json.dumps(body).encode()) == expected


SAID = {"messages": [{"role": "user", "content": 'What is "This model\'s maximum context length is 600 tokens."?'}]}
FASTAPI = {
    "type": "float_parsing",
    "loc": ["body", "temperature"],
    "msg": "Input should be a valid number",
    "input": SAID,
}


OTHER_ERRORS: dict[str, Any] = {
    "fastapi": {"detail": [FASTAPI]},
    "fastapi with the body": {"detail": [{**FASTAPI, "ctx": SAID}], "body": SAID},
    "vllm": {"error": {"message": f"1 validation error:\n  {FASTAPI}", "type": "Bad Request"}},
    "pydantic": {"message": f"1 validation error for Request\n [type=missing, input_value={SAID}]"},
    "gateway": f"Bad request: {json.dumps(FASTAPI)}",
    "llama.cpp": f"Failed to parse messages: Missing 'role'; messages = {json.dumps(SAID)}",
    "echo": {"error": {"message": "no such thing", "param": SAID}, "request": SAID},
    "too large to be decoded": {"error": {"message": "bad " + "x" * 70_000}, "input": SAID},
    "tools": "The number of tools (140) exceeds the limit of 128.",
    "images": "The number of images exceeds the limit of 20 per request",
    "stops": "stop sequences: 5 exceeds the limit of 4",
    "stops of tgi": "`stop` supports up to 4 stop sequences. Given: 5",
    "rate": "Request rate exceeds the limit of 60 requests per minute",
    "file": "File size exceeds the limit of 20 MB",
    "name": "tools.0.name exceeds maximum length of 64",
    "reply of tgi": "`max_new_tokens` must be <= 512. Given: 600",
    "tokens a minute": "Request too large for gpt-4o on tokens per min (TPM): Limit 30000, Requested 37000. The input "
    "or output tokens must be reduced in order to run successfully.",
    "too many tokens": "Too many tokens, please wait before trying again.",
    "format": "Invalid 'tools' format",
    "reply": "max_tokens is too large: 32000. This model supports at most 16384",
    "rate of messages": "Rate limit reached: Limit 6000, please reduce your message size and try again",
    "template": "the template has no place for this",
    "no number": {"error": {"n_ctx": True, "message": "no"}},
    "nothing": b"",
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000,
}
"""What repeats the request is no word of the window, and neither is another limit."""


@pytest.mark.parametrize("said", OTHER_ERRORS.values(), ids=OTHER_ERRORS)
def test_any_other_error_is_none(said: Any) -> None:
    body = {"error": {"message": said}} if isinstance(said, str) else said
    assert refusal_for_length(said if isinstance(said, bytes) else json.dumps(body).encode()) is None


# -- what is kept -----------------------------------------------------------------------------------------------------


def test_a_refusal_is_believed_that_what_the_model_took_or_was_sent_does_not_contradict() -> None:
    known = KnownWindows("auto")
    known.accepted("m", 5_000)
    assert not known.refused("m", LengthRefusal(600), Sent(1_000)) and known.of("m").tokens is None
    known.accepted("m", 900)
    assert not known.refused("m", LengthRefusal(600), Sent(1_000)), "it has taken a prompt since"
    assert known.refused("m", LengthRefusal(600), Sent(1_000)) and known.of("m").tokens == 600, "loaded with less"
    assert known.refused("other", LengthRefusal(600), Sent(1_000)), "each model has its own"

    known.accepted("counts", 5_000)
    assert not known.refused("counts", LengthRefusal(600, 90_000), Sent(1_000)), "the count of another prompt"
    assert known.refused("counts", LengthRefusal(600, 1_150), Sent(1_000)) and known.of("counts").tokens == 600

    for _ in range(3):
        assert not known.refused("n", LengthRefusal(4_096), Sent(1_000, reply_tokens=500, doubt=2.0)), "it fits"
    assert known.refused("n", LengthRefusal(4_096), Sent(1_000, reply_tokens=3_000, doubt=2.0)), "with its max_tokens"
    assert known.refused("p", LengthRefusal(4_096), Sent(1_000, doubt=math.inf)), "nobody knows what its images take"

    known.told({"short": ModelWindow(32_768, source="/v1/models")})
    assert not known.refused("short", LengthRefusal(), Sent(2_000)) and known.of("short").tokens == 32_768
    assert known.refused("short", LengthRefusal(), Sent(30_000)) and known.of("short").tokens == 27_000


def test_props_are_believed_before_words_and_a_field_before_props() -> None:
    """llama.cpp's slots may have less than `/props` says: its own refusal names the window in a field."""
    known = KnownWindows("auto")
    known.told({"": ModelWindow(32_768, source="/props")})
    assert not known.refused("m", LengthRefusal(600), Sent(1_000)) and known.of("m").tokens == 32_768
    assert known.refused("m", LengthRefusal(8_192, 9_000, is_exact=True), Sent(9_000))
    assert known.of("m").tokens == 8_192


def test_a_window_stays_known_when_its_model_is_unloaded_and_changes_when_it_is_told_anew() -> None:
    known = KnownWindows("auto")
    known.told({"m": ModelWindow(8_192)})
    known.refused("m", LengthRefusal(4_096), Sent(8_000))
    known.told({})
    assert known.of("m").tokens == 4_096
    known.told({"m": ModelWindow(16_384)})
    assert known.of("m").tokens == 16_384, "loaded with another window"
