"""Memory through every chat template that llama.cpp ships: the real daemon, the real server, the templates as they are.

Rule: what is right is what the same template makes of the same conversation without memory, with the block let in
before its question and nothing else changed. What a template or llama.cpp's reader of its answers refuses is asked of
the server directly too, and named here.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import MEMORY_MARKER, REPLY, REPLY_WITH_MEMORY, MakeDaemon
from daemon_process import Answer, DaemonProcess, ask, user
from llama_server import Llama, replaceable_llama, running_llama
from llamacpp_sources import chat_templates
from recording_upstream import RecordingUpstream, recording_upstream
from tiny_model import CHATML_TEMPLATE, write_scripted_model

from memd.wire.chat import CHAT

SHIPPED = chat_templates()
pytestmark = pytest.mark.llama
every_template = pytest.mark.parametrize("name", SHIPPED, scope="module")  # all tests of one, then of the next

WINDOW = 32_768
SEEN = "".join(REPLY_WITH_MEMORY)

THINKS, THOUGHT = "<think>", "</think>"
OPENINGS = {
    "Apriel-1.6-15b-Thinker-fixed": "\n[BEGIN FINAL RESPONSE]\n",
    "Cohere2MoE": "<|END_THINKING|><|START_TEXT|>",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "<|START_RESPONSE|>",
    "IFM-K2-Horizon": "</ifm|think>",
    "Kimi-K3": "<|close|>think<|sep|><|open|>response<|sep|>",
    "llama-cpp-rwkv-world": "",  # its prompt ends with <think>, but llama.cpp reads all of the answer as text
    "llm-jp-llm-jp-4.1-8b-thinking": "<|channel|>final<|message|>",
    "meetkai-functionary-medium-v3.2": "all\n",
    "muse-glimmer": " to=user<|message|>",
    "openai-gpt-oss-120b": "<|channel|>final<|message|>",
}
"""How a model of this template begins what it says, where that is neither the text itself nor the end of a thought."""

NO_TOOL_LOOP = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "does not match the expected",
    "deepseek-ai-DeepSeek-V3.2": "does not match the expected",
    "google-gemma-2-2b-it": "roles must alternate",
    "google-translategemma-4b-it": "roles must alternate",
}
"""Where llama.cpp answers a tool's result with an error, and its words: two templates know no results, and of two it
does not understand an answer in words."""
SYSTEM_MESSAGE_MOVES = {"mistralai-Mistral-Nemo-Instruct-2407"}
"""Puts the system message into the last question, wherever that is: no prompt goes on where the one before ended."""

KEY, ASKS_KEY = "The deploy key is kept in the drawer of desk nine.", "Where is the deploy key kept?"
CAKE, ASKS_CAKE = "Aunt Olga's birthday cake needs three spoons of cardamom.", "How much cardamom goes into the cake?"
FACTS = {ASKS_KEY: KEY, ASKS_CAKE: CAKE}
BLOCKS = [f"[memory] Excerpts.\n[mem:a3f{number}] {fact}\n[/memory]" for number, fact in enumerate((KEY, CAKE))]
BRIEF = {"role": "system", "content": "Be brief."}
READ = {
    "name": "read",
    "description": "Read a file.",
    "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
}
TOOLS = [{"type": "function", "function": READ}]

Messages = Sequence[dict[str, Any]]


def read(number: int) -> list[dict[str, Any]]:
    """A step of a tool loop: the call and its result."""
    function = {"name": "read", "arguments": json.dumps({"path": f"note{number}.txt"})}
    call = {"id": f"call{number:05}", "type": "function", "function": function}  # nine characters: Mistral's rule
    result = {"role": "tool", "tool_call_id": call["id"], "name": "read", "content": "It is empty."}
    return [{"role": "assistant", "content": "", "tool_calls": [call]}, result]


class Turn(NamedTuple):
    """What memd answered, and the messages it sent to llama.cpp, as often as it did."""

    answer: Answer
    sent: list[list[dict[str, Any]]]

    @property
    def recalled(self) -> tuple[bool, str | None, int]:
        """Whether the model saw memory, what the headers say, and how often it was asked."""
        # Behind a tool's result some templates open no thought: what would end one is then part of the text.
        return self.answer.reply.endswith(SEEN), self.answer.headers["X-Memory-Status"], len(self.sent)


class Stage:
    """One daemon, and behind it llama.cpp with one template after the other."""

    def __init__(self, folder: Path, llama: Llama, upstream: RecordingUpstream, daemon: DaemonProcess) -> None:
        self._folder = folder
        self._llama = llama
        self._upstream = upstream
        self._daemon = daemon
        self._name = ""

    def use(self, name: str) -> None:
        """Put llama.cpp with this template behind the daemon, with a model whose answers have its form."""
        if name == self._name:
            return
        template, opening = SHIPPED[name].read_text(), OPENINGS.get(name, "")
        self._llama.replace(self._model(opening), template)
        if name not in OPENINGS and self.prompt([user("Hello.")]).rstrip().endswith(THINKS):
            self._llama.replace(self._model(THOUGHT), template)
        self._upstream.behind, self._name = self._llama.url, name

    def _model(self, opening: str) -> Path:
        path = self._folder / f"tiny-{opening.encode().hex()}.gguf"
        if not path.exists():
            # Two spellings: the model knows which of its replies it is in by its last piece only.
            pieces = [[opening, *REPLY], [f"{opening} ", *REPLY_WITH_MEMORY]] if opening else [REPLY, REPLY_WITH_MEMORY]
            write_scripted_model(path, marker=MEMORY_MARKER, reply=pieces[0], reply_seen=pieces[1])
        return path

    def chat(self, topic: str, messages: Messages, **more: Any) -> Turn:
        """A turn through memd."""
        before = len(self._upstream.chats)
        url = f"{self._daemon.base_url}/t/{topic}/v1/chat/completions"
        answer = ask(url, {"messages": list(messages), "max_tokens": 32, **more})
        return Turn(answer, [json.loads(request.body)["messages"] for request in self._upstream.chats[before:]])

    def directly(self, messages: Messages, **more: Any) -> Answer:
        """The same without memd."""
        return ask(f"{self._llama.url}/v1/chat/completions", {"messages": list(messages), "max_tokens": 32, **more})

    def prompt(self, messages: Messages, **more: Any) -> str:
        """What the model reads of these messages."""
        answer = ask(f"{self._llama.url}/apply-template", {"messages": list(messages), **more})
        assert answer.status == 200, answer.body
        return str(answer.json["prompt"])

    def tell(self, topic: str, *facts: str) -> None:
        """Say each fact in a chat of its own."""
        for fact in facts:
            assert self.chat(topic, [user(fact)]).answer.status == 200


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """One process of llama.cpp and one daemon for all templates: to start them takes longer than a template does."""
    folder = tmp_path_factory.mktemp("shipped")
    model = folder / "tiny.gguf"
    write_scripted_model(model, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY)
    with replaceable_llama(model, context=WINDOW, log=folder / "llama.log") as llama, recording_upstream() as upstream:
        upstream.behind = llama.url
        # A question is to find its own answer only, so that each turn has a block of its own.
        daemon = DaemonProcess(folder, upstream.url, {"retrieval": {"min_score": 0.3}})
        try:
            yield Stage(folder, llama, upstream, daemon.start())
        finally:
            daemon.discard()
            print(f"--- {daemon!r}")


def only_memory_is_new(stage: Stage, own: Messages, sent: Messages, **more: Any) -> str:
    """Check the prompt of what memd `sent` against that of the client's `own` messages; return the former."""
    prompt = rest = stage.prompt(sent, **more)
    for message, shown in zip(own, sent, strict=True):
        fact = FACTS.get(message["content"]) if message["role"] == "user" else None
        if fact is None:
            assert shown == message
            continue
        question, block = message["content"], shown["content"].removesuffix(message["content"])
        assert block.startswith("[memory]") and block.endswith("[/memory]\n\n")
        assert fact in block and prompt.count(fact) == 1 and prompt.count(block + question) == 1
        rest = rest.replace(block, "")
    assert rest == stage.prompt(own, **more)
    return prompt


