"""The package for TypeScript programs, `clients/typescript`: through the real daemon, the SDKs and llama.cpp.

Rule: a stand-in answers only where a server has to fail or to lie.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import openai_responses
import pytest
from conftest import ANSWERED_MARKER, REPLY, REPLY_AFTER_CALLS, REPLY_WITH_MEMORY, MakeDaemon, Serving
from daemon_process import DaemonProcess, ask, token_setting
from ollama_server import ollama_answer
from raw_wire import Peer, RawUpstream
from recording_upstream import RecordingUpstream, Request, Response, answered, chat_answer
from typescript_client import node
from typescript_package import AI_SDKS, TypeScriptPackage, examples

from memd.admin.reads import LogEvent, LogPage
from memd.entries import Correction
from memd.notes import Note
from memd.recall.explained import FoundChunk, SearchAnswer
from memd.selection import Selection
from memd.wire.sideband import InjectedChunk, MemoryOut, NoteOut, Signal, decode_memory_in

FACT = "The release word for the lighthouse lamp is cinnamon-42."
QUESTION = "What is the release word for the lighthouse lamp?"
NEW_FACT = "user: The release word for the lighthouse lamp is nutmeg-7."
UNKNOWN = "ffffffff"
MOMENT = 1_700_000_000_000_000
"""As in the package's own test/types.ts."""
CREATE = [
    *("openai chat", "openai responses", "anthropic"),
    *("ai compatible", "ai openai chat", "ai openai responses"),
]
STREAM = [name for name in CREATE if name != "ai openai responses"]  # which cannot read llama.cpp's events
WAYS = [
    *[(name, how, 7) for how, names in (("create", CREATE), ("stream", STREAM)) for name in names],
    *[(name, how, ai) for ai in (5, 6) for how in ("create", "stream") for name in ("ai compatible", "ai openai chat")],
    *[("ai openai responses", "create", ai) for ai in (5, 6)],
]
"""An SDK's API, how it is called, and the AI SDK's version."""
NOWHERE = "http://127.0.0.1:2"  # the port of a service that nobody runs
HELPFUL = {"chunk_ids": [UNKNOWN], "action": "Helpful", "reason": "it answered the question"}


def asked(url: str, question: str, sdk: str = "openai chat", how: str = "create", **more: Any) -> dict[str, Any]:
    return {"sdk": sdk, "how": how, "base_url": f"{url}/v1", "question": question, **more}


def squeezed(text: str) -> str:
    return text.replace(" ", "")


def shown_after_telling(package: TypeScriptPackage, daemon: DaemonProcess, sdk: str, how: str, **memory: Any) -> str:
    """Tell a fact and ask for it; the id of the chunk that the model was shown."""
    url = daemon.base_url
    told = package.steps("steps.ts", [asked(url, FACT, sdk, how), asked(url, QUESTION, sdk, how)], **memory)
    assert [one["error"] for one in told] == [None, None]
    assert squeezed(told[1]["reply"]) == squeezed("".join(REPLY_WITH_MEMORY))
    assert told[0]["memory_out"] == {"injected_chunks": []}
    [chunk] = told[1]["memory_out"]["injected_chunks"]
    headers = {"status": "injected", "injected": [chunk["id"]], "mode": "full"}
    assert {name: told[1]["headers"][name] for name in headers} == headers
    assert told[1]["headers"]["turn"] != told[0]["headers"]["turn"]
    chunk_id = chunk["id"]
    assert isinstance(chunk_id, str)
    return chunk_id


def live(daemon: DaemonProcess) -> dict[str, dict[str, Any]]:
    """The present state of every chunk that is live, by its id."""
    entries = {entry["id"]: entry for entry in daemon.export()}
    return {name: entry for name, entry in entries.items() if entry["live"]}


# -- the package itself ------------------------------------------------------------------------------------------


def test_the_types_are_those_of_memd(memd_client: TypeScriptPackage) -> None:
    # What is read: whatever memd can say is assignable, and an object literal may have no member that the type lacks.
    chunk = InjectedChunk(id="a3f9", topic_id="office", canonical_id=1)
    kinds = get_args(get_type_hints(Signal)["type"])
    assert set(kinds) == {"context_pressure", "context_overflow", "correction_failed", "taken_out", "memory_in_refused"}
    fills = [Signal(type=kind, fill_ratio=1.5) for kind in kinds if kind.startswith("context_")]
    notes = (NoteOut(("b2e1",), duplicate=True), NoteOut(error="readonly"))
    told = (
        *(Signal(type=one, chunk_id="b2e1") for one in ("correction_failed", "taken_out")),
        Signal(type="memory_in_refused", reason="no action"),
    )
    whole = MemoryOut((chunk,), (*fills, *told), notes)
    outs = [msgspec.json.encode(out).decode() for out in (whole, MemoryOut(()))]
    lines = [f"export const out{number}: MemoryOut = {out};\n" for number, out in enumerate(outs)]
    memd_client.write("wire.ts", "import type { MemoryOut } from 'memd-client';\n" + "".join(lines))
    programs = {heading: program for heading, program in examples().items() if heading != "CommonJS"}
    for ai in AI_SDKS:
        package = memd_client.with_ai_sdk(ai)
        for number, (heading, program) in enumerate(programs.items()):
            package.write(f"readme{number}.ts", program)
            assert "memd-client" in program, heading
        package.check_types()
    # What is written: memd reads it, and no member of memd's is left at its default.
    memory_in = decode_memory_in(memd_client.run("types.ts").encode())
    assert memory_in.topic_id == "office"
    assert memory_in.related_topic_ids == ("company-wide",)
    assert memory_in.corrections == (
        Correction(("a3f9",), "Update", "we moved", "The office is in Bergen."),
        Correction(("b2e1",), "Helpful", "it answered the question", steps=10),
    )
    assert memory_in.notes == (Note("Lamps are in the attic.", "Lamps", ("ops",), MOMENT + 3, "wiki", dated=True),)
    assert memory_in.filter == Selection(
        MOMENT + 1, MOMENT + 2, kinds=("turn",), sources=("handbook.md",), tags=("ops",)
    )
    assert len(memory_in.__struct_fields__) == 5


