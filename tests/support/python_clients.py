"""The official Python clients of OpenAI's two APIs and of Anthropic's: one question, and tools called to the end.

Rule: they tell of each step what the scripts in `tests/clients/` tell, so that one test says what all have to see.
"""

from typing import Any

TOKENS_MAX = 100
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
READ = {"name": "read", "description": "Read a file."}

Step = dict[str, Any]
Answered = tuple[str, list[Any], list[str]]
"""The text, what the client keeps of the answer for its next request, and the ids of the calls."""


def ask_python(
    api: str, base_url: str, *, question: str, how: str, memory_in: object = None, results: list[str] | None = None
) -> list[Step]:
    """What came back at each step.

    Args:
        api: `chat`, `responses` or `anthropic`.
        how: `create` (one answer), `stream` (its events) or `helper` (a stream that the client puts together).
    """
    messages: list[Any] = [{"role": "user", "content": question}]
    said, steps = iter(results or ()), list[Step]()
    answered, result_of = APIS[api]
    with _client(api, base_url) as client:
        while True:
            steps.append({"memory_out": [], "memory_status": None})
            extra = {} if memory_in is None else {"memory_in": memory_in}
            steps[-1]["reply"], kept, calls = answered(client, how, steps[-1], messages, results is not None, extra)
            messages += kept
            if not calls:
                return steps
            messages += [result_of(call, next(said)) for call in calls]


def _client(api: str, base_url: str) -> Any:
    if api == "anthropic":
        from anthropic import Anthropic  # here, as below, for it takes seconds

        return Anthropic(base_url=base_url, api_key="not needed", max_retries=0)
    from openai import OpenAI

    return OpenAI(base_url=f"{base_url}/v1", api_key="not needed", max_retries=0)


def _note(step: Step, answered: Any) -> None:
    if (out := (answered.model_extra or {}).get("memory_out")) is not None:
        step["memory_out"].append(out)


def _chat(client: Any, how: str, step: Step, messages: list[Any], has_tools: bool, extra: Any) -> Answered:
    params: dict[str, Any] = {"model": "tiny", "messages": messages, "extra_body": extra}
    if has_tools:
        params["tools"] = [{"type": "function", "function": READ | {"parameters": PARAMETERS}}]
    if how == "create":
        completion = client.chat.completions.create(**params)
        _note(step, completion)
    elif how == "stream":
        from openai.lib.streaming.chat import ChatCompletionStreamState

        state = ChatCompletionStreamState()
        for chunk in client.chat.completions.create(**params, stream=True):
            _note(step, chunk)
            state.handle_chunk(chunk)
        completion = state.get_final_completion()
    else:
        with client.chat.completions.stream(**params) as stream:
            for event in stream:
                if event.type == "chunk":
                    _note(step, event.chunk)
            completion = stream.get_final_completion()
    message = completion.choices[0].message
    return message.content or "", [message.model_dump(exclude_none=True)], [one.id for one in message.tool_calls or ()]


def _responses(client: Any, how: str, step: Step, messages: list[Any], has_tools: bool, extra: Any) -> Answered:
    params: dict[str, Any] = {"model": "tiny", "input": messages, "extra_body": extra}
    if has_tools:
        params["tools"] = [{"type": "function", "strict": False, "parameters": PARAMETERS} | READ]
    if how == "create":
        response = client.responses.create(**params)
        _note(step, response)
    elif how == "stream":
        for event in client.responses.create(**params, stream=True):
            _note(step, event)
        assert event.type == "response.completed"
        response = event.response
    else:
        with client.responses.stream(**params) as stream:
            for event in stream:
                _note(step, event)
            response = stream.get_final_response()
    calls = [item.call_id for item in response.output if item.type == "function_call"]
    return response.output_text, response.output, calls


def _anthropic(client: Any, how: str, step: Step, messages: list[Any], has_tools: bool, extra: Any) -> Answered:
    params: dict[str, Any] = {"model": "tiny", "max_tokens": TOKENS_MAX, "messages": messages, "extra_body": extra}
    params["tools"] = [READ | {"input_schema": PARAMETERS}] if has_tools else []
    if how == "create":
        raw = client.messages.with_raw_response.create(**params)
        step["memory_status"], answer = raw.headers["X-Memory-Status"], raw.parse()
        _note(step, answer)
    else:
        with client.messages.stream(**params) as stream:
            step["memory_status"] = stream.response.headers["X-Memory-Status"]
            for event in stream:
                _note(step, event)
            answer = stream.get_final_message()
    text = "".join(block.text for block in answer.content if block.type == "text")
    calls = [block.id for block in answer.content if block.type == "tool_use"]
    return text, [{"role": "assistant", "content": answer.content}], calls


APIS: dict[str, Any] = {
    "chat": (_chat, lambda call, said: {"role": "tool", "tool_call_id": call, "content": said}),
    "responses": (_responses, lambda call, said: {"type": "function_call_output", "call_id": call, "output": said}),
    "anthropic": (
        _anthropic,
        lambda call, said: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": said}]},
    ),
}
"""How each asks, and how it writes the result of a call."""