@every_template
def test_what_was_said_in_other_chats_is_recalled_in_two_turns_and_the_prompt_goes_on_where_it_ended(
    stage: Stage, name: str
) -> None:
    """With a system message: that of a tool loop has none."""
    stage.use(name)
    stage.tell(name, KEY, CAKE)
    history: list[dict[str, Any]] = [BRIEF, user(ASKS_KEY)]
    first = stage.chat(name, history)
    assert first.recalled == (True, "injected", 1)
    prompts = [only_memory_is_new(stage, history, first.sent[0])]
    without = [stage.prompt(history)]
    history += [first.answer.json["choices"][0]["message"], user(ASKS_CAKE)]
    second = stage.chat(name, history)
    assert second.recalled == (True, "injected", 1)
    prompts.append(only_memory_is_new(stage, history, second.sent[0]))
    without.append(stage.prompt(history))

    def goes_on(earlier: str, later: str) -> bool:
        return later.startswith(earlier[: earlier.index(ASKS_KEY) + len(ASKS_KEY)])

    expected = name not in SYSTEM_MESSAGE_MOVES
    assert goes_on(*without) == expected  # else the table above is wrong
    assert goes_on(*prompts) == expected


@every_template
def test_a_tool_loop_keeps_the_memory_in_its_place_and_ends_as_it_does_without_memd(stage: Stage, name: str) -> None:
    stage.use(name)
    topic = f"{name}.tools"
    stage.tell(topic, KEY)
    steps = [user(ASKS_KEY), *read(1)]
    questions = []
    for messages in (steps, [*steps, *read(2)]):
        turn = stage.chat(topic, messages, tools=TOOLS)
        if name in NO_TOOL_LOOP:
            directly = stage.directly(messages, tools=TOOLS)
            assert directly.status != 200 and NO_TOOL_LOOP[name] in directly.body.decode()
            assert (turn.answer.status, turn.answer.body) == (directly.status, directly.body)
        else:
            assert turn.recalled == (True, "injected", 1)
        if "alternate" not in NO_TOOL_LOOP.get(name, ""):  # the template makes a prompt of it
            only_memory_is_new(stage, messages, turn.sent[0], tools=TOOLS)
        questions.append(turn.sent[0][0])
    assert questions[0] == questions[1]  # the block of the turn is the one that it began with


