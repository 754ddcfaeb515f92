"""The shapes of requests that seven agents send: what stands around a user's words, and what of a history is rewritten.

Rule: each shape is what the program's own source does, which is named; sizes are those of the real prompts, texts are
filler. A shape is a pure function from all that was said to the next request's messages. Where the window is too small
for the program's own system prompt it gets a cut-down one, as their users do: three eighths of the window.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

from agents_runs import Event, Words

Json = dict[str, Any]
View = Callable[[Sequence[Event]], list[Json]]

STANDING_SHARE = 3 / 8
TOOL_TOKENS = 700
"""Of one tool's description: opencode's `bash` and Claude Code's `TodoWrite` take thousands, `read` a few hundred."""


class Shape(NamedTuple):
    """One program's requests."""

    name: str
    source: str
    """Project and files."""
    view: View
    standing_tokens: int
    """System prompt and tools."""
    tools: int
    max_tokens: int | None
    manner: Literal["tools", "chat"] = "tools"
    api: Literal["/v1/chat/completions", "/v1/messages"] = "/v1/chat/completions"
    streams: bool = True
    rewrites: bool = False
    """Whether it changes what it has sent before."""
    thinks: bool = False
    """Whether the model's answers begin with reasoning, which the client does not send back."""
    writes_actions: bool = False
    """Whether the model writes its actions into its text."""
    asides: Callable[[Sequence[Event]], list[list[Json]]] = lambda _: []
    """Requests beside the conversation that belong to the latest event: titles, tags, queries."""

    def reply(self, event: Event) -> Json:
        """The model's message: text and calls in one, as llama-server says it, reasoning in front where it thinks."""
        if self.writes_actions:
            return {"role": "assistant", "content": event.text + _actions(event)}
        calls = {"tool_calls": [_chat_call(call) for call in event.calls]} if event.calls else {}
        thought = f"<think>\n{event.think}\n</think>\n\n" if self.thinks and event.think else ""
        return {"role": "assistant", "content": thought + event.text, **calls}

    def body(self, events: Sequence[Event], window: int) -> Json:
        """The next request."""
        system, tools = _standing(self.standing_tokens, self.tools, int(window * STANDING_SHARE))
        body: Json = {"model": "recorded", "messages": self.view(events)}
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        if self.api == "/v1/messages":
            parts = [{"type": "text", "text": part} for part in system]
            return body | {"system": parts, "tools": [_anthropic_tool(tool) for tool in tools]}
        body["messages"] = (
            [{"role": "system", "content": "\n\n".join(system)}, *body["messages"]] if system else body["messages"]
        )
        if tools:
            body["tools"] = tools
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if self.streams else {})