def example(package: TypeScriptPackage, daemon: DaemonProcess, heading: str) -> list[str]:
    """Run a program of the README; the lines that it wrote."""
    program = examples()[heading]
    assert "http://127.0.0.1:876" in program
    program = program.replace("http://127.0.0.1:8765", daemon.base_url).replace("http://127.0.0.1:8766", daemon.own_url)
    name = "example.cjs" if heading == "CommonJS" else "example.ts"
    package.write(name, program)
    return package.run(name).splitlines()


def test_the_readme_s_example_with_openai_node_does_what_it_says(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    told, answer, ids, corrected, pending = example(memd_client, daemon, "openai-node")
    assert [told, answer, corrected] == ["".join(REPLY), "".join(REPLY_WITH_MEMORY), "".join(REPLY_WITH_MEMORY)]
    assert pending == "0 corrections wait"
    [old] = [entry for entry in daemon.export() if "7340" in entry["content"]]
    assert ids == f"[ '[mem:{old['id']}] of bike-workshop' ]"
    contents = [entry["content"] for entry in live(daemon).values()]
    assert "Decision: the booking API listens on port 8443." in contents
    assert old["id"] not in live(daemon)


@pytest.mark.parametrize("ai", AI_SDKS)
def test_the_readme_s_example_with_the_ai_sdk_does_what_it_says(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, ai: int
) -> None:
    reply = "".join(REPLY_WITH_MEMORY)
    assert example(memd_client.with_ai_sdk(ai), daemon, "AI SDK") == [
        f"{reply} 1 injected",
        f"{reply} 0 corrections wait, 0 signals",
    ]
    [marta] = [entry for entry in live(daemon).values() if "never e-mail" in entry["content"]]
    assert (marta["action"], marta["utility_multiplier"]) == ("Helpful", 1.5)


def test_the_readme_s_example_without_a_model_does_what_it_says(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    assert example(memd_client, daemon, "Without a model") == [
        "1 chunk",
        "[ 'Keys: The spare keys hang behind the compressor.' ]",
        "0 failed",
        "[",
        "  'replacement: The spare keys are with Marta.',",
        "  'Update: The spare keys hang behind the compressor.'",
        "] true",
        "400 memd-client: there is no topic 'nobody'; `memd stats` lists them",
    ]


TOLD_BEFORE = (
    "The booking API listens only on the shop's own network.",
    "On port 8080 listens the label printer of the shop.",
    "Marta reads her messages on the bus, before nine.",
    "The spare keys of the van hang at Jonas's home.",
)


@pytest.mark.parametrize("heading", ["openai-node", "AI SDK", "Without a model"])
def test_the_readme_s_examples_correct_one_chunk_of_those_that_were_shown(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, heading: str
) -> None:
    topic = "bike-workshop"
    notes = [{"content": text} for text in TOLD_BEFORE]
    before = ask(f"{daemon.own_url}/memd/notes", {"topic_id": topic, "notes": notes}).json["notes"]
    example(memd_client, daemon, heading)
    now = live(daemon)
    assert [now[one["chunk_ids"][0]]["action"] for one in before] == [None] * 4
    assert any(one["action"] for one in daemon.export()), "the one chunk was"


def test_the_readme_s_other_examples_do_what_they_say(memd_client: TypeScriptPackage, daemon: DaemonProcess) -> None:
    assert example(memd_client, daemon, "Whole requests") == ["200 none readonly"]
    assert example(memd_client, daemon, "CommonJS") == ["200 full"]
    assert set(examples()) == {"openai-node", "AI SDK", "Without a model", "Whole requests", "CommonJS"}
    assert not [entry for entry in daemon.export() if "Nobody" in entry["content"]]


# -- with every SDK ----------------------------------------------------------------------------------------------


def check_round(package: TypeScriptPackage, daemon: DaemonProcess, sdk: str, how: str) -> None:
    """A fact is told, recalled and replaced by a correction; an id that is unknown is told."""
    chunk_id = shown_after_telling(package, daemon, sdk, how, topic="lighthouse")
    replaced = {"chunk_ids": [chunk_id, UNKNOWN], "action": "Update", "reason": "it leaked", "content": NEW_FACT}
    step = asked(daemon.base_url, "Thank you.", sdk, how, corrections=[replaced])
    [told] = package.steps("steps.ts", [step], topic="lighthouse")
    assert {"type": "correction_failed", "chunk_id": UNKNOWN} in told["memory_out"]["signals"]
    assert (told["pending"], told["refused"]) == (0, 0)
    entries = daemon.export()
    [old] = [entry for entry in entries if entry["id"] == chunk_id and not entry["live"]][-1:]
    [new] = [entry for entry in entries if entry["content"] == NEW_FACT]
    assert (old["reason"], new["live"], new["topic_id"]) == ("it leaked", True, "lighthouse")


@pytest.mark.parametrize(("sdk", "how", "ai"), WAYS)
def test_an_sdk_s_requests_are_remembered_recalled_and_corrected(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, sdk: str, how: str, ai: int
) -> None:
    check_round(memd_client.with_ai_sdk(ai), daemon, sdk, how)


@pytest.mark.parametrize("ai", AI_SDKS)
def test_the_ai_sdk_s_responses_are_streamed_with_memory(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream, ai: int
) -> None:
    upstream.answer = openai_responses.answer  # OpenAI's events, which this provider insists on
    check_round(memd_client.with_ai_sdk(ai), make_daemon(upstream.url).start(), "ai openai responses", "stream")


@pytest.mark.parametrize(("sdk", "how", "ai"), WAYS)
def test_a_server_that_is_no_memd_answers_as_without_the_package(
    memd_client: TypeScriptPackage, llama: str, sdk: str, how: str, ai: int
) -> None:
    package = memd_client.with_ai_sdk(ai)
    [told] = package.steps("steps.ts", [asked(llama, QUESTION, sdk, how, corrections=[HELPFUL])], topic="a")
    assert squeezed(told["reply"]) == squeezed("".join(REPLY))
    # Corrections stay where they are: nobody took them.
    assert told == {**told, "memory_out": None, "headers": None, "pending": 1, "refused": 0, "error": None}


@pytest.mark.parametrize("ai", AI_SDKS)
def test_the_middleware_shows_raw_chunks_only_if_asked_and_keeps_the_provider_s_metadata(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, ai: int
) -> None:
    told = json.loads(memd_client.with_ai_sdk(ai).run("parts.ts", {"base_url": f"{daemon.base_url}/v1"}))
    assert [one["raw"] > 0 for one in told] == [False, False, True]
    for one in told:
        assert set(one["metadata"]) == {"provider", "memd"}
        assert set(one["metadata"]["memd"]) == {"status", "injected", "mode", "turn", "memory_out"}


def test_a_related_topic_is_searched(memd_client: TypeScriptPackage, daemon: DaemonProcess) -> None:
    memd_client.steps("steps.ts", [asked(daemon.base_url, FACT), asked(daemon.base_url, "Hi.")], topic="company-wide")
    step = asked(daemon.base_url, QUESTION)
    [told] = memd_client.steps("steps.ts", [step], topic="workshop", relatedTopics=["company-wide"])
    assert "company-wide" in [chunk["topic_id"] for chunk in told["memory_out"]["injected_chunks"]]


# -- the queue of corrections ------------------------------------------------------------------------------------


def test_corrections_wait_until_memd_is_there_and_are_applied_once(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    chunk_id = shown_after_telling(memd_client, daemon, "openai chat", "create")
    first = {**HELPFUL, "chunk_ids": [chunk_id], "reason": "first"}
    second = {**HELPFUL, "chunk_ids": [chunk_id], "reason": "second"}
    steps = [
        asked(NOWHERE, "Thanks.", corrections=[first]),
        asked(NOWHERE, "Thanks.", "ai compatible", "stream"),
        asked(daemon.base_url, "Thank you.", corrections=[second]),
        asked(daemon.base_url, "Goodbye."),
    ]
    told = memd_client.steps("steps.ts", steps)
    assert [one["pending"] for one in told] == [1, 1, 0, 0]
    assert [one["error"] is None for one in told] == [False, False, True, True]
    assert [entry["reason"] for entry in daemon.export() if entry["action"] == "Helpful"] == ["first", "second"]
    assert live(daemon)[chunk_id]["utility_multiplier"] == 2.25


@pytest.mark.parametrize("sdk", ["openai chat", "anthropic", "ai compatible"])
def test_an_sdk_s_own_retry_applies_a_correction_once(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream, llama: str, sdk: str
) -> None:
    daemon = make_daemon(llama).start()
    chunk_id = shown_after_telling(memd_client, daemon, sdk, "create")
    daemon.terminate()
    failures = iter([Response((b'{"error": {"message": "loading"}}',), status=503)])

    def answer(request: Request) -> Response:
        failed = next(failures, None)
        return failed or (anthropic_answer() if sdk == "anthropic" else chat_answer(request))

    upstream.answer = answer
    daemon.upstream = upstream.url
    daemon.start()
    correction = {**HELPFUL, "chunk_ids": [chunk_id]}
    [told] = memd_client.steps(
        "steps.ts", [asked(daemon.base_url, "Thanks.", sdk, corrections=[correction], retries=1)]
    )
    assert (told["reply"], told["pending"], next(failures, None)) == ("Noted.", 0, None)
    assert live(daemon)[chunk_id]["utility_multiplier"] == 1.5


def anthropic_answer() -> Response:
    body = {"id": "msg_1", "type": "message", "role": "assistant", "model": "recorded", "stop_reason": "end_turn"}
    content = [{"type": "text", "text": "Noted."}]
    return Response((json.dumps({**body, "content": content, "usage": {}}).encode(),))


def test_a_correction_that_memd_cannot_read_costs_one_request_its_memory_and_is_kept_apart(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    steps = [
        asked(daemon.base_url, FACT, corrections=[{**HELPFUL, "action": "Delete"}]),
        asked(daemon.base_url, FACT),
        asked(daemon.base_url, QUESTION),
    ]
    told = memd_client.steps("steps.ts", steps)
    assert [one["headers"]["status"] for one in told] == ["bad-memory-in", "none", "injected"]
    assert [(one["pending"], one["refused"]) for one in told] == [(0, 1)] * 3


@pytest.mark.parametrize("sdk", ["openai chat", "anthropic"])
def test_a_stream_that_is_left_early_has_said_what_became_of_the_corrections(
    memd_client: TypeScriptPackage, daemon: DaemonProcess, sdk: str
) -> None:
    [told] = memd_client.steps("steps.ts", [asked(daemon.base_url, "Hi.", sdk, "leave", corrections=[HELPFUL])])
    assert (told["pending"], told["error"]) == (0, None)


# -- servers that fail or lie ------------------------------------------------------------------------------------

CHUNK = {"id": "a3f9", "topic_id": "default", "canonical_id": 1}
ODD: list[tuple[Any, Any]] = [
    ("injected", None),
    (None, None),
    ([], None),
    ({}, None),
    ({"injected_chunks": {"id": "a3f9"}}, None),
    (
        {"injected_chunks": [None, 1, "a3f9", {"id": 1}, {**CHUNK, "canonical_id": "1"}, CHUNK]},
        {"injected_chunks": [CHUNK]},
    ),
    (
        {
            "injected_chunks": [],
            "signals": [{"type": "novel"}, {"type": "context_overflow"}, {"type": "correction_failed"}],
        },
        {"injected_chunks": []},
    ),
    ({"injected_chunks": [], "signals": "none"}, {"injected_chunks": []}),
]


def lying(memory_out: Any, headers: dict[str, str] | None = None, status: int = 200) -> Callable[[Request], Response]:
    """Answers of a server that adds this `memory_out` and these headers to a chat completion."""

    def answer(request: Request) -> Response:
        honest = chat_answer(request)
        member = b', "memory_out": ' + json.dumps(memory_out).encode()
        first, *rest = honest.parts
        end = first.rindex(b"}")
        parts = (first[:end] + member + first[end:], *rest)
        return honest._replace(parts=parts, status=status, headers=(*honest.headers, *(headers or {}).items()))

    return answer


@pytest.mark.parametrize("how", ["create", "stream"])
@pytest.mark.parametrize("sdk", ["openai chat", "ai compatible"])
def test_an_odd_memory_out_is_left_out_and_breaks_nothing(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, sdk: str, how: str
) -> None:
    answers = iter([lying(said) for said, _ in ODD])
    upstream.answer = lambda request: next(answers)(request)
    told = memd_client.steps("steps.ts", [asked(upstream.url, "Hi.", sdk, how) for _ in ODD])
    assert [squeezed(one["reply"]) for one in told] == ["Noted."] * len(ODD)
    assert [one["memory_out"] for one in told] == [read for _, read in ODD]


def test_an_error_puts_corrections_back_whatever_it_says(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream
) -> None:
    statuses = iter((400, 429, 503))
    upstream.answer = lambda request: lying({"injected_chunks": []}, status=next(statuses))(request)
    steps = [asked(upstream.url, "Hi.", corrections=queued) for queued in ([HELPFUL], [], [])]
    told = memd_client.steps("steps.ts", steps)
    assert all(one["error"] is not None for one in told) and [one["pending"] for one in told] == [1, 1, 1]


def test_a_stream_that_breaks_off_puts_corrections_back(memd_client: TypeScriptPackage, raw: RawUpstream) -> None:
    def script(peer: Peer) -> None:
        peer.read_body()
        peer.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        peer.send(b'f\r\ndata: {"a": 1}\n\r\n')
        peer.abort()

    raw.script = script
    step = {"url": f"{raw.url}/v1/chat/completions", "method": "POST", "body": "{}", "corrections": [HELPFUL]}
    [told] = memd_client.steps("fetch.ts", [step])
    assert (told["status"], told["error"]) == (200, "TypeError")  # it began well
    assert told["pending"] == [HELPFUL]


@pytest.mark.parametrize("there", [True, False])
def test_corrections_that_come_back_go_before_those_that_came_meanwhile(
    memd_client: TypeScriptPackage, llama: str, there: bool
) -> None:
    first, second, third = ({**HELPFUL, "reason": reason} for reason in ("first", "second", "third"))
    step = {"url": f"{llama if there else NOWHERE}/v1/chat/completions", "method": "POST"}
    step["body"] = json.dumps({"messages": [{"role": "user", "content": "Hi."}]})
    [told] = memd_client.steps("fetch.ts", [{**step, "corrections": [first, second], "meanwhile": [third]}])
    assert told["status"] == (200 if there else 0)
    assert told["pending"] == [first, second, third]


def test_notes_go_out_with_the_next_request_and_wait_until_memd_says_that_it_took_them(
    memd_client: TypeScriptPackage, served: DaemonProcess, upstream: RecordingUpstream
) -> None:
    note = {"content": "The spare lamp is behind the rope.", "title": "Lamp", "tags": ["house"]}
    step = {"url": f"{served.base_url}/chat/completions", "method": "POST"}
    step["body"] = json.dumps({"messages": [{"role": "user", "content": "Where is the spare lamp?"}]})
    nowhere = {**step, "url": f"{NOWHERE}/v1/chat/completions"}
    told = memd_client.steps("fetch.ts", [{**nowhere, "notes": [note]}, step, step])
    assert [one["notes"] for one in told] == [[note], [], []]
    assert len(json.loads(told[1]["body"])["memory_out"]["notes"][0]["chunk_ids"]) == 1
    assert "(note: Lamp, tagged house) The spare lamp" in upstream.prompts[-1]
    assert "memory_out" in told[2]["body"] and '"notes"' not in told[2]["body"]


# -- what passes untouched ---------------------------------------------------------------------------------------

UNTOUCHED = [
    ("GET", "/v1/models", None),
    ("POST", "/v1/embeddings", '{"input": "Hi."}'),
    ("POST", "/v1/messages/count_tokens", '{"messages": []}'),
    ("POST", "/v1/chat/completions", "no JSON"),
    ("POST", "/v1/chat/completions", '[{"messages": []}]'),
    ("POST", "/v1/chat/completions", '{"messages": [],  "memory_in": {}}'),
    ("POST", "/v1/chat/completions", '{"messages": [],  "metadata": {"memory_in": "{}"}}'),
    ("POST", "/v1/chat/completions", '{"messages": [],  "metadata": "odd"}'),
]


def test_what_is_no_request_to_a_model_passes_untouched(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream
) -> None:
    steps = [
        {"url": upstream.url + path, "method": method, "corrections": [] if number else [HELPFUL]}
        | ({} if body is None else {"body": body})
        for number, (method, path, body) in enumerate(UNTOUCHED)
    ]
    told = memd_client.steps("fetch.ts", steps)
    came = [(one.method, one.target, one.body) for one in upstream.requests]
    assert came == [(method, path, (body or "").encode()) for method, path, body in UNTOUCHED]
    assert [one["pending"] for one in told] == [[HELPFUL]] * len(UNTOUCHED)


def test_an_answer_is_read_along_and_its_bytes_stay(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream
) -> None:
    ways = [
        (False, 0, b"\n"),
        (False, 7, b"\r"),
        (True, 0, b"\n"),
        (True, 1, b"\r\n"),
        (True, 7, b"\r"),
        (True, 7, b"\r\n"),
    ]

    def answer(request: Request) -> Response:
        told = lying({"injected_chunks": [], "said": "Grüße an 東京"})(request)
        return told._replace(parts=(b"".join(told.parts).replace(b"\n", ways[len(upstream.requests) - 1][2]),))

    upstream.answer = answer
    url = f"{upstream.url}/v1/chat/completions"
    for stream, piece_bytes, _ in ways:
        body = {"messages": [{"role": "user", "content": "Grüße"}], "stream": stream, "metadata": {"user": "marta"}}
        step = {"url": url, "method": "POST", "body": json.dumps(body), "corrections": [HELPFUL], "slice": piece_bytes}
        [told] = memd_client.steps("fetch.ts", [step])
        request = upstream.requests[-1]
        assert sent(request) == (body, {"corrections": [HELPFUL]})
        assert told["body"].encode() == answer(request).parts[0]
        assert (told["status"], told["pending"]) == (200, [])
        assert told["url"] == ("" if piece_bytes else url)  # in pieces it comes from a `fetch` that names none


# The agent in examples/typescript-agent

AGENT = Path(__file__).parent.parent / "examples" / "typescript-agent" / "agent.ts"
TOLD = "The spare lamp is behind the rope."
MOVED = "The spare lamp is in the boat."
OWN = "The spare lamp is at Marta's."


@pytest.fixture(scope="module")
def agent(memd_client: TypeScriptPackage) -> TypeScriptPackage:
    """A project with the agent in it."""
    memd_client.write("agent.ts", AGENT.read_text())
    return memd_client


def typed(agent: TypeScriptPackage, daemon: DaemonProcess, monkeypatch: pytest.MonkeyPatch, *lines: str) -> list[str]:
    """Type these lines; what the agent said to each."""
    monkeypatch.setenv("MEMD_BASE_URL", f"{daemon.base_url}/v1")
    monkeypatch.setenv("MEMD_URL", daemon.own_url)
    monkeypatch.setenv("MEMD_TOPIC", "boat")
    said = node("agent.ts", stdin="".join(f"{line}\n" for line in lines), folder=agent.folder)
    assert said.startswith("> ") and said.endswith("> \n"), said
    return said.removesuffix("\n").split("> ")[1:-1]


def says(text: str) -> Response:
    return answered({"content": text}, stream=True)


def calls(name: str, **given: str) -> Response:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(given)}}
    return answered({"tool_calls": [call]}, stream=True)


def scripted(request: Request) -> Response:
    """A model that puts down, looks up and corrects when it is asked to, and repeats what the tool said."""
    messages = json.loads(request.body)["messages"]
    text = [one["content"] for one in messages if one["role"] == "user"][-1].rpartition("[/memory]")[2]
    if messages[-1]["role"] == "tool":
        result = messages[-1]["content"]
        if (found := re.search(r"\[mem:(\w+)\] The spare", result)) and "Correct it" in text:
            return calls("correct_memory", id=found[1], reason="it was moved", content=MOVED)
        return says(f"I got: {result}")
    if "Remember" in text:
        return calls("remember", content=TOLD, title="Lamp")
    if "Correct it" in text or "Look" in text:
        return calls("search_memory", question="Where is the spare lamp?")
    if "Break" in text:
        return calls("correct_memory", id="ffffffff", reason="it was moved")
    if "Leave" in text:
        return calls("read", path="../package.json")
    return says("Noted.")


def test_the_agent_takes_notes_looks_up_and_corrects_across_runs(
    agent: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.check_types()
    upstream.answer = scripted
    # All that is stored by then fits into a quarter of this window: which chunks it is differs from run to run.
    daemon = make_daemon(upstream.url, {"upstream": {"window": 65_536}}).start()
    first, again = typed(agent, daemon, monkeypatch, "Remember where the lamp is.", "Remember it well.")
    assert re.fullmatch(r"\(remember\) I got: Noted: mem:\w+\n.*\n", first), first
    assert "I got: Known already: mem:" in again
    [corrected] = typed(agent, daemon, monkeypatch, "Correct it: the lamp was moved.")
    assert "(search_memory) (correct_memory) I got: Corrected." in corrected
    texts = {entry["content"] for entry in daemon.export() if entry["live"]}
    assert MOVED in texts and TOLD not in texts
    [looked] = typed(agent, daemon, monkeypatch, "Look where it is.")
    [chunk_id] = {found[1] for found in re.finditer(rf"\[mem:(\w+)\] {re.escape(MOVED)}", looked)}
    wrong, left = typed(agent, daemon, monkeypatch, "Break it.", "Leave this folder.")
    assert "I got: error: there is nothing live with the id ffffffff" in wrong
    assert "I got: error: only files below this folder can be read" in left
    # The user's own correction goes out with the next message, of a chunk that a prompt had.
    asked = "Where is the spare lamp?", f"/wrong mem:{chunk_id} {OWN}", "Thanks."
    shown, _, thanked = typed(agent, daemon, monkeypatch, *asked)
    assert f"[mem:{chunk_id}]" in shown
    assert thanked.startswith("Noted.\n")
    assert OWN in {entry["content"] for entry in daemon.export() if entry["live"]}


def test_the_agent_works_its_way_through_the_tools_of_a_real_llama_cpp(
    agent: TypeScriptPackage, make_daemon: MakeDaemon, calling_llama: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.write("log", f"The pump was oiled. {ANSWERED_MARKER}\n")
    daemon = make_daemon(calling_llama).start()
    [said] = typed(agent, daemon, monkeypatch, "Read the log.")
    assert said.startswith("(read) " + "".join(REPLY_AFTER_CALLS)), said
    daemon.wait_stored("The pump was oiled.")


# What programs hand to its fetch, its options, and what it asks without a model

BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Grüße"}], "metadata": {"user": "marta"}}
HANDED = ["request", "request and init", "bytes", "blob", "length", "ky", "openapi-fetch"]
"""In which a request can carry a MemoryIn; see the package's test/handed.ts."""
WHERE = "Where is the spare lamp?"
FLUSH: dict[str, Any] = {"call": "flush", "notes": [{"content": TOLD}]}

Json = dict[str, Any]


def handed(package: TypeScriptPackage, url: str, way: str, memory: Json | None = None, **more: Any) -> Json:
    told = json.loads(package.run("handed.ts", {"url": url, "way": way, "memory": memory or {}, **more}))
    assert isinstance(told, dict)
    return told


def sent(request: Request) -> tuple[Json, Json | None]:
    """The body that a server got, without its MemoryIn, and that."""
    body = json.loads(request.body)
    memory_in = body.get("metadata", {}).pop("memory_in", None)
    return body, None if memory_in is None else json.loads(memory_in)


# -- what is handed over -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", HANDED)
def test_a_request_carries_a_memory_in_however_it_is_handed_over(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, way: str
) -> None:
    options = {"topic": "lamp", "mode": "full", "session": "evening"}
    told = handed(memd_client, upstream.url, way, options, corrections=[HELPFUL])
    [request] = upstream.requests
    assert (request.method, request.target) == ("POST", "/v1/chat/completions")
    assert sent(request) == (BODY, {"topic_id": "lamp", "corrections": [HELPFUL]})
    names = ("x-own", "x-memory-mode", "x-memory-session", "content-length")
    assert [request.header(name) for name in names] == ["kept", "full", "evening", str(len(request.body))]
    assert (request.header("content-type") or "").startswith("application/json")
    assert json.loads(told["body"])["choices"][0]["message"]["content"] == "Noted."
    assert told["pending"] == [HELPFUL], "no memd took it"


def test_a_body_that_can_be_read_only_once_passes_and_the_queue_waits(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream
) -> None:
    told = handed(memd_client, upstream.url, "stream", {"session": "evening"}, corrections=[HELPFUL])
    [request] = upstream.requests
    assert sent(request) == (BODY, None)
    assert (request.header("x-memory-session"), told["pending"]) == ("evening", [HELPFUL])


def test_ollama_js_carries_a_memory_in_and_is_told_what_became_of_corrections(
    memd_client: TypeScriptPackage, make_daemon: MakeDaemon, upstream: RecordingUpstream
) -> None:
    upstream.answer = ollama_answer
    daemon = make_daemon(upstream.url).start()
    told = handed(memd_client, daemon.base_url, "ollama", {"topic": "lamp"}, corrections=[HELPFUL])
    outs = [part["memory_out"] for part in json.loads(told["body"]) if "memory_out" in part]
    assert [out["signals"] for out in outs] == [[{"type": "correction_failed", "chunk_id": "ffffffff"}]]
    assert told["pending"] == []


@pytest.mark.parametrize("way", ["request", "length"])
@pytest.mark.parametrize(
    ("options", "headers", "memory_in"),
    [
        ({"mode": "readonly"}, {}, {"topic_id": "lamp"}),
        ({"mode": "off"}, {}, None),  # memd would pass it on to the model server
        ({}, {"X-Memory-Mode": "Off"}, None),
        ({"mode": "off"}, {"X-Memory-Mode": "full"}, {"topic_id": "lamp", "corrections": [HELPFUL]}),
    ],
)
def test_a_mode_that_stores_nothing_sends_nothing_to_be_stored(
    memd_client: TypeScriptPackage,
    upstream: RecordingUpstream,
    way: str,
    options: Json,
    headers: dict[str, str],
    memory_in: Json | None,
) -> None:
    told = handed(memd_client, upstream.url, way, {"topic": "lamp", **options}, headers=headers, corrections=[HELPFUL])
    [request] = upstream.requests
    assert sent(request) == (BODY, memory_in)
    assert request.header("x-memory-mode") == (headers.get("X-Memory-Mode") or options["mode"])
    assert told["pending"] == [HELPFUL]


# -- options -----------------------------------------------------------------------------------------------------

TOPIC_RULE = 'use 1 to 128 letters, digits, ".", "_" or "-", beginning with a letter or digit'
WRONG: list[tuple[Json, str]] = [
    ({"topic": ""}, f'topic cannot be "": {TOPIC_RULE}'),
    ({"topic": "the office"}, f'topic cannot be "the office": {TOPIC_RULE}'),
    ({"topic": ".hidden"}, f'topic cannot be ".hidden": {TOPIC_RULE}'),
    ({"topic": "büro"}, f'topic cannot be "büro": {TOPIC_RULE}'),
    ({"topic": "a" * 129}, f'topic cannot be "{"a" * 129}": {TOPIC_RULE}'),
    ({"topic": 7}, f"topic cannot be 7: {TOPIC_RULE}"),
    ({"relatedTopics": ["fine", "a/b"]}, f'relatedTopics[1] cannot be "a/b": {TOPIC_RULE}'),
    ({"mode": "read-only"}, 'mode cannot be "read-only": use one of full, readonly, off'),
    ({"session": "böse"}, 'session cannot be "böse": use letters, digits and signs of ASCII'),
    ({"session": "a\nb"}, 'session cannot be "a\\nb": use letters, digits and signs of ASCII'),
    ({"session": ""}, 'session cannot be "": use letters, digits and signs of ASCII'),
    ({"url": "localhost"}, 'url cannot be "localhost": give memd\'s own address, like http://127.0.0.1:8766'),
]
RIGHT: list[Json] = [
    {},
    {"topic": "a" * 128, "relatedTopics": [], "mode": "off", "session": "chat 1/2 (Marta)"},
    {"topic": "0._-", "url": "https://memd.example/", "token": "secret"},
]


def test_a_wrong_option_throws_at_once_and_says_what_to_write(memd_client: TypeScriptPackage) -> None:
    told = json.loads(memd_client.run("options.ts", [*[options for options, _ in WRONG], *RIGHT]))
    assert told == [*[f"memd-client: {problem}" for _, problem in WRONG], *[None] * len(RIGHT)]


# -- without a model ---------------------------------------------------------------------------------------------


def test_the_types_of_answers_are_those_of_memd(memd_client: TypeScriptPackage) -> None:
    shared: Json = dict.fromkeys(("id", "uuid", "topic_id", "kind", "content"), "a")
    shared |= {"canonical_id": 1, "said_at": 1, "roles": ("user",), "source": "wiki", "tags": ("ops",)}
    shared |= {"heading": ("Lamps",), "page": 1, "sheet": "one", "multiplier": 1.0}
    numbers = ("score", "cosine", "meaning", "words", "feedback", "neighbours", "echo", "time")
    scores: Json = dict.fromkeys(numbers, 0.5)
    found = FoundChunk(**shared, **scores, tokens=1, created_at=1, verdict="injected")
    counted: Json = {"budget_tokens": 1, "tokens": 1, "is_model_asked": True}
    answer = SearchAnswer(question="a", topics=("b",), as_of=1, note="c", chunks=(found,), **counted)
    event = LogEvent(**shared, at=1, event="told", reason="d", live=True, supersedes=("e",))
    pages = [LogPage(events=(event,), next=1), LogPage(events=(), next=None)]
    answers = [answer, SearchAnswer(question="a", topics=(), chunks=(), **counted)]
    values = [("SearchAnswer", one) for one in answers] + [("LogPage", one) for one in pages]
    lines = [
        f"export const value{place}: {name} = {msgspec.json.encode(one).decode()};"
        for place, (name, one) in enumerate(values)
    ]
    memd_client.write(
        "answers.ts", "import type { LogPage, SearchAnswer } from 'memd-client';\n" + "\n".join(lines) + "\n"
    )
    memd_client.check_types()


def test_what_is_flushed_is_found_corrected_and_in_the_log(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    options = {"topic": "lamp", "url": f"{daemon.own_url}/"}
    notes = [{"content": TOLD, "title": "Lamp", "tags": ["house"]}, {"content": "The rope is wet."}]
    flushes: list[Json] = [{"call": "flush", "notes": notes}, {"call": "flush", "notes": notes[:1]}]
    first, again = [one["told"] for one in memd_client.steps("routes.ts", flushes, **options)]
    daemon.wait_stored(TOLD, "wet")  # until then only words find it
    filters: list[Json] = [
        {"tags": ["house"], "kinds": ["note"], "limit": 1},
        {"contains": "WET", "from": "2020-01-01"},
        {"to": "2020-01-01"},
        {"topics": []},
    ]
    asked: list[Json] = [{"call": "search", "question": WHERE, "filter": one} for one in filters]
    searches = [one["told"] for one in memd_client.steps("routes.ts", asked, **options)]
    assert [len(note["chunk_ids"]) for note in first["notes"]] == [1, 1]
    assert again["notes"] == [{**first["notes"][0], "duplicate": True}]
    assert [[chunk["content"] for chunk in one["chunks"]] for one in searches[:3]] == [[TOLD], ["The rope is wet."], []]
    assert {chunk["content"] for chunk in searches[3]["chunks"]} == {TOLD, "The rope is wet."}
    [chunk_id] = first["notes"][0]["chunk_ids"]
    # It was never shown to a model, which a correction in a request would have needed.
    update = {"chunk_ids": [chunk_id], "action": "Update", "reason": "moved", "content": MOVED}
    steps: list[Json] = [{"call": "flush", "corrections": [update, HELPFUL]}, {"call": "log", "part": {"limit": 2}}]
    flushed, page = memd_client.steps("routes.ts", steps, **options)
    assert flushed["told"] == {"failed": ["ffffffff"], "notes": []}
    assert [flushed["pending"], flushed["refused"]] == [[], []]
    assert [event["event"] for event in page["told"]["events"]] == ["replacement", "Update"]
    assert page["told"]["events"][0]["content"] == update["content"]
    older = {"call": "log", "part": {"before": page["told"]["next"]}}
    [rest] = memd_client.steps("routes.ts", [older], **options)
    assert [event["event"] for event in rest["told"]["events"]] == ["told", "told"]


def test_more_notes_than_memd_takes_at_once_are_sent_in_turns(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    notes = [{"content": f"Shelf {number} is full."} for number in range(150)]
    [told] = memd_client.steps("routes.ts", [{"call": "flush", "notes": notes}], url=daemon.own_url)
    assert len({note["chunk_ids"][0] for note in told["told"]["notes"]}) == 150


def test_what_could_not_be_flushed_waits_and_what_memd_cannot_read_is_kept_apart(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    note = {"content": TOLD}
    flush = {"call": "flush", "notes": [note], "corrections": [HELPFUL]}
    [told] = memd_client.steps("routes.ts", [flush], url=NOWHERE)
    remedy = "start it (memd serve), or give its own address (admin.port) as url"
    assert told["told"] == {
        "error": f"memd-client: no memd answers at {NOWHERE} (ECONNREFUSED): {remedy}",
        "status": None,
    }
    assert (told["pending"], told["notes"]) == ([HELPFUL], [note])
    wrong = {**HELPFUL, "action": "Delete"}
    steps = [
        {"call": "flush", "notes": [{"content": ""}]},
        {"call": "flush", "corrections": [wrong, HELPFUL]},
        {"call": "flush", "notes": [note]},
    ]
    bad_note, bad_correction, rest = memd_client.steps("routes.ts", steps, topic="lamp", url=daemon.own_url)
    assert [one["told"]["status"] for one in (bad_note, bad_correction)] == [400, 400]
    assert bad_note["refused_notes"] == [{"content": ""}]
    assert (bad_correction["refused"], bad_correction["pending"]) == ([wrong], [HELPFUL])
    assert rest["told"]["failed"] == ["ffffffff"]
    assert (rest["pending"], rest["notes"]) == ([], [])


def test_a_note_that_was_erased_for_good_is_not_sent_for_ever(
    memd_client: TypeScriptPackage, daemon: DaemonProcess
) -> None:
    [taken] = memd_client.steps("routes.ts", [FLUSH], url=daemon.own_url)
    daemon.wait_stored(TOLD)
    [chunk_id] = taken["told"]["notes"][0]["chunk_ids"]
    assert daemon.run("erase", "--chunk", chunk_id, "--forbid", "--yes").returncode == 0
    [refused] = memd_client.steps("routes.ts", [FLUSH], url=daemon.own_url)
    assert refused["told"]["status"] == 409 and "memd erase --forbid" in refused["told"]["error"]
    told = handed(memd_client, daemon.base_url, "request", notes=[{"content": TOLD}])
    for one in (refused, told):
        assert (one["notes"], one["refused_notes"]) == ([], [{"content": TOLD}])


@pytest.mark.parametrize("mode", ["readonly", "off"])
def test_a_mode_that_stores_nothing_flushes_nothing(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, mode: str
) -> None:
    [told] = memd_client.steps("routes.ts", [FLUSH], mode=mode, url=upstream.url)
    assert told["told"]["error"] == f"memd-client: mode is {mode}, so nothing is stored: flush a Memory of mode full"
    assert (told["notes"], upstream.requests) == ([{"content": TOLD}], [])


def test_a_token_opens_memd_s_own_address_also_where_the_model_s_leads_there(
    memd_client: TypeScriptPackage, serving: Serving
) -> None:
    daemon = serving({"auth": {"token": "a-token-of-this-test"}})
    steps: list[Json] = [FLUSH, {"call": "search", "question": WHERE}]
    for url in (daemon.own_url, daemon.base_url):
        _, found = memd_client.steps("routes.ts", steps, url=url, token="a-token-of-this-test")
        assert found["told"]["chunks"][0]["content"] == TOLD
    [refused] = memd_client.steps("routes.ts", [{"call": "log"}], url=daemon.own_url)
    assert refused["told"]["status"] == 401
    assert refused["told"]["error"].endswith(": give memd's auth.token as token, or that of `memd token add`")
    assert refused["told"]["name"] == "UnknownToken"


def test_a_token_that_may_only_read_is_told_so_and_the_chat_goes_on(
    memd_client: TypeScriptPackage, serving: Serving
) -> None:
    secret = "reader-has-a-token-of-this-length"
    auth: Json = {"token": "a-token-of-this-test", "tokens": [token_setting("reader", secret, "read")]}
    daemon = serving({"auth": auth})
    note, owner = {"notes": [{"content": TOLD}]}, {"X-Memory-Token": auth["token"]}
    assert ask(f"{daemon.own_url}/memd/notes", note, headers=owner).status == 200
    steps: list[Json] = [{"call": "flush", **note}, {"call": "search", "question": WHERE}]
    refused, found = memd_client.steps("routes.ts", steps, url=daemon.own_url, token=secret)
    assert (refused["told"]["name"], refused["told"]["status"]) == ("RightMissing", 403)
    assert refused["told"]["error"].startswith("memd-client: the token 'reader' has no right to write")
    assert refused["notes"] == note["notes"] and found["told"]["chunks"][0]["content"] == TOLD
    headers = {"authorization": f"Bearer {secret}"}
    told = handed(memd_client, daemon.base_url, "request", headers=headers, corrections=[HELPFUL])
    assert told["body"] and told["mode"] == "readonly" and told["pending"] == [HELPFUL]
    log = [{"call": "log"}]
    for number in range(60):
        ask(f"{daemon.own_url}/memd/me", headers={"X-Memory-Token": f"guess {number}"})
    [many] = memd_client.steps("routes.ts", log, url=daemon.own_url, token="a wrong one")
    assert (many["told"]["name"], many["told"]["status"]) == ("TooManyAttempts", 429)
    assert many["told"]["retry_after"] >= 1 and "try again in" in many["told"]["error"]


ODD_ANSWERS = [
    *(b"", b"<html>", b"[]", b'{"chunks": {}}', b'{"chunks": [{"id": 1}]}', b'{"events": 1}', b'{"notes": [1]}')
]


@pytest.mark.parametrize("status", [200, 404, 500])
def test_a_server_that_is_no_memd_is_an_error_that_says_so(
    memd_client: TypeScriptPackage, upstream: RecordingUpstream, status: int
) -> None:
    upstream.answer = lambda request: Response((ODD_ANSWERS[(len(upstream.requests) - 1) // 3],), status=status)
    upstream.answers_all = True
    calls: list[Json] = [{"call": "search", "question": WHERE}, {"call": "log"}, FLUSH]
    for one in memd_client.steps("routes.ts", calls * len(ODD_ANSWERS), url=upstream.url):
        assert one["told"]["error"].startswith(f"memd-client: {upstream.url} does not answer like memd")
        assert one["told"]["error"].endswith(": give its own address (admin.port) as url")
    assert len(upstream.requests) == 3 * len(ODD_ANSWERS)