def is_inserted(plain: str, shown: str, block: str) -> bool:
    """Whether `shown` is `plain` and somewhere in it the block, with what the template puts around a message."""
    head, found, tail = shown.partition(block)
    cuts = range(len(plain) + 1)
    return bool(found) and any(tail.endswith(plain[cut:]) and head.startswith(plain[:cut]) for cut in cuts)


@every_template
def test_a_question_in_parts_has_its_memory_in_front_of_it(stage: Stage, name: str) -> None:
    stage.use(name)
    own = [{"role": "user", "content": [{"type": "text", "text": ASKS_KEY}]}]
    request, block = CHAT.parse(json.dumps({"messages": own}).encode()), BLOCKS[0]
    body = CHAT.encode(request, blocks={0: block})
    shown = stage.prompt(json.loads(body)["messages"])
    assert shown.count(block) == 1 and shown.index(block) < shown.index(ASKS_KEY)
    assert is_inserted(stage.prompt(own), shown, block)


# A template that refuses more than any that is shipped


NO_MEMORY = (
    "{%- for m in messages -%}{%- if '[memory]' in (m.content or '') -%}{{- raise_exception('no such message') -}}"
    "{%- endif -%}{%- endfor -%}"
)
"""Refuses memory wherever it stands: the worst template there could be."""


def test_where_memory_is_refused_altogether_the_answer_comes_without_it_and_says_so(
    tmp_path: Path, make_daemon: MakeDaemon
) -> None:
    model, template = tmp_path / "strict.gguf", NO_MEMORY + CHATML_TEMPLATE
    write_scripted_model(model, marker=MEMORY_MARKER, reply=REPLY, reply_seen=REPLY_WITH_MEMORY, template=template)
    with running_llama(model, context=8192, log=tmp_path / "llama.log") as url:
        daemon = make_daemon(url).start()
        assert daemon.chat([user(KEY)]).status == 200
        answer = daemon.chat([user(ASKS_KEY)], memory_in={})
    assert (answer.reply, answer.headers["X-Memory-Status"]) == ("".join(REPLY), "degraded:template")
    assert answer.json["memory_out"] == {"injected_chunks": []}