@cache
def _standing(tokens: int, tools: int, most: int) -> tuple[list[str], list[Json]]:
    """A system prompt in two parts and a list of tools, of so many tokens together."""
    words = Words(tokens + tools)
    share = min(1.0, most / max(1, tokens))
    each = TOOL_TOKENS * share
    made: list[Json] = []
    for number in range(tools):
        fields = {
            "command": {"type": "string"},
            "path": {"type": "string", "description": words.prose(int(each * 0.1))},
        }
        parameters = {"type": "object", "properties": fields, "required": ["command"]}
        described = {"name": f"tool_{number}", "description": words.prose(int(each * 0.8)), "parameters": parameters}
        made.append({"type": "function", "function": described})
    left = int(tokens * share - tools * each)
    return ([words.prose(left * 3 // 4), words.prose(left // 4)] if left > 8 else []), made


def _anthropic_tool(tool: Json) -> Json:
    told = tool["function"]
    return {"name": told["name"], "description": told["description"], "input_schema": told["parameters"]}


def _chat_call(call: tuple[str, str, Json]) -> Json:
    call_id, name, arguments = call
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def plain(events: Sequence[Event], *, name: str | None = None) -> list[Json]:
    """As the API's documentation has it: text and calls in one message, a message for each result."""
    messages: list[Json] = []
    named = {} if name is None else {"name": name}
    for event in events:
        if event.kind == "user":
            messages.append({"role": "user", "content": event.text})
        elif event.kind == "results":
            messages += [{"role": "tool", "tool_call_id": one, "content": text} for one, text in event.results]
        else:
            calls = {"tool_calls": [_chat_call(call) for call in event.calls]} if event.calls else {}
            messages.append({"role": "assistant", "content": event.text, **named, **calls})
    return messages


def last_user(events: Sequence[Event]) -> int:
    """The position of the latest user message."""
    return max(at for at, event in enumerate(events) if event.kind == "user")


# -- opencode -------------------------------------------------------------------------------------------------------

PRUNE_PROTECT, PRUNE_MINIMUM = 40_000, 20_000
OPENCODE_TITLE = "You are a title generator. You output ONLY a thread title. Nothing else."
CLEARED = "[Old tool result content cleared]"


def _opencode(events: Sequence[Event]) -> list[Json]:
    """Old results are replaced once those behind them take 40,000 tokens (estimated as characters / 4)."""
    users = [at for at, event in enumerate(events) if event.kind == "user"]
    before = users[-2] if len(users) > 1 else 0
    kept, pruned, cleared = 0, 0, set()
    for at in range(before - 1, -1, -1):
        for call_id, text in events[at].results:
            kept += len(text) // 4
            if kept > PRUNE_PROTECT:
                pruned += len(text) // 4
                cleared.add(call_id)
    messages = plain(events)
    if pruned <= PRUNE_MINIMUM:
        return messages
    return [one | {"content": CLEARED} if one.get("tool_call_id") in cleared else one for one in messages]


def _opencode_asides(events: Sequence[Event]) -> list[list[Json]]:
    if len(events) > 1:
        return []
    asked = {"role": "user", "content": "Generate a title for this conversation:\n"}
    return [
        [
            {"role": "system", "content": OPENCODE_TITLE},
            asked,
            {"role": "user", "content": events[0].text},
        ]
    ]


# -- Cline ----------------------------------------------------------------------------------------------------------

CLINE_WINDOW = 128_000
"""What it assumes of a model that it does not know."""
CONTINUE = "[Continue assisting the user!]"
NOTICE = "[NOTE] Some previous conversation history with the user has been removed to maintain optimal context length."


def _cline(events: Sequence[Event]) -> list[Json]:
    """No tools of the API: actions are text, results the user's, each message closed by <environment_details>."""
    messages: list[Json] = []
    for at, event in enumerate(events):
        if event.kind in ("user", "results"):
            named = {call[0]: call[1] for call in events[at - 1].calls}
            said = [f"[{named.get(one, 'tool')}] Result:\n{text}" for one, text in event.results]
            text = f"<task>\n{event.text}\n</task>" if at == 0 else event.text
            said = said or [text if at == 0 else f"<feedback>\n{event.text}\n</feedback>"]
            parts = [{"type": "text", "text": one} for one in (*said, _environment(at))]
            messages.append({"role": "user", "content": parts})
        else:
            messages.append({"role": "assistant", "content": event.text + _actions(event)})
    return _cline_truncated(messages)


def _actions(event: Event) -> str:
    return "".join(
        f"\n<{name}>\n" + "".join(f"<{key}>{value}</{key}>\n" for key, value in told.items()) + f"</{name}>"
        for _, name, told in event.calls
    )


def _cline_truncated(messages: list[Json]) -> list[Json]:
    """Beyond its idea of the window the middle goes, and the first pair says so."""
    while sum(len(json.dumps(one)) for one in messages) // 4 > CLINE_WINDOW * 3 // 4:
        gone = (len(messages) - 2) // 4 * 2
        parts = messages[0]["content"][1:]
        first = {"role": "user", "content": [{"type": "text", "text": CONTINUE}, *parts]}
        told = (
            messages[1]["content"]
            if messages[1]["content"].startswith(NOTICE)
            else NOTICE + "\n\n" + messages[1]["content"]
        )
        messages = [first, {"role": "assistant", "content": told}, *messages[2 + gone :]]
    return messages


@cache
def _environment(at: int) -> str:
    files = "\n".join(f"src/{Words(n).thing().replace(' ', '_')}.py" for n in range(40))
    tabs = "\n".join(f"src/{Words(n).thing().replace(' ', '_')}.py" for n in range(at % 7, at % 7 + 5))
    return (
        f"<environment_details>\n# Visual Studio Code Visible Files\n{tabs}\n\n"
        f"# Visual Studio Code Open Tabs\n{tabs}\n\n"
        f"# Current Time\n11/22/2026, 3:{at % 60:02}:{at * 7 % 60:02} PM (Europe/Zurich, UTC+1:00)\n\n"
        f"# Current Working Directory (/srv/harbour) Files\n{files}\n\n# Context Window Usage\n"
        f"{at * 900:,} / 128K tokens used ({at}%)\n\n# Current Mode\nACT MODE\n</environment_details>"
    )


# -- Codex ----------------------------------------------------------------------------------------------------------


def _codex(events: Sequence[Event]) -> list[Json]:
    """Each call is an assistant message of its own behind the one with the text; two wrappers open the session."""
    messages: list[Json] = [
        {"role": "user", "content": f"<user_instructions>\n\n{_prose(600, 1)}\n\n</user_instructions>"},
        {
            "role": "user",
            "content": "<environment_context>\n  <cwd>/srv/harbour</cwd>\n"
            "  <approval_policy>on-request</approval_policy>\n  <sandbox_mode>workspace-write</sandbox_mode>\n"
            "  <network_access>restricted</network_access>\n  <shell>zsh</shell>\n</environment_context>",
        },
    ]
    for at, event in enumerate(events):
        results = dict(events[at + 1].results) if at + 1 < len(events) else {}
        if event.kind == "user":
            messages.append({"role": "user", "content": event.text})
        elif event.kind in ("act", "answer"):
            messages.append({"role": "assistant", "content": event.text})
        for call in event.calls:  # one at a time
            messages.append({"role": "assistant", "content": None, "tool_calls": [_chat_call(call)]})
            messages.append({"role": "tool", "tool_call_id": call[0], "content": results[call[0]]})
    return messages


@cache
def _prose(tokens: int, seed: int) -> str:
    return Words(seed).prose(tokens)


# -- Claude Code ----------------------------------------------------------------------------------------------------


def _claude(events: Sequence[Event]) -> list[Json]:
    """Content blocks, reminders in front of the first words and behind the latest ones, results in a user message."""
    messages: list[Json] = []
    opening = "<system-reminder>\nAs you answer the user's questions, you can use the following context:\n# claudeMd\n"
    first = f"{opening}{_prose(900, 2)}\n\nIMPORTANT: this context may or may not be relevant.\n</system-reminder>\n"
    for at, event in enumerate(events):
        if event.kind in ("user", "results"):
            blocks: list[Json] = [{"type": "text", "text": first}] if at == 0 else []
            blocks += [{"type": "tool_result", "tool_use_id": one, "content": text} for one, text in event.results]
            blocks += [{"type": "text", "text": event.text}] if event.text else []
            if at == len(events) - 1 and at % 3 == 0:  # told again where the list of tasks was not touched for a while
                reminder = f"The TodoWrite tool hasn't been used recently. {_prose(90, at % 5)}"
                blocks.append({"type": "text", "text": f"<system-reminder>\n{reminder}\n</system-reminder>"})
            messages.append({"role": "user", "content": blocks})
        else:
            blocks = [{"type": "text", "text": event.text}] if event.text else []
            blocks += [{"type": "tool_use", "id": one, "name": name, "input": told} for one, name, told in event.calls]
            messages.append({"role": "assistant", "content": blocks})
    return messages


# -- Aider ----------------------------------------------------------------------------------------------------------


def _aider(events: Sequence[Event]) -> list[Json]:
    """Examples, the map of the repository, what was said, the files as they are now, the question and the reminder."""
    pairs = [(_prose(180, seed), _prose(220, seed + 1)) for seed in (10, 12)]
    pairs.append(("I switched to a new code base. Please don't consider the above files or try to edit them.", "Ok."))
    summaries = f"Here are summaries of some files present in my git repository.\n{_prose(900, 20)}"
    pairs.append((summaries, "Ok, I won't try and edit those files without asking first."))
    done = plain(events[:-1])
    edits = sum(event.kind == "answer" for event in events)
    lines = _prose(700, 21).split("\n")
    lines[edits % len(lines)] += f"  # edit {edits}"
    files = "I have *added these files to the chat* so you can go ahead and edit them.\n\npump.py\n```\n"
    now = [(files + "\n".join(lines) + "\n```", "Ok, any changes I propose will be to those files.")]
    reminder = (
        f"# *SEARCH/REPLACE block* Rules:\n\nEvery *SEARCH/REPLACE block* must use this format:\n{_prose(500, 22)}"
    )
    asked = {"role": "user", "content": f"{events[-1].text}\n\n{reminder}"}
    return [*_paired(pairs), *done, *_paired(now), asked]


def _paired(pairs: Sequence[tuple[str, str]]) -> list[Json]:
    return [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair, strict=True)
    ]


# -- Open WebUI -----------------------------------------------------------------------------------------------------


def _open_webui_asides(events: Sequence[Event]) -> list[list[Json]]:
    """A search query before the answer; title, tags and follow-ups after the first."""
    told = "\n".join(f'{event.kind.upper()}: """{event.text}"""' for event in events[-6:-1])
    asked = [f"Query: History:\n{told}\nQuery: {events[-1].text}"] if len(events) > 1 else []
    if len(events) == 3:
        history = f"### Chat History:\n<chat_history>\n{told}\n</chat_history>"
        asked += [
            f"### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n{history}",
            f"### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history.\n{history}",
            f"### Task:\nSuggest 3-5 relevant follow-up questions that the user might naturally ask next.\n{history}",
        ]
    return [[{"role": "user", "content": one}] for one in asked]


# -- LangGraph ------------------------------------------------------------------------------------------------------


def _langgraph(events: Sequence[Event]) -> list[Json]:
    """Every answer has the name of the agent that gave it."""
    return plain(events, name="researcher")


SHAPES: tuple[Shape, ...] = (
    Shape("opencode", "sst/opencode packages/opencode/src/session/{prompt,compaction}.ts", _opencode,
          18_000, 14, 32_000, rewrites=True, asides=_opencode_asides),
    Shape("Cline", "cline/cline src/core/{prompts/responses,context/context-management/ContextManager}.ts", _cline,
          12_000, 0, None, rewrites=True, writes_actions=True),
    Shape("Codex", "openai/codex codex-rs/core/src/chat_completions.rs", _codex, 7_500, 4, None, rewrites=True),
    Shape("Claude Code", "anthropics/claude-code as ai-sdk and routers record it: /v1/messages", _claude,
          18_000, 15, 32_000, api="/v1/messages", streams=False, rewrites=True),
    Shape("Aider", "Aider-AI/aider aider/coders/{base_coder,chat_chunks}.py", _aider,
          2_500, 0, None, manner="chat", rewrites=True),
    Shape("Open WebUI", "open-webui/open-webui backend/open_webui/{config,utils/middleware}.py", plain,
          0, 0, None, manner="chat", rewrites=True, thinks=True, asides=_open_webui_asides),
    Shape("LangGraph", "langchain-ai/langgraph libs/prebuilt: create_react_agent", _langgraph, 3_500, 5, None),
)  # fmt: skip
"""By name, with where each is read from."""
